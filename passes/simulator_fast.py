"""The quick path of the simulator: makespans only, for lists of compute tasks on lines of their own.

Every task list is replayed as far as it goes, device after device, until all are done. An operation is
a number, `(kind * stages + stage) * microbatches + microbatch` with kind 0 for F, 1 for B or I, 2 for
W, so that one pass over a list is a handful of list look-ups per task. The arithmetic is the event
simulator's, in the same order, so that both return the same float (tests/passes/test_simulator.py).

Where each line is fed by one device, the order of posting is the order of that device's list, and no
event queue is needed; shared lines take a small one. Sync and update tasks and explicit sends are for
`hetjax.passes.simulator`.
"""

from __future__ import annotations

import dataclasses
import functools
import heapq
from collections.abc import Sequence

from hetjax.ir.errors import VerifyError
from hetjax.ir.program import Task
from hetjax.passes.schedules.costs import PipelineCosts

F, B, W = 0, 1, 2
_NUMBER = {"F": F, "B": B, "I": B, "W": W}

# seconds, the operation that reads the result (-1: none), route (-1: same device), serialisation, latency
OpInfo = tuple[float, int, int, float, float]
OpLists = list[list[int]]


@dataclasses.dataclass(frozen=True)
class Tables:
    """What an evaluation looks up, by operation number.

    Attributes:
      costs: what it was made from.
      split: whether the backward is two halves (I is kind 1, W is kind 2).
      info: see `OpInfo`.
      ready: when the operation may start if nobody has to finish first, or -1.
      routes: per route, the numbers of the lines it occupies.
      num_lines: how many lines there are.
      exclusive: whether each route is one line, fed by one device; lines that are only used together
        count as one.
    """

    costs: PipelineCosts
    split: bool
    info: list[OpInfo]
    ready: list[float]
    routes: list[tuple[int, ...]]
    num_lines: int
    exclusive: bool

    @property
    def kinds(self) -> int:
        return 3 if self.split else 2

    def op(self, kind: int, stage: int, microbatch: int) -> int:
        costs = self.costs
        return (kind * costs.num_stages + stage) * costs.num_microbatches + microbatch


@functools.lru_cache(maxsize=64)
def tables(costs: PipelineCosts, split: bool) -> Tables:
    """Returns the look-up tables of a pipeline, for whole or split backwards."""
    stages, m = costs.num_stages, costs.num_microbatches
    routes, num_lines = _routes(costs)
    number: dict[tuple[int, ...], int] = {}
    feeders: dict[int, set[int]] = {}
    info: list[OpInfo] = []

    def rows(seconds: float, reader: int | None, boundary: int | None, way: int, sender: int) -> None:
        if boundary is None or not costs.crosses(boundary):
            line, ser, lat = -1, 0.0, 0.0
        else:
            route = routes[boundary, way]
            line = number.setdefault(route, len(number))
            for n in route:
                feeders.setdefault(n, set()).add(sender)
            ser, lat = costs.serialisation_s[boundary], costs.latency_s[boundary]
        info.extend(
            (seconds, -1 if reader is None else reader + i, line, ser, lat) for i in range(m))

    for s in range(stages):
        last = s == stages - 1
        reader = (stages + s) * m if last else (s + 1) * m
        rows(costs.forward_s[s], reader, None if last else s, 0, costs.device_of[s])
    for s, seconds in enumerate(costs.input_s if split else costs.backward_s):
        rows(seconds, (stages + s - 1) * m if s else None, s - 1 if s else None, 1, costs.device_of[s])
    if split:
        for s, seconds in enumerate(costs.weight_s):
            rows(seconds, None, None, 0, costs.device_of[s])
    ready = [-1.0] * len(info)
    ready[:m] = [0.0] * m
    ready[2 * stages * m:] = [0.0] * (len(info) - 2 * stages * m)
    exclusive = all(len(devices) == 1 for devices in feeders.values()) and all(
        len(route) == 1 for route in number)
    return Tables(costs, split, info, ready, list(number), num_lines, exclusive)


