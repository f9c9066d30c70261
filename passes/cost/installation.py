"""What a framework adds on a cluster, whatever the model: constants, fitted to executed plans."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import numpy as np


@dataclasses.dataclass(frozen=True, slots=True)
class Installation:
    """Constants of a framework as it was installed on a cluster.

    Attributes:
      host_s: seconds for which a device idles after an arrival, until its host has started it
        again. Assumed: two small transfers and a read-back of a few integers.
      sync_passes: how often a link carries what an all-reduce sends; 2 where receiving and sending
        share it.
      parameter_bytes: parameter, gradient and two moments of Adam, four bytes each.
      base_bytes: memory in use before a model is loaded, where the measurement counts it.
      stored_share: bytes the allocator holds per byte the forward keeps.
      loss_copies: copies of the logits that the loss makes.
      keeps_scores: whether attention scores are kept for the backward.
    """

    host_s: float = 1e-3
    sync_passes: float = 1.0
    parameter_bytes: int = 16
    base_bytes: float = 0.0
    stored_share: float = 1.0
    loss_copies: float = 0.0
    keeps_scores: bool = True


# By device kind, fitted to the plans published with Sailor. On Grace Hopper the measurement counts
# what driver and fused kernels hold before a model is loaded; on the mixed RTX nodes it does not,
# and the peaks are below what their attention scores alone would be.
PUBLISHED: dict[str, Installation] = {
    "gh200": Installation(sync_passes=2.0, base_bytes=4.53e9, stored_share=1.11, loss_copies=1.57),
    "rtx-3090": Installation(keeps_scores=False),
    "rtx-2080ti": Installation(keeps_scores=False),
    "titan-rtx": Installation(keeps_scores=False),
}


@dataclasses.dataclass(frozen=True, slots=True)
class StageBytes:
    """What a stage's peak memory is made of, before any constant.

    Attributes:
      parameters: number of parameters on one device.
      stored_bytes: what the forwards in flight keep.
      logits_bytes: of the largest value the stage hands on.
    """

    parameters: int
    stored_bytes: int
    logits_bytes: int

    def peak(self, constants: Installation) -> float:
        """Returns the peak bytes under an installation's constants."""
        return (
            constants.base_bytes
            + constants.parameter_bytes * self.parameters
            + constants.stored_share * self.stored_bytes
            + constants.loss_copies * self.logits_bytes
        )


def fit_memory(
    plans: Sequence[tuple[Sequence[StageBytes], float]], base: Installation
) -> Installation:
    """Returns the base, the share of stored bytes and the copies of logits that fit measured peaks.

    Least squares of the relative error; which stage is the largest is found by iteration.

    Args:
      plans: per plan, its stages and the measured peak of the largest.
      base: the constants to start from; what is not fitted is kept.
    """
    fitted = base
    for _ in range(8):
        largest = [max(stages, key=lambda s: s.peak(fitted)) for stages, _ in plans]
        peaks = np.array([peak for _, peak in plans])
        rows = np.array([[1.0, s.stored_bytes, s.logits_bytes] for s in largest])
        rest = peaks - np.array([base.parameter_bytes * s.parameters for s in largest])
        solved = _least_squares(rows / peaks[:, None], rest / peaks)
        fitted = dataclasses.replace(
            base,
            base_bytes=float(solved[0]),
            stored_share=float(solved[1]),
            loss_copies=float(solved[2]),
        )
    return fitted


def fit_sync(
    predict: Callable[[Installation], Sequence[float]],
    measured_s: Sequence[float],
    base: Installation,
) -> Installation:
    """Returns the constants with the number of sync passes, 1 or 2, that fits better.

    Args:
      predict: seconds of each plan under given constants.
      measured_s: seconds of each plan.
      base: the constants to start from.
    """
    choices = [dataclasses.replace(base, sync_passes=passes) for passes in (1.0, 2.0)]

    def error(choice: Installation) -> float:
        return sum(abs(math.log(p / m)) for p, m in zip(predict(choice), measured_s))

    return min(choices, key=error)


def _least_squares(rows: np.ndarray, goal: np.ndarray) -> np.ndarray:
    """Returns the solution with columns left out whose entries would be negative."""
    columns = list(range(rows.shape[1]))
    while columns:
        solved = np.linalg.lstsq(rows[:, columns], goal, rcond=None)[0]
        if (solved >= 0).all():
            out = np.zeros(rows.shape[1])
            out[columns] = solved
            return out
        columns.pop(int(np.argmin(solved)))
    return np.zeros(rows.shape[1])
