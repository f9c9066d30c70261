"""price-stages and price-step: numbers that are not known are filled in, known ones stay."""

import dataclasses

import pytest

import hetjax
from hetjax.ir import presets
from hetjax.passes.cost.estimate import estimate_program
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
