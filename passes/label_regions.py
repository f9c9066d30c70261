"""label-regions: says of every op whether it is prologue, forward, backward or update."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.graph import Graph, Op, definitions


@dataclasses.dataclass(frozen=True)
class LabelRegions:
    """Labels each op's region from the transforms in its name stack.

    Before: `%5:f32[8,4] = dot_general %2 %0`, traced under `jvp(Dense_0)`.
    After:  the same op with region "forward"; `transpose(jvp(Dense_0))` gives "backward". An op under
    neither is "prologue" when the forward or backward needs it and it needs neither, else "update".
    A program without any gradient keeps "update" everywhere: it has no regions to tell apart.
    """

    name: ClassVar[str] = "label-regions"
    summary: ClassVar[str] = "read forward, backward and update off the name stacks"

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            return bundle
        graph = label_regions(bundle.graph)
        return bundle if graph is bundle.graph else bundle.replace(graph=graph)


def region_of_scopes(op: Op) -> str:
    """Returns "forward", "backward" or "" from the outermost differentiation in the name stack.

    The outermost one decides: the gradient inside a loss (a gradient penalty) belongs to the forward
    of the gradient around it.
    """
    for kind, name in op.scopes:
        if kind == "transform" and name in ("jvp", "transpose"):
            return "forward" if name == "jvp" else "backward"
    return ""


def label_regions(graph: Graph) -> Graph:
    """Returns the graph with every op's region set; the same object when they all were."""
    labels = [region_of_scopes(op) for op in graph.ops]
    defined = definitions(graph)
    needs_gradient = [bool(label) for label in labels]  # reads, through any op, a forward or backward value
    for i, op in enumerate(graph.ops):
        needs_gradient[i] = needs_gradient[i] or any(
            needs_gradient[defined[r]] for r in op.refs if r in defined
        )
    wanted = [bool(label) for label in labels]
    for i in reversed(range(len(graph.ops))):
        if wanted[i]:
            for r in graph.ops[i].refs:
                if r in defined:
                    wanted[defined[r]] = True
    for i, label in enumerate(labels):
        if not label:
            labels[i] = "prologue" if wanted[i] and not needs_gradient[i] else "update"
    if all(op.region == label for op, label in zip(graph.ops, labels)):
        return graph
    ops = tuple(dataclasses.replace(op, region=label) for op, label in zip(graph.ops, labels))
    return graph.replace(ops=ops)
