"""Where and when every op runs: its kind, its stage, its order among the fragments.

Right numbers do not depend on what is decided here: any placement whose fragments can be ordered runs
the same equations on the same values. What depends on it is how many bytes cross between stages.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable, Mapping, Sequence

from hetjax.ir.errors import MicrobatchError
from hetjax.ir.graph import Graph, Op, Ref, definitions, users
from hetjax.ir.microbatching import Microbatching
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.prover.analysis import is_parameter

# What an op is to the schedule:
#   once      before the microbatches, at full batch, on every stage that needs it
#   clone     cheap and free of parameters: repeated inside every fragment that needs it
#   forward, backward   per microbatch
#   update    after the microbatches
ONCE, CLONE, FORWARD, BACKWARD, UPDATE = "once", "clone", "forward", "backward", "update"
_PHASE = {FORWARD: 0, BACKWARD: 1, UPDATE: 2}

# Ops that make constants of numbers.
CONSTANT_MAKERS = frozenset({
    "add", "broadcast_in_dim", "convert_element_type", "div", "eq", "ge", "gt", "iota", "le", "lt", "max", "min",
    "mul", "ne", "neg", "reshape", "select_n", "squeeze", "sub", "transpose",
})

Order = tuple[int, int, int]  # round, phase, level


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


def parameter_refs(graph: Graph) -> frozenset[Ref]:
    """Returns the inputs that count as parameters, as the prover sees them."""
    return frozenset(a.ref for a in graph.inputs if is_parameter(a, graph.avals[a.ref]))


def depends_on(graph: Graph, sources: Iterable[Ref]) -> list[bool]:
    """Returns, per op, whether it reads one of `sources` through any number of ops."""
    reached = set(sources)
    out = []
    for op in graph.ops:
        hit = any(r in reached for r in op.refs)
        if hit:
            reached.update(op.outputs)
        out.append(hit)
    return out


def classify(graph: Graph, micro: Microbatching) -> list[str]:
    """Returns the kind of every op."""
    types, parametric = micro.types, depends_on(graph, parameter_refs(graph))
    backward_refs: set[Ref] = set()
    kinds: list[str] = []
    for i, op in enumerate(graph.ops):
        of = [types[r] for r in op.outputs]
        if any(t.kind == "U" for t in of) or any(r in micro.resliced for r in op.outputs):
            kind = UPDATE
        elif any(r in micro.hoisted for r in op.outputs) or all(t.kind == "Z" or (t.kind == "R" and not t.power) for t in of):
            kind = ONCE
        elif not parametric[i]:
            kind = CLONE
        elif op.region == "backward" or any(r in backward_refs for r in op.refs):
            kind = BACKWARD
        else:
            kind = FORWARD
        if kind == BACKWARD:
            backward_refs.update(op.outputs)
        kinds.append(kind)
    if micro.resliced:
        _before_the_head(graph, micro, kinds)
    _repeat_constants(graph, micro, kinds)
    # A step-level op that no microbatch needs (weight decay, a learning rate) waits for the update, or its result would be held through the whole step.
    defined = definitions(graph)
    early = [k in (FORWARD, BACKWARD) for k in kinds]
    for i in reversed(range(len(kinds))):
        if early[i] or (kinds[i] == ONCE and graph.ops[i].outputs and _hoisted(graph.ops[i], micro)):
            early[i] = True
            for r in graph.ops[i].refs:
                if r in defined:
                    early[defined[r]] = True
    kinds = [UPDATE if k == ONCE and not early[i] else k for i, k in enumerate(kinds)]
    if micro.num_microbatches == 1:  # a callback that gives values runs once, on however many stages they are read
        told: set[Ref] = set()
        for i, op in enumerate(graph.ops):
            if kinds[i] in (ONCE, CLONE) and op.outputs and (_acts(op) or told.intersection(op.refs)):
                kinds[i] = FORWARD if early[i] else UPDATE
                told.update(op.outputs)
    return kinds


def _before_the_head(graph: Graph, micro: Microbatching, kinds: list[str]) -> None:
    """Makes forwards of the backward's ops that a loss head at full batch reads, as it runs before all backwards."""
    wanted = set(micro.resliced)
    for i in reversed(range(len(kinds))):
        if wanted.intersection(graph.ops[i].outputs):
            wanted.update(graph.ops[i].refs)
            if kinds[i] == BACKWARD:
                kinds[i] = FORWARD


def _repeat_constants(graph: Graph, micro: Microbatching, kinds: list[str]) -> None:
    """Makes clones of what is made of nothing (a broadcast number, an iota).

    Made once, it would be held in memory and read from there by every fragment, and XLA could not see
    that it is a constant.
    """
    from_nothing: set[Ref] = set()
    for i, op in enumerate(graph.ops):
        made_here = op.primitive in CONSTANT_MAKERS and all(r in from_nothing for r in op.refs)
        if kinds[i] == ONCE and made_here and not _hoisted(op, micro):
            kinds[i] = CLONE
            from_nothing.update(op.outputs)


