"""SLAMB against LAMB and its rivals: bytes off program text, accuracy, floors, a limited link.

    python benchmarks/slamb.py            # everything, hours
    python benchmarks/slamb.py --quick    # within 50 s
    python benchmarks/slamb.py --only long --results slamb.jsonl --limit-s 800   # in pieces

Prints a table, or with --json one object. Trainings are deterministic given the machine; --results
keeps each one, and the state of one that --limit-s cut, so that a long table can be made by several
calls.
"""

from __future__ import annotations

import argparse
import json
import os
import pathlib
import platform
import sys
import time

os.environ.setdefault("NPROC", "32")
os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")
os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[1]))

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType
from jax.sharding import PartitionSpec as P

from benchmarks import _slamb_arms as arms
from benchmarks import _slamb_link as limited
from benchmarks import _slamb_tasks as tasks
from benchmarks._slamb_runs import Runs, mean_deviation
from hetjax import slamb, slamb_bytes
from hetjax.optim.hlo_collectives import collectives_in

WORKERS = 8
RING = {"all-reduce": 2.0, "all-gather": 1.0, "all-to-all": 1.0, "reduce-scatter": 1.0}
LONG_RATES = (0.005, 0.007, 0.01)  # of 0.0035 to 0.014, LAMB's best at 10,000 steps and its neighbours
LAMB_BY_BUDGET = ((2000, 0.014), (5000, 0.01), (10_000, 0.007), (20_000, 0.007))
LONG_RUNS = ((10_000, 3),)  # steps and seeds
ONE_BIT_LAMB_VOLUME = 1 / 4.6  # of dense, with its warm-up: Li et al., 1-bit LAMB, 2021, abstract


class Report:
    """The figures so far, printed as they come."""

    def __init__(self, as_json: bool):
        self.as_json, self.figures = as_json, []

    def add(self, name, value, unit, target=None, holds=None):
        self.figures.append(
            {"name": name, "value": value, "unit": unit, "target": target, "holds": holds})
        if not self.as_json:
            verdict = "" if holds is None else ("  holds" if holds else "  MISSED")
            print(f"  {name:64s} {value:>12.5g} {unit:12s} {target or '':24s}{verdict}", flush=True)


def wire_bytes(arm: arms.Arm, params, steps: int) -> tuple[float, dict[str, list]]:
    """Bytes one worker sends a step over a ring, amortised over a run, and each phase's collectives.

    Read off the StableHLO of each phase's own program on 8 devices; all-reduce counts twice its
    payload, the others once their result, times (N - 1) / N.
    """
    mesh = jax.make_mesh((WORKERS,), (arms.AXIS,), axis_types=(AxisType.Auto,))
    state = jax.eval_shape(arm.init, params)

    def grow(tree):
        return jax.tree.map(lambda a: jax.ShapeDtypeStruct(
            (WORKERS, *a.shape) if tasks.is_local(a) else a.shape, a.dtype), tree)

    def spec(tree):
        return jax.tree.map(lambda a: P(arms.AXIS) if tasks.is_local(a) else P(), tree)

    def cut(tree):
        return jax.tree.map(lambda a: a[0] if tasks.is_local(a) else a, tree)

    total, seen = 0.0, {}
    for phase, name in enumerate(arm.phases):

        def step(params, state, grads, phase=phase):
            out = arm.step(cut(params), cut(state), cut(grads), jnp.float32(0.01), phase)
            return jax.tree.map(lambda a: a[None] if tasks.is_local(a) else a, out)

        mapped = jax.shard_map(
            step, mesh=mesh, in_specs=(spec(params), spec(state), spec(params)),
            out_specs=(spec(params), spec(state)), check_vma=True)
        found = collectives_in(
            jax.jit(mapped).lower(grow(params), grow(state), grow(params)).as_text())
        seen[name] = found
        sent = sum(RING[c.kind] * c.payload_bytes for c in found) * (WORKERS - 1) / WORKERS
        total += sent * arm.share(phase, steps)
    return total, seen


