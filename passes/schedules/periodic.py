"""Orders from a timetable: every operation of a microbatch at a fixed offset, repeated every T seconds.

A pipeline that runs at the pace of its slowest part does the same thing every T. So place the chain
F_0, F_1, ..., B_1, B_0 of one microbatch, each operation as early as its input allows, in a slot that
is free on its device (and its line) modulo T; microbatch i follows i T later. Two stages, F = 1, B = 2,
a link of 2 one way, T = 3 (a digit is a forward, in brackets a backward):

    t        0  1  2  3  4  5  6  7  8  9 10 11 12 13 14 15 16 17 18
    stage 0  0  .  .  1  .  .  2  .  .  3 [0  0] 4 [1  1] 5 [2  2] 6
    stage 1  .  .  .  0 [0  0] 1 [1  1] 2 [2  2] 3 [3  3] 4 [4  4] 5

The gradient of microbatch 0 is back on stage 0 at 8, where the slot belongs to forwards; so B_0 starts
at 10, with 4 forwards before it. In general stage s starts its first backward d_s after its first
forward and so has floor(d_s / T) + 1 warm-ups. Without links that is 1F1B's stages - s; a link of one
way time c adds 2c to d_s on every stage before it: 2c / T virtual stages, which hold microbatches but
no device. Where the plain formula ceil(RTT_s / T) rounds, the timetable knows which slots are free.
"""

from __future__ import annotations

from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.simulator_fast import B, F, OpLists, Tables, W


def shortest_period_s(costs: PipelineCosts) -> float:
    """Returns the seconds per microbatch of the busiest device or line."""
    load: dict[object, float] = {}
    for s, d in enumerate(costs.device_of):
        load[d] = load.get(d, 0.0) + costs.forward_s[s] + costs.backward_s[s]
    for b in filter(costs.crosses, range(costs.num_stages - 1)):
        for name in (*costs.route(b, 0), *costs.route(b, 1)):
            load[name] = load.get(name, 0.0) + costs.serialisation_s[b]
    return max(load.values())


def offsets(table: Tables, period_s: float) -> list[float] | None:
    """Returns each operation's start for microbatch 0, by kind * stages + stage, or None if none fits.

    Args:
      table: the pipeline.
      period_s: T.
    """
    costs, stages, m = table.costs, table.costs.num_stages, table.costs.num_microbatches
    taken: dict[object, list[tuple[float, float]]] = {}
    starts = [0.0] * (table.kinds * stages)

    def place(where: object, ready: float, seconds: float) -> float | None:
        slots = taken.setdefault(where, [])
        start = _earliest(slots, ready, seconds, period_s)
        if start is not None and seconds > 0:
            slots.append((start % period_s, seconds))
        return start

    chain = [(F, s) for s in range(stages)] + [(B, s) for s in reversed(range(stages))]
    ready = 0.0
    for kind, s in chain:
        seconds, _, line, ser, lat = table.info[table.op(kind, s, 0)]
        start = place(costs.device_of[s], ready, seconds)
        if start is None:
            return None
        starts[kind * stages + s] = start
        ready = start + seconds
        if line >= 0:
            # Of several lines the first stands for all: a timetable is a guide, the simulator judges.
            start = place(("line", table.routes[line][0]), ready, ser)
            if start is None:
                return None
            ready = start + ser + lat
    if table.split:
        # Weight gradients fill what is left; the stages that hold activations longest go first.
        for s in range(stages):
            seconds = table.info[W * stages * m + s * m][0]
            after = starts[stages + s] + table.info[table.op(B, s, 0)][0]
            start = place(costs.device_of[s], after, seconds)
            if start is None:
                return None
            starts[W * stages + s] = start
    return starts


def _earliest(
    slots: list[tuple[float, float]], ready: float, seconds: float, period_s: float
) -> float | None:
    """Returns the earliest time from `ready` on whose slot is free modulo the period."""
    # Rounding must not turn a slot that fits exactly into one that does not.
    slack = 1e-9 * period_s
    for start in sorted([ready, *(
        ready + (at + length - ready) % period_s for at, length in slots)]):
        if all(
            (at - start + slack) % period_s >= seconds - slack and (start - at + slack) % period_s >= length - slack
            for at, length in slots
        ) and seconds <= period_s + slack:
            return start
    return None


def timetable(table: Tables, period_s: float, *, stretch: float = 1.02) -> tuple[list[float], float]:
    """Returns nominal starts of all operations, by operation number, and the period they repeat in.

    Args:
      table: the pipeline.
      period_s: the period to try first; it grows by `stretch` until every operation has a slot.
    """
    found = offsets(table, period_s)
    while found is None:
        period_s *= stretch
        found = offsets(table, period_s)
    m = table.costs.num_microbatches
    return [start + i * period_s for start in found for i in range(m)], period_s


def lists_by(table: Tables, nominal: list[float]) -> OpLists:
    """Returns each device's operations in order of their nominal starts."""
    costs, m = table.costs, table.costs.num_microbatches
    out: OpLists = [[] for _ in range(costs.num_devices)]
    for block in range(table.kinds * costs.num_stages):
        out[costs.device_of[block % costs.num_stages]].extend(range(block * m, (block + 1) * m))
    return [sorted(items, key=lambda op: nominal[op]) for items in out]
