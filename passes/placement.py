"""Where and when every op runs: its kind, its stage, its order among the fragments.

Right numbers do not depend on what is decided here: any placement whose fragments can be ordered runs
the same equations on the same values. What depends on it is how many bytes cross between stages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

from hetjax.ir.errors import MicrobatchError
from hetjax.ir.graph import Graph, Ref, definitions, users
from hetjax.ir.microbatching import Microbatching
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.fragment_order import Order, orders_of
from hetjax.passes.op_kinds import (
    BACKWARD,
    CLONE,
    FORWARD,
    ONCE,
    PHASE,
    UPDATE,
    acts,
    classify,
    rounds_of,
)
from hetjax.passes.update_stages import update_stages


@dataclasses.dataclass(frozen=True)
class Placement:
    """The result of `place`.

    Attributes:
      num_stages: how many stages there are.
      kinds: per op, one of the kinds above.
      stages: per op, the stages that run it: one for forward and backward, one or more for update
        (scalar ops are repeated where they are needed), none for once and clone.
      orders: (round, phase, level) of each (op, stage) that runs per microbatch or after.
      homes: the stage that keeps each state leaf, by ref.
    """

    num_stages: int
    kinds: tuple[str, ...]
    stages: tuple[tuple[int, ...], ...]
    orders: Mapping[tuple[int, int], Order]
    homes: Mapping[Ref, int]


def _forward_demand(
    graph: Graph, kinds: Sequence[str], stage: Sequence[int]
) -> dict[Ref, set[int]]:
    """Returns, per ref, the stages whose forward reads it, directly or through once and clone ops."""
    demand: dict[Ref, set[int]] = {}
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if kinds[i] == FORWARD:
            wanted = {stage[i]}
        elif kinds[i] in (ONCE, CLONE):
            wanted = set().union(*(demand.get(r, set()) for r in op.outputs))
        else:
            continue
        for r in op.refs:
            demand.setdefault(r, set()).update(wanted)
    return demand


def place(
    graph: Graph, micro: Microbatching, num_stages: int, cuts: Sequence[int] = (),
    homes: Mapping[Ref, int] | None = None, block_stages: Mapping[str, int] | None = None, *,
    whole_sums: bool = False,
) -> Placement:
    """Returns where every op runs.

    Args:
      graph: the full graph, labelled.
      micro: its microbatching, proved (or of one microbatch).
      num_stages: how many stages there are.
      cuts: positions in `graph.ops` of the first forward op of stages 1, 2, …, ascending.
      homes: stages that already keep state leaves, by ref; with them the forward follows the data
        instead of the cuts (for functions that run on the plan of another).
      block_stages: with `homes`, the stages of modules that lie in one stage, by module path.
      whole_sums: whether sums over the batch wait for all microbatches, to be made on all of them at once.
    """
    if num_stages == 1 and micro.num_microbatches == 1:
        return _one_fragment(graph)
    kinds = classify(graph, micro)
    if num_stages > 1:
        _refuse_repeated_effects(graph, kinds)
    at_blocks = block_stages or {}
    kinds = _defer_shared_sums(graph, micro, kinds, num_stages, cuts, homes, at_blocks)
    stage, found_homes = _micro_stages(graph, kinds, num_stages, cuts, homes, at_blocks)
    fixed: dict[int, int] = {}
    if whole_sums and micro.num_microbatches > 1:
        fixed = {i: stage[i] for i in _batch_sums(graph, micro, kinds)}
        kinds = [UPDATE if i in fixed else k for i, k in enumerate(kinds)]
    stages = update_stages(graph, kinds, stage, found_homes, num_stages, fixed, micro.resliced)
    orders = orders_of(graph, kinds, stages, first_backward=1 if micro.resliced else 0)
    for argument in graph.inputs:
        found_homes.setdefault(argument.ref, 0)
    return Placement(num_stages, tuple(kinds), tuple(stages), orders, found_homes)


def _refuse_repeated_effects(graph: Graph, kinds: Sequence[str]) -> None:
    """Raises for callbacks that every stage would run before the microbatches."""
    lost = [op for op, kind in zip(graph.ops, kinds) if kind == ONCE and op.outputs and acts(op)]
    if lost:
        listed = ", ".join(f"'{op.primitive}'{f' at {op.source}' if op.source else ''}" for op in lost)
        raise MicrobatchError(
            f"{listed} has an effect and gives values that the microbatches read: each stage would run it again; "
            "use num_microbatches=1, or one stage", reason="a callback that gives values runs once",
        )


def _one_fragment(graph: Graph) -> Placement:
    """Returns the placement of a step that is neither cut nor split: everything in one fragment."""
    n = len(graph.ops)
    orders = {(i, 0): (0, PHASE[UPDATE], 0) for i in range(n)}
    return Placement(1, (UPDATE,) * n, ((0,),) * n, orders, {a.ref: 0 for a in graph.inputs})


def _micro_stages(
    graph: Graph, kinds: Sequence[str], num_stages: int, cuts: Sequence[int],
    homes: Mapping[Ref, int] | None, block_stages: Mapping[str, int], sink: bool = True,
) -> tuple[list[int], dict[Ref, int]]:
    rounds = rounds_of(graph, kinds)
    stage = [-1] * len(graph.ops)
    if homes is None:
        for i, kind in enumerate(kinds):
            if kind == FORWARD and rounds[i] == 0:
                stage[i] = sum(1 for c in cuts if i >= c)
        _keep_forward_monotone(graph, kinds, stage)
        demand = _forward_demand(graph, kinds, stage)
        homes = {a.ref: min(demand[a.ref]) for a in graph.inputs if demand.get(a.ref) and min(demand[a.ref]) >= 0}
    _follow_data(graph, kinds, stage, homes, block_stages)
    demand = _forward_demand(graph, kinds, stage)
    _place_backward(graph, kinds, stage, num_stages, demand)
    if sink:
        _sink_backward(graph, kinds, stage, demand, homes)
    return stage, {r: s for r, s in homes.items() if s >= 0}


def _keep_forward_monotone(graph: Graph, kinds: Sequence[str], stage: list[int]) -> None:
    """Raises a forward op to the latest stage of its inputs (metrics after the loss, say)."""
    at: dict[Ref, int] = {}
    for i, op in enumerate(graph.ops):
        if kinds[i] == FORWARD and stage[i] >= 0:
            stage[i] = max([stage[i], *(at[r] for r in op.refs if r in at)])
            at.update((r, stage[i]) for r in op.outputs)


def _follow_data(
    graph: Graph, kinds: Sequence[str], stage: list[int], homes: Mapping[Ref, int],
    block_stages: Mapping[str, int],
) -> None:
    """Gives forward ops without a stage that of their module, or the latest of what they read."""
    at: dict[Ref, int] = dict(homes)
    for i, op in enumerate(graph.ops):
        known = [at[r] for r in op.refs if r in at]
        if kinds[i] == FORWARD and stage[i] < 0:
            stage[i] = max([*known, block_stages.get(op.block, 0)])
        if kinds[i] == FORWARD:
            at.update((r, stage[i]) for r in op.outputs)
        elif kinds[i] == ONCE and known:
            at.update((r, max(known)) for r in op.outputs)


def _availability(
    graph: Graph, kinds: Sequence[str], stage: Sequence[int], demand: Mapping[Ref, set[int]]
) -> dict[Ref, frozenset[int]]:
    """Returns the stages that hold a ref after the forward; refs held nowhere are left out.

    A value free of parameters (a dropout mask) could be had anywhere, but the stages whose forward
    read it are the ones its backward belongs to.
    """
    held: dict[Ref, frozenset[int]] = {
        a.ref: frozenset(demand[a.ref]) for a in graph.inputs if demand.get(a.ref)
    }
    for i, op in enumerate(graph.ops):
        for r in op.outputs:
            if kinds[i] == FORWARD:
                held[r] = frozenset({stage[i], *demand.get(r, ())})
            elif demand.get(r):
                held[r] = frozenset(demand[r])
            elif kinds[i] in (ONCE, CLONE):
                near = set[int]().union(*(held.get(a, frozenset()) for a in op.refs))
                if near and kinds[i] == ONCE:
                    held[r] = frozenset(near)
    return held


def _place_backward(
    graph: Graph, kinds: Sequence[str], stage: list[int], num_stages: int,
    demand: Mapping[Ref, set[int]],
) -> None:
    """Gives each backward op the latest stage that holds its residuals and is not after its cotangents."""
    held = _availability(graph, kinds, stage, demand)
    at: dict[Ref, int] = {}
    for i, op in enumerate(graph.ops):
        if kinds[i] != BACKWARD:
            continue
        highest = min((at[r] for r in op.refs if r in at), default=num_stages - 1)
        residuals = [r for r in op.refs if r not in at and r in held]
        fits = [q for q in range(highest, -1, -1) if all(q in held[r] for r in residuals)]
        if fits:
            stage[i] = fits[0]
        else:  # no stage holds them all: the one that has most of the bytes
            stage[i] = max(
                range(highest + 1),
                key=lambda q: (sum(graph.avals[r].nbytes for r in residuals if q in held[r]), q),
            )
        at.update((r, stage[i]) for r in op.outputs)


def _sink_backward(
    graph: Graph, kinds: Sequence[str], stage: list[int], demand: Mapping[Ref, set[int]],
    homes: Mapping[Ref, int],
) -> None:
    """Moves backward ops toward the stage that reads their results where no more bytes cross for it."""
    held = _availability(graph, kinds, stage, demand)
    defined, readers = definitions(graph), users(graph)
    updated_at = follow_updates(graph, {r: s for r, s in homes.items() if s >= 0})
    nbytes = lambda r: graph.avals[r].nbytes  # noqa: E731
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if kinds[i] != BACKWARD:
            continue
        reading = [stage[u] for r in op.outputs for u in readers.get(r, ()) if kinds[u] == BACKWARD]
        if any(kinds[u] == UPDATE for r in op.outputs for u in readers.get(r, ())):
            reading += [updated_at.get(r, stage[i]) for r in op.outputs]
        if not reading:
            continue
        target = max(reading)
        cotangents = [r for r in op.refs if r in defined and kinds[defined[r]] == BACKWARD]
        others = [r for r in op.refs if r in held and r not in cotangents]
        if target >= stage[i] or any(target not in held[r] for r in others):
            continue
        arriving = sum(
            nbytes(r) for r in cotangents
            if stage[defined[r]] != target
            and not any(u != i and stage[u] == target and kinds[u] == BACKWARD for u in readers[r])
        )
        if arriving <= sum(map(nbytes, op.outputs)):
            stage[i] = target


def _defer_shared_sums(
    graph: Graph, micro: Microbatching, kinds: list[str], num_stages: int, cuts: Sequence[int],
    homes: Mapping[Ref, int] | None, block_stages: Mapping[str, int],
) -> list[str]:
    """Moves sums of one parameter's gradients from several stages behind the accumulation.

    A tied embedding gets a gradient from the first stage and one from the last; added per microbatch,
    one of them would cross every time. Both are batch sums, so they are accumulated where they are
    made and added once.
    """
    stage, _ = _micro_stages(graph, kinds, num_stages, cuts, homes, block_stages, sink=False)
    defined, readers = definitions(graph), users(graph)
    out = list(kinds)
    returned = {r.atom for r in graph.outputs if isinstance(r.atom, int)}
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if kinds[i] != BACKWARD or micro.num_microbatches == 1:
            continue
        late = all(out[u] == UPDATE for r in op.outputs for u in readers.get(r, ()))
        sums = all(micro.types[r].kind == "S" for r in op.outputs) and all(
            micro.types[r].kind in ("S", "Z") for r in op.refs
        )
        made = {stage[defined[r]] for r in op.refs if r in defined and kinds[defined[r]] == BACKWARD}
        crosses = len(made) > 1 or any(
            out[u] == UPDATE and kinds[u] == BACKWARD for r in op.outputs for u in readers.get(r, ())
        )
        used = any(r in readers or r in returned for r in op.outputs)
        if late and sums and used and len(made) > 1 and crosses:
            out[i] = UPDATE
    return out


def _batch_sums(graph: Graph, micro: Microbatching, kinds: Sequence[str]) -> set[int]:
    """Returns the ops of the microbatches whose results are sums over the batch, and that no microbatch reads.

    A loop that also gives values of single examples runs in the microbatches, with the sums it makes.
    """
    readers = users(graph)
    found: set[int] = set()
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if kinds[i] not in (FORWARD, BACKWARD) or not op.outputs:
            continue
        late = all(u in found or kinds[u] == UPDATE for r in op.outputs for u in readers.get(r, ()))
        if late and all(micro.types[r].kind == "S" for r in op.outputs):
            found.add(i)
    return found
