"""Branch and bound over whole structures, where a problem has few enough to list: best bound first.

A structure is a division of the batch with the devices of every stage; it has a plan for every choice of
options and edges. All structures wait in one queue, by a value that none of their plans falls below. The first
is taken out, the plans that its groups suggest are judged, and its other plans come into the queue, each by a
bound of its own. Whatever is not better than the best plan is never judged; when nothing else is left, the best
plan is proved to be one.

Listing structures and bounding them judges no plan, and takes some 50 µs each.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

from hetjax.passes.search.judge import Edges, Groups
from hetjax.passes.search.moves import MOST_EDGES, Moves, State, canonical
from hetjax.passes.search.space import Micro
from hetjax.passes.search.view import View

# Problems of more structures than these are left to the tree.
MOST_STRUCTURES = 3_000
# And those with more stages of like replicas to begin with are not even listed.
_MOST_FIRST = 500


def structures(moves: Moves) -> Iterator[tuple[Micro, Groups]]:
    """Yields every division of the batch with every sequence of groups."""
    limit = moves.problem.stage_limit

    def longer(micro: Micro, groups: Groups) -> Iterator[tuple[Micro, Groups]]:
        for mixed in (False, True):
            for g in moves.groups(micro, groups, mixed):
                yield micro, (*groups, g)
                if len(groups) + 1 < limit:
                    yield from longer(micro, (*groups, g))

    for micro in moves.micros:
        yield from longer(micro, ())


def _first_stages(moves: Moves) -> int:
    return sum(len(moves.groups(micro, (), False)) for micro in moves.micros)


class Sweep:
    """The queue; see the module's text.

    Args:
      view: the problem.

    Attributes:
      done: whether no plan of the problem is better than the best.
      active: whether there are few enough structures.
    """

    def __init__(self, view: View):
        self.view = view
        self.evaluator = view.evaluator
        self.judge = view.judge
        self.done = False
        # (bound, number, micro, groups, edges; None for a structure)
        self._queue: list[tuple[float, int, Micro, Groups, Edges | None]] = []
        self._number = itertools.count()
        problem = view.problem
        few = view.moves.num_edges(min(problem.stage_limit, 1 + problem.num_layers // 2)) <= MOST_EDGES
        found: list[tuple[Micro, Groups]] = []
        if view.prunes_by_bound and few and _first_stages(view.moves) <= _MOST_FIRST:
            found = list(itertools.islice(structures(view.moves), MOST_STRUCTURES + 1))
        self.active = 0 < len(found) <= MOST_STRUCTURES
        twins, seen = self.judge.twins(), set()
        for micro, groups in found if self.active else ():
            state = canonical(twins, State(micro, groups))
            if state not in seen:
                seen.add(state)
                self._wait(view.cutter.bound(micro, groups), micro, groups, None)

    def _wait(self, bound: float, micro: Micro, groups: Groups, edges: Edges | None) -> None:
        if bound < self.evaluator.best:
            heapq.heappush(self._queue, (bound, next(self._number), micro, groups, edges))

    def work(self, evaluations: int) -> None:
        """Goes on for so many evaluations."""
        until = self.evaluator.evaluations + evaluations
        source, self.evaluator.source = self.evaluator.source, "sweep"
        try:
            while self.active and not self.done and self.evaluator.evaluations < until:
                if not self._queue or self._queue[0][0] >= self.evaluator.best:
                    self.done = True
                    return
                _, _, micro, groups, edges = heapq.heappop(self._queue)
                if edges is None:
                    self._open(micro, groups)
                else:
                    self.evaluator.value(micro.num_microbatches, groups, edges)
        finally:
            self.evaluator.source = source

    def _open(self, micro: Micro, groups: Groups) -> None:
        best = self.evaluator.best
        self.view.look(micro, groups, 0.0, best)
        every = list(self.view.moves.edges(len(groups)))
        for outfit in self.view.moves.options(groups):
            if all(map(self.judge.known, outfit)):
                for edges in every:
                    self._wait(self._bound(micro, outfit, edges), micro, outfit, edges)

    def _bound(self, micro: Micro, groups: Groups, edges: Edges) -> float:
        """Returns a value that a plan does not fall below: its busiest stage, and all microbatches behind the stages before."""
        judge, m = self.judge, micro.num_microbatches
        period_s = before_s = filled_s = 0.0
        for s, group in enumerate(groups):
            a, b = edges[s], edges[s + 1]
            period_s = max(period_s, max([w[b] - w[a] for w in judge.step_works(m, group)]))
            if s:
                before_s += judge.least_crossing_s(groups[s - 1], group)
            work_s = max([w[b] - w[a] for w in judge.works(group)])
            filled_s = max(filled_s, before_s + m * work_s)
            before_s += work_s
        if judge.adds_up:
            seconds = (m - 1) * period_s + max(period_s, before_s)
        else:
            seconds = max(m * period_s, filled_s)
        return (seconds + judge.floor_s(micro)) * self.evaluator.factor(groups)
