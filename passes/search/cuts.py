"""Where a sequence of groups is cut so that its slowest stage is as fast as it can be."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence

from hetjax.passes.search.judge import INF, Edges, Groups, Judge, Room
from hetjax.passes.search.space import Group

# Running sums of a stage's work, per part, and what its memory allows.
Way = tuple[tuple[Sequence[float], ...], tuple[Room, ...]]

# The limit is halved towards the mean until so close, or so often, before the last steps are taken one by one.
_HALVINGS, _CLOSE = 30, 1e-4
_JUST_BELOW = 1.0 - 1e-9


def balanced(
    judge: Judge, m: int, choices: Sequence[Sequence[Group]], in_flight: int | Sequence[int] | None = None
) -> tuple[Groups, Edges | None, float]:
    """Returns the groups and edges with the least longest stage, and how long that stage takes.

    Counted is what a stage does in a step, exchange and update included, per microbatch. A stage takes layers while a limit of time and its memory allow, in the way that lets it take most,
    first to last; the later stages then have the least to do. Where a stage is stopped by a single layer that is too
    much for it, every end is tried. The limit is lowered until some layer is left over, so no groups and edges beat the
    result.

    Args:
      judge: for times and bytes.
      m: microbatches.
      choices: per stage, the groups it may be, those preferred first.
      in_flight: activations every stage must have room for; one number for all, None for what the judge
        asks of each, 0 to leave memory out of account and count the cheapest options.

    Returns:
      (groups, edges, seconds of the slowest stage for one microbatch); ((), None, inf) where no edges fit in
      memory.
    """
    num, stages = judge.problem.num_layers, len(choices)
    if stages > num:
        return (), None, INF
    if isinstance(in_flight, int) or in_flight is None:
        held = [in_flight or judge.in_flight(s, stages, m) for s in range(stages)]
    else:
        held = list(in_flight)
    ways: list[list[Way]] = [
        [(judge.step_works(m, g, least=in_flight == 0), () if in_flight == 0 else judge.rooms(g, k)) for g in groups]
        for groups, k in zip(choices, held)
    ]
    totals = [max([w[-1] for work, _ in way for w in work]) for way in ways]
    best = _fill(ways, num, max(totals))
    if best is None:
        return (), None, INF
    longest = _longest(ways, *best)
    low = 1.0 / sum([1.0 / max(1e-300, t) for t in totals])
    for _ in range(_HALVINGS):
        if longest - low <= _CLOSE * longest:
            break
        middle = (low + longest) / 2
        found = _fill(ways, num, middle)
        if found is None:
            low = middle
        else:
            best, longest = found, _longest(ways, *found)
    while longest > 0 and (found := _fill(ways, num, longest * _JUST_BELOW)) is not None:
        best, longest = found, _longest(ways, *found)
    edges, chosen = best
    return tuple([groups[c] for groups, c in zip(choices, chosen)]), edges, longest


def _longest(ways, edges: Edges, chosen: Sequence[int]) -> float:
    return max([
        w[edges[s + 1]] - w[edges[s]] for s, c in enumerate(chosen) for w in ways[s][c][0]
    ])  # fmt: skip


def _fill(ways, num: int, limit_s: float) -> tuple[Edges, list[int]] | None:
    """Returns edges at which each stage takes as many layers as time and memory allow, and in which way."""
    stages = len(ways)
    edges, chosen = [0], []
    at = 0
    for s in range(stages):
        # Every later stage takes one at least.
        furthest, way = _reach(ways[s], at, num - (stages - 1 - s), limit_s)
        if furthest <= at:
            # The layer that is next is too much for this stage; with fewer before, it may have another one.
            return _fill_exactly(ways, num, limit_s) if _may_fill(ways[s + 1 :], at, num, limit_s) else None
        at = furthest
        edges.append(at)
        chosen.append(way)
    return (tuple(edges), chosen) if at == num else None


def _reach(ways: Sequence[Way], at: int, most: int, limit_s: float) -> tuple[int, int]:
    """Returns the last layer before which a stage that begins at one may end, and in which way; (at, 0) for none."""
    furthest, way = at, 0
    for c, (works, rooms) in enumerate(ways):
        end = most
        for w in works:
            if w[end] - w[at] > limit_s:
                end = bisect_right(w, w[at] + limit_s, at, end) - 1
        for need, free in rooms:
            if free < 0:
                end = at
            elif need[end] - need[at] > free:
                end = bisect_right(need, need[at] + free, at, end) - 1
        if end > furthest:
            furthest, way = end, c
    return furthest, way


def _may_fill(ways, at: int, num: int, limit_s: float) -> bool:
    """Returns whether stages do the layers from one on if some may have none, which is easier."""
    for stage in ways:
        at = max(at, _reach(stage, at, num, limit_s)[0])
    return at == num


def _fill_exactly(ways, num: int, limit_s: float) -> tuple[Edges, list[int]] | None:
    """Returns edges and ways as `_fill`, whichever stages are stopped by a single layer: every end is tried."""
    stages = len(ways)
    # Per stage, where it may end: where it began then, the last of such places, and in which way.
    ends: list[dict[int, tuple[int, int]]] = [{0: (0, 0)}]
    for s in range(stages):
        found: dict[int, tuple[int, int]] = {}
        for at in ends[-1]:
            for c in range(len(ways[s]) - 1, -1, -1):
                furthest, _ = _reach(ways[s][c : c + 1], at, num - (stages - 1 - s), limit_s)
                for end in range(at + 1, furthest + 1):
                    if end not in found or found[end][0] <= at:
                        found[end] = (at, c)
        ends.append(dict(sorted(found.items())))
    if num not in ends[-1]:
        return None
    edges, chosen = [num], []
    for s in range(stages, 0, -1):
        at, way = ends[s][edges[-1]]
        edges.append(at)
        chosen.append(way)
    return tuple(reversed(edges)), chosen[::-1]


def even(num_layers: int, stages: int) -> Edges | None:
    """Returns edges with as many layers in one stage as in another, the later ones taking what is over."""
    if stages > num_layers:
        return None
    return tuple(s * num_layers // stages for s in range(stages + 1))
