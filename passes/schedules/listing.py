"""List scheduling: a free device takes the most urgent of the operations whose inputs have arrived.

Unlike a fixed pattern it never stands still while it could work, which is what matters before the
pipeline has filled and after it starts to drain. Urgency is a number per operation, smallest first:
the timetable's start, or rules as simple as "backward first".
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.simulator_fast import B, F, OpLists, Tables, W, tables


def list_schedule(
    table: Tables, urgency: Sequence[float], limits: Sequence[int] | None = None
) -> OpLists:
    """Returns the order in which devices take operations when they go by urgency.

    Args:
      table: the pipeline.
      urgency: per operation, smallest first.
      limits: the most activations per device; None means no limit. A forward waits for room. Where
        a device runs several stages, an early stage leaves one place for each later one, so that
        the oldest microbatch can always go on.
    """
    costs, m, stages = table.costs, table.costs.num_microbatches, table.costs.num_stages
    info, ready = table.info, table.ready[:]
    releasing = W if table.split else B
    # Per device: [next operation, one past the last, is F, places to leave, releases] of each kind and stage.
    rows: list[list[list[int]]] = []
    for d in range(costs.num_devices):
        here = costs.stages_of(d)
        rows.append([
            [table.op(kind, s, 0), table.op(kind, s, 0) + m, kind == F,
             len(here) - 1 - here.index(s), kind == releasing]
            for s in here for kind in range(table.kinds)])
    if table.split:
        # A weight gradient waits for its input gradient, which the tables leave to the list's order.
        ready[W * stages * m:] = [-1.0] * (stages * m)
    room = [m * stages if limits is None else limits[d] for d in range(costs.num_devices)]
    busy_until, line_free = [0.0] * costs.num_devices, [0.0] * table.num_lines
    lists: OpLists = [[] for _ in range(costs.num_devices)]
    frees: list[int] = [0] * costs.num_devices
    wake: list[tuple[float, int]] = [(0.0, d) for d in range(costs.num_devices)]
    heapq.heapify(wake)
    while wake:
        now, d = heapq.heappop(wake)
        if busy_until[d] > now:
            continue
        room[d] += frees[d]
        frees[d] = 0
        best, best_row = 0.0, None
        for row in rows[d]:
            op = row[0]
            if op == row[1] or not 0.0 <= ready[op] <= now or (row[2] and room[d] <= row[3]):
                continue
            if best_row is None or urgency[op] < best:
                best, best_row = urgency[op], row
        if best_row is None:
            continue
        op = best_row[0]
        best_row[0] += 1
        lists[d].append(op)
        room[d] -= best_row[2]
        frees[d] = best_row[4]
        seconds, reader, line, ser, lat = info[op]
        end = busy_until[d] = now + seconds
        heapq.heappush(wake, (end, d))
        if table.split and stages * m <= op < 2 * stages * m:
            ready[op + stages * m] = end
        if reader >= 0:
            arrival = end
            if line >= 0:
                done = max(end, *(line_free[n] for n in table.routes[line])) + ser
                for n in table.routes[line]:
                    line_free[n] = done
                arrival = done + lat
            ready[reader] = arrival
            heapq.heappush(wake, (arrival, costs.device_of[reader // m % stages]))
    return lists


def reversed_costs(costs: PipelineCosts) -> PipelineCosts:
    """Returns the pipeline as it looks when time runs backwards: B and F change places."""
    return costs.replace(
        forward_s=costs.backward_s, backward_s=costs.forward_s,
        lines=tuple((back, there) for there, back in costs.lines))


def reversed_table(table: Tables) -> Tables:
    return tables(reversed_costs(table.costs), False)


def turn_round(table: Tables, lists: OpLists) -> OpLists:
    """Returns lists made for `reversed_table(table)` as lists for `table` (whole backwards only).

    A list that fills the pipeline well backwards is one that drains it well forwards.
    """
    m, half = table.costs.num_microbatches, table.costs.num_stages * table.costs.num_microbatches

    def turn(op: int) -> int:
        op = op + half if op < half else op - half
        return op - op % m + (m - 1 - op % m)

    return [[turn(op) for op in reversed(items)] for items in lists]


def splice(table: Tables, first: OpLists, second: OpLists, cut: int) -> OpLists:
    """Returns `first` up to the backward of microbatch `cut` - 1 on every stage, then `second`'s order.

    Args:
      table: the pipeline.
      first, second: complete lists.
      cut: how many microbatches' backwards are taken from `first`.
    """
    m, stages = table.costs.num_microbatches, table.costs.num_stages
    low, high = stages * m, 2 * stages * m
    out = []
    for a, b in zip(first, second):
        stop = 1 + max(i for i, op in enumerate(a) if low <= op < high and op % m < cut) if cut else 0
        head = a[:stop]
        done = set(head)
        out.append(head + [op for op in b if op not in done])
    return out


def peaks(table: Tables, lists: OpLists) -> list[int]:
    """Returns the most activations each device holds at once."""
    size = table.costs.num_stages * table.costs.num_microbatches
    release = W if table.split else B
    out = []
    for items in lists:
        held = peak = 0
        for op in items:
            kind = op // size
            if kind == F:
                held += 1
                if held > peak:
                    peak = held
            elif kind == release:
                held -= 1
        out.append(peak)
    return out


def hold_back(table: Tables, items: list[int], limit: int) -> list[int]:
    """Returns one device's list with forwards delayed until it holds at most `limit` activations."""
    size = table.costs.num_stages * table.costs.num_microbatches
    release = W if table.split else B
    out: list[int] = []
    waiting: list[int] = []
    held = 0
    for op in items:
        kind = op // size
        if kind == F:
            waiting.append(op)
        else:
            out.append(op)
            held -= kind == release
        while waiting and held < limit:
            out.append(waiting.pop(0))
            held += 1
    return out + waiting
