"""Local refinement: plans that look good are climbed from, neighbour by neighbour, in small portions.

The search alternates: it draws plans, and gives the refinement so many evaluations for each. The refinement
climbs from the best plan that it has not climbed from, one of each division of the batch at first, then from
plans two or three random moves away from the best of all. Neighbours are tried in random order and the first
better one is taken.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from hetjax.passes.search.evaluator import distinct
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import FINE, with_options
from hetjax.passes.search.space import PLAIN, Group, Micro, Outline, Part, placeable
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
# Up to so many stages each is a place for neighbours of its own; of more unlike stages than these,
# neighbours are drawn.
_EVERY, _MIXED = 8, 60
# Up to so many ways to give the same devices other shares are neighbours.
_RESHARED = 40


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
        self._by_devices: dict[Micro, dict[tuple, list[Group]]] = {}
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
        for sort, other_micro, other in self._sorted_neighbours(micro, groups):
            sorts.setdefault(sort, []).append((other_micro, other))
        out = []
        for near in sorts.values():
            self.random.shuffle(near)
            out += [(i / len(near) ** 0.5, self.random.random(), n) for i, n in enumerate(near)]
        out.sort(key=lambda x: x[:2])
        left = _PATIENCE
        for _, _, (other_micro, other) in out:
            if len(other) <= self.problem.stage_limit and self._may(other, groups):
                yield other_micro, other
                left -= 1
                if not left:
                    return

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

    # Neighbours.

    def neighbours(self, micro: Micro, groups: Groups) -> Iterator[tuple[Micro, Groups]]:
        """Yields plans that differ in one thing and that no principle forbids."""
        for _, other_micro, other in self._sorted_neighbours(micro, groups):
            if len(other) <= self.problem.stage_limit and self._may(other, groups):
                yield other_micro, other

    def _sorted_neighbours(self, micro: Micro, groups: Groups) -> Iterator[tuple[str, Micro, Groups]]:
        for sort, other in self._same_division(micro, groups):
            yield sort, micro, other
        for other_micro in self.view.moves.micros:
            if other_micro != micro:
                for other in self._redivided(micro, groups, other_micro):
                    yield "divide", other_micro, other

    def _may(self, groups: Groups, before: Groups) -> bool:
        """Returns whether a plan can be built, without groups that a principle is against, save those it had."""
        view = self.view
        return all([
            g in before or (view.judge.known(g) and view.weigh_group(g)[0] > 0) for g in groups
        ]) and placeable(self.problem, groups)  # fmt: skip

    def _same_division(self, micro: Micro, groups: Groups) -> Iterator[tuple[str, Groups]]:
        n = len(groups)
        # Of many stages alike in a row the first and the last stand for all.
        at = list(range(n)) if n <= _EVERY else _ends(groups)
        for i, j in itertools.combinations(at, 2):
            if groups[i] != groups[j]:
                swapped = list(groups)
                swapped[i], swapped[j] = swapped[j], swapped[i]
                yield "swap", tuple(swapped)
        for i in at:
            rest = groups[:i] + groups[i + 1 :]
            if n > 1:
                yield "drop", rest
            for g in self._choices(micro, rest):
                if g != groups[i]:
                    yield "replace", (*groups[:i], g, *groups[i + 1 :])
        if n < self.problem.stage_limit:
            for g in self._choices(micro, groups):
                for i in (*at, n):
                    yield "insert", (*groups[:i], g, *groups[i:])
        if self.problem.options:
            for other in self._optioned(groups):
                yield "options", other
        for old in distinct(groups):  # all stages alike together
            if groups.count(old) > 1:
                rest = tuple(g for g in groups if g != old)
                for g in self._choices(micro, rest):
                    if g != old:
                        yield "replace alike", tuple(g if x == old else x for x in groups)
        left = self.view.moves.left(groups)
        # Of few examples every way to divide them between two sorts of replicas is a move of its own.
        for i in at if micro.examples > FINE else ():
            for g in (*self._shifted(groups[i]), *self._exchanged(groups[i], left)):
                yield "exchange", (*groups[:i], g, *groups[i + 1 :])
        yield from self._by_run(micro, groups)

    def _by_run(self, micro: Micro, groups: Groups) -> Iterator[tuple[str, Groups]]:
        """Yields plans that differ in a whole run of stages alike: its place, its length, its devices."""
        runs = runs_of(groups)
        for i, (old, count) in enumerate(runs):
            for g, n in self._regraded(micro, old, count):
                yield "regrade", (*joined(runs[:i]), *[g] * n, *joined(runs[i + 1 :]))
        if len(runs) == len(groups):
            return
        for i, j in itertools.combinations(range(len(runs)), 2):
            turned = list(runs)
            turned[i], turned[j] = runs[j], runs[i]
            yield "swap runs", joined(turned)
        for i, (old, count) in enumerate(runs):
            before, after = joined(runs[:i]), joined(runs[i + 1 :])
            rest = before + after
            for n in {1, count // 2, count - 2, count - 1, count + 1, count + 2, 2 * count} - {0, count}:
                if 0 < n <= self.view.moves.counts(rest, old.with_options(PLAIN)):
                    yield "lengthen", (*before, *[old] * n, *after)
            for g in self._choices(micro, rest):
                most = self.view.moves.counts(rest, g)
                same = round(count * old.devices / g.devices)
                for n in {most, most - 1, same, count}:
                    if 0 < n <= most and (g, n) != (old, count):
                        yield "replace run", (*before, *[g] * n, *after)

    def _regraded(self, micro: Micro, group: Group, count: int) -> Iterator[tuple[Group, int]]:
        """Yields stages of other tensor degree, or of other width, on as many devices of the same pool."""
        if len({p.pool for p in group.parts}) > 1:
            return
        pool = group.parts[0].pool
        for tensor in self.problem.table.tensors(self.problem.pools[pool].kind):
            shares = {p.share for p in group.parts} | {1}
            for share in sorted({*shares, *(2 * s for s in shares), *(s // 2 for s in shares)} - {0}):
                if micro.examples % share:
                    continue
                new = Group((Part(pool, tensor, micro.examples // share, share),), group.options)
                for n in {count * group.devices // new.devices, -(-count * group.devices // new.devices)}:
                    if n and (new, n) != (group, count) and self._offered(new):
                        yield new, n

    def _offered(self, group: Group) -> bool:
        """Returns whether there are numbers for a group of one part, and replicas allowed as they are."""
        p = group.parts[0]
        shares = self.problem.table.shares(self.problem.pools[p.pool].kind, p.tensor)
        return not self.problem.alike and (shares is None or p.share in shares)

    def _optioned(self, groups: Groups) -> Iterator[Groups]:
        """Yields the groups with other options: of all of them, of those alike, of one."""
        choices = (PLAIN, *self.problem.options)
        for o in choices:
            yield tuple(with_options(self.problem, g, o) for g in groups)
        for i, old in enumerate(groups):
            for o in {c.recompute for c in choices}:  # only what the problem offers
                new = with_options(self.problem, old, dataclasses.replace(old.options, recompute=o))
                if new != old:
                    yield (*groups[:i], new, *groups[i + 1 :])
                    if i == groups.index(old) and groups.count(old) > 1:
                        yield tuple(new if g == old else g for g in groups)

    def _choices(self, micro: Micro, rest: Groups) -> Iterator[Group]:
        """Yields the devices a stage may have beside others."""
        yield from self.view.moves.groups(micro, rest, False)
        mixed = self.view.moves.groups(micro, rest, True)
        yield from mixed if len(mixed) <= _MIXED else self.random.sample(mixed, _MIXED)

    def _shifted(self, group: Group) -> Iterator[Group]:
        """Yields a mixed group with some replicas moved from one part to another, or its parts turned round."""
        if len(group.parts) == 1:
            return
        yield Group(group.parts[::-1], group.options)
        for a, pa in enumerate(group.parts):
            for b, pb in enumerate(group.parts):
                for step in (1, 2, 4):
                    if a == b or pa.replicas <= step or (pa.share * step) % pb.share:
                        continue
                    parts = list(group.parts)
                    parts[a] = dataclasses.replace(pa, replicas=pa.replicas - step)
                    parts[b] = dataclasses.replace(pb, replicas=pb.replicas + pa.share * step // pb.share)
                    yield Group(tuple(parts), group.options)

    def _exchanged(self, group: Group, left: tuple[int, ...]) -> Iterator[Group]:
        """Yields a group with some replicas replaced by others, of another sort, on devices left over."""
        if not self.problem.mixed:
            return
        pools = self.problem.pools
        for i, p in enumerate(group.parts):
            for pool, free in enumerate(left):
                free += p.devices if pool == p.pool else 0
                for tensor in self.problem.table.tensors(pools[pool].kind):
                    if (pool, tensor) == (p.pool, p.tensor) or free < tensor:
                        continue
                    for n in {min(free // tensor, p.replicas - 1), p.replicas // 2, p.replicas // 4}:
                        if 0 < n < p.replicas and n * tensor <= free:
                            rest = dataclasses.replace(p, replicas=p.replicas - n)
                            new = Part(pool, tensor, n, p.share)
                            parts = (*group.parts[:i], rest, new, *group.parts[i + 1 :])
                            yield Group(_merged(parts), group.options)

    def _redivided(self, micro: Micro, groups: Groups, other: Micro) -> Iterator[Groups]:
        """Yields the groups on another division of the batch: other shares, or other numbers of replicas."""
        if not micro.replicas:
            ratio = other.examples / micro.examples
            scales = [(1.0, 1.0, ratio), (ratio, 1.0, 1.0), (ratio, 1.0 / ratio, 1.0)]
            yield from self._regrouped(groups, ratio)
            yield from self._reshared(groups, other)
        else:
            share = (other.examples // other.replicas) / (micro.examples // micro.replicas)
            count = other.replicas / micro.replicas
            scales = [(count, tensor, share) for tensor in sorted({1.0, 1.0 / count})]
        for scale in scales:
            found = _scaled(groups, *scale)
            if found is not None:
                yield found


    def _reshared(self, groups: Groups, other: Micro) -> Iterator[Groups]:
        """Yields the groups on another division with the same devices, whatever the shares."""
        found = self._by_devices.get(other)
        if found is None:
            found = self._by_devices[other] = {}
            for mixed in (False, True) if other.examples <= FINE else (False,):
                for g in self.view.moves.groups(other, (), mixed):
                    found.setdefault(_devices(g), []).append(g)
        choices = [[h.with_options(g.options) for h in found.get(_devices(g), ())] for g in distinct(groups)]
        if 0 < math.prod(map(len, choices)) <= _RESHARED:
            for picked in itertools.product(*choices):
                new = dict(zip(distinct(groups), picked))
                yield tuple(new[g] for g in groups)

    def _regrouped(self, groups: Groups, ratio: float) -> Iterator[Groups]:
        """Yields `ratio` times as many replicas in so many times fewer stages."""
        wider = _scaled(groups, ratio, 1.0, 1.0)
        if wider is None:
            return
        for rounded in (math.floor, math.ceil):
            runs = [(g, max(1, rounded(n / ratio))) for g, n in runs_of(wider)]
            yield joined(runs)


def _devices(group: Group) -> tuple[tuple[int, int, int], ...]:
    """Returns how many devices of which pool and degree a group takes."""
    return tuple(sorted((p.pool, p.tensor, p.replicas) for p in group.parts))


def runs_of(groups: Groups) -> list[tuple[Group, int]]:
    """Returns the groups in order, and how many in a row are alike."""
    return [(g, len(list(same))) for g, same in itertools.groupby(groups)]


def joined(runs: Sequence[tuple[Group, int]]) -> Groups:
    """Returns the groups that runs stand for."""
    return tuple(g for g, n in runs for _ in range(n))


def _ends(groups: Groups) -> list[int]:
    """Returns the first and last position of every run."""
    out, at = [], 0
    for _, n in runs_of(groups):
        out += [at, at + n - 1]
        at += n
    return list(dict.fromkeys(out))


def micro_of(outline: Outline, alike: bool) -> Micro:
    """Returns the division of the batch that a plan has."""
    first = outline.groups[0]
    return Micro(outline.num_microbatches, first.examples, first.replicas if alike else 0)


def _scaled(groups: Groups, count: float, tensor: float, share: float) -> Groups | None:
    """Returns groups with replicas, degrees and shares multiplied, or None where that leaves no whole number."""
    out = []
    for group in groups:
        parts = []
        for p in group.parts:
            new = (p.tensor * tensor, p.replicas * count, p.share * share)
            if any(x < 1 or x != int(x) for x in new):
                return None
            parts.append(Part(p.pool, int(new[0]), int(new[1]), int(new[2])))
        out.append(Group(tuple(parts), group.options))
    return tuple(out)


def _merged(parts: tuple[Part, ...]) -> tuple[Part, ...]:
    """Returns parts with like ones put together."""
    out: dict[tuple[int, int, int], int] = {}
    for p in parts:
        key = (p.pool, p.tensor, p.share)
        out[key] = out.get(key, 0) + p.replicas
    return tuple(Part(pool, tensor, n, share) for (pool, tensor, share), n in sorted(out.items()))
