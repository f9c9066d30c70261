"""Predicted against measured: twelve plans of a small GPT on eight CPU devices, after calibration.

All eight devices are threads of one process on the same few processors. What a step takes is mostly
what those processors need for all of it, so a plan with more devices is not quicker, and the ranking
tests the price of work and of calls far more than that of overlap. It says nothing of accelerators.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

# (stages, mesh "data,model", microbatches)
PLANS = (
    (1, "1,1", 1), (1, "1,1", 4), (1, "2,1", 2), (1, "4,1", 1), (1, "8,1", 1), (2, "1,1", 4),
    (2, "1,1", 8), (2, "2,1", 2), (2, "4,1", 1), (4, "1,1", 4), (4, "1,1", 8), (4, "2,1", 2),
)  # fmt: skip
BATCH, LENGTH, WIDTH, LAYERS = 32, 64, 64, 4
ROUNDS = 10


def step_and_data() -> tuple[Any, Any, Any]:
    import numpy as np
    import optax

    from hetjax.demo import linen_gpt
    from hetjax.demo.training import Config

    config = Config(vocab_size=256, length=LENGTH, width=WIDTH, num_layers=LAYERS)
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, 256, (BATCH, LENGTH)).astype(np.int32) for k in ("tokens", "targets")}
    return linen_gpt.train_step, linen_gpt.create(config, optax.adam(1e-3)), batch


def calibrated(path: Path) -> tuple[Any, int, float]:
    """Returns the judge, how many calls were measured, and the seconds that took."""
    from hetjax.calibrate.session import Request, agenda, run
    from hetjax.frontend.calls import flatten_call
    from hetjax.frontend.tracing import trace_call
    from hetjax.ir.cluster import Cluster
    from hetjax.passes.cost.judge import Judge

    step, state, batch = step_and_data()
    leaves, structure = flatten_call((state, batch), {}, False)
    traced = trace_call(step, structure, leaves, name="gpt")
    start, count = time.perf_counter(), 0
    wanted: dict[tuple[int, int], set[int]] = {}
    for _, mesh, num in PLANS:
        data, model = map(int, mesh.split(","))
        wanted.setdefault((data, model), set()).add(BATCH // num)
    for (data, model), sizes in wanted.items():
        plan = agenda(traced, Cluster.local(), Request((model,), (data,), tuple(sorted(sizes))))
        count += run(plan, path).measured
    return Judge.load(path), count, time.perf_counter() - start


def compare() -> tuple[list[dict[str, Any]], int, float, Any]:
    """Returns a row per plan, measured and predicted; what calibrating took; what it says of the host.

    Plans take turns, half of the rounds before calibrating and half after it, so that what else the
    machine does meanwhile weighs on both.
    """
    import jax

    import hetjax
    from hetjax.passes.cost.estimate import estimate_program

    step, state, batch = step_and_data()
    runs = []
    for stages, mesh, num in PLANS:
        options = {"num_stages": stages, "mesh": mesh, "num_microbatches": num, "schedule": "1f1b"}
        parallel = hetjax.parallelize(step, **options)
        for _ in range(2):
            placed, out = parallel(state, batch)
            jax.block_until_ready((placed, out))
        runs.append((parallel, placed))
    times: list[list[float]] = [[] for _ in runs]

    def take_turns() -> None:
        for _ in range(ROUNDS):
            for k, (parallel, placed) in enumerate(runs):
                start = time.perf_counter()
                jax.block_until_ready(parallel(placed, batch))
                times[k].append(time.perf_counter() - start)

    take_turns()
    with tempfile.TemporaryDirectory() as folder:
        judge, count, took_s = calibrated(Path(folder) / "profiles.json")
    take_turns()
    rows = []
    for (stages, mesh, num), (parallel, _), took in zip(PLANS, runs, times):
        bundle = parallel._latest.bundle
        judged = estimate_program(bundle, judge=judge)
        rows.append({
            "plan": f"{stages} stages of {mesh}, {num} microbatches",
            "measured_s": statistics.median(took), "predicted_s": judged.iteration_s,
            "before_s": statistics.median(took[:ROUNDS]), "after_s": statistics.median(took[ROUNDS:]),
            "makespan_s": judged.timeline.makespan_s, "analytic_s": estimate_program(bundle).iteration_s,
            "sources": dict(judged.sources)["op costs"],
        })  # fmt: skip
    return rows, count, took_s, judge.store.hosts["cpu"]
