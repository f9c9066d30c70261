"""The residual forest: what it learns, what it refuses, how it is kept."""

import dataclasses
import json
import math

import numpy as np
import pytest

from hetjax.ir import presets
from hetjax.ir.errors import ParseError, PlanError
from hetjax.passes.cost.forest import (
    FEATURES,
    UNKNOWN,
    ResidualForest,
    Sample,
    analytic_s,
    features,
    train_forest,
)
from hetjax.passes.cost.group import Group
from hetjax.passes.cost.work import Kernel, Work, gathered

T4, V100 = presets.KINDS["t4"], presets.KINDS["v100-16g"]


def work(size, phase="forward", products=4, count=6):
    """A layer of `size` tokens: some products of 256 x 256 and some elementwise kernels."""
    kernels = [Kernel(2.0 * size * 256 * 256, 4.0 * (2 * size * 256 + 256 * 256), "f32")] * products
    return gathered(phase, [*kernels, *[Kernel(size * 256, 8.0 * size * 256)] * count])


def truth(w, kind):
    """What the analytic model misses, in this test: launch overhead hurts backwards, and T4s more."""
    share = 1 + 0.5 / (1 + analytic_s(w, kind) * 1e4)
    return share * (1.6 if w.phase == "backward" else 1.0) * (2.0 if kind is T4 else 1.2)


def samples(kinds=(T4, V100), noise=0.02, seed=0):
    rng = np.random.default_rng(seed)
    out = []
    for kind in kinds:
        for size in (64, 128, 256, 512, 1024, 2048, 4096):
            for phase in ("forward", "backward"):
                for products in (2, 4, 8):
                    w = work(size, phase, products)
                    seconds = analytic_s(w, kind) * truth(w, kind) * rng.lognormal(0, noise)
                    out.append(Sample(w, kind, Group(), seconds, kind.name))
    return out


@pytest.fixture(scope="module")
def forest():
    return train_forest(samples())


def test_it_learns_what_the_analytic_model_misses(forest):
    for kind in (T4, V100):
        for size, phase in ((96, "forward"), (700, "backward"), (3000, "forward")):
            w = work(size, phase, products=3)
            found = forest.predict(w, kind)
            assert found.ratio == pytest.approx(truth(w, kind), rel=0.1)
            assert 0 <= found.uncertainty < 0.3


def test_many_at_once_are_the_same_as_one_by_one(forest):
    works = [(work(n), Group()) for n in (80, 1000)]
    assert forest.predict_many(works, T4) == [forest.predict(w, T4) for w, _ in works]
    assert forest.predict_many([], T4) == []


def test_uncertainty_grows_where_measurements_disagree():
    spread = train_forest(samples(noise=0.6)).predict(work(700), T4).uncertainty
    assert spread > 2 * train_forest(samples(noise=0.0)).predict(work(700), T4).uncertainty


def test_reading_the_trees_gives_what_xgboost_predicts():
    import xgboost

    data = samples(noise=0.3)
    rows = np.array([features(s.work, s.kind, s.group) for s in data])
    goal = np.array([math.log(s.seconds / s.analytic_s) for s in data])
    centre = goal.mean()
    theirs = xgboost.XGBRFRegressor(
        n_estimators=20, max_depth=8, subsample=0.8, colsample_bynode=0.6, base_score=0.0,
        reg_lambda=1e-3, random_state=3, n_jobs=1, tree_method="hist", max_bin=1024,
    ).fit(rows, goal - centre)  # fmt: skip
    ours = train_forest(data, trees=20, seed=3).trees(rows)
    assert ours.shape == (len(rows), 20)
    np.testing.assert_allclose(ours.mean(axis=1), theirs.predict(rows) + centre, rtol=0, atol=2e-6)
    assert ours.std(axis=1).max() > 0


def test_equal_seeds_give_equal_forests_and_json_reads_back(forest, tmp_path):
    again = train_forest(samples())
    assert again.to_json() == forest.to_json()
    assert train_forest(samples(), seed=1).to_json() != forest.to_json()
    forest.save(tmp_path / "forest.json")
    loaded = ResidualForest.load(tmp_path / "forest.json")
    assert loaded.kinds == forest.kinds == (("t4", 42), ("v100-16g", 42))
    assert loaded.clusters == ("t4", "v100-16g") and "xgboost" in loaded.made_with
    assert loaded.predict(work(77), T4) == forest.predict(work(77), T4)