def of_dense(arm, params, steps) -> float:
    """Wire bytes of a run over those of a dense float32 all-reduce a step."""
    dense = 2 * (WORKERS - 1) / WORKERS * 4 * sum(a.size for a in jax.tree.leaves(params))
    return wire_bytes(arm, params, steps)[0] / dense


def third(min_size: int, every: int = 40) -> arms.Arm:
    """SLAMB's directions, a third of them at each step in eight bits: 0.084 of dense, 0.025 for averaging."""
    return arms.slamb("SLAMB, third in 8 bits", compress_ratio=1 / 3, comm_dtype=jnp.float8_e4m3fn,
                      exchange="direction", min_size=min_size, every=every)


def rivals(steps: int, every: int, min_size: int):
    """Every arm of the comparison, at about 0.11 of the dense bytes where it can choose."""
    sizes = dict(min_size=min_size, every=every)
    return [
        (arms.lamb(), 1),
        (arms.slamb("SLAMB as published", **sizes), WORKERS),
        (arms.slamb("SLAMB, fifth in bf16", compress_ratio=0.2, comm_dtype=jnp.bfloat16, **sizes),
         WORKERS),
        (third(min_size), WORKERS),
        (arms.slamb("SLAMB held, bf16", compensation="held", nu_ratio=0.1,
                    comm_dtype=jnp.bfloat16, **sizes), WORKERS),
        (arms.unsent_dropped(min_size=min_size), WORKERS),
        (arms.top_k(0.11 / WORKERS, True), WORKERS),
        (arms.top_k(0.11 / WORKERS, False), WORKERS),
        (arms.one_bit_lamb(0.2, steps), WORKERS),
        (arms.diloco(9), WORKERS),
        (arms.power_sgd(0.11), WORKERS),
    ]


def bytes_part(report: Report) -> None:
    """The MLP of 2,119,680 parameters: what each step sends, off its StableHLO."""
    layer = {"w1": (256, 1024), "b1": (1024,), "w2": (1024, 256), "b2": (256,), "scale": (256,)}
    shapes = {**{f"l{i}": layer for i in range(4)}, "out": (256, 64)}
    params = jax.tree.map(lambda s: jax.ShapeDtypeStruct(s, jnp.float32), shapes,
                          is_leaf=lambda x: isinstance(x, tuple))
    steps = 1000
    arm = arms.slamb("SLAMB", every=100)
    _, seen = wire_bytes(arm, params, steps)
    leaves = [a.shape for a in jax.tree.leaves(params)]
    formula = slamb_bytes(leaves)
    local = seen["local"]
    report.add("slamb: collectives in a step", len(local), "", "1", len(local) == 1)
    report.add("slamb: bytes in a step", local[0].payload_bytes, "B", f"{formula.step_bytes}",
               local[0].payload_bytes == formula.step_bytes)
    step = local[0].payload_bytes / formula.dense_bytes
    report.add("slamb: step over dense", step, "", "<= 0.103", step <= 0.103)
    amortised = of_dense(arm, params, steps)
    report.add("slamb: with averaging, over dense", amortised, "", "<= 0.115", amortised <= 0.115)
    share = amortised / ONE_BIT_LAMB_VOLUME
    report.add("slamb: over 1-bit LAMB's whole run (4.6x)", share, "", "<= 0.53", share <= 0.53)
    one_bit = arms.one_bit_lamb(0.0, steps)
    _, seen = wire_bytes(one_bit, params, steps)
    dense = 2 * formula.dense_bytes
    steady = sum(RING[c.kind] * c.payload_bytes for c in seen[arms.PHASE_SPARSE]) / dense
    report.add("slamb: over 1-bit LAMB's steady state alone", step / steady, "")
    for other, _ in rivals(steps, 100, 9000)[1:]:
        report.add(f"bytes over dense: {other.name}", of_dense(other, params, steps), "")


