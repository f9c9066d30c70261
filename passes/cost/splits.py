"""How far a forest can be trusted: samples held out, within a cluster and cluster by cluster.

Held out within a cluster are whole groups of samples (all layers at one size and degree), never
single layers: a block measured beside its twin would be no test. Held out as a cluster, the forest is
asked about kinds it never saw, which it refuses in use: the score says why.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Hashable, Sequence

import numpy as np

from hetjax.passes.cost.forest import Sample, features, train_forest


@dataclasses.dataclass(frozen=True, slots=True)
class SplitScore:
    """Predictions of samples that were held out.

    Attributes:
      num_samples: how many were predicted; where it is 0 the others are NaN.
      analytic_error, forest_error: mean of |predicted / measured - 1|.
      analytic_rank, forest_rank: Spearman's correlation of predicted and measured, the mean over
        clusters: between layers of one machine, which is what a search compares.
    """

    num_samples: int
    analytic_error: float
    forest_error: float
    analytic_rank: float
    forest_rank: float


def within_clusters(
    samples: Sequence[Sample], *, folds: int = 5, trees: int = 100, seed: int = 0
) -> SplitScore:
    """Returns the score of predicting groups of samples from the others of all clusters.

    Args:
      samples: measured layers.
      folds: how many parts, each of which is held out once.
      trees, seed: of the forests.
    """
    keys = sorted({_place(s) for s in samples}, key=repr)
    order = np.random.default_rng(seed).permutation(len(keys))
    fold_of = {keys[k]: i % folds for i, k in enumerate(order)}
    return _score(samples, lambda s: fold_of[_place(s)], trees, seed)


def leaving_clusters_out(
    samples: Sequence[Sample], *, trees: int = 100, seed: int = 0
) -> SplitScore:
    """Returns the score of predicting each cluster from the others."""
    return _score(samples, lambda s: s.cluster, trees, seed)


def _place(s: Sample) -> Hashable:
    """Returns what samples taken in one go share: kind, devices, and the batch, by the work's size."""
    flops = sum(k.count * k.flops for k in s.work.kernels)
    return s.cluster, s.kind.name, s.group.data, s.group.model, round(np.log2(1 + flops))


def _score(
    samples: Sequence[Sample], fold: Callable[[Sample], Hashable], trees: int, seed: int
) -> SplitScore:
    predicted = np.full(len(samples), np.nan)
    folds = [fold(s) for s in samples]
    for name in dict.fromkeys(folds):
        train = [s for s, f in zip(samples, folds) if f != name]
        if not train:
            continue
        forest = train_forest(train, trees=trees, seed=seed)
        held = [i for i, f in enumerate(folds) if f == name]
        rows = np.array([features(s.work, s.kind, s.group, s.efficiency) for s in (samples[i] for i in held)])
        # Asked directly: in use it would refuse kinds it has no data of.
        predicted[held] = np.exp(forest.trees(rows).mean(axis=1))
    analytic = np.array([s.analytic_s for s in samples])
    measured = np.array([s.seconds for s in samples])
    known = ~np.isnan(predicted)
    clusters = np.array([s.cluster for s in samples])
    guess = analytic * predicted

    def error(values: np.ndarray) -> float:
        return float(np.mean(np.abs(values / measured - 1)[known])) if known.any() else float("nan")

    def rank(values: np.ndarray) -> float:
        each = [
            rank_correlation(values[here], measured[here])
            for c in sorted(set(clusters))
            for here in (known & (clusters == c),)
            if here.sum() > 2
        ]
        return float(np.mean(each)) if each else float("nan")

    return SplitScore(int(known.sum()), error(analytic), error(guess), rank(analytic), rank(guess))


def rank_correlation(a: Sequence[float] | np.ndarray, b: Sequence[float] | np.ndarray) -> float:
    """Returns Spearman's rank correlation; equal values share their mean rank."""

    def ranks(values: np.ndarray) -> np.ndarray:
        _, inverse, counts = np.unique(values, return_inverse=True, return_counts=True)
        ends = np.cumsum(counts)
        return (ends - (counts - 1) / 2)[inverse]

    x, y = ranks(np.asarray(a, float)), ranks(np.asarray(b, float))
    if x.std() == 0 or y.std() == 0:
        return float("nan")
    return float(np.corrcoef(x, y)[0, 1])