def test_a_kind_without_data_is_refused_and_said(forest):
    h100 = presets.KINDS["h100-80g"]
    assert not forest.covers("h100-80g") and forest.covers("t4")
    assert forest.predict(work(100), h100) == UNKNOWN == (1.0, math.inf)
    assert "has none of kind 'h100-80g'" in forest.why_not("h100-80g")
    assert "did you mean 'v100-16g'" in forest.why_not("v100-32g")
    assert "t4 (42)" in forest.why_not("v100-32g") and forest.why_not("t4") == ""


def test_a_few_samples_of_a_kind_are_no_data():
    few = [s for s in samples() if s.kind is V100] + [s for s in samples() if s.kind is T4][:5]
    forest = train_forest(few)
    assert forest.covers("v100-16g") and not forest.covers("t4")
    assert "has 5 measured layers, fewer than 8" in forest.why_not("t4")
    with pytest.raises(PlanError, match="at least 8 measured layers"):
        train_forest(few[-5:])


def test_groups_and_links_are_features():
    link = presets.LINKS["10gbe"]
    alone, four = features(work(10), T4, Group()), features(work(10), T4, Group(2, 2, 2, link))
    differ = {FEATURES[i] for i, (a, b) in enumerate(zip(alone, four)) if a != b}
    assert differ == {"data", "model", "nodes", "link_bandwidth", "link_latency"}
    shared = work(10).with_collectives(1e-3, 1e6)
    more = features(shared, T4, Group(2, 2, 2, link))
    assert {FEATURES[i] for i, (a, b) in enumerate(zip(four, more)) if a != b} >= {"collective_share", "collective_bytes"}


@pytest.mark.parametrize(("change", "says"), [
    ({"hetjax_forest": 9}, "hetjax_forest: version 9 is not known"),
    ({"features": ["phase"]}, "features: it decides by other features"),
    ({"left": [[0, 0], [0, 0]]}, "a damaged forest"),
    ({"value": "x"}, "a damaged forest"),
    ({"hetjax_forest": None}, "not known"),
])
def test_a_file_that_is_no_forest_of_ours_is_refused(forest, change, says):
    data = json.loads(forest.to_json()) | change
    with pytest.raises(PlanError, match=says):
        ResidualForest.from_json(json.dumps(data), "f.json")


def test_a_circle_among_nodes_is_damage(forest):
    data = json.loads(forest.to_json())
    data["left"][0][1] = 0
    with pytest.raises(PlanError, match="do not fit"):
        ResidualForest.from_json(json.dumps(data))
    with pytest.raises(ParseError, match="not JSON"):
        ResidualForest.from_json("{")
    with pytest.raises(PlanError, match="not a residual forest"):
        ResidualForest.from_json("[]")


def test_work_splits_and_reads_back():
    w = work(128).with_collectives(0.5, 100.0)
    assert Work.from_row(json.loads(json.dumps(w.to_row()))) == w
    half = w.split(2)
    assert sum(k.flops * k.count for k in half.kernels) == sum(k.flops * k.count for k in w.kernels) / 2
    assert half.collective_s == 0
    with pytest.raises(ValueError, match="phase"):
        Work.from_row(w.to_row() | {"phase": "sideways"})
    assert gathered("forward", [Kernel(1, 2), Kernel(1, 2, count=2)]).kernels == (Kernel(1, 2, count=3),)
    assert dataclasses.replace(w, kernels=()).split(2).kernels == ()


def test_published_layers_become_samples(shared_dir):
    from hetjax.passes.cost.imported import published_samples
    from hetjax.passes.cost.sailor import read_model

    folder = shared_dir / "data/sailor"
    found = published_samples(folder, read_model(folder, "OPT-350"))
    kinds = {s.kind.name for s in found}
    assert len(kinds) == 7 and {s.cluster for s in found} == {"clariden", "mit", "cloud", "a100-80"}
    # On every kind the model is of the right order: half of the layers within a factor of four.
    for kind in kinds:
        ratios = [s.seconds / s.analytic_s for s in found if s.kind.name == kind and s.work.phase == "forward"]
        assert 1 / 4 < np.median(ratios) < 4, kind
    assert published_samples(folder, read_model(folder, "OPT-30")) == []  # its shape is not published