def digits_part(report: Report, runs: Runs, quick: bool) -> None:
    """Digits, 60 steps of 512: accuracy of every arm at its best learning rate."""
    task, steps = tasks.digits(), 60
    chosen = rivals(steps, 50, 1000)
    if quick:
        chosen = chosen[:2]
    accuracy = {}
    for arm, workers in chosen:
        rates = (0.02,) if quick else None
        # A test image is 0.19 points and a seed moves 0.6: ten seeds, and rates chosen by all of them.
        got = runs.tuned(task, arm, steps, workers, "accuracy_percent", least=False, rates=rates,
                         seeds=range(3 if quick else 10))
        if got is None:
            continue
        rate, results = got
        mean, deviation = mean_deviation(results, "accuracy_percent")
        accuracy[arm.name] = mean
        holds = target = None
        if arm.name.startswith("SLAMB") and "dropped" not in arm.name:
            target = ">= LAMB - 0.5"
            holds = mean >= accuracy["LAMB"] - 0.5
        report.add(f"digits: {arm.name} (rate {rate:g}, deviation {deviation:.2f})", mean, "%",
                   target, holds)


def floors_part(report: Report, runs: Runs, quick: bool) -> None:
    """Workers that disagree: how far above the known optimum each arm ends."""
    steps, kw = 500, dict(decay=0.0, min_size=500)
    chosen = [
        (arms.lamb(0.0), 1),
        (arms.slamb("SLAMB held", compensation="held", nu_ratio=0.1, every=100, **kw), WORKERS),
        (arms.slamb("SLAMB as published", every=100, **kw), WORKERS),
        (arms.unsent_dropped(**kw), WORKERS)]
    for task in [tasks.quadratic()] if quick else [tasks.quadratic(), tasks.logistic()]:
        floor = {}
        for arm, workers in chosen[:2] if quick else chosen:
            got = runs.tuned(task, arm, steps, workers, "excess", least=True,
                             rates=(0.01,) if quick else (0.005, 0.01, 0.02, 0.04))
            if got is None:
                continue
            rate, results = got
            mean, deviation = mean_deviation(results, "excess")
            floor[arm.name] = mean
            ratio = mean / floor["LAMB"]
            target, holds = {
                "SLAMB held": ("<= 1.2 of LAMB", ratio <= 1.2),
                "SLAMB, unsent dropped": (">= 3 of LAMB", ratio >= 3)}.get(arm.name, (None, None))
            report.add(f"{task.name}: {arm.name} floor (rate {rate:g}, deviation {deviation:.1e})",
                       mean, "", target, holds)
            report.add(f"{task.name}: {arm.name} over LAMB", ratio, "", target, holds)


def language_part(report: Report, runs: Runs) -> None:
    """The masked language model, 2,000 steps of 512 sequences: nats on held-out text."""
    task, steps = tasks.masked_lm(), 2000
    kw = dict(min_size=500, every=100)
    params = jax.eval_shape(task.init, jax.random.key(0))
    chosen = [
        (arms.lamb(), 1),
        (arms.slamb("SLAMB as published", **kw), WORKERS),
        (arms.slamb("SLAMB local k=.2 bf16", compress_ratio=0.2, comm_dtype=jnp.bfloat16, **kw),
         WORKERS),
        (third(500), WORKERS)]
    loss = {}
    for arm, workers in chosen:
        got = runs.tuned(task, arm, steps, workers, "held_out_nat", least=True,
                         rates=(0.005, 0.01, 0.014, 0.02), tune_seeds=(0,))
        if got is None:
            continue
        rate, results = got
        mean, deviation = mean_deviation(results, "held_out_nat")
        loss[arm.name] = mean
        report.add(f"language: {arm.name} (rate {rate:g}, deviation {deviation:.4f})", mean, "nat")
        if workers > 1:
            share, gap = of_dense(arm, params, steps), mean - loss["LAMB"]
            report.add(f"language: {arm.name} bytes over dense", share, "", "<= 0.12", share <= 0.12)
            report.add(f"language: {arm.name} above LAMB", gap, "nat", "<= 0.02", gap <= 0.02)


