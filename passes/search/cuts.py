"""Where a sequence of groups is cut so that its slowest stage is as fast as it can be."""

from __future__ import annotations

from bisect import bisect_right

from hetjax.passes.search.judge import INF, Edges, Groups, Judge

# Halvings towards the mean before the last steps are taken one by one.
_HALVINGS = 6
_JUST_BELOW = 1.0 - 1e-9


def balanced(
    judge: Judge, m: int, groups: Groups, in_flight: int | None = None
) -> tuple[Edges | None, float]:
    """Returns the edges with the least longest stage, and how long that stage takes.

    A stage takes layers while a limit of time and its memory allow, first to last; the later stages then
    have the least to do. The limit is lowered until some layer is left over, so no edges beat the result.

    Args:
      judge: for times and bytes.
      m: microbatches.
      groups: one per stage.
      in_flight: activations every stage must have room for; None for what the judge asks of each, 0 to
        leave memory out of account.

    Returns:
      (edges, seconds of the slowest stage for one microbatch); (None, inf) where no edges fit in memory.
    """
    num, stages = judge.problem.num_layers, len(groups)
    if stages > num:
        return None, INF
    works = [judge.works(g) for g in groups]
    rooms: list = [()] * stages
    if in_flight != 0:
        rooms = [
            judge.rooms(g, in_flight or judge.in_flight(s, stages, m)) for s, g in enumerate(groups)
        ]
    totals = [max([w[-1] for w in work]) for work in works]
    best = _fill(works, rooms, num, max(totals))
    if best is None:
        return None, INF
    longest = _longest(works, best)
    low = 1.0 / sum([1.0 / max(1e-300, t) for t in totals])
    for _ in range(_HALVINGS):
        middle = (low + longest) / 2
        found = _fill(works, rooms, num, middle)
        if found is None:
            low = middle
        else:
            best, longest = found, _longest(works, found)
    while (found := _fill(works, rooms, num, longest * _JUST_BELOW)) is not None:
        best, longest = found, _longest(works, found)
    return best, longest


def _longest(works, edges: Edges) -> float:
    return max([w[edges[s + 1]] - w[edges[s]] for s, work in enumerate(works) for w in work])


def _fill(works, rooms, num: int, limit_s: float) -> Edges | None:
    """Returns edges at which each stage takes as many layers as time and memory allow, or None."""
    stages = len(works)
    edges = [0]
    at = 0
    for s in range(stages):
        end = num - (stages - 1 - s)  # every later stage takes one at least
        for w in works[s]:
            if w[end] - w[at] > limit_s:
                end = bisect_right(w, w[at] + limit_s, at, end) - 1
        for need, free in rooms[s]:
            if need[end] - need[at] > free:
                end = bisect_right(need, need[at] + free, at, end) - 1
        if end <= at:
            return None
        at = end
        edges.append(at)
    return tuple(edges) if at == num else None


def even(num_layers: int, stages: int) -> Edges | None:
    """Returns edges with as many layers in one stage as in another, the later ones taking what is over."""
    if stages > num_layers:
        return None
    return tuple(s * num_layers // stages for s in range(stages + 1))
