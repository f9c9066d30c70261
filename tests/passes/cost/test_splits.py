"""Scores of held-out samples: groups held out whole, clusters left out, ranks."""

import math

import numpy as np
import pytest

from hetjax.ir import presets
from hetjax.passes.cost.forest import Sample, analytic_s
from hetjax.passes.cost.group import Group
from hetjax.passes.cost.splits import leaving_clusters_out, rank_correlation, within_clusters
from hetjax.passes.cost.work import Kernel, Work


def samples(ratio_of):
    """Layers of many sizes on two machines, measured ratio_of(machine, size) times the analytic time."""
    out = []
    for cluster, kind in (("a", presets.KINDS["t4"]), ("b", presets.KINDS["v100-16g"])):
        for n in range(60):
            size = 2.0 ** (10 + n / 6)
            w = Work("forward", (Kernel(1e3 * size, 40 * size, "f32", count=1 + n % 3), Kernel(size, 8 * size)))
            out.append(Sample(w, kind, Group(), analytic_s(w, kind) * ratio_of(cluster, size), cluster))
    return out


def test_what_all_clusters_share_is_learned_both_ways():
    found = samples(lambda cluster, size: 3.0)
    for score in (within_clusters(found, trees=30), leaving_clusters_out(found, trees=30)):
        assert score.num_samples == 120
        assert score.analytic_error == pytest.approx(2 / 3)
        assert score.forest_error < 0.01
        assert score.forest_rank > 0.99


def test_what_is_a_clusters_own_is_not_learned_from_the_others():
    found = samples(lambda cluster, size: {"a": 2.0, "b": 8.0}[cluster])
    within, across = within_clusters(found, trees=30), leaving_clusters_out(found, trees=30)
    assert within.forest_error < 0.1
    # From b alone, a is taken for four times too slow; from a alone, b for four times too fast.
    assert across.forest_error == pytest.approx((3 + 0.75) / 2, abs=0.05)


def test_a_single_cluster_has_nothing_to_be_left_out_of():
    found = [s for s in samples(lambda cluster, size: 2.0) if s.cluster == "a"]
    assert leaving_clusters_out(found).num_samples == 0


def test_rank_correlation_by_hand():
    assert rank_correlation([1, 2, 3, 10], [5, 6, 7, 8]) == pytest.approx(1)
    assert rank_correlation([1, 2, 3], [3, 2, 1]) == pytest.approx(-1)
    # Ranks (1, 2.5, 2.5, 4) against (1, 2, 3, 4).
    assert rank_correlation([0, 5, 5, 9], [1, 2, 3, 4]) == pytest.approx(math.sqrt(0.9))
    assert math.isnan(rank_correlation([1, 1], [1, 2]))
    rng = np.random.default_rng(0)
    a, b = rng.integers(0, 9, (2, 50))
    scipy = pytest.importorskip("scipy.stats", reason="scipy ranks, to compare with")
    assert rank_correlation(a, b) == pytest.approx(scipy.spearmanr(a, b).statistic)