def long_part(report: Report, runs: Runs) -> str | None:
    """The language model at the budget from which twice the steps gain LAMB little: nats, held out."""
    task = tasks.masked_lm()
    params = jax.eval_shape(task.init, jax.random.key(0))
    cut = "cut by --limit-s; the same call with the same --results goes on"
    # LAMB at its best rate by budget tells what a long run is: one seed, for it is the trend.
    for steps, rate in LAMB_BY_BUDGET:
        got = runs.one(task, arms.lamb(), steps, 1, rate, 0)
        if got is None:
            return cut
        report.add(f"long: LAMB, {steps} steps (rate {rate:g}, 1 seed)", got["held_out_nat"], "nat")
    for steps, seeds in LONG_RUNS:
        lamb_loss = 0.0
        for arm, workers in ((arms.lamb(), 1), (third(500), WORKERS)):
            got = runs.tuned(task, arm, steps, workers, "held_out_nat", least=True,
                             rates=LONG_RATES, tune_seeds=(0,), seeds=range(seeds))
            if got is None:
                return cut
            mean, deviation = mean_deviation(got[1], "held_out_nat")
            report.add(f"long: {arm.name}, {steps} steps (rate {got[0]:g}, deviation {deviation:.4f})",
                       mean, "nat")
            if workers == 1:
                lamb_loss = mean
                continue
            share, gap = of_dense(arm, params, steps), mean - lamb_loss
            report.add(f"long: {arm.name}, {steps} steps, bytes over dense", share, "", "<= 0.12",
                       share <= 0.12)
            report.add(f"long: {arm.name}, {steps} steps, above LAMB", gap, "nat", "<= 0.02",
                       gap <= 0.02)
    return None


