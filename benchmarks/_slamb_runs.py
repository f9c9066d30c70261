"""Runs of arms on tasks, kept in a file of JSON lines so that a long table can be made in pieces."""

from __future__ import annotations

import json
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field

from benchmarks._slamb_arms import Arm
from benchmarks._slamb_tasks import Task, trainer


@dataclass
class Runs:
    """What has been measured, by task, arm, steps, learning rate and seed.

    Attributes:
      path: file of JSON lines to continue, or None to keep nothing.
      deadline_s: `time.monotonic()` after which nothing new is started.
    """

    path: pathlib.Path | None = None
    deadline_s: float = float("inf")
    known: dict[tuple, dict] = field(default_factory=dict)
    _trainers: dict[tuple, Callable[..., tuple]] = field(default_factory=dict)

    def __post_init__(self):
        if self.path and self.path.exists():
            for line in self.path.read_text().splitlines():
                entry = json.loads(line)
                self.known[tuple(entry["key"])] = entry["figures"]

    def one(
        self, task: Task, arm: Arm, steps: int, workers: int, learning_rate: float, seed: int
    ) -> dict | None:
        """Figures of one training run; None when it is not known and the deadline has passed."""
        key = (task.name, task.batch, arm.name, steps, workers, learning_rate, seed)
        if key in self.known:
            return self.known[key]
        if time.monotonic() > self.deadline_s:
            return None
        if key[:5] not in self._trainers:
            self._trainers = {key[:5]: trainer(arm, task, steps, workers)}  # one at a time
        start = time.monotonic()
        params, spread, losses = self._trainers[key[:5]](learning_rate, seed)
        figures = {name: float(value) for name, value in task.measure(params).items()}
        figures |= {"spread": float(spread), "last_loss": float(losses[-max(steps // 20, 1) :].mean()),
                    "run_s": time.monotonic() - start}
        self.known[key] = figures
        print(*key, {k: float(f'{v:.4g}') for k, v in figures.items()}, file=sys.stderr, flush=True)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "figures": figures}) + "\n")
        return figures

    def tuned(
        self, task: Task, arm: Arm, steps: int, workers: int, figure: str, *, least: bool,
        seeds=(0, 1, 2), rates=None, tune_seeds=None,
    ) -> tuple[float, list[dict]] | None:
        """The best learning rate, and the figures of every seed with it.

        Best is the mean over `tune_seeds`; None takes all seeds, which costs more and does not pick
        a rate for its luck with one.
        """
        of_rate: dict[float, float] = {}
        for rate in rates or arm.learning_rates:
            got = [self.one(task, arm, steps, workers, rate, seed) for seed in tune_seeds or seeds]
            if None in got:
                return None
            value = statistics.mean(r[figure] for r in got if r is not None)
            of_rate[rate] = (value if least else -value) if value == value else float("inf")
        best = min(of_rate, key=lambda rate: of_rate[rate])
        results = [self.one(task, arm, steps, workers, best, seed) for seed in seeds]
        return None if None in results else (best, [r for r in results if r is not None])


def mean_deviation(results: list[dict], figure: str) -> tuple[float, float]:
    """Mean and sample deviation of a figure over runs."""
    values = [r[figure] for r in results]
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0