def _routes(costs: PipelineCosts) -> tuple[dict[tuple[int, int], tuple[int, ...]], int]:
    """Returns each boundary's and way's lines as numbers, and how many numbers there are."""
    used: dict[str, set[tuple[int, int]]] = {}
    for b in filter(costs.crosses, range(costs.num_stages - 1)):
        for way in (0, 1):
            for name in costs.route(b, way):
                used.setdefault(name, set()).add((b, way))
    routes: dict[tuple[int, int], tuple[int, ...]] = {}
    # Lines with the same users are always busy together and free together.
    together = sorted({tuple(sorted(users)) for users in used.values()})
    for n, users in enumerate(together):
        for user in users:
            routes[user] = (*routes.get(user, ()), n)
    return routes, len(together)


def encode(tasks: Sequence[Sequence[Task]], costs: PipelineCosts) -> tuple[OpLists, Tables]:
    """Returns compute tasks as numbers, and the tables to evaluate them with.

    Raises:
      VerifyError: the lists hold other kinds of task than F, B, I and W.
    """
    split = any(task.kind == "W" for items in tasks for task in items)
    stages, m = costs.num_stages, costs.num_microbatches
    base = {(kind, s): (n * stages + s) * m for kind, n in _NUMBER.items() for s in range(stages)}
    try:
        lists = [[base[t.kind, t.stage] + t.microbatch for t in items] for items in tasks]  # pyright: ignore[reportOperatorIssue]
    except (KeyError, TypeError):
        others = sorted({t.kind for items in tasks for t in items} - set(_NUMBER))
        raise VerifyError(
            f"the quick path takes F, B, I and W tasks of {stages} stages, not {', '.join(others) or 'these'};"
            " use hetjax.passes.simulator.simulate") from None
    return lists, tables(costs, split)


