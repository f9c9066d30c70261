"""Local refinement: plans that look good are climbed from, neighbour by neighbour, in small portions.

The search alternates: it draws plans, and gives the refinement so many evaluations for each. The refinement
climbs from the best plan that it has not climbed from, one of each division of the batch at first, then from
plans two or three random moves away from the best of all. Neighbours are tried in random order and the first
better one is taken.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator

from hetjax.passes.search.forest_bonus import RANKED
from hetjax.passes.search.judge import INF
from hetjax.passes.search.neighbours import Neighbours
from hetjax.passes.search.space import Group, Micro, Outline
from hetjax.passes.search.view import View

Groups = tuple[Group, ...]

# Plans within this factor of the best are climbed from.
_REACH = 1.3
# A climb ends after so many neighbours that are no better.
_PATIENCE = 300
# A step of a climb must make a plan better by this share of its value; once none does, by the next.
_STEPS = (1e-2, 2e-3, 1e-9)
# How much better other starts must be than one that came to a halt.
_WAIT = 1.02


class Refiner:
    """Improves plans; the results are where the evaluator keeps its best.

    Args:
      view: the problem.
      seed: of the order of neighbours.
    """

    def __init__(self, view: View, seed: int):
        self.view = view
        self.problem = view.problem
        self.evaluator = view.evaluator
        self.random = random.Random(seed)
        self._starts: dict[tuple[Micro, Groups], float] = {}
        self._done: set[tuple[Micro, Groups, int]] = set()
        self._halted: list[tuple[float, int, Micro, Groups]] = []
        self._values: dict[tuple[Micro, Groups], float] = {}
        self.neighbours = Neighbours(view, self.random)
        self._climb: Iterator[None] | None = None
        self._idle = self._rest = 0

    def offer(self, micro: Micro, groups: Groups, value: float) -> None:
        """Takes note of a plan that might be climbed from."""
        if value < _REACH * self.evaluator.best and (micro, groups, 0) not in self._done:
            self._starts[micro, groups] = value
            self._rest = 0

    def work(self, evaluations: int) -> None:
        """Goes on for so many evaluations, or a few times as many looks at plans known already.

        When one portion after another brought nothing new, the next ones are left out, twice as many each
        time: the neighbourhood of the best plan is known then, and the tree has more to tell.
        """
        if self._rest > 0:
            self._rest -= 1
            return
        begin = self.evaluator.evaluations
        until, looks = begin + evaluations, 4 * evaluations
        source, self.evaluator.source = self.evaluator.source, "refinement"
        try:
            while self.evaluator.evaluations < until and looks > 0:
                looks -= 1
                if self._climb is None:
                    self._climb = self._next()
                if self._climb is None:
                    break
                try:
                    next(self._climb)
                except StopIteration:
                    self._climb = None
        finally:
            self.evaluator.source = source
        if self.evaluator.evaluations > begin:
            self._idle = 0
        else:
            self._idle += 1
            self._rest = (1 << min(self._idle, 12)) - 1

    def _next(self) -> Iterator[None] | None:
        reach = _REACH * self.evaluator.best
        self._starts = {k: v for k, v in self._starts.items() if v < reach and (*k, 0) not in self._done}
        self._halted = [h for h in self._halted if h[0] < reach]
        starts = [(v, 0, *k) for k, v in self._starts.items()] + self._halted
        if starts:
            # Those that have come to a halt once are gone on with when the others are as good.
            value, level, micro, groups = min(starts, key=lambda h: h[0] * _WAIT ** h[1])
            self._halted = [h for h in self._halted if h[1:] != (level, micro, groups)]
            if not level:
                # Of one division the best start is enough, until all else has been tried.
                self._starts = {k: v for k, v in self._starts.items() if k[0] != micro}
            return self._up(value, micro, groups, level)
        outline = self.evaluator.outline
        if outline is None:
            return None
        return self._kick(outline)

    def _kick(self, outline: Outline) -> Iterator[None]:
        """Climbs from a plan a few random moves away that is not much worse."""
        micro, groups = micro_of(outline, self.problem.alike), outline.groups
        value = self.evaluator.best
        for _ in range(self.random.choice((1, 1, 2))):
            for other_micro, other in itertools.islice(self._sample(micro, groups), 30):
                found = self._value(other_micro, other, _REACH * self.evaluator.best)
                yield
                if found < 1.15 * self.evaluator.best and (other_micro, other, 0) not in self._done:
                    value, micro, groups = found, other_micro, other
                    break
        yield from self._up(value, micro, groups)

    def _up(self, value: float, micro: Micro, groups: Groups, level: int = 0) -> Iterator[None]:
        """Climbs until many neighbours in a row were not much better; yields after every evaluation.

        What counts as much better is less at each level; where one level halts, the next may go on later.
        """
        while (micro, groups, level) not in self._done and value < INF:
            self._done.add((micro, groups, level))
            enough = value * (1 - _STEPS[level])
            for other_micro, other in self._sample(micro, groups):
                found = self._value(other_micro, other, enough)
                yield
                if found < enough:
                    value, micro, groups = found, other_micro, other
                    break
            else:
                if level + 1 < len(_STEPS):
                    self._halted.append((value, level + 1, micro, groups))
                return

    def _sample(self, micro: Micro, groups: Groups) -> Iterator[tuple[Micro, Groups]]:
        """Yields legal neighbours in random order, of each sort about as many."""
        sorts: dict[str, list[tuple[Micro, Groups]]] = {}
        for sort, other_micro, other in self.neighbours.by_sort(micro, groups):
            sorts.setdefault(sort, []).append((other_micro, other))
        out = []
        for near in sorts.values():
            self.random.shuffle(near)
            out += [(i / len(near) ** 0.5, self.random.random(), n) for i, n in enumerate(near)]
        out.sort(key=lambda x: x[:2])
        legal = (
            n for _, _, n in out if len(n[1]) <= self.problem.stage_limit and self.neighbours.may(n[1], groups)
        )
        left, forest = _PATIENCE, self.view.forest
        if forest is not None and forest.ranks:
            some = list(itertools.islice(legal, RANKED))
            yield from forest.ranked(some)
            left -= len(some)
        yield from itertools.islice(legal, left)

    def _value(self, micro: Micro, groups: Groups, before: float) -> float:
        key = (micro, groups)
        known = self._values.get(key)
        if known is not None:
            return known
        climb_below = min(before, 1.05 * self.evaluator.best)
        value = self.view.look(micro, groups, climb_below, before)
        if value < before:
            self._values[key] = value
        return value


def micro_of(outline: Outline, alike: bool) -> Micro:
    """Returns the division of the batch that a plan has."""
    first = outline.groups[0]
    return Micro(outline.num_microbatches, first.examples, first.replicas if alike else 0)