def _hoisted(op: Op, micro: Microbatching) -> bool:
    return any(r in micro.hoisted for r in op.outputs)


def rounds_of(graph: Graph, kinds: Sequence[str]) -> list[int]:
    """Returns the round of each op: how often the step has gone from update back to forward before."""
    where: dict[Ref, tuple[int, int]] = {}
    out = []
    for op, kind in zip(graph.ops, kinds):
        if kind not in _PHASE:
            out.append(0)
            continue
        rnd, phase = 0, _PHASE[kind]
        for r in op.refs:
            if r in where:
                before = where[r]
                rnd = max(rnd, before[0] + (before[1] > phase))
        out.append(rnd)
        for r in op.outputs:
            where[r] = (rnd, phase)
    return out


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
    stages = _update_stages(graph, kinds, stage, found_homes, num_stages, fixed, micro.resliced)
    orders = _orders(graph, kinds, stages, first_backward=1 if micro.resliced else 0)
    for argument in graph.inputs:
        found_homes.setdefault(argument.ref, 0)
    return Placement(num_stages, tuple(kinds), tuple(stages), orders, found_homes)


def _refuse_repeated_effects(graph: Graph, kinds: Sequence[str]) -> None:
    """Raises for callbacks that every stage would run before the microbatches."""
    lost = [op for op, kind in zip(graph.ops, kinds) if kind == ONCE and op.outputs and _acts(op)]
    if lost:
        listed = ", ".join(f"'{op.primitive}'{f' at {op.source}' if op.source else ''}" for op in lost)
        raise MicrobatchError(
            f"{listed} has an effect and gives values that the microbatches read: each stage would run it again; "
            "use num_microbatches=1, or one stage", reason="a callback that gives values runs once",
        )


def _one_fragment(graph: Graph) -> Placement:
    """Returns the placement of a step that is neither cut nor split: everything in one fragment."""
    n = len(graph.ops)
    orders = {(i, 0): (0, _PHASE[UPDATE], 0) for i in range(n)}
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


class _Sets:
    """Union-find over refs."""

    def __init__(self) -> None:
        self._parent: dict[Ref, Ref] = {}

    def find(self, ref: Ref) -> Ref:
        parent = self._parent.setdefault(ref, ref)
        while parent != ref:
            grand = self._parent.setdefault(parent, parent)
            self._parent[ref] = grand
            ref, parent = parent, grand
        return ref

    def union(self, a: Ref, b: Ref) -> None:
        self._parent[self.find(a)] = self.find(b)

    def __contains__(self, ref: Ref) -> bool:
        return ref in self._parent


def _update_stages(
    graph: Graph, kinds: Sequence[str], stage: Sequence[int], homes: dict[Ref, int],
    num_stages: int, fixed: Mapping[int, int], resliced: frozenset[Ref] = frozenset(),
) -> list[tuple[int, ...]]:
    """Places update ops: arrays with the state leaf they update, scalars wherever they are read.

    Those in `fixed` stay on the stage that it gives by their number; values in `resliced` are also pulled by
    the backwards that read them.
    """
    defined, readers = definitions(graph), users(graph)
    array = lambda r: graph.avals[r].ndim > 0  # noqa: E731
    sets = _Sets()
    for i, op in enumerate(graph.ops):
        if kinds[i] == UPDATE and i not in fixed:
            linked = [r for r in (*op.refs, *op.outputs) if array(r)]
            for a, b in itertools.pairwise(linked):
                sets.union(a, b)
            for r in linked:
                sets.find(r)
    for result in graph.outputs:  # a new leaf lives where the old one did
        if result.updates is not None and isinstance(result.atom, int) and array(result.atom):
            sets.union(result.atom, graph.inputs[result.updates].ref)
    weight: dict[Ref, dict[int, int]] = {}

    def vote(ref: Ref, at: int, nbytes: int) -> None:
        votes = weight.setdefault(sets.find(ref), {})
        votes[at] = votes.get(at, 0) + nbytes

    for ref, home in homes.items():
        if ref in sets and array(ref):
            vote(ref, home, max(1, graph.avals[ref].nbytes) << 20)
    for i, op in enumerate(graph.ops):  # values of the microbatches pull too, but weakly
        if kinds[i] in (FORWARD, BACKWARD) or i in fixed:
            for r in (*op.outputs, *(r for r in op.refs if r in resliced)):
                if r in sets and array(r):
                    vote(r, stage[i], graph.avals[r].nbytes)
    where = {root: max(votes, key=lambda s: (votes[s], -s)) for root, votes in weight.items()}
    for argument in graph.inputs:
        if argument.ref in sets and array(argument.ref):
            homes.setdefault(argument.ref, where.get(sets.find(argument.ref), 0))
    out: list[tuple[int, ...]] = [
        (stage[i],) if kinds[i] in (FORWARD, BACKWARD) or i in fixed else () for i in range(len(kinds))
    ]
    returned = {r.atom: r for r in graph.outputs if isinstance(r.atom, int)}
    for i in reversed(range(len(graph.ops))):
        op = graph.ops[i]
        if kinds[i] != UPDATE or i in fixed:
            continue
        if _acts(op):
            out[i] = (num_stages - 1,)  # all on one stage, or nothing would keep their order
            continue
        anchored = [r for r in (*op.refs, *op.outputs) if array(r)]
        if anchored:
            out[i] = (where.get(sets.find(anchored[0]), 0),)
            continue
        wanted = {s for r in op.outputs for u in readers.get(r, ()) for s in out[u]}
        for r in op.outputs:
            updates = returned[r].updates if r in returned else None
            if r in returned and not wanted:
                wanted.add(_scalar_owner(graph, kinds, stage, out, op, defined, sets, where))
            elif updates is not None:
                wanted.add(homes.get(graph.inputs[updates].ref, 0))
        out[i] = tuple(sorted(wanted)) or (0,)
    return out


