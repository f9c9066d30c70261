"""prove-microbatching: shows that the microbatches add up to the whole batch, or names what stops it."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import Microbatching
from hetjax.passes.annotate_costs import annotate_costs
from hetjax.passes.label_blocks import label_blocks
from hetjax.passes.label_regions import label_regions
from hetjax.passes.lift_draws import lift_draws
from hetjax.passes.lift_slices import lift_slices
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.prover import prove


@dataclasses.dataclass(frozen=True)
class ProveMicrobatching:
    """Types every value of a step that was traced at two batch sizes.

    Before: a microbatching that holds the step traced at one microbatch, no types.
    After:  every value typed, what must be computed at full batch hoisted, or a refusal kept.
    Where draws inside loops, or slices that loops take of the batch, stand in the way, they are lifted
    out of both traces first, as by lift-draws and lift-slices.
    A bundle without a second trace gets one microbatch, which needs no proof.

    Attributes:
      accept: whether what cannot be proved runs with its meaning per microbatch.
    """

    name: ClassVar[str] = "prove-microbatching"
    summary: ClassVar[str] = "prove that microbatches add up to the whole batch"
    requires: ClassVar[tuple[str, ...]] = ("graph.regions",)

    accept: bool = False

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            raise PassError(self.name, "needs a graph")
        untyped = bundle.microbatching
        if untyped is None:
            return bundle.replace(microbatching=one_microbatch(bundle.graph))
        if untyped.types:
            return bundle
        return _proved(bundle, bundle.graph, untyped, accept=self.accept)


def _proved(bundle: Bundle, full: Graph, untyped: Microbatching, *, accept: bool) -> Bundle:
    small, num = untyped.graph, untyped.num_microbatches

    def proof(**options: bool) -> Microbatching:
        found = prove(_with_equations(full), _with_equations(small), num, **options)
        return dataclasses.replace(found, graph=small)

    micro = proof(head=False)
    if micro.refusal is not None and (lifted := _lifted(full)) is not full:
        full, small = lifted, _lifted(small)
        micro = proof(head=False)
    if micro.refusal is not None and not accept:  # who accepts a meaning per microbatch wants no barrier
        micro = proof()
    if micro.refusal is not None and accept:
        micro = proof(accept=True)
    return bundle.replace(graph=full, microbatching=micro)


def _with_equations(graph: Graph) -> Graph:
    """Returns a graph whose ops carry their equations: the rules read dimension numbers from them."""
    if all(op.eqn is not None for op in graph.ops):
        return graph
    from hetjax.ir.rebuild import rebuild_equations

    return rebuild_equations(graph)


def _lifted(graph: Graph) -> Graph:
    """Returns the graph with draws and slices of the batch moved out of loops, labelled again; the same object without any."""
    lifted = lift_slices(lift_draws(graph))
    return graph if lifted is graph else annotate_costs(label_blocks(label_regions(lifted)))
