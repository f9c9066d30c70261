"""Whether the runtime runs each mesh's tasks, and posts its transfers, in the order the simulator says."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from typing import Any

SCHEDULES = ("gpipe", "1f1b", "virtual-1f1b")
STAGES, MICROBATCHES = 3, 6


def agreement(schedules: Iterable[str] = SCHEDULES) -> tuple[int, int]:
    """Returns how many tasks and transfers ran, and how many of them in the simulator's order."""
    import jax
    import numpy as np
    import optax

    import hetjax
    from hetjax.demo import linen_gpt
    from hetjax.demo.training import Config
    from hetjax.passes.cost.estimate import estimate_program
    from hetjax.passes.simulator_program import simulate_program

    config = Config(vocab_size=64, length=16, width=16, num_layers=STAGES)
    rng = np.random.default_rng(0)
    batch = {k: rng.integers(0, 64, (12, 16)).astype(np.int32) for k in ("tokens", "targets")}
    state = linen_gpt.create(config, optax.sgd(0.1))
    ran = agreed = 0
    for name in schedules:
        parallel = hetjax.parallelize(
            linen_gpt.train_step, num_stages=STAGES, mesh="1,1", num_microbatches=MICROBATCHES,
            schedule=name,
        )  # fmt: skip
        jax.block_until_ready(parallel.measure(state, batch))
        entry = parallel._latest
        bundle, times = entry.bundle, entry.executor.times
        prices = estimate_program(bundle).fragments
        timeline = simulate_program(
            bundle.program, bundle.cluster, {n: p.seconds for n, p in prices.items()}
        )
        idle = {f.name for f in bundle.program.fragments if not f.outputs}
        for lane, spans in enumerate(timeline.spans):
            tasks = [t for t in times if t.lane == lane and t.task.kind != "send"]
            sends = [t for t in times if t.lane == lane and t.task.kind == "send"]
            posted = sorted(
                (s for s in timeline.transfers if s.device == lane), key=lambda s: s.posted_s
            )
            for mine, theirs in (
                # Accumulators are made under the name of the task that first adds to them.
                (_once(sorted(tasks, key=lambda t: t.start_s)), [s.task for s in spans if s.task.work not in idle]),
                (_once(sorted(sends, key=lambda t: t.posted_s)), [s.task for s in posted]),
            ):  # fmt: skip
                ran += max(len(mine), len(theirs))
                agreed += sum(a == b for a, b in zip(mine, theirs))
    return ran, agreed


def _once(times: Iterable[Any]) -> list[Any]:
    return [task for task, _ in itertools.groupby(t.task for t in times)]
