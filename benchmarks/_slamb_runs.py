"""Runs of arms on tasks, kept in a file of JSON lines so that a long table can be made in pieces."""

from __future__ import annotations

import json
import os
import pathlib
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks._slamb_arms import Arm
from benchmarks._slamb_tasks import Task, averaged, stepper

PIECE_STEPS = 500  # between two of which a run can stop, and go on in another process


@dataclass
class Runs:
    """What has been measured, by task, arm, steps, learning rate and seed.

    Attributes:
      path: file of JSON lines to continue, or None to keep nothing. Beside it, with `.state` added to
        its name, lies the state of a run that the deadline cut.
      deadline_s: `time.monotonic()` after which nothing new is started and runs are cut.
    """

    path: pathlib.Path | None = None
    deadline_s: float = float("inf")
    known: dict[tuple, dict] = field(default_factory=dict)
    _steppers: dict[tuple, tuple[Callable, Callable]] = field(default_factory=dict)

    def __post_init__(self):
        if self.path and self.path.exists():
            for line in self.path.read_text().splitlines():
                entry = json.loads(line)
                self.known[tuple(entry["key"])] = entry["figures"]

    def one(
        self, task: Task, arm: Arm, steps: int, workers: int, learning_rate: float, seed: int
    ) -> dict | None:
        """Figures of one training run; None when the deadline passes before it is done."""
        key = (task.name, task.batch, arm.name, steps, workers, learning_rate, seed)
        if key in self.known:
            return self.known[key]
        if time.monotonic() > self.deadline_s:
            return None
        of = key[:5]
        if of not in self._steppers:
            self._steppers = {of: stepper(arm, task, workers)}  # one at a time
        start, advance = self._steppers[of]
        begin, random = time.monotonic(), jax.random.key(seed)
        carry, losses, before_s = self._resumed(key, start(random))
        while len(losses) < steps:
            carry, more = advance(
                carry, len(losses), min(PIECE_STEPS, steps - len(losses)), steps, learning_rate, random)
            losses = np.concatenate([losses, more])
            if self.path and len(losses) < steps and time.monotonic() > self.deadline_s:
                self._cut(key, carry, losses, before_s + time.monotonic() - begin)
                return None
        params, spread = averaged(carry[0])
        figures = {name: float(value) for name, value in task.measure(params).items()}
        figures |= {"spread": float(spread), "last_loss": float(losses[-max(steps // 20, 1) :].mean()),
                    "run_s": before_s + time.monotonic() - begin}
        self.known[key] = figures
        print(*key, {k: float(f'{v:.4g}') for k, v in figures.items()}, file=sys.stderr, flush=True)
        if self.path:
            with self.path.open("a") as file:
                file.write(json.dumps({"key": key, "figures": figures}) + "\n")
        return figures

    @property
    def _state_path(self) -> pathlib.Path | None:
        return self.path and self.path.with_name(self.path.name + ".state")

    def _cut(self, key, carry, losses, spent_s: float) -> None:
        # Bytes, for numpy writes eight-bit floats but does not know them again.
        arrays: dict[str, Any] = {f"leaf{i}": np.frombuffer(np.asarray(a).tobytes(), np.uint8)
                                  for i, a in enumerate(jax.tree.leaves(carry))}
        arrays |= {"key": json.dumps(key), "losses": losses, "spent_s": spent_s}
        assert self._state_path
        new = self._state_path.with_name(self._state_path.name + ".new")
        with new.open("wb") as file:
            np.savez(file, **arrays)
        os.replace(new, self._state_path)

    def _resumed(self, key, carry):
        """(carry, losses so far, seconds spent), of the run that was cut if it is this one."""
        if self._state_path and self._state_path.exists():
            with np.load(self._state_path) as kept:
                if kept["key"] == json.dumps(key):
                    leaves, treedef = jax.tree.flatten(carry)
                    read = [jnp.asarray(np.frombuffer(kept[f"leaf{i}"].tobytes(), a.dtype).reshape(a.shape))
                            for i, a in enumerate(leaves)]
                    return treedef.unflatten(read), kept["losses"], float(kept["spent_s"])
        return carry, np.zeros(0, np.float32), 0.0

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