def decode(lists: OpLists, table: Tables) -> tuple[tuple[Task, ...], ...]:
    """Returns the tasks that `encode` turned into numbers."""
    stages, m = table.costs.num_stages, table.costs.num_microbatches
    names = "FIW" if table.split else "FB"
    return tuple(
        tuple(Task(names[op // m // stages], op // m % stages, op % m) for op in items) for items in lists)


def ends_of(lists: OpLists, table: Tables) -> list[float] | None:
    """Returns when each device ends its last task, or None for a deadlock.

    W is taken to stand after its I: `check_schedule` says whether it does.
    """
    if not table.exclusive:
        return _ends_by_clock(lists, table)
    info, ready = table.info, table.ready[:]
    # A route is one line here, so the route's number serves for the line's.
    free = [0.0] * len(table.routes)
    devices = len(lists)
    position, now = [0] * devices, [0.0] * devices
    # Forward sweeps carry activations down in one pass, backward sweeps gradients up.
    sweep = [*range(devices), *range(devices - 2, 0, -1)]
    left = sum(map(len, lists))
    while left:
        before = left
        for d in sweep:
            items = lists[d]
            i = start = position[d]
            n = len(items)
            if i == n:
                continue
            t = now[d]
            while i < n:
                op = items[i]
                r = ready[op]
                if r < 0.0:
                    break
                seconds, reader, line, ser, lat = info[op]
                t = (r if r > t else t) + seconds
                if line >= 0:
                    x = free[line]
                    x = (t if t > x else x) + ser
                    free[line] = x
                    ready[reader] = x + lat
                elif reader >= 0:
                    ready[reader] = t
                i += 1
            if i > start:
                position[d] = i
                now[d] = t
                left -= i - start
        if left == before:
            return None
    return now


def _ends_by_clock(lists: OpLists, table: Tables) -> list[float] | None:
    """Returns what `ends_of` does where devices share a line, whose order only the clock tells."""
    info, ready = table.info, table.ready[:]
    m, stages, device_of = table.costs.num_microbatches, table.costs.num_stages, table.costs.device_of
    free = [0.0] * table.num_lines
    position, now = [0] * len(lists), [0.0] * len(lists)
    running = [-1] * len(lists)
    # (time, 0: a task ends or a value arrives / 1: a line is asked for, device, operation)
    events: list[tuple[float, int, int, int]] = []

    def start(d: int, at: float) -> None:
        i = position[d]
        if running[d] < 0 and i < len(lists[d]) and 0.0 <= ready[lists[d][i]] <= at:
            op = running[d] = lists[d][i]
            now[d] = at + info[op][0]
            heapq.heappush(events, (now[d], 0, d, op))

    for d in range(len(lists)):
        start(d, 0.0)
    while events:
        at, kind, d, op = heapq.heappop(events)
        _, reader, line, ser, lat = info[op]
        if kind == 1:
            route = table.routes[line]
            done = max(at, *(free[n] for n in route)) + ser
            for n in route:
                free[n] = done
            ready[reader] = done + lat
            to = device_of[reader // m % stages]
            heapq.heappush(events, (ready[reader], 0, to, -1))
            continue
        if op >= 0:
            running[d] = -1
            position[d] += 1
            if line >= 0:
                heapq.heappush(events, (at, 1, d, op))
            elif reader >= 0:
                ready[reader] = at
        start(d, at)
    return now if all(i == len(items) for i, items in zip(position, lists)) else None


def makespan_of(lists: OpLists, table: Tables) -> float | None:
    """Returns the seconds from the first task's start to the last one's end, or None for a deadlock."""
    ends = ends_of(lists, table)
    return None if ends is None else max(ends)


def warmup_ops(table: Tables, warmups: Sequence[int]) -> OpLists:
    """Returns the 1F1B pattern with the given warm-ups as numbers; `flush.warmup_lists`, quicker.

    Args:
      table: one stage per device, whole backwards.
      warmups: forwards before the first backward, per stage; more than M counts as M.
    """
    m, stages = table.costs.num_microbatches, table.costs.num_stages
    lists = []
    for s, k in enumerate(warmups):
        k = min(k, m)
        forwards, backwards = range(s * m, (s + 1) * m), range((stages + s) * m, (stages + s + 1) * m)
        items = [*forwards[:k], *backwards] + [0] * (m - k)
        items[k:2 * m - k:2] = backwards[:m - k]
        items[k + 1:2 * m - k:2] = forwards[k:]
        items[2 * m - k:] = backwards[m - k:]
        lists.append(items)
    return lists


def finish_s(ends: Sequence[float], costs: PipelineCosts) -> float:
    """Returns when the last device has synchronised and updated after its last backward.

    Exact with one stage per device. With several, the first stage's backward is taken to end last.

    Args:
      ends: when each device ends its last backward.
      costs: the pipeline.
    """
    if not any(costs.sync_s) and not any(costs.update_s):
        return max(ends)
    return max(
        ends[d] + costs.sync_s[here[0]] + sum(costs.update_s[s] for s in here)
        for d, here in enumerate(map(costs.stages_of, range(costs.num_devices))))


def step_s(tasks: Sequence[Sequence[Task]], costs: PipelineCosts) -> float:
    """Returns the makespan with synchronisation and optimizer, as far as there are any.

    It is `simulate(with_step_tasks(tasks, costs), costs).makespan_s`, quicker, with one stage per device;
    with several stages per device it is that call where anything is owed at all.

    Args:
      tasks: per device; F, B, I and W only, checked by `check_schedule`.
      costs: their numbers.

    Raises:
      VerifyError: the lists deadlock or hold other kinds of task.
    """
    if not any(costs.sync_s) and not any(costs.update_s):
        return makespan_s(tasks, costs)
    if costs.placement != "line":
        from hetjax.passes.simulator import simulate, with_step_tasks

        return simulate(with_step_tasks(tasks, costs), costs).makespan_s
    ends = ends_of(*encode(tasks, costs))
    if ends is None:
        return makespan_s(tasks, costs)  # which says what is wrong
    return finish_s(ends, costs)


def makespan_s(tasks: Sequence[Sequence[Task]], costs: PipelineCosts) -> float:
    """Returns the makespan of checked lists of compute tasks: `simulate(...).makespan_s`, quicker.

    Args:
      tasks: per device; F, B, I and W only, checked by `check_schedule`.
      costs: their numbers; `sync_s` and `update_s` play no part here.

    Raises:
      VerifyError: the lists deadlock or hold other kinds of task.
    """
    lists, table = encode(tasks, costs)
    makespan = makespan_of(lists, table)
    if makespan is None:
        from hetjax.passes.schedules.check import find_deadlock

        raise VerifyError(find_deadlock(tasks) or "the lists do not belong to these costs")
    return makespan
