"""price-stages and price-step: numbers that are not known are filled in, known ones stay."""

import dataclasses

import pytest

import hetjax
from hetjax.ir import presets
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Plan
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.cost.group import mesh_group
from hetjax.passes.cost.layers import layer_map, segments, step_layers
from hetjax.passes.cost.program_price import fragment_ops, work_of
from hetjax.passes.cost.store import Measured, ProfileStore
from hetjax.passes.cost.work import work_price
from hetjax.passes.manager import run_pipeline
from hetjax.passes.price_plan import PriceStages, PriceStep
from tests.support import make_linen


@pytest.fixture(scope="module")
def bundle():
    step, state, batch = make_linen()
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": "1,1"}
    return hetjax.parallelize(step, **options).lower(state, batch)._entry.bundle


def unpriced(bundle):
    plan = bundle.plan
    stages = [dataclasses.replace(s, predicted_s=None, peak_bytes=None, sent_bytes=None) for s in plan.stages]
    return bundle.replace(plan=plan.with_(stages=tuple(stages), predicted_s=None, sources=()))


def test_a_lowered_plan_bears_what_the_estimate_says(bundle):
    found, plan = estimate_program(bundle), bundle.plan
    assert plan.predicted_s == found.iteration_s
    assert tuple(s.peak_bytes for s in plan.stages) == found.peak_bytes
    for s, stage in enumerate(plan.stages):
        mine = [f for f in bundle.program.fragments if f.stage == s and f.per_microbatch]
        assert stage.predicted_s == pytest.approx(sum(found.fragments[f.name].seconds for f in mine))
    there = sum(r.nbytes for r in bundle.program.reshards if r.form == "micro" and r.source == 0)
    assert plan.stages[0].sent_bytes >= there > 0 and plan.stages[1].sent_bytes == 0
    assert {"stage times", "step time", "memory"} <= set(dict(plan.sources))


def test_a_step_in_one_fragment_has_its_time():
    step, state, batch = make_linen()
    whole = hetjax.parallelize(step, num_stages=1, num_microbatches=1, mesh="1,1").lower(state, batch)._entry.bundle
    (stage,) = whole.plan.stages
    assert stage.predicted_s == pytest.approx(whole.plan.predicted_s) and stage.predicted_s > 0


def test_priced_plans_stay_the_same_object(bundle):
    again = run_pipeline(bundle, [PriceStages(), PriceStep()])
    assert again is bundle


def test_what_is_known_is_kept_and_the_rest_is_filled(bundle):
    plain = unpriced(bundle)
    first = dataclasses.replace(plain.plan.stages[0], predicted_s=123.0, peak_bytes=7)
    plan = plain.plan.with_(stages=(first, plain.plan.stages[1]))
    priced = run_pipeline(plain.replace(plan=plan), [PriceStages(), PriceStep()]).plan
    assert (priced.stages[0].predicted_s, priced.stages[0].peak_bytes) == (123.0, 7)
    assert priced.stages[1] == bundle.plan.stages[1] and priced.predicted_s == bundle.plan.predicted_s


def test_a_dtype_that_a_kind_lacks_leaves_the_plan_unpriced_and_says_so(bundle):
    kind = bundle.cluster.kinds[0]
    bare = dataclasses.replace(presets.KINDS["a100-80g"], name=kind.name, peak_flops=(("bf16", 1e12),))
    other = bundle.replace(cluster=dataclasses.replace(bundle.cluster, kinds=(bare,)))
    said = run_pipeline(unpriced(other), [PriceStages()])
    assert said.plan.stages[0].predicted_s is None
    topic, sentence = said.notes[-1]
    assert topic == "price" and "has no f32" in sentence


def test_a_dtype_that_a_kind_emulates_is_noted(bundle):
    kind = bundle.cluster.kinds[0]
    old = dataclasses.replace(
        presets.KINDS["v100-16g"], name=kind.name, peak_flops=(("f64", 1e12),), emulated_dtypes=("f32",))
    other = bundle.replace(cluster=dataclasses.replace(bundle.cluster, kinds=(old,)))
    notes = run_pipeline(unpriced(other), [PriceStages(), PriceStep()]).notes
    said = [sentence for topic, sentence in notes if topic == "price"]
    assert said == [f"stage {s} computes in f32, which cpu emulates, and is priced so" for s in (0, 1)]


def measured_layers(bundle, times):
    """A store in which layers took a multiple of what the data sheet says; None stands for all others."""
    program, cluster = bundle.program, bundle.cluster
    layers = layer_map(bundle.graph, bundle.microbatching, step_layers(bundle.graph, bundle.microbatching))
    rows, kind = [], cluster.kind("cpu")
    for f in program.fragments:
        group = mesh_group(cluster, program.meshes[f.stage])
        for s in segments(program, f, fragment_ops(program, f, cluster), layers):
            if times.get(s.layer, times.get(None)):
                work = work_of(s.phase, s.ops)
                took_s = times.get(s.layer, times.get(None)) * work_price(work, kind).seconds
                rows.append(Measured(s.signature, "cpu", s.phase, took_s, work, group.data, group.model))
    return ProfileStore(kinds={"cpu": kind}).adding(*rows), len(rows)


@pytest.mark.quick
def test_a_plan_priced_by_profiles_says_which_of_its_numbers_were_measured(bundle, tmp_path):
    def priced(times):
        store, count = measured_layers(bundle, times)
        store.save(tmp_path / "profiles.json")
        assert count
        passes = [p(profiles=str(tmp_path / "profiles.json")) for p in (PriceStages, PriceStep)]
        return run_pipeline(unpriced(bundle), passes).plan

    known = priced({None: 3})
    assert dict(known.sources) == {
        "stage times": "measured", "step time": "measured", "memory": "analytic", "sent bytes": "analytic",
    }  # fmt: skip
    for known_stage, sheet in zip(known.stages, bundle.plan.stages):
        assert known_stage.predicted_s == pytest.approx(3 * sheet.predicted_s, rel=0.05)
    # Both stages have a block, and equal blocks are one measurement; the head is the second stage's alone.
    half = priced({"Model/head": 300})
    sources = dict(half.sources)
    assert sources["stage times"] == "analytic"
    assert (sources["time of stage 0"], sources["time of stage 1"]) == ("analytic", "measured")
    assert Plan.from_json(half.to_json()) == half


def test_parallelize_and_with_price_by_the_profiles_given(bundle, tmp_path):
    path = tmp_path / "profiles.json"
    measured_layers(bundle, {None: 3})[0].save(path)
    step, state, batch = make_linen()
    options = {"num_stages": 2, "num_microbatches": 2, "mesh": "1,1", "profiles": path}
    plan = hetjax.parallelize(step, **options).plan_for(state, batch)
    assert dict(plan.sources)["stage times"] == "measured" and plan.predicted_s > 2 * bundle.plan.predicted_s
    again = plan.with_(schedule="gpipe")
    assert dict(again.sources)["stage times"] == "measured" and again.predicted_s > 2 * bundle.plan.predicted_s
    with pytest.raises(PlanError, match=r"cannot read the profiles .*absent\.json"):
        hetjax.parallelize(step, profiles=tmp_path / "absent.json")
    with pytest.raises(PlanError, match="profiles is a int; it must be the name of a file"):
        hetjax.parallelize(step, profiles=3)