def _acts(op: Op) -> bool:
    """Whether an op has an effect, as a print or a callback has: it runs once, and is not repeated."""
    return op.eqn is not None and bool(op.eqn.effects)


def _scalar_owner(
    graph: Graph, kinds: Sequence[str], stage: Sequence[int], placed: Sequence[tuple[int, ...]],
    op: Op, defined: Mapping[Ref, int], sets: _Sets, where: Mapping[Ref, int],
) -> int:
    """Returns the stage that has most of what a returned scalar is made from."""
    seen, stack, found = set(), list(op.refs), []
    while stack:
        r = stack.pop()
        if r in seen:
            continue
        seen.add(r)
        if graph.avals[r].ndim and r in sets:
            found.append(where.get(sets.find(r), 0))
        elif r in defined:
            i = defined[r]
            if kinds[i] in (FORWARD, BACKWARD):
                found.append(stage[i])
            elif len(placed[i]) == 1:  # a sum put off, on the stage of its operands
                found.append(placed[i][0])
            elif kinds[i] == UPDATE:
                stack.extend(graph.ops[i].refs)
    return max(found, default=0, key=lambda s: (found.count(s), s))


def _orders(
    graph: Graph, kinds: Sequence[str], stages: Sequence[tuple[int, ...]], first_backward: int = 0
) -> dict[tuple[int, int], Order]:
    """Returns (round, phase, level) of each op on each of its stages; fragments sort by it.

    No backward is in a round before `first_backward`, so that one fragment holds those that wait for a
    loss head at full batch and those that need not.

    Within a phase, the forward may go to later stages and the backward to earlier ones at the same
    level; any other crossing starts the next level, so that fragments never wait for each other.
    """
    made: dict[Ref, dict[int, Order]] = {}
    out: dict[tuple[int, int], Order] = {}
    acted: Order = (0, 0, 0)  # when the last print or callback happens: the next one is not earlier
    for i, op in enumerate(graph.ops):
        if kinds[i] not in _PHASE:
            continue
        phase = _PHASE[kinds[i]]
        for s in stages[i]:
            order = (first_backward if kinds[i] == BACKWARD else 0, phase, 0)
            for r in op.refs:
                for t, before in _nearest(made.get(r, {}), s):
                    order = max(order, _after(before, phase, t, s))
            if kinds[i] == UPDATE and _acts(op):
                order = acted = max(order, acted)
            out[i, s] = order
        for r in op.outputs:
            made[r] = {s: out[i, s] for s in stages[i]}
    return _delay_updates(graph, kinds, stages, out)


def _delay_updates(
    graph: Graph, kinds: Sequence[str], stages: Sequence[tuple[int, ...]],
    orders: Mapping[tuple[int, int], Order],
) -> dict[tuple[int, int], Order]:
    """Moves update ops to the last level that serves their readers.

    Left as early as they can be, the moments of every leaf would be computed before a global norm
    arrives from the other stages, and wait for it in memory.
    """
    out = dict(orders)
    readers = users(graph)
    for i in reversed(range(len(graph.ops))):
        if kinds[i] != UPDATE:
            continue
        for s in stages[i]:
            latest: list[Order] = []
            for r in graph.ops[i].outputs:
                for u in readers.get(r, ()):
                    for t in stages[u]:
                        if t == s:
                            latest.append(out[u, t])
                        elif s not in stages[u] or len(stages[i]) == 1:
                            latest.append(orders[i, s])
            if latest and min(latest)[:2] == orders[i, s][:2]:
                out[i, s] = max(orders[i, s], min(latest))
    return out


def _nearest(
    made: Mapping[int, Order], s: int
) -> list[tuple[int, Order]]:
    """Returns where stage s takes a value from: itself if it makes it, else the first maker."""
    if s in made:
        return [(s, made[s])]
    return [min(made.items(), key=lambda item: (item[1], item[0]))] if made else []


def _after(before: Order, phase: int, source: int, target: int) -> Order:
    rnd, earlier, level = before
    if earlier > phase:
        return (rnd + 1, phase, 0)
    if earlier < phase:
        return (rnd, phase, 0)
    allowed = source == target or (phase == 0 and source < target) or (phase == 1 and source > target)
    return (rnd, phase, level + (not allowed))