def batch_part(report: Report, runs: Runs) -> None:
    """Batches of 256 to 4,096 at a fixed number of epochs, rate by the square root of the batch."""
    loss, names = {}, []
    for batch in (256, 1024, 4096):
        task = tasks.classification(batch)
        steps = task.data[0].shape[0] * 10 // batch
        for arm, workers in (
                (arms.lamb(), 1), (third(500), WORKERS),
                (arms.slamb("SLAMB as published", min_size=500, every=max(steps // 8, 2)), WORKERS)):
            # Steps of the root of two: a grid of twos is coarser than what it is to tell apart.
            rates = tuple(0.005 * 2 ** (i / 2) * (batch / 256) ** 0.5 for i in range(5))
            got = runs.tuned(task, arm, steps, workers, "held_out_nat", least=True, rates=rates)
            if got is None:
                return
            mean, deviation = mean_deviation(got[1], "held_out_nat")
            loss[arm.name, batch] = mean
            names += [arm.name] * (arm.name not in names)
            report.add(f"batch {batch}: {arm.name} (rate {got[0]:.3g}, deviation {deviation:.4f})",
                       mean, "nat")
    loses = {name: loss[name, 4096] - loss[name, 256] for name in names}
    for name in names:
        is_ours = name != "LAMB"
        report.add(f"batch 256 to 4,096: {name} loses", loses[name], "nat",
                   "<= LAMB's (to 0.005)" if is_ours else None,
                   loses[name] <= loses["LAMB"] + 0.005 if is_ours else None)


def update_part(report: Report) -> None:
    """CPU time of one update of 3.1 million parameters, the state donated, against optax.lamb's."""
    params = {k: jax.random.normal(jax.random.key(i), (1024, 1024)) for i, k in enumerate("abc")}
    arms_of = {
        "lamb": optax.lamb(1e-3), "slamb": slamb(1e-3),
        "slamb held": slamb(1e-3, compensation="held", nu_ratio=0.1)}
    run = {name: jax.jit(tx.update, donate_argnums=1) for name, tx in arms_of.items()}
    state = {name: tx.init(params) for name, tx in arms_of.items()}
    cost = dict.fromkeys(run, float("inf"))
    for _ in range(15):
        for name in run:  # in turn, so that what else the machine does meets all alike
            start = time.process_time()
            updates, state[name] = run[name](params, state[name], params)
            jax.block_until_ready((updates, state[name]))
            cost[name] = min(cost[name], time.process_time() - start)
    for name, seconds in cost.items():
        report.add(f"update of 3.1 M parameters: {name}", 1e3 * seconds, "ms of CPU")
    report.add("update: slamb over lamb", cost["slamb"] / cost["lamb"], "")


def link_part(report: Report, quick: bool) -> str | None:
    """Step time over 1 Gb/s between two namespaces; returns why not, where it cannot run."""
    reason = limited.missing()
    if reason:
        return reason
    got = limited.measure(1.0, 20 if quick else 80, 1024, 45 if quick else 240)
    for name in ("dense", "slamb"):
        compute, step = got[f"{name}, no exchange"]["step_s"], got[name]["step_s"]
        payload = got[name]["payload_bytes"]  # two workers: a ring sends 2 (N - 1) / N = 1 of it
        expected = compute + payload / 125e6
        report.add(f"link at 1 Gb/s: {name} step", 1e3 * step, "ms")
        report.add(f"link at 1 Gb/s: {name}, over compute + bytes / rate", step / expected, "",
                   "0.85 to 1.15", 0.85 <= step / expected <= 1.15)
        report.add(f"link at 1 Gb/s: {name} exchange", 1e3 * (step - compute), "ms")
    compute, payload = got["slamb, no exchange"]["step_s"], got["slamb"]["payload_bytes"]
    for workers in (8, 64, 1024):
        ring = 2 * (workers - 1) / workers / 125e6
        dense = got["dense, no exchange"]["step_s"] + ring * got["dense"]["payload_bytes"]
        report.add(f"modelled from these: dense over slamb step, {workers} workers at 1 Gb/s",
                   dense / (compute + ring * payload), "")
    return None


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--quick", action="store_true", help="end within 50 s")
    parser.add_argument("--only", choices=PARTS, help="one part")
    parser.add_argument("--results", type=pathlib.Path, help="file of JSON lines to continue")
    parser.add_argument("--limit-s", type=float, default=float("inf"),
                        help="start no new training after so many seconds")
    args = parser.parse_args()
    begin = time.monotonic()
    limit = min(args.limit_s, 25.0) if args.quick else args.limit_s
    runs, report, missing = Runs(args.results, begin + limit), Report(args.json), []
    wanted = [args.only] if args.only else (
        ["bytes", "update", "floors", "digits"] if args.quick else list(PARTS))
    for part in PARTS:
        if part not in wanted or (args.quick and time.monotonic() - begin > 30):
            missing.append(part)
            continue
        if not args.json:
            print(f"{part}:")
        reason = {
            "bytes": lambda: bytes_part(report), "update": lambda: update_part(report),
            "floors": lambda: floors_part(report, runs, args.quick),
            "digits": lambda: digits_part(report, runs, args.quick),
            "link": lambda: link_part(report, args.quick),
            "batch": lambda: batch_part(report, runs),
            "language": lambda: language_part(report, runs),
            "long": lambda: long_part(report, runs)}[part]()
        if reason:
            missing.append(f"{part} ({reason})")
    machine = {"processor": platform.processor() or platform.machine(), "cpus": os.cpu_count(),
               "jax": jax.__version__, "python": platform.python_version()}
    if args.json:
        print(json.dumps({"figures": report.figures, "machine": machine, "not_measured": missing}))
    elif missing:
        print("not measured now:", ", ".join(missing))
    return 0 if all(f["holds"] is not False for f in report.figures) else 1


PARTS = ("bytes", "update", "floors", "digits", "link", "batch", "language", "long")

if __name__ == "__main__":
    sys.exit(main())
