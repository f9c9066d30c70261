"""The dynamic program that planners of pipelines use, as a baseline: the fewest seconds under a longest stage.

For every division of the batch and every limit on a stage's time, stages are put together from the last layer
and the last pool forwards: a stage has equal replicas in one pool, takes as many layers as the limit and its
memory allow, with as many activations in flight as the mean stage has, and the sum of all stages' times is made small (Zheng et al., Alpa,
OSDI 2022, with devices of several kinds in a fixed order). Pools are taken by memory, largest first. The
program knows nothing of links; each of its plans is judged like anybody's.
"""

from __future__ import annotations

import functools
from bisect import bisect_left

from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import Groups, Moves, dearness, with_options
from hetjax.passes.search.space import PLAIN, Group, Micro

# Limits on a stage, as factors of the pace of all devices together.
_LIMITS = tuple(1.08**i for i in range(10))
# A pool is cut into no more than so many units of equal numbers of devices.
_UNITS = 8

# (seconds of the stages, how many, (group, first layer) of each)
_Found = tuple[float, int, tuple[tuple[Group, int], ...]]


def dynamic(evaluator: Evaluator) -> None:
    """Judges the plan that the dynamic program finds for each division of the batch and limit."""
    from hetjax.passes.search.view import View

    evaluator.source = "dynamic"
    view = View(evaluator)
    for micro in sorted(view.moves.micros, key=lambda m: view.sketch(m).seconds):
        for factor in _LIMITS:
            evaluator.check()
            ideal_s = micro.examples * view.rates.total / max(1e-300, view.speed)
            found = _plan(evaluator, view.moves, micro, factor * ideal_s, view.sketch(micro).stages)
            if found is not None:
                groups, edges = found
                evaluator.value(micro.num_microbatches, groups, edges)
                # And once more with options and cuts that know of the links.
                view.look(micro, tuple(g.with_options(PLAIN) for g in groups), 0.0, INF)


def _plan(
    evaluator: Evaluator, moves: Moves, micro: Micro, limit_s: float, stages: int
) -> tuple[Groups, tuple[int, ...]] | None:
    problem, judge = evaluator.problem, evaluator.judge
    pools = sorted(
        range(len(problem.pools)), key=lambda p: -problem.cluster.kind(problem.pools[p].kind).memory_bytes
    )
    units = [max(1, problem.pools[p].devices // _UNITS) for p in pools]
    sorts: list[list[tuple[int, list[Group]]]] = [[] for _ in pools]
    options = sorted(dict.fromkeys((PLAIN, *problem.options)), key=dearness)
    for g in moves.groups(micro, (), False):
        if len(g.parts) == 1:
            at = pools.index(g.parts[0].pool)
            if g.devices % units[at] == 0:
                ways = [with_options(problem, g, o) for o in options]
                sorts[at].append((g.devices // units[at], [w for w in dict.fromkeys(ways) if judge.known(w)]))

    held = min(micro.num_microbatches, max(1, stages // 2))

    @functools.cache
    def reach(at: int, sort: int, end: int) -> tuple[int, Group, float] | None:
        """Returns how far back a stage that ends before layer `end` begins, its group and its seconds."""
        best = None
        for way in sorts[at][sort][1]:
            work = judge.works(way)[0]
            begin = bisect_left(work, work[end] - limit_s, 0, end)
            for need, free in judge.rooms(way, held):
                begin = max(begin, bisect_left(need, need[end] - free, 0, end)) if free > 0 else end
            if begin < (best[0] if best else end):
                best = (begin, way, work[end] - work[begin])
        return best

    @functools.cache
    def rest(end: int, at: int, left: int) -> _Found | None:
        """Returns the stages that do the layers before `end` with pools up to `at`."""
        if end == 0:
            return (0.0, 0, ())
        if at < 0:
            return None
        fewer = problem.pools[pools[at - 1]].devices // units[at - 1] if at else 0
        best = rest(end, at - 1, fewer)
        for sort, (width, _) in enumerate(sorts[at]):
            if width > left or (stage := reach(at, sort, end)) is None:
                continue
            first, group, seconds = stage
            before = rest(first, at, left - width)
            if before is None or before[1] >= problem.stage_limit:
                continue
            if best is None or before[0] + seconds < best[0]:
                best = (before[0] + seconds, before[1] + 1, (*before[2], (group, first)))
        return best

    whole = problem.pools[pools[-1]].devices // units[-1]
    found = rest(problem.num_layers, len(pools) - 1, whole)
    if found is None:
        return None
    return tuple(g for g, _ in found[2]), (*(first for _, first in found[2]), problem.num_layers)
