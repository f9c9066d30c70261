"""Plans: JSON both ways, the schema, and whether a plan fits a cluster."""

import dataclasses
import json
import pathlib
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import ParseError, PlanError, VerifyError
from hetjax.ir.plan import SOURCES, VERSION, Cut, Plan, StagePlan, verify_plan

SCHEMA_FILE = pathlib.Path(__file__).parents[2] / "docs/plan.schema.json"
# An installed wheel is tested outside the source tree, where there are no docs.
SCHEMA: Any = json.loads(SCHEMA_FILE.read_text()) if SCHEMA_FILE.is_file() else None
beside_docs = pytest.mark.skipif(SCHEMA is None, reason=f"no schema at {SCHEMA_FILE}")

CLUSTER = Cluster.parse("""
name = "two"
[[sites]]
name = "lyon"
nodes = [{ kind = "a100-80g", devices = 4 }]
[[sites]]
name = "oslo"
nodes = [{ kind = "v100-16g", devices = 2 }]
[links.wan]
like = "10gbe"
between = ["lyon", "oslo"]
""")

PLAN = Plan(
    name="train_step", cluster="two", cluster_hash=CLUSTER.hash, num_microbatches=4, batch_size=32,
    schedule="1f1b",
    stages=(
        StagePlan((0, 1, 2, 3), "lyon", "a100-80g", (("data", 2), ("model", 2)), None, ("wte", "block_0"), 0.5),
        StagePlan((4, 5), "oslo", "v100-16g", (("data", 2), ("model", 1)), Cut("block_1", 2), ("block_1",)),
    ),
    warmups=(3, 1), state_specs=(("params/block_0/kernel", ((), ("model",))),),
    microbatch_reason="asked for", seed=7, evaluations=100, sources=(("stage times", "analytic"),),
    predicted_s=1.25,
)  # fmt: skip

texts = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), max_size=8)
counts = st.integers(0, 2**40)
seconds = st.none() | st.floats(0, 1e9)


def tuples(items):
    return st.lists(items, max_size=3).map(tuple)


stages = st.builds(
    StagePlan, tuples(counts), texts, texts, tuples(st.tuples(texts, counts)),
    st.none() | st.builds(Cut, texts, counts), tuples(texts), seconds, st.none() | counts, st.none() | counts,
)  # fmt: skip
plans = st.builds(
    Plan, name=texts, cluster=texts, cluster_hash=texts, num_microbatches=counts, batch_size=counts, schedule=texts,
    stages=tuples(stages), warmups=tuples(counts), per_microbatch=st.booleans(),
    state_specs=tuples(st.tuples(texts, tuples(tuples(texts)))), microbatch_reason=texts, seed=st.none() | counts,
    evaluations=st.none() | counts, sources=tuples(st.tuples(texts, st.sampled_from(SOURCES))), predicted_s=seconds,
)  # fmt: skip


@given(plans)
@settings(max_examples=150, deadline=None)
def test_json_reads_back_equal(plan):
    again = Plan.from_json(plan.to_json())
    assert again == plan
    assert hash(again) == hash(plan)
    assert again.hash == plan.hash


@beside_docs
@given(plans)
@settings(max_examples=50, deadline=None)
def test_json_follows_the_schema(plan):
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    jsonschema.Draft202012Validator(SCHEMA).validate(json.loads(plan.to_json()))


@beside_docs
@pytest.mark.quick
def test_the_schema_names_the_fields_of_the_dataclasses():
    for cls, schema in ((Plan, SCHEMA), (StagePlan, SCHEMA["$defs"]["stage"]), (Cut, SCHEMA["$defs"]["cut"])):
        fields = dataclasses.fields(cls)
        own = {"hetjax_plan"} if cls is Plan else set()
        assert set(schema["properties"]) == {f.name for f in fields} | own
        required = {f.name for f in fields if f.default is dataclasses.MISSING}
        assert set(schema["required"]) == required | own
    assert SCHEMA["properties"]["hetjax_plan"]["const"] == VERSION
    assert SCHEMA["properties"]["sources"]["items"]["prefixItems"][1]["enum"] == list(SOURCES)


@beside_docs
@pytest.mark.quick
def test_save_load_and_what_the_hash_covers(tmp_path):
    PLAN.save(tmp_path / "p.json")
    assert Plan.load(tmp_path / "p.json") == PLAN
    assert PLAN.with_(num_microbatches=8).hash != PLAN.hash
    assert PLAN.with_().hash == PLAN.hash
    assert json.loads(PLAN.to_json())["hetjax_plan"] == 1
    # A field that is not given has its default, so that a plan can be written by hand.
    data = {k: v for k, v in json.loads(PLAN.to_json()).items() if k in SCHEMA["required"]}
    assert Plan.from_json(json.dumps(data)).warmups == ()
    with pytest.raises(PlanError, match="cannot read"):
        Plan.load(tmp_path / "absent.json")


