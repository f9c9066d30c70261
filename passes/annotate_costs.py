"""annotate-costs: counts each op's floating point operations and bytes from its shapes."""

from __future__ import annotations

import dataclasses
import math
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.graph import Cost, Graph, Op, subgraphs


@dataclasses.dataclass(frozen=True)
class AnnotateCosts:
    """Counts FLOPs and bytes of every op at full batch, nested regions times their trip count."""

    name: ClassVar[str] = "annotate-costs"
    summary: ClassVar[str] = "count the FLOPs and bytes of every op"

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            return bundle
        graph = annotate_costs(bundle.graph)
        return bundle if graph is bundle.graph else bundle.replace(graph=graph)


def op_flops(graph: Graph, op: Op) -> int:
    """Returns the floating point operations of one op.

    A product of matrices counts 2*m*n*k, a convolution 2 * outputs * kernel window * input features,
    anything else one per output element (or per input element, for reductions).
    """
    nested = list(subgraphs(op))
    if nested:
        trips = int(op.param("length", 1) or 1) if op.primitive == "scan" else 1
        counts = [sum(op_flops(g, o) for o in g.ops) for g in nested]
        return trips * (max(counts) if op.primitive == "cond" else sum(counts))
    out = sum(graph.avals[r].size for r in op.outputs)
    if op.primitive == "dot_general":
        (contracting, _), _ = op.param("dimension_numbers")
        lhs = graph.aval(op.inputs[0])
        return 2 * out * math.prod(lhs.shape[d] for d in contracting)
    if op.primitive == "conv_general_dilated":
        kernel = graph.aval(op.inputs[1])
        spec = op.param("dimension_numbers").rhs_spec
        return 2 * out * kernel.size // max(1, kernel.shape[spec[0]])
    if op.primitive.startswith(("reduce_", "arg", "cum", "sort")):
        return max(out, sum(graph.aval(a).size for a in op.inputs))
    return out


def annotate_costs(graph: Graph) -> Graph:
    """Returns the graph with every op's cost set; the same object when they all were."""
    if all(op.cost is not None for op in graph.ops):
        return graph
    ops = tuple(
        dataclasses.replace(
            op,
            cost=Cost(
                op_flops(graph, op),
                sum(graph.aval(a).nbytes for a in op.inputs),
                sum(graph.avals[r].nbytes for r in op.outputs),
            ),
        )
        for op in graph.ops
    )
    return graph.replace(ops=ops)
