"""When every op runs: round, phase and level, by which fragments are told apart and sorted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetjax.ir.graph import Graph, Ref, users
from hetjax.passes.op_kinds import BACKWARD, PHASE, UPDATE, acts

Order = tuple[int, int, int]  # round, phase, level


def orders_of(
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
        if kinds[i] not in PHASE:
            continue
        phase = PHASE[kinds[i]]
        for s in stages[i]:
            order = (first_backward if kinds[i] == BACKWARD else 0, phase, 0)
            for r in op.refs:
                for t, before in _nearest(made.get(r, {}), s):
                    order = max(order, _after(before, phase, t, s))
            if kinds[i] == UPDATE and acts(op):
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
