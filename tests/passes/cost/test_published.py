"""Published profiles, links and plans: read, refused where wrong, and predicted as measured."""

import json

import numpy as np
import pytest

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import ParseError, PlanError
from hetjax.passes.cost.installation import Installation, StageBytes, fit_memory, fit_sync
from hetjax.passes.cost.published import estimate, stage_bytes
from hetjax.passes.cost.sailor import (
    PublishedPlan,
    Replica,
    find_folder,
    model_of,
    plan_cluster,
    read_model,
    read_plan,
)


@pytest.fixture(scope="module")
def folder(shared_dir):
    path = shared_dir / "data" / "sailor"
    if not path.is_dir():
        pytest.skip(f"the published profiles are not at {path}")
    return path


@pytest.fixture(scope="module")
def model(folder):
    return read_model(folder, "OPT-350")


@pytest.fixture(scope="module")
def plans(folder):
    files = sorted((folder / "measured").rglob("*.json"))
    # The measurement of this one is a copy of another group's.
    return {
        str(f.relative_to(folder / "measured")): read_plan(f.read_text(), str(f))
        for f in files
        if "mit/N3" not in str(f)
    }


def plan_text(**changes):
    stage = [[[["GH-96", 4, "us-central1-a"]], 4]]
    pipeline = {
        "num_stages": 2, "layers_per_stage": [[0, 1], [2, 3]], "tmp_per_stage": [stage, stage], "dp": [1, 1],
    }  # fmt: skip
    data = {"pipeline_list": str([pipeline]), "mbs": 2, "gbs": 32, "real": 1.5, "max_mem": 7}
    data.update(changes)
    return json.dumps({k: v for k, v in data.items() if v is not KeyError})


@pytest.mark.quick
def test_a_plan_file_is_read():
    plan = read_plan(plan_text())
    replica = Replica("GH-96", 4, "us-central1-a", 4)
    assert plan == PublishedPlan(((0, 1), (2, 3)), ((replica,), (replica,)), 2, 32, 1.5, 7)
    assert (plan.num_stages, plan.num_microbatches) == (2, 16)
    assert replica.kind == "gh200"


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"mbs": KeyError}, "missing field 'mbs'"),
        ({"mbs": 0}, "mbs: must be a whole number"),
        ({"pipeline_list": "["}, "pipeline_list: not a list of pipelines"),
        ({"pipeline_list": []}, "exactly one pipeline"),
        ({"pipeline_list": [{"layers_per_stage": [[0]]}]}, "not as in their plan files"),
        (
            {"pipeline_list": [{"layers_per_stage": [[0]], "tmp_per_stage": [[[[["GH-69", 4, "z"]], 4]]]}]},
            "unknown GPU 'GH-69'; did you mean 'GH-96'",
        ),
        (
            {"pipeline_list": [{"layers_per_stage": [[0]], "tmp_per_stage": [[[[["GH-96", 4, "z"]] * 2, 4]]]}]},
            "a replica that spans nodes",
        ),
        (
            {"pipeline_list": [{"layers_per_stage": [[0], [1]], "tmp_per_stage": [[[[["GH-96", 4, "z"]], 4]]]}]},
            "2 stages have layers, 1 have devices",
        ),
    ],
)  # fmt: skip
def test_a_wrong_plan_file_is_told(changes, says):
    with pytest.raises(PlanError) as caught:
        read_plan(plan_text(**changes), "p.json")
    assert any(says in p for p in caught.value.problems), caught.value.problems
    with pytest.raises(ParseError):
        read_plan("{")


def test_the_folder_and_the_model_are_found(folder, plans):
    some = next((folder / "measured").rglob("*.json"))
    assert find_folder(some) == folder.resolve()
    assert find_folder("/nowhere/plan.json") is None
    assert {model_of(folder, plan) for plan in plans.values()} == {"OPT-350"}
    with pytest.raises(PlanError, match="4 layers; name its model"):
        model_of(folder, read_plan(plan_text()))


