"""After which layers a loop over layers should be split, so that the stages can be cut there."""

from __future__ import annotations

import itertools

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Graph
from hetjax.passes.cutting import find_cuts
from hetjax.passes.layer_stacks import layer_stacks
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.plan_stages import Request, plan_stages
from hetjax.passes.split_scans import Edges, even_edges, split_and_found, split_scans

# A loop is tried in at most this many parts; a cut falls between two of them.
MAX_PARTS = 16


def layer_edges(graph: Graph, cluster: Cluster, request: Request) -> tuple[Edges, ...]:
    """Returns where to split each loop over layers, () when none is to be split.

    The step is planned with its loops in many parts; the parts between which that plan cuts are the
    ones to make.

    Args:
      graph: labelled, with costs.
      cluster, request: as for `plan_stages`.
    """
    stacks = layer_stacks(graph)
    fine = [even_edges(s.length, MAX_PARTS) for s in stacks]
    split, parts = split_and_found(graph, fine)
    if split is graph:
        return ()
    micro = one_microbatch(split)
    try:
        plan = plan_stages(split, micro, cluster, request)
    except PlanError:
        return ()  # the plan of the whole graph will say why
    if plan.num_stages == 1:
        return ()
    cuts = find_cuts(split, micro, [s.first for s in plan.stages[1:] if s.first is not None])
    out = []
    for stack, edges in zip(stacks, fine):
        inner = {
            edges[k + 1]
            for loop in stack.forward
            for k, (before, after) in enumerate(itertools.pairwise(parts.get(loop, ())))
            if any(before < c <= after for c in cuts)
        }
        out.append((0, *sorted(inner), stack.length))
    return tuple(out) if any(len(e) > 2 for e in out) else ()


def split_like(graph: Graph, edges: tuple[Edges, ...]) -> Graph:
    """Returns the graph with its loops over layers split as a plan's `layer_edges` say.

    Raises:
      PlanError: the plan was made for other loops.
    """
    lengths = tuple(s.length for s in layer_stacks(graph))
    if tuple(e[-1] for e in edges) != lengths:
        raise PlanError(
            f"the plan splits loops over {[e[-1] for e in edges]} layers; this step has loops over "
            f"{list(lengths)}; plan again for it"
        )
    return split_scans(graph, edges)