def changed(**changes):
    data = json.loads(PLAN.to_json())
    for key, value in changes.items():
        if value is KeyError:
            del data[key]
        else:
            data[key] = value
    return json.dumps(data)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"num_microbatches": KeyError}, "p.json: num_microbatches: missing field"),
        ({"num_microbatches": -1}, "num_microbatches: must be a whole number of at least 0, not -1"),
        ({"num_microbatches": True}, "num_microbatches: must be a whole number"),
        ({"num_microbatches": 2.0}, "num_microbatches: must be a whole number"),
        ({"shedule": "gpipe"}, "shedule: unknown field; did you mean 'schedule'?"),
        ({"schedule": None}, "schedule: must be a string, not null"),
        ({"warmups": 3}, "warmups: must be a list, not 3"),
        ({"stages": [{"devices": ["0"]}]}, "stages[0].devices[0]: must be a whole number"),
        ({"stages": [{"devices": ["0"]}]}, "stages[0].axes: missing field"),
        ({"stages": [3]}, "stages[0]: must be an object, not 3"),
        ({"sources": [["x", "measurd"]]}, "sources[0][1]: unknown source 'measurd'; did you mean 'measured'?"),
        ({"sources": [["x"]]}, "sources[0]: must be a pair"),
        ({"predicted_s": -0.5}, "predicted_s: must be a number of seconds"),
        ({"hetjax_plan": 2}, "hetjax_plan: version 2 is not known; this hetjax reads version 1"),
        ({"hetjax_plan": KeyError}, "hetjax_plan: missing"),
    ],
)
def test_a_wrong_plan_is_told_by_key(changes, says):
    with pytest.raises(PlanError) as caught:
        Plan.from_json(changed(**changes), "p.json")
    assert any(says in p for p in caught.value.problems), caught.value.problems


def test_all_problems_of_a_plan_are_told_at_once():
    with pytest.raises(PlanError) as caught:
        Plan.from_json(changed(seed="x", nmae="y", warmups=[1, "2"]))
    assert len(caught.value.problems) == 3


@pytest.mark.parametrize(("text", "line"), [('{\n "a": }', 2), ('{"predicted_s": NaN}', 0), ("", 1)])
def test_what_is_not_json_is_a_parse_error(text, line):
    with pytest.raises(ParseError) as caught:
        Plan.from_json(text, "p.json")
    assert caught.value.line == line
    assert caught.value.filename == "p.json"


def test_a_list_is_no_plan():
    with pytest.raises(PlanError, match="a plan is a JSON object"):
        Plan.from_json("[]")


# Against a cluster.


@pytest.mark.quick
def test_a_plan_that_fits_is_accepted():
    assert verify_plan(PLAN, CLUSTER) is None
    assert verify_plan(PLAN.with_(warmups=(), cluster_hash=""), CLUSTER) is None


def stage(index, **changes):
    stages = list(PLAN.stages)
    stages[index] = dataclasses.replace(stages[index], **changes)
    return {"stages": tuple(stages)}


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"cluster_hash": "0" * 64}, "plan again for it"),
        ({"num_microbatches": 5}, "5 microbatches do not divide a batch of 32; nearest: 2, 4, 8"),
        ({"num_microbatches": 0}, "must both be positive"),
        ({"stages": (), "warmups": (), "state_specs": ()}, "no stage"),
        ({"warmups": (1,)}, "warmups has 1 numbers for 2 stages"),
        ({"warmups": (1, 0)}, "warmups[1] is 0"),
        (stage(1, devices=(4, 9)), "devices [9] do not exist; 'two' has 0 … 5"),
        (stage(1, devices=(4, -1)), "devices [-1] do not exist"),
        (stage(1, devices=(4, 4)), "names a device twice"),
        (stage(1, devices=(3, 4)), "device 3 serves stages 0 and 1"),
        (stage(1, devices=(3, 4)), "stage 1 mixes kinds a100-80g, v100-16g"),
        (stage(1, devices=(3, 4)), "stage 1 mixes sites lyon, oslo"),
        (stage(1, kind="t4"), "stage 1 says kind 't4', but its devices are 'v100-16g'"),
        (stage(1, devices=()), "stage 1 has no device"),
        (stage(0, axes=(("data", 3),)), "a mesh of data 3 has 3 devices, not 4"),
        (stage(0, first=Cut("wte")), "stage 0: first must be null"),
        (stage(1, first=None), "stage 1: first must name a cut"),
        ({"state_specs": (("w", (("modle",),)),)}, "no stage has a mesh axis 'modle'; did you mean 'model'?"),
    ],
)
def test_a_plan_that_does_not_fit_is_refused_with_the_reason(changes, says):
    with pytest.raises(VerifyError) as caught:
        verify_plan(PLAN.with_(**changes), CLUSTER)
    assert any(says in p for p in caught.value.problems), caught.value.problems


def test_every_reason_is_told_at_once():
    with pytest.raises(VerifyError) as caught:
        verify_plan(PLAN.with_(num_microbatches=5, warmups=(1,), cluster_hash="x"), CLUSTER)
    assert len(caught.value.problems) == 3


def test_the_summary_tells_stages_by_module():
    text = str(PLAN)
    assert "2 stages, 1f1b, batch 32 in 4 microbatches, predicted 1.25 s" in text
    assert "stage 0: 4 x a100-80g in lyon (data 2 x model 2): wte … block_0" in text
