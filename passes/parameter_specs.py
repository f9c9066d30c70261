"""Which dimension of each state leaf is split over a stage's "model" axis."""

from __future__ import annotations

from collections.abc import Mapping

from hetjax.ir.graph import Graph, Op, Ref
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.plan import Plan
from hetjax.ir.program import Spec
from hetjax.passes.cutting import find_cuts
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.placement import place


def parameter_specs(
    graph: Graph, micro: Microbatching, plan: Plan
) -> tuple[tuple[str, Spec], ...]:
    """Returns (path, spec) of the state leaves to split, sorted by path.

    A weight of a matrix product is split over "model" on its output dimension when its input is not
    split, and on its contracted dimension when the input is split there (the product's partial sums
    are then added, by one all-reduce): Megatron-LM's column and row parallel layers, found from the
    products themselves. Leaves of the same shape that are updated together (moments) follow their
    parameter. Other leaves stay replicated.
    """
    sizes = [dict(stage.axes).get("model", 1) for stage in plan.stages]
    if all(n == 1 for n in sizes):
        return ()
    cuts = find_cuts(graph, micro, [s.first for s in plan.stages[1:] if s.first is not None])
    placement = place(graph, micro, plan.num_stages, cuts)
    split = _split_dimensions(graph, placement.homes, sizes)
    out = []
    for argument in graph.inputs:
        if argument.ref in split:
            dims: list[tuple[str, ...]] = [()] * graph.avals[argument.ref].ndim
            dims[split[argument.ref]] = ("model",)
            out.append((argument.path, tuple(dims)))
    return tuple(sorted(out))


def _split_dimensions(
    graph: Graph, homes: Mapping[Ref, int], sizes: list[int]
) -> dict[Ref, int]:
    """Returns the dimension to split of each state leaf that is to be split."""
    state = {a.ref for a in graph.inputs if a.role == "state" and graph.avals[a.ref].ndim >= 2}
    weight_of: dict[Ref, Ref] = {r: r for r in state}
    split: dict[Ref, int] = {}
    features: set[Ref] = set()  # activations whose last dimension is split
    for op in graph.ops:
        if op.region == "backward":
            continue
        if op.primitive in ("convert_element_type", "copy") and op.refs and op.refs[0] in weight_of:
            weight_of[op.outputs[0]] = weight_of[op.refs[0]]
        if op.primitive == "dot_general" and len(op.refs) == 2:
            activation, weight = op.refs
            if weight not in weight_of or activation in weight_of:
                continue
            leaf = weight_of[weight]
            (_, contracted), (_, batch) = op.param("dimension_numbers")
            n = sizes[homes.get(leaf, 0)]
            shape = graph.avals[leaf].shape
            if n == 1 or leaf in split or batch:
                continue
            inner = contracted[0]
            outer = [d for d in range(len(shape)) if d not in contracted]
            if activation in features and shape[inner] % n == 0:
                split[leaf] = inner
            elif outer and shape[outer[-1]] % n == 0 and outer[-1] == len(shape) - 1:
                split[leaf] = outer[-1]
                features.add(op.outputs[0])
        elif any(r in features for r in op.refs) and _keeps_last(graph, op):
            features.update(op.outputs)
    return _with_followers(graph, split)


def _keeps_last(graph: Graph, op: Op) -> bool:
    if not op.outputs:
        return False
    last = graph.avals[op.outputs[0]].shape[-1:]
    elementwise = all(
        not graph.avals[r].ndim or graph.avals[r].shape[-1:] in (last, (1,)) for r in op.refs
    )
    return bool(last) and elementwise and not op.primitive.startswith(("reduce", "dot", "transpose", "reshape", "broadcast"))


def _with_followers(graph: Graph, split: dict[Ref, int]) -> dict[Ref, int]:
    """Adds the state leaves (moments, averages) that are updated together with a split parameter."""
    carried = follow_updates(graph, split)
    out = dict(split)
    for argument in graph.inputs:
        if argument.role == "state" and argument.ref in carried:
            out.setdefault(argument.ref, carried[argument.ref])
    return out
