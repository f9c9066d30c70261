"""The microbatching of a step that is not split: what is per microbatch, with nothing to prove."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import BatchType, Microbatching, Refusal


@dataclasses.dataclass(frozen=True)
class OneMicrobatch:
    """Takes the batch whole, unless a proof for more microbatches came with the graph.

    A file holds the step at one batch size, so that more than one cannot be proved from it:
    `hetjax trace --microbatches M` puts the proof into the file, and this pass leaves it alone.
    """

    name: ClassVar[str] = "one-microbatch"
    summary: ClassVar[str] = "take the batch whole, unless more microbatches are proved"
    requires: ClassVar[tuple[str, ...]] = ("graph.regions",)

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None or bundle.microbatching is not None:
            return bundle
        return bundle.replace(microbatching=one_microbatch(bundle.graph))


def one_microbatch(graph: Graph, refusal: Refusal | None = None) -> Microbatching:
    """Returns the microbatching with M = 1, always exact.

    Values that depend on the batch, in prologue, forward and backward, are typed B (they run in the
    one microbatch); what the update makes of them is U; everything else is R.

    Args:
      graph: the labelled full graph.
      refusal: why more microbatches were not taken, kept for `explain`.
    """
    has_gradient = any(op.region in ("forward", "backward") for op in graph.ops)
    types: dict[int, BatchType] = {
        a.ref: BatchType("B", 0, a.batch_axis) if a.role == "batch" else BatchType("R")
        for a in graph.inputs
    }
    for op in graph.ops:
        kinds = {types[r].kind for r in op.refs}
        in_microbatch = op.region != "update" or not has_gradient
        if not kinds & {"B", "U"}:
            kind = "R"
        elif in_microbatch:
            kind = "B"
        else:
            kind = "U"
        types.update((r, BatchType(kind)) for r in op.outputs)
    return Microbatching(
        1, graph, tuple(types[r] for r in range(len(graph.avals))), refusal=refusal
    )
