"""`plan.with_` changes what was said and nothing else, and prices it as planning from scratch would."""

from __future__ import annotations

import pytest

import hetjax
from hetjax.demo.session import CLUSTER
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import MicrobatchError, PlanError, VerifyError
from hetjax.ir.plan import Plan
from tests.notebook.conftest import OPTIONS


def rehearse(small_step, **options):
    step, state, batch = small_step
    return hetjax.rehearse(step, str(CLUSTER), state, batch, options={**OPTIONS, **options})


@pytest.mark.parametrize(
    "change",
    [{"num_microbatches": 2}, {"schedule": "gpipe"}, {"num_microbatches": 1, "schedule": "gpipe"}],
)
def test_a_changed_plan_costs_what_planning_it_costs(rehearsal, small_step, change):
    changed = rehearsal.plan.with_(**change)
    again = rehearse(small_step, **change)
    assert changed.costing.estimate.iteration_s == again.step_s
    assert changed.costing.estimate.peak_bytes == again.estimate.peak_bytes
    assert changed.predicted_s == again.step_s
    assert [s.first for s in changed.stages] == [s.first for s in rehearsal.plan.stages]
    row = changed.delta.cost("step")
    assert (row.before, row.after) == (rehearsal.step_s, again.step_s)
    assert rehearsal.plan.delta is None and rehearsal.plan.num_microbatches == 4


def test_the_table_names_what_was_changed_and_what_it_costs(rehearsal):
    plan = rehearsal.plan.with_(num_microbatches=2).with_(schedule="gpipe")
    delta = plan.delta
    assert [(r.what, r.before, r.after) for r in delta.decisions] == [("schedule", "1f1b", "gpipe")]
    text = str(rehearsal.plan.with_(num_microbatches=2).delta)
    assert "num_microbatches  4       2" in text
    assert "peak on s1" in text and "%" in text


def test_mesh_and_devices_of_a_stage(rehearsal):
    wide = rehearsal.plan.with_(stage={1: {"mesh": (1, 4)}})
    assert wide.stages[1].axes == (("data", 1), ("model", 4)) and wide.stages[0] == _same(
        wide.stages[0], rehearsal.plan.stages[0]
    )
    other = rehearsal.plan.with_(stage={1: {"devices": (2, 3), "mesh": (2, 1)}})
    assert other.stages[1].devices == (2, 3) and other.stages[1].kind == "slow"
    assert other.delta.cost("peak on s1").after > other.delta.cost("peak on s1").before
    decided = {r.what for r in other.delta.decisions}
    assert decided == {"s1 devices", "s1 axes"}


def _same(stage, before):
    """Returns the stage with the predicted time taken out of account."""
    import dataclasses

    return dataclasses.replace(before, predicted_s=stage.predicted_s)


def test_a_cut_moved_by_module(rehearsal):
    moved = rehearsal.plan.with_(stage={1: {"first": "Model/head"}})
    program = moved.costing.bundle.program
    blocks = {
        op.block
        for f in program.fragments
        if f.stage == 1
        for op in f.ops
        if op.region == "forward"
    }
    assert "Model/head" in blocks and not any(b.startswith("Model/block") for b in blocks)
    assert moved.stages[1].first.block == "Model/head"


def test_a_spec_brings_along_what_is_updated_with_it(rehearsal):
    path = "state/params/block_1/down/kernel"
    plan = rehearsal.plan.with_(spec={"params/block_1/down/kernel": (None, "model")})
    specs = dict(plan.state_specs)
    assert specs[path] == ((), ("model",)) == specs["state/opt_state/0/trace/block_1/down/kernel"]
    whole = plan.with_(spec={path: None})
    assert path not in dict(whole.state_specs)
    assert whole.delta.cost("peak on s1").after > whole.delta.cost("peak on s1").before
    feeds = [
        f
        for f in plan.costing.bundle.program.feeds
        if plan.costing.bundle.graph.inputs[f.argument].path == path
    ]
    assert [f.spec for f in feeds] == [((), ("model",))]


