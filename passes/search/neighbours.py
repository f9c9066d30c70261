"""Plans beside a plan: one stage replaced, moved, dropped or put in; a run of stages alike changed as one; two
stages made one; another division of the batch.

Of stages alike in a row the first and the last stand for all. No neighbour has a stage that a principle forbids,
save those the plan had.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
from collections.abc import Iterator, Sequence

from hetjax.passes.search.evaluator import distinct
from hetjax.passes.search.moves import FINE, with_options
from hetjax.passes.search.space import PLAIN, Group, Micro, Part, placeable
from hetjax.passes.search.view import View

Groups = tuple[Group, ...]

# Up to so many stages each is a place for neighbours of its own; of more unlike stages than these,
# neighbours are drawn.
_EVERY, _MIXED = 8, 60
# Up to so many ways to give the same devices other shares are neighbours.
_RESHARED = 40


class Neighbours:
    """The plans beside others; see the module's text.

    Args:
      view: the problem.
      rng: draws where there are too many.
    """

    def __init__(self, view: View, rng: random.Random):
        self.view = view
        self.problem = view.problem
        self.random = rng
        self._by_devices: dict[Micro, dict[tuple, list[Group]]] = {}

    def by_sort(self, micro: Micro, groups: Groups) -> Iterator[tuple[str, Micro, Groups]]:
        """Yields (sort of change, division, groups); whether they may be is for `may` to say."""
        for sort, other in self._same_division(micro, groups):
            yield sort, micro, self._sensible(other)
        for other_micro in self.view.moves.micros:
            if other_micro != micro:
                for other in self._redivided(micro, groups, other_micro):
                    yield "divide", other_micro, self._sensible(other)

    def _sensible(self, groups: Groups) -> Groups:
        """Returns groups with the options that still make sense: others may have been for other replicas."""
        if all([g.options == PLAIN for g in groups]):
            return groups
        return tuple([with_options(self.problem, g, g.options) for g in groups])

    def may(self, groups: Groups, before: Groups) -> bool:
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
        yield from self._together(micro, groups, at)

    def _together(self, micro: Micro, groups: Groups, at: Sequence[int]) -> Iterator[tuple[str, Groups]]:
        """Yields plans with two stages made one, of another degree, and one made two."""
        for i, j in itertools.combinations(at, 2):
            for g in self._fused(micro, groups[i], groups[j]):
                rest = (*groups[i + 1 : j], *groups[j + 1 :])
                yield "fuse", (*groups[:i], g, *rest)
                yield "fuse", (*groups[:i], *groups[i + 1 : j], g, *groups[j + 1 :])
        for i in at:
            for a, b in self._halves(micro, groups[i]):
                yield "halve", (*groups[:i], a, b, *groups[i + 1 :])
                yield "halve", (*groups[:i], b, a, *groups[i + 1 :])

    def _fused(self, micro: Micro, a: Group, b: Group) -> Iterator[Group]:
        """Yields stages of replicas alike on the devices of two."""
        devices: dict[int, int] = {}
        for p in (*a.parts, *b.parts):
            devices[p.pool] = devices.get(p.pool, 0) + p.devices
        kinds = {self.problem.pools[p].kind for p in devices}
        for tensor in set.intersection(*(set(self.problem.table.tensors(k)) for k in kinds)):
            replicas = sum(n // tensor for n in devices.values())
            if any(n % tensor for n in devices.values()) or micro.examples % replicas:
                continue
            if micro.replicas in (0, replicas):
                share = micro.examples // replicas
                parts = tuple(Part(p, tensor, n // tensor, share) for p, n in sorted(devices.items()))
                yield Group(parts, a.options)

    def _halves(self, micro: Micro, group: Group) -> Iterator[tuple[Group, Group]]:
        """Yields two stages of as many replicas as one has, each of half its degree."""
        if any(p.tensor % 2 for p in group.parts):
            return
        first, second, missing = [], [], group.replicas
        for p in group.parts:
            n = min(missing, 2 * p.replicas)
            missing -= n
            for side, k in ((first, n), (second, 2 * p.replicas - n)):
                if k:
                    side.append(dataclasses.replace(p, tensor=p.tensor // 2, replicas=k))
        halves = [Group(tuple(side), group.options) for side in (first, second)]
        if all(h.examples == micro.examples for h in halves):
            yield halves[0], halves[1]

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
                if micro.examples % share or micro.replicas not in (0, micro.examples // share):
                    continue
                new = Group((Part(pool, tensor, micro.examples // share, share),), group.options)
                for n in {count * group.devices // new.devices, -(-count * group.devices // new.devices)}:
                    if n and (new, n) != (group, count) and self._offered(new):
                        yield new, n

    def _offered(self, group: Group) -> bool:
        """Returns whether there are numbers for a group of one part."""
        p = group.parts[0]
        shares = self.problem.table.shares(self.problem.pools[p.pool].kind, p.tensor)
        return shares is None or p.share in shares

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
