"""Predicted against measured: what a calibration shows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from hetjax.passes.cost.forest import Residual, ResidualForest
from hetjax.passes.cost.splits import rank_correlation
from hetjax.passes.cost.store import Measured, ProfileStore
from hetjax.passes.cost.work import work_price


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """One measured layer beside its predictions, in seconds of one call.

    Attributes:
      layer, phase, data, model, microbatch: what it is.
      measured_s: what it took.
      assumed_s: by the data sheet alone.
      fitted_s: by the fitted curve, with what a call takes.
      forest_s: the same times what the forest says; None where it says nothing.
      uncertainty: of that, as a standard deviation of the logarithm.
      spread: of the measurement.
    """

    layer: str
    phase: str
    data: int
    model: int
    microbatch: int
    measured_s: float
    assumed_s: float
    fitted_s: float
    forest_s: float | None
    uncertainty: float
    spread: float


def rows_of(
    store: ProfileStore, forest: ResidualForest | None, kind: str, *, step: str | None = None
) -> list[Row]:
    """Returns a row per layer measured on a kind, of one step or of all."""
    described = store.kinds[kind]
    chosen = [
        m for m in store.measured.values()
        if m.kind == kind and m.source == "measured" and (step is None or m.step == step)
    ]  # fmt: skip
    curve = store.efficiency.get(kind)
    said = (
        forest.predict_many([(m.work, m.group) for m in chosen], described, curve)
        if forest is not None
        else [Residual(1.0, math.inf)] * len(chosen)
    )
    out = []
    for m, residual in zip(chosen, said):
        call_s = _call_s(store, m)
        fitted_s = work_price(m.work, described, curve).seconds + m.work.collective_s
        knows = math.isfinite(residual.uncertainty)
        out.append(
            Row(
                m.layer, m.phase, m.data, m.model, m.microbatch, m.seconds,
                work_price(m.work, described).seconds + m.work.collective_s,
                fitted_s + call_s, fitted_s * residual.ratio + call_s if knows else None,
                residual.uncertainty, m.spread,
            )
        )  # fmt: skip
    return out


def _call_s(store: ProfileStore, m: Measured) -> float:
    call = store.calls.get((m.kind, m.data * m.model))
    return call.seconds(m.arrays) if call else 0.0


def mean_error(predicted: Sequence[float], measured: Sequence[float]) -> float:
    """Returns the mean of |predicted / measured - 1|."""
    return float(np.mean(np.abs(np.array(predicted) / np.array(measured) - 1)))


def summary(rows: Sequence[Row]) -> dict[str, float]:
    """Returns mean errors and rank correlations of the predictions that need no held-out data."""
    if not rows:
        return {}
    measured = [r.measured_s for r in rows]
    out = {}
    for name in ("assumed", "fitted"):
        predicted = [getattr(r, f"{name}_s") for r in rows]
        out[f"{name}_error"] = mean_error(predicted, measured)
        out[f"{name}_rank"] = rank_correlation(predicted, measured)
    return out
