"""Virtual-1F1B: a slow link counts as stages that hold microbatches but no device.

Four stages, F = 1, B = 2, a link of 3 in the middle, 8 microbatches (a digit is a forward, a letter a
backward). 1F1B stands still for the way there and back every few microbatches, and takes 57:

    1f1b           s0  0123............aa4bb5......cc6dd7......ee.ff.......gg.hh
                   s1  .012..........aa3bb4......cc5dd6......ee7ff.......gg.hh..
                   s2  .....01..aa2bb......3cc4dd......5ee6ff......7gg.hh.......
                   s3  ......0aa1bb2cc......3dd4ee......5ff6gg......7hh.........

With two more warm-ups on the stages before the link (the link's way there and back is 6, a stage's F + B
is 3), 6, 5, 2, 1 instead of 4, 3, 2, 1, the step takes 39, which no order can beat:

    virtual-1f1b   s0  012345..........aa6bb7cc.dd.ee.ff.gg.hh
                   s1  .01234........aa5bb6cc7dd.ee.ff.gg.hh..
                   s2  .....01..aa2bb3cc4dd5ee6ff7gg.hh.......
                   s3  ......0aa1bb2cc3dd4ee5ff6gg7hh.........

How the order is found, each step only if the ones before leave a gap to the lower bound:

1. Warm-ups from the timetable at the shortest period (`periodic`), and at longer ones that fit in the
   memory limit; 1F1B, eager 1F1B and GPipe where they fit, so that the result is never worse than
   these; then warm-ups climbing from the timetable's, one stage or all up to one stage at a time.
2. List scheduling with several urgencies, in both directions of time (`listing`).
3. Splices: fill the pipeline as one of these does, drain it as another.
4. A local search that shifts the warm-up of single stages, and of parts of the step.

Whatever wins is then trimmed: each device gives up every activation whose loss costs no time.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

from hetjax.ir.errors import PlanError, VerifyError
from hetjax.passes.bounds import lower_bound
from hetjax.passes.schedules import listing
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.flush import TaskLists, eager_1f1b, gpipe, one_f_one_b, warmup_lists
from hetjax.passes.schedules.periodic import lists_by, offsets, shortest_period_s, timetable
from hetjax.passes.simulator_fast import (
    B,
    F,
    OpLists,
    Tables,
    decode,
    encode,
    ends_of,
    finish_s,
    tables,
    warmup_ops,
)

_EPS = 1e-9


def virtual_1f1b(costs: PipelineCosts) -> TaskLists:
    """Returns the quickest order found with whole backwards, within the memory limit."""
    return search(costs, split=False)


def virtual_zb(costs: PipelineCosts) -> TaskLists:
    """Returns the quickest order found with split backwards, within the memory limit."""
    return search(costs, split=True)


def virtual_warmups(costs: PipelineCosts) -> tuple[int, ...]:
    """Returns the warm-ups of the timetable at the shortest period, without any search.

    Args:
      costs: one stage per device; its memory limit is applied by cutting the warm-up.
    """
    table, period = tables(costs, False), shortest_period_s(costs)
    starts = offsets(table, period)
    while starts is None:  # lines that several boundaries share may leave no slot
        period *= 1.02
        starts = offsets(table, period)
    stages, m = costs.num_stages, costs.num_microbatches
    waits = [starts[stages + s] - starts[s] for s in range(stages)]
    # Forwards start every period from 0 on; those before the first backward are the warm-up.
    found = [min(m, max(1, math.ceil(d / period - _EPS))) if period else 1 for d in waits]
    return tuple(map(min, found, costs.max_in_flight or found))


def virtual_quick(costs: PipelineCosts) -> TaskLists:
    """Returns the 1F1B pattern with `virtual_warmups`: what a planner can afford for every plan it weighs."""
    return warmup_lists(costs, virtual_warmups(costs))


def virtual_quick_s(costs: PipelineCosts) -> tuple[float, tuple[int, ...]]:
    """Returns the seconds of `virtual_quick`, synchronisation and optimizer included, and its warm-ups.

    This is the reward of a search over plans: some 2500 plans of 8 stages and 32 microbatches a second
    on one core. `search` is for the plan that is chosen.

    Args:
      costs: one stage per device.
    """
    warmups = virtual_warmups(costs)
    table = tables(costs, False)
    ends = ends_of(warmup_ops(table, warmups), table)
    if ends is None:
        raise VerifyError("the warm-ups of the timetable deadlock")
    return finish_s(ends, costs), warmups


class _Best:
    """The best lists so far; offers are evaluated once and kept only if they fit and are quicker."""

    def __init__(self, table: Tables, limits: tuple[int, ...] | None, bound_s: float):
        self.table, self.limits, self.bound_s = table, limits, bound_s
        self.makespan_s = float("inf")
        self.lists: OpLists = []
        self.held = 0
        self.evaluations = 0
        self._seen: set[int] = set()

    @property
    def done(self) -> bool:
        return self.makespan_s <= self.bound_s * (1 + _EPS)

    def evaluate(self, lists: OpLists) -> float | None:
        """Returns the makespan with synchronisation and optimizer, or None for a deadlock."""
        self.evaluations += 1
        ends = ends_of(lists, self.table)
        return None if ends is None else finish_s(ends, self.table.costs)

    def offer(self, lists: OpLists) -> bool:
        """Returns whether these lists are the best so far."""
        mark = hash(tuple(map(tuple, lists)))
        if mark in self._seen:
            return False
        self._seen.add(mark)
        if sum(map(len, lists)) != len(self.table.info):
            return False  # list scheduling got stuck
        held = listing.peaks(self.table, lists)
        if self.limits is not None and any(n > cap for n, cap in zip(held, self.limits)):
            return False
        makespan = self.evaluate(lists)
        if makespan is None:
            return False
        quicker = makespan < self.makespan_s * (1 - _EPS)
        as_quick = makespan <= self.makespan_s * (1 + _EPS)
        if quicker or (as_quick and sum(held) < self.held):
            self.makespan_s, self.lists, self.held = makespan, lists, sum(held)
            return True
        return False


def search(costs: PipelineCosts, *, split: bool, local_steps: int = 150) -> TaskLists:
    """Returns the quickest task lists found for the given placement.

    The same costs give the same lists: no clock and no random number decides.

    Args:
      costs: any placement of stages on devices.
      split: whether backwards are run as I and W.
      local_steps: evaluations of the local search.

    Raises:
      PlanError: no order fits in the memory limit.
    """
    short = [d for d in range(costs.num_devices) if (costs.limit(d) or 1) < (
        1 if costs.max_in_flight is None else len(costs.stages_of(d)))]
    if short:
        raise PlanError("\n".join([
            "no order fits in max_in_flight; a device needs one activation per stage it runs:", *(
                f"  device {d} runs {len(costs.stages_of(d))} stages and may hold {costs.limit(d)}"
                " activation(s)" for d in short)]))
    table = tables(costs, split)
    best = _Best(table, costs.max_in_flight, lower_bound(costs, split=split).lower_s)
    for lists in _candidates(table, best):
        best.offer(lists)
        if best.done:
            break
    if not best.done:
        _local_search(best, local_steps)
    _trim(best)
    return decode(best.lists, table)


def _candidates(table: Tables, best: _Best) -> Iterator[OpLists]:
    """Yields lists, cheap ones and those that hold little first."""
    costs = table.costs
    m, limits = costs.num_microbatches, costs.max_in_flight
    linear = costs.device_of == tuple(range(costs.num_stages))
    shortest = shortest_period_s(costs)
    nominal, period = timetable(table, shortest)
    patterns: list[OpLists] = []
    urgencies = [nominal]

    def pattern(lists: OpLists) -> OpLists:
        patterns.append(lists)
        return lists

    yield pattern(lists_by(table, nominal))
    if linear and not table.split:
        for plain in (one_f_one_b, eager_1f1b, gpipe):
            yield encode(plain(costs), costs)[0]
        yield from _warmup_vectors(table, best, virtual_warmups(costs))
    if limits is not None:
        longer = _fitting_period(table, period, limits)
        if longer is not None:
            yield pattern(lists_by(table, longer))
            urgencies.append(longer)
        # The same order with every forward held back until there is room.
        yield pattern([
            listing.hold_back(table, items, cap) for items, cap in zip(lists_by(table, nominal), limits)])
        yield pattern([
            listing.hold_back(table, items, cap)
            for items, cap in zip(lists_by(table, _rule(table, "forward")), limits)])
    rules = [*urgencies, _rule(table, "backward"), _rule(table, "forward")]
    if not linear or table.split:
        yield from _within_tight_budgets(table, rules, limits)
    fills = []
    for urgency in rules:
        fills.append(listing.list_schedule(table, urgency, limits))
        yield fills[-1]
    if table.split:
        yield from _weights_late(table, rules, limits)
        return
    mirror = listing.reversed_table(table)
    back = [timetable(mirror, shortest)[0]]
    if limits is not None:
        longer = _fitting_period(mirror, shortest, limits)
        back += [longer] if longer is not None else []
    drains = []
    for urgency in [*back, _rule(mirror, "backward"), _rule(mirror, "forward")]:
        drains.append(listing.turn_round(table, listing.list_schedule(mirror, urgency, limits)))
        yield drains[-1]
    cuts = sorted({m // 2, m // 4, (3 * m) // 4} - {0})
    for cut in cuts:
        for first, second in itertools.product(fills + patterns, drains + patterns):
            if first is not second:
                yield listing.splice(table, first, second, cut)


def _warmup_vectors(table: Tables, best: _Best, start: tuple[int, ...]) -> Iterator[OpLists]:
    """Yields 1F1B patterns around the given warm-ups, climbing to the quickest.

    A step raises or lowers the warm-up of one stage, or of all stages up to one (what a stage may
    hold is of no use if the stages before it do not send it).
    """
    costs = table.costs
    caps = costs.max_in_flight or (costs.num_microbatches,) * costs.num_stages

    now, time = start, best.evaluate(warmup_ops(table, start)) or float("inf")
    moves = [(first, s, step) for s in range(costs.num_stages) for step in (1, 2, -1)
             for first in ({0, s} if s else {0})]
    improved = True
    while improved:
        improved = False
        for first, last, step in moves:
            new = tuple(
                min(caps[s], max(1, k + step)) if first <= s <= last else k for s, k in enumerate(now))
            lists = warmup_ops(table, new)
            found = best.evaluate(lists)
            if found is not None and found < time * (1 - _EPS):
                now, time, improved = new, found, True
                yield lists


def _within_tight_budgets(
    table: Tables, rules: list[list[float]], limits: tuple[int, ...] | None
) -> Iterator[OpLists]:
    """Yields list schedules within what 1F1B would hold, and within a little more than the timetable.

    `_trim` can only delay forwards; where W or several stages share the memory, these do more.
    """
    costs = table.costs
    devices = costs.num_devices
    plain = [devices * len(costs.stages_of(d)) for d in range(devices)]
    nominal = listing.peaks(table, lists_by(table, rules[0]))
    budgets = [plain, nominal, [n + devices for n in nominal], [2 * n for n in plain]]
    for budget in sorted(budgets, key=sum):
        caps = tuple(budget) if limits is None else tuple(map(min, budget, limits))
        for urgency in rules:
            yield listing.list_schedule(table, urgency, caps)
        if table.split:
            yield from _weights_late(table, rules, caps)


def _rule(table: Tables, name: str) -> list[float]:
    """Returns urgencies by operation number for "backward first" or "forward first".

    Within a kind the older microbatch goes first, then the stage nearer to the end. W goes last.
    """
    costs, m = table.costs, table.costs.num_microbatches
    order = {"backward": {B: 0, F: 1}, "forward": {F: 0, B: 1}}[name]
    big = float(m * costs.num_stages)
    return [
        order.get(kind, 2) * big + i * costs.num_stages + (costs.num_stages - 1 - s)
        for kind in range(table.kinds) for s in range(costs.num_stages) for i in range(m)]


def _weights_late(table: Tables, rules: list[list[float]], limits) -> Iterator[OpLists]:
    """Yields list schedules in which weight gradients only fill gaps or make room."""
    size = table.costs.num_stages * table.costs.num_microbatches
    for urgency in rules:
        late = max(urgency) + 1
        yield listing.list_schedule(
            table, [u + late if op >= 2 * size else u for op, u in enumerate(urgency)], limits)


def _fitting_period(
    table: Tables, period_s: float, limits: tuple[int, ...]
) -> list[float] | None:
    """Returns the timetable with the shortest period tried that fits in the limits."""
    longest = sum(info[0] for info in table.info) / table.costs.num_microbatches + 2 * sum(table.costs.link_s)
    while True:
        nominal, period_s = timetable(table, period_s)
        held = listing.peaks(table, lists_by(table, nominal))
        if all(n <= cap for n, cap in zip(held, limits)):
            return nominal
        if period_s > longest:
            return None
        period_s *= 1.02


def _local_search(best: _Best, steps: int) -> None:
    """Shifts the warm-up of one stage, or of the stages up to it, by one, all along or in part."""
    table, devices = best.table, best.table.costs.num_devices
    m = table.costs.num_microbatches
    size = table.costs.num_stages * m
    spans = [(0, m), (0, m // 2), (m // 2, m), (0, m // 4), (3 * m // 4, m), (m // 4, 3 * m // 4)]
    budget = best.evaluations + steps
    improved = True
    while improved and not best.done and best.evaluations < budget:
        improved = False
        for (low, high), d, shift, upstream in itertools.product(spans, range(devices), (1, -1), (False, True)):
            if best.evaluations >= budget or best.done:
                return
            if upstream and d == 0:
                continue
            lists = [
                _shift(items, size, low, high, m, shift) if (i <= d if upstream else i == d) else items
                for i, items in enumerate(best.lists)]
            before = best.makespan_s
            if best.offer(lists) and best.makespan_s < before:
                improved = True


def _shift(items: list[int], size: int, low: int, high: int, m: int, shift: int) -> list[int]:
    """Returns a list whose backwards of microbatches low to high stand one forward later or earlier."""
    out = list(items)
    if shift > 0:
        # B F -> F B, from the back, so that each forward passes one backward only.
        i = len(out) - 2
        while i >= 0:
            a, b = out[i], out[i + 1]
            if size <= a < 2 * size and b < size and low <= a % m < high:
                out[i], out[i + 1] = b, a
                i -= 1
            i -= 1
        return out
    i = 1
    while i < len(out):
        a, b = out[i - 1], out[i]
        if a < size and size <= b < 2 * size and low <= b % m < high and a % m != b % m:
            out[i - 1], out[i] = b, a
            i += 1
        i += 1
    return out


def _trim(best: _Best) -> None:
    """Lowers the devices' peaks as far as the makespan does not grow, in whichever order saves more."""
    devices = range(best.table.costs.num_devices)
    found = [_trimmed(best, order) for order in (devices, devices[::-1])]
    best.lists = min(found, key=lambda lists: sum(listing.peaks(best.table, lists)))


def _trimmed(best: _Best, order: range) -> OpLists:
    """Returns the best lists with each device's forwards held back, one device after the other."""
    table, lists = best.table, best.lists
    held = listing.peaks(table, lists)
    for d in order:
        low, high = 1, held[d]
        while low < high:
            middle = (low + high) // 2
            tried = [*lists[:d], listing.hold_back(table, lists[d], middle), *lists[d + 1:]]
            fits = listing.peaks(table, tried)[d] <= middle
            makespan = best.evaluate(tried) if fits else None
            if makespan is not None and makespan <= best.makespan_s * (1 + _EPS):
                lists, high = tried, middle
            else:
                low = middle + 1
    return lists
