"""Schedules: golden cases, distance from the lower bound on random pipelines, speed of the simulator.

    python benchmarks/schedules.py            the whole run, a table
    python benchmarks/schedules.py --quick    fewer instances, within 50 s
    python benchmarks/schedules.py --json     one object
    python benchmarks/schedules.py --executed only what is executed in real time

The random pipelines are those of `hetjax.passes.schedules.samples.random_pipeline` from the seed printed.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os

# Before jax is imported: four devices, and threads enough that none of their collectives starves.
os.environ.setdefault("NPROC", "32")
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import platform
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from hetjax.passes.bounds import lower_bound
from hetjax.passes.schedules import PipelineCosts, check_schedule, peak_in_flight, schedule
from hetjax.passes.schedules.flush import warmups_1f1b
from hetjax.passes.schedules.samples import GOLDEN, budget_1f1b, random_pipeline
from hetjax.passes.schedules.virtual import virtual_quick_s
from hetjax.passes.simulator import simulate
from hetjax.passes.simulator_fast import encode, makespan_of, makespan_s

SEED = 2026
Figure = dict[str, Any]


def figure(name: str, value: float, unit: str, target: str, holds: bool) -> Figure:
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}


def golden() -> tuple[list[Figure], list[str]]:
    """Returns figures of cases A to J and a table, with what each schedule holds."""
    rows = ["case  bound   GPipe (holds)   1F1B (holds)    eager (holds)   virtual (holds)   virtual within 1F1B's / eager's memory"]
    plain_exact, within = True, 0
    for case in GOLDEN:
        times, held = {}, {}
        for name in ("gpipe", "1f1b", "eager-1f1b", "virtual-1f1b"):
            lists = schedule(name, case.costs)
            times[name], held[name] = simulate(lists, case.costs).makespan_s, sum(peak_in_flight(lists))
        plain_exact &= (times["gpipe"], times["1f1b"], times["eager-1f1b"]) == (case.gpipe, case.one_f_one_b, case.eager)
        within += times["virtual-1f1b"] <= case.best
        stages = case.costs.num_stages
        equal = [
            makespan_s(schedule("virtual-1f1b", case.costs.replace(max_in_flight=caps)), case.costs)
            for caps in (warmups_1f1b(stages), tuple(2 * (stages - s) - 1 for s in range(stages)))]
        cells = "".join(f"{times[n]:8g} ({held[n]:3d})  " for n in times)
        rows.append(f"{case.name:4}{case.lower:7g} {cells}    {equal[0]:8g} / {equal[1]:g}")
    return [
        figure("golden cases, plain schedules exact", float(plain_exact), "bool", "1", plain_exact),
        figure("golden cases, virtual-1f1b at its target", within, "of 10", "10", within == 10),
    ], rows


def near_the_bound(count: int, more: int | None) -> list[Figure]:
    """Returns how far virtual-1f1b stays from the lower bound on random pipelines.

    Args:
      count: how many, from the seed.
      more: activations beyond 1F1B's that each stage may hold; None sets no limit.
    """
    rng = random.Random(SEED)
    ratios, plain, worse, cpu = [], [], 0, []
    for _ in range(count):
        costs = random_pipeline(rng)
        if more is not None:
            costs = costs.replace(max_in_flight=budget_1f1b(costs, more))
        start = time.process_time()
        lists = schedule("virtual-1f1b", costs)
        cpu.append(time.process_time() - start)
        check_schedule(lists, costs.num_microbatches, max_in_flight=costs.max_in_flight)
        found, one = makespan_s(lists, costs), makespan_s(schedule("1f1b", costs), costs)
        bound = lower_bound(costs).lower_s
        worse += found > one * (1 + 1e-9)
        ratios.append(found / bound)
        plain.append(one / bound)
    ratios.sort()
    plain.sort()
    p95 = int(0.95 * (count - 1))
    what = "no limit" if more is None else f"1f1b's memory + {more}"
    limit = 1.06 if more is None else 1.15
    median = statistics.median(ratios)
    return [
        figure(f"makespan / bound, {what}: median of {count}", median, "ratio", "<= 1.01", median <= 1.01),
        figure(f"makespan / bound, {what}: 95th percentile", ratios[p95], "ratio", f"<= {limit}", ratios[p95] <= limit),
        figure(f"makespan / bound, {what}: worst", ratios[-1], "ratio", "", True),
        figure(f"slower than 1f1b, {what}", worse, f"of {count}", "0", worse == 0),
        figure(f"1f1b / bound, {what}: median", statistics.median(plain), "ratio", "", True),
        figure(f"1f1b / bound, {what}: 95th percentile", plain[p95], "ratio", "", True),
        figure(f"search, {what}: median", statistics.median(cpu) * 1e3, "ms CPU", "", True),
        figure(f"search, {what}: slowest", max(cpu) * 1e3, "ms CPU", "", True),
    ]


def zero_bubble() -> list[Figure]:
    """Returns the simulated bubbles of split backwards on balanced stages."""
    costs = PipelineCosts((1.0,) * 8, (2.0,) * 8, 32)
    plain = simulate(schedule("1f1b", costs), costs)
    ratio = simulate(schedule("zb-h1", costs), costs).bubble / plain.bubble
    from hetjax.passes.schedules import split_stages

    vee = split_stages(costs, 2, "vee")
    zbv = simulate(schedule("zb-v", vee), vee)
    return [
        figure("zb-h1 bubble / 1f1b bubble, simulated, 8 stages, 32 microbatches", ratio, "ratio", "<= 0.4", ratio <= 0.4),
        figure("zb-v bubble within a device's step, simulated", zbv.bubble_within, "share", "<= 0.02", zbv.bubble_within <= 0.02),
    ]


def rate(run: Callable[[], Any], seconds: float) -> float:
    """Returns calls per second of CPU time, the best of three rounds."""
    best = 0.0
    for _ in range(3):
        start, calls = time.process_time(), 0
        while time.process_time() - start < seconds / 3:
            run()
            calls += 1
        best = max(best, calls / (time.process_time() - start))
    return best


def simulator_speed(seconds: float) -> list[Figure]:
    """Returns evaluations a second on one core, 8 stages and 32 microbatches with two slow links."""
    costs = PipelineCosts((1.0,) * 8, (2.0,) * 8, 32, (0, 0, 3, 0, 0, 3, 0), (0, 0, 0, 0.5, 0, 0, 0))
    lists = schedule("virtual-1f1b", costs)
    encoded, table = encode(lists, costs)
    full = simulate(lists, costs).makespan_s
    equal = makespan_s(lists, costs) == full == makespan_of(encoded, table)
    tasks = rate(lambda: makespan_s(lists, costs), seconds)
    again = rate(lambda: makespan_of(encoded, table), seconds)
    events = rate(lambda: simulate(lists, costs), seconds)
    fresh = itertools.count()
    plans = rate(lambda: virtual_quick_s(costs.replace(update_s=(next(fresh) * 1e-9,) * 8)), seconds)
    return [
        figure("quick path from task lists", tasks, "evaluations/s", ">= 2000", tasks >= 2000),
        figure("quick path, lists encoded before", again, "evaluations/s", ">= 2000", again >= 2000),
        figure("a new plan from its numbers to seconds, formula warm-ups", plans, "evaluations/s", ">= 2000", plans >= 2000),
        figure("event simulator with its whole timeline", events, "evaluations/s", "", True),
        figure("quick path equal to the event simulator to the last bit", float(equal), "bool", "1", equal),
    ]


def executed_without_values(unit_s: float) -> list[Figure]:
    """Returns how schedules do in real time, stages and links modelled, values left out."""
    import _schedule_runs as runs

    took = runs.without_values(unit_s)
    wall_s, told_s = runs.three_sites(unit_s)
    return [
        *_slow_link("executed without values", took["1f1b"], took["virtual-1f1b"], took["virtual-1f1b simulated"], took["bound"]),
        figure("8 stages on 3 sites, shared uplink: executed / simulated", wall_s / told_s, "ratio", "0.95 to 1.05", abs(wall_s / told_s - 1) <= 0.05),
    ]


def _slow_link(what: str, plain_s: float, virtual_s: float, told_s: float, bound_s: float) -> list[Figure]:
    gain, told, bound = plain_s / virtual_s, virtual_s / told_s, virtual_s / bound_s
    return [
        figure(f"slow middle link, {what}: virtual-1f1b over 1f1b", gain, "x", ">= 1.65", gain >= 1.65),
        figure(f"slow middle link, {what}: executed / simulated", told, "ratio", "0.95 to 1.05", abs(told - 1) <= 0.05),
        figure(f"slow middle link, {what}: executed / lower bound", bound, "ratio", "<= 1.08", bound <= 1.08),
    ]


def executed(unit_s: float) -> list[Figure]:
    """Returns the same with a real step's arrays, and what dispatching costs."""
    import _schedule_runs as runs

    costs = runs.slow_middle(unit_s)
    whole = runs.Executed(split=False)
    plain_s, _, _, apart = whole.run("1f1b", costs)
    virtual_s, told_s, _, near = whole.run("virtual-1f1b", costs)
    out = _slow_link("real arrays", plain_s, virtual_s, told_s, lower_bound(costs).lower_s)
    apart = max(apart, near)
    out.append(figure("parameters and momenta against plain jit, of what is allowed", apart, "ratio", "<= 1", apart <= 1))
    one_s, threads_s = whole.dispatch(15)
    out.append(figure("a step by threads / by one dispatcher, nothing modelled", threads_s / one_s, "ratio", "", True))
    even = costs.replace(latency_s=(0.0,) * 3)
    _, _, bubble, _ = whole.run("1f1b", even)
    _, _, halved, near = runs.Executed(split=True).run("zb-h1", even)
    out.append(figure("zb-h1 bubble / 1f1b bubble, executed, 4 stages, 32 microbatches", halved / bubble, "ratio", "<= 0.4", halved / bubble <= 0.4))
    out.append(figure("zb-h1 parameters and momenta against plain jit, of what is allowed", near, "ratio", "<= 1", near <= 1))
    alone = runs.one_stage(200)
    out.append(figure("one stage on one device / plain jit", alone, "ratio", "<= 1.05", alone <= 1.05))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--executed", action="store_true", help="only what is executed in real time")
    args = parser.parse_args()
    count = 60 if args.quick else 500
    figures: list[Figure] = []
    rows: list[str] = []
    if not args.executed:
        figures, rows = golden()
        figures += simulator_speed(1.5 if args.quick else 6)
        figures += zero_bubble()
        figures += near_the_bound(count, None)
        figures += near_the_bound(count, 2)
    figures += executed_without_values(0.015 if args.quick else 0.03)
    not_measured = []
    if args.quick:
        not_measured = [f"all 500 random pipelines (the first {count} here)", "execution with real arrays"]
    else:
        figures += executed(0.05)  # what the real arrays take on shared cores is small against it
    machine = {
        "processor": platform.processor() or platform.machine(), "cores": os.cpu_count(),
        "python": platform.python_version(), "seed": SEED,
    }
    if args.json:
        print(json.dumps({"figures": figures, "machine": machine, "not_measured": not_measured}))
        return
    print("\n".join(rows))
    print()
    for f in figures:
        verdict = "" if not f["target"] else "  holds" if f["holds"] else "  DOES NOT HOLD"
        print(f"{f['name']:75} {f['value']:10.4g} {f['unit']:14} {f['target']:9}{verdict}")
    for line in not_measured:
        print(f"not measured: {line}")
    print(f"machine: {machine}")


if __name__ == "__main__":
    main()