def test_a_model_that_is_not_there_is_told_with_the_nearest(folder, model):
    with pytest.raises(PlanError, match="did you mean 'OPT-350'"):
        read_model(folder, "OPT-35")
    with pytest.raises(PlanError, match="its layers are 0 … 25"):
        model.size(4, 26)
    with pytest.raises(PlanError, match="3-way"):
        model.size(3, 0)


def test_links_are_curves_that_never_fall_and_keep_the_measured_peak(folder, plans):
    cluster = plan_cluster(folder, plans["clariden/OPT-350/N4/plan_config_N4_D2.json"])
    assert Cluster.parse(cluster.to_toml()) == cluster
    assert cluster.num_devices == 16
    between = cluster.link(0, 4)
    # Four GPUs a node reach 92.6 GB/s together in their table.
    assert between.bandwidth_bytes_s == pytest.approx(92.55e9, rel=1e-3)
    rates = [n / between.transfer_s(n) for n in (4e6, 16e6, 64e6, 256e6, 1024e6)]
    assert rates == sorted(rates)
    assert rates[0] == pytest.approx(45.25e9, rel=0.01)
    mixed = plan_cluster(folder, plans["mit/N2/plan_config_N2_D1.json"])
    assert mixed.link(0, 2).bandwidth_bytes_s < 0.12e9  # one gigabit Ethernet between the two kinds
    assert mixed.link(0, 1).bandwidth_bytes_s > 40e9


def test_a_profile_that_is_missing_is_told(folder, model, plans):
    plan = plans["mit/N2/plan_config_N2_D1.json"]
    odd = PublishedPlan(plan.layers, plan.replicas, 3, 256)
    with pytest.raises(PlanError, match="no microbatch 3; there is: 1, 2, 4"):
        estimate(odd, model, plan_cluster(folder, odd))


def test_measured_plans_are_predicted_and_put_in_order(folder, model, plans):
    errors, by_group = [], {}
    for name, plan in plans.items():
        predicted = estimate(plan, model, plan_cluster(folder, plan))
        assert predicted.lower_bound_s <= predicted.iteration_s + 1e-9
        assert 0 <= predicted.bubble < 1 and predicted.exposed_comm_s >= -1e-9
        errors.append(abs(predicted.iteration_s / plan.measured_s - 1))
        group = by_group.setdefault(name.rsplit("/", 1)[0], [])
        group.append((plan.measured_s, predicted.iteration_s))
    assert len(errors) == 17
    assert np.mean(errors) <= 0.08
    for pairs in by_group.values():
        predictions = [p for _, p in sorted(pairs)]
        assert predictions == sorted(predictions)


def test_memory_constants_are_fitted_back():
    true = Installation(base_bytes=4e9, stored_share=1.2, loss_copies=2.0)
    rng = np.random.default_rng(0)
    plans = []
    for _ in range(12):
        stages = [
            StageBytes(int(p * 1e8), int(a * 1e10), int(o * 1e9)) for p, a, o in rng.random((3, 3))
        ]
        plans.append((stages, max(s.peak(true) for s in stages)))
    fitted = fit_memory(plans, Installation())
    assert fitted.base_bytes == pytest.approx(4e9, rel=1e-6)
    assert fitted.stored_share == pytest.approx(1.2, rel=1e-6)
    assert fitted.loss_copies == pytest.approx(2.0, rel=1e-6)


def test_sync_passes_are_chosen_by_the_better_fit():
    def predict(constants):
        return [1 + constants.sync_passes, 2 + 2 * constants.sync_passes]

    assert fit_sync(predict, [3.1, 5.8], Installation()).sync_passes == 2
    assert fit_sync(predict, [2.2, 4.1], Installation()).sync_passes == 1


def test_scores_that_are_not_kept_are_taken_off(folder, model, plans):
    plan = plans["mit/N2/plan_config_N2_D1.json"]
    kept = stage_bytes(plan, model, True, 0)
    lean = stage_bytes(plan, model, False, 0)
    # Eleven layers, two in flight, two examples, eight of sixteen heads, 2048 x 2048 floats.
    assert kept.stored_bytes - lean.stored_bytes == 11 * 2 * 2 * 8 * 2048 * 2048 * 4
    assert kept.parameters == lean.parameters