@pytest.mark.parametrize(
    ("changes", "error", "words"),
    [
        ({"num_microbatches": 3}, VerifyError, "3 microbatches do not divide a batch of 8; nearest"),
        ({"num_microbatches": 8}, MicrobatchError, "would not give the numbers of the whole batch"),
        ({"schedul": "gpipe"}, PlanError, "no 'schedul'; did you mean 'schedule'"),
        ({"schedule": "gpip"}, PlanError, "did you mean gpipe"),
        ({"stage": {5: {}}}, PlanError, "there is no stage 5; the plan has 0 … 1"),
        ({"stage": {1: {"mash": (1, 4)}}}, PlanError, "a stage has no 'mash'; did you mean 'mesh'"),
        ({"stage": {1: {"mesh": (3, 2)}}}, VerifyError, "a mesh of data 3 x model 2 has 6 devices, not 4"),
        ({"stage": {1: {"devices": (0, 1, 2, 3)}}}, VerifyError, "device 0 serves stages 0 and 1"),
        ({"spec": {"params/hed/kernel": (None, "model")}}, PlanError, "no state leaf 'params/hed/kernel'"),
        ({"spec": {"kernel": None}}, PlanError, "'kernel' is the end of"),
        ({"spec": {"params/head/kernel": ("model",)}}, PlanError, "1 entries for f32[16,17], which has 2"),
        ({"spec": {"params/head/kernel": ("modell", None)}}, VerifyError, "no stage has a mesh axis 'modell'"),
    ],
)  # fmt: skip
def test_what_cannot_be_is_said(rehearsal, changes, error, words):
    with pytest.raises(error) as raised:
        rehearsal.plan.with_(**changes)
    assert words in str(raised.value)


def test_a_plan_without_its_step_keeps_its_numbers(rehearsal):
    plan = Plan.from_json(rehearsal.plan.to_json())
    changed = plan.with_(num_microbatches=2, spec={"state/params/head/kernel": ("model", None)})
    assert changed.num_microbatches == 2 and dict(changed.state_specs)[
        "state/params/head/kernel"
    ] == (("model",), ())
    assert changed.delta is None and changed.costing is None


def test_numbers_given_by_hand_are_kept(rehearsal):
    changed = rehearsal.plan.with_(predicted_s=123.0)
    assert changed.predicted_s == 123.0 and changed.costing is None
    assert rehearsal.plan.with_() == rehearsal.plan


def test_the_plan_of_a_function_can_be_changed_and_run(ran, small_step):
    step, state, batch = small_step
    plan = ran.plan.with_(schedule="gpipe")
    other = hetjax.parallelize(step, cluster=str(CLUSTER), plan=plan, rehearse=True)
    assert other.plan_for(state, batch).schedule == "gpipe"
    assert other.plan == plan


def test_a_rehearsal_says_memory_time_price_and_gap(rehearsal):
    assert rehearsal.step_s >= rehearsal.lower_bound_s > 0
    assert rehearsal.gap == pytest.approx(rehearsal.step_s / rehearsal.lower_bound_s - 1)
    assert rehearsal.device_hours == {
        "fast": pytest.approx(2 * rehearsal.step_s / 3600),
        "slow": pytest.approx(4 * rehearsal.step_s / 3600),
    }
    assert rehearsal.price == pytest.approx(rehearsal.step_s / 3600 * (2 * 2.0 + 4 * 0.5))
    assert rehearsal.fits and "EUR" in str(rehearsal) and "gap" in str(rehearsal)


def test_a_rehearsal_without_prices_and_without_room(small_step):
    step, state, batch = small_step
    tiny = CLUSTER.read_text().replace('like = "cpu"', 'like = "cpu"\nmemory_bytes = 30000')
    r = hetjax.rehearse(step, Cluster.parse(tiny), state, batch, options=OPTIONS)
    assert not r.fits and "does not fit: stage 0 needs" in str(r)
    assert r.price is None and "no price is given for fast, slow" in str(r)
    with pytest.raises(PlanError, match="prices are given for h100; 'two-sites' has fast, slow"):
        hetjax.rehearse(step, str(CLUSTER), state, batch, prices={"h100": 2.0})
