"""`hetjax explain`: the stages, what moves, what memory holds, and why a value is where it is."""

import json
import math
import pathlib

import optax
import pytest
from click.testing import CliRunner

import hetjax
from hetjax.cli.main import cli
from hetjax.explaining.memory import _Holders, stage_peaks
from hetjax.explaining.movements import movements, parse_size
from hetjax.explaining.propagation import propagate
from hetjax.explaining.stages import outline
from hetjax.explaining.values import explain_value
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PlanError
from hetjax.ir.parser import parse_bundle
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.cost.memory import stage_memory
from hetjax.passes.manager import run_pipeline
from hetjax.passes.plan_donation import plan_donation
from tests.support import make_linen

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "lowering.hj"


@pytest.fixture(scope="module")
def bundle():
    return run_pipeline(parse_bundle(GOLDEN.read_text()), "default")


def explain(*args):
    return CliRunner().invoke(cli, ["explain", str(GOLDEN), *args], standalone_mode=False)


def answer(*args):
    result = explain(*args, "--json")
    assert result.exception is None, result.exception
    return json.loads(result.output)


def test_the_overview_names_modules_and_predicts(bundle):
    found = answer()
    estimate = estimate_program(bundle)
    assert math.isclose(found["step_s"], estimate.iteration_s)
    first, second = found["stages"]
    assert first["modules"][0] == "MLP/Dense_0" and "MLP/Dense_1" in second["modules"]
    assert first["num_devices"] == 2 and second["axes"] == [["data", 1], ["model", 2]]
    assert second["parameter_bytes"] == 64  # 8 x 4 floats over two devices
    # 2*M*(a product of the forward, two of the backward), counted by hand, and some elementwise work.
    assert second["flops"] >= 2 * 2 * 3 * 4 * 8 * 4
    assert 0 <= first["bubble"] < 1
    text = explain().output
    assert (
        "step: 2 stages, 2 microbatches (2 asked for or chosen, proved exact), schedule 1f1b"
        in text
    )
    assert "MLP/Dense_1" in text and "predicted:" in text


def test_a_stage_lists_fragments_and_leaves():
    found = answer("s1")
    assert [f["name"] for f in found["fragments"]] == ["s1/forward", "s1/backward", "s1/update"]
    assert {
        "path": "state/params/Dense_1/kernel",
        "type": "f32[8,4]",
        "spec": [["model"], []],
    } in found["leaves"]
    assert "dimension 0 over model" in explain("1").output


def test_what_moves_is_listed_largest_first_and_adds_up(bundle):
    found = movements(bundle)
    assert [m.step_bytes for m in found] == sorted((m.step_bytes for m in found), reverse=True)
    transfers = [m for m in found if m.kind == "transfer"]
    assert {(m.where, m.nbytes, m.times, m.link) for m in transfers} == {
        ("s0 > s1", 128, 2, "wan"),
        ("s1 > s0", 128, 2, "wan"),
    }
    assert any(m.source == "golden_case.py:6" for m in transfers)
    reductions = [(m.where, m.nbytes) for m in found if m.kind == "all-reduce"]
    # The first kernel's gradient over data, once; the second product over model.
    assert sorted(reductions) == [("s0, axis data", 192), ("s1, axis model", 64)]
    assert answer("--reshards")["bytes_between_stages"] == 512


@pytest.mark.parametrize(("limit", "code", "over"), [("1kB", 0, 0), ("300B", 1, 1), ("0", 1, 4)])
def test_fail_over_is_a_gate(limit, code, over):
    result = explain("--reshards", "--fail-over", limit, "--json")
    found = json.loads(result.output)
    assert (result.return_value or 0, len(found["over"]), found["ok"]) == (code, over, code == 0)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("4096", 4096), ("64MiB", 2**26), ("1.5 GB", 1.5e9), ("2kB", 2000), ("7 B", 7)],
)
def test_sizes_are_read(text, nbytes):
    assert parse_size(text) == nbytes


def test_what_is_no_size_is_refused():
    with pytest.raises(PlanError, match="'12 parsecs' is not a size"):
        parse_size("12 parsecs")


def test_the_holders_of_memory_add_up_to_the_peak(bundle):
    for peak in stage_peaks(bundle):
        assert sum(h.nbytes for h in peak.holders) == peak.memory.peak_bytes
    found = answer("--memory")["stages"]
    assert found[0]["holders"][0]["nbytes"] >= found[0]["holders"][-1]["nbytes"]
    assert {h["what"] for h in found[1]["holders"]} >= {"state/params/Dense_1/kernel"}
    assert "activations x 2" in explain("--memory").output


def test_a_state_leaf_has_its_spec_who_chose_it_and_the_price_of_others(bundle):
    facts = explain_value(bundle, "Dense_1/kernel")
    assert facts.name == "state/params/Dense_1/kernel"
    (place,) = facts.places
    assert (place.stage, place.how, place.spec, place.device_bytes) == (
        "s1",
        "fed",
        (("model",), ()),
        64,
    )
    assert place.chosen_by.startswith("the planner's rule")
    specs = {a.spec for a in facts.alternatives}
    assert specs == {((), ()), ((), ("model",))}
    before = estimate_program(bundle)
    whole = next(a for a in facts.alternatives if not any(a.spec))
    changed = bundle.replace(plan=bundle.plan.with_(state_specs=()), program=None)
    after = estimate_program(run_pipeline(changed, "default"))
    assert math.isclose(
        whole.step_s, after.iteration_s - before.iteration_s, rel_tol=1e-9, abs_tol=1e-15
    )
    assert "runner-up: " in explain("Dense_1/kernel").output
    assert answer("Dense_1/kernel", "--no-price")["value"]["alternatives"] == []


def test_the_chooser_is_the_user_or_the_search_when_the_plan_says_so(bundle):
    for changes, words in (
        ({"sources": (("state_specs", "given"),)}, "the user, in the plan"),
        ({"seed": 7, "evaluations": 90}, "the search (seed 7, 90 evaluations)"),
    ):
        facts = explain_value(
            bundle.replace(plan=bundle.plan.with_(**changes)), "Dense_1/kernel", price=False
        )
        assert facts.places[0].chosen_by == words


def test_a_value_inside_a_fragment_is_explained_by_shardys_edges(bundle):
    program = bundle.program
    f = next(f for f in program.fragments if f.name == "s0/forward")
    found = propagate(program, f, 5)
    assert found.spec == (("data",), ())
    assert found.origins == {"data": 3}
    (edge,) = found.paths["data"]
    assert (edge.op, edge.source, edge.target) == ("stablehlo.dot_general", "operand 0", "result 0")
    text = explain("%5").output
    assert "s0, s0/forward (inside): dimension 0 over data" in text
    assert "axis data comes from batch/x" in text
    assert "stablehlo.dot_general (tensor<4x8xf32>): operand 0 to result 0" in text
    assert answer("%5")["value"]["places"][0]["propagation"]["origins"] == {"data": 3}


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (("nope",), "there is no value 'nope'"),
        (("state/params/Dense_1/kernl",), "did you mean 'state/params/Dense_1/kernel'?"),
        (("kernel",), "'kernel' is the end of 2 paths"),
        (("%999",), "there is no value %999; values go up to %29"),
        (("--fail-over", "3MiB"), "--fail-over needs --reshards"),
        (("--reshards", "--memory"), "give one of"),
        (("--stages", "3"), "--stages: a file's plan is made"),
    ],
)
def test_wrong_requests_say_what_is_wrong(args, words):
    result = explain(*args)
    message = getattr(result.exception, "format_message", lambda: str(result.exception))()
    assert words in message
    if "--" not in args[0]:
        assert words in json.loads(explain(*args, "--json").output)["error"]


def test_a_plan_alone_tells_its_stages(bundle, tmp_path):
    path = tmp_path / "plan.json"
    bundle.plan.save(path)
    runner = CliRunner()
    result = runner.invoke(cli, ["explain", str(path)], standalone_mode=False)
    assert "MLP/Dense_0" in result.output and "predicted" not in result.output
    result = runner.invoke(cli, ["explain", str(path), "Dense_1/kernel"], standalone_mode=False)
    assert "a plan alone names no values" in str(result.exception)
    result = runner.invoke(cli, ["explain", str(path), "--memory"], standalone_mode=False)
    assert "of a complete program only" in str(result.exception)


def test_parts_that_are_missing_are_named():
    with pytest.raises(PlanError, match="a complete program only"):
        movements(Bundle())
    with pytest.raises(PlanError, match="a plan alone names no values"):
        explain_value(Bundle(), "x")


def test_modules_are_outlined_at_the_level_that_tells_them_apart():
    blocks = tuple(f"GPT/block_{i}/{part}" for i in range(5) for part in ("attn", "mlp"))
    assert outline(blocks) == "GPT/block_0 … GPT/block_4 (5)"
    assert outline(("GPT", "GPT/head")) == "GPT/head"
    assert outline(()) == "-"


@pytest.fixture(scope="module")
def adam():
    """A linen step with Adam on two stages of two model shards, one microbatch."""
    step, state, batch = make_linen(tx=optax.adam(1e-3))
    parallel = hetjax.parallelize(step, num_stages=2, mesh="1,2", num_microbatches=1)
    return parallel._lowered_entry((state, batch), {}).bundle


def test_moments_follow_their_parameter_and_the_rest_is_replicated(adam):
    split = [path for path, _ in adam.plan.state_specs]
    kernel = next(p for p in split if p.startswith("state/params"))
    moment = next(a.path for a in adam.graph.inputs if "opt_state" in a.path and a.path.endswith("/mu/" + kernel.removeprefix("state/params/")))
    assert moment in split
    # Said of the moment alone when the plan names only its parameter.
    only = tuple((p, s) for p, s in adam.plan.state_specs if p != moment)
    facts = explain_value(adam.replace(plan=adam.plan.with_(state_specs=only)), moment, price=False)
    assert facts.places[0].chosen_by == f"it follows {kernel}, with which it is updated"
    scale = next(a.path for a in adam.graph.inputs if a.path.endswith("norm/scale"))
    assert explain_value(adam, scale, price=False).places[0].chosen_by == "replicated: neither plan nor rule splits it"
    noted = adam.note("replicated", f"{scale} f32[16] on s0: dimension of 16 does not divide over model of 3")
    assert "does not divide" in explain_value(noted, scale, price=False).places[0].chosen_by


def test_a_batch_leaf_and_values_at_the_border(adam):
    (tokens, *_) = explain_value(adam, "batch/tokens", price=False).places
    assert tokens.chosen_by == "shard-stages: nothing to split it over"
    transfer = adam.program.reshards[0]
    places = explain_value(adam, f"%{transfer.ref}", price=False).places
    assert {p.how for p in places} >= {"read", "given"} or len(places) >= 2


@pytest.mark.parametrize("donated", [False, True])
def test_at_the_update_the_new_values_are_held(adam, donated):
    """Itemised, old state, gradients and new values add up to what the totals say."""
    program = adam.program
    if donated:
        program = plan_donation(adam.graph, program, True)
        assert any(f.donated for f in program.fragments)
    bundle = adam.replace(program=program)
    for stage in range(len(program.meshes)):
        memory = stage_memory(adam.graph, program, stage, 1)
        holders = _Holders(bundle, stage, memory).at_peak(updating=True)
        state = memory.parameters + memory.optimizer + memory.gradients
        assert sum(h.nbytes for h in holders) == state + memory.update
        assert any(h.kind == "new values" for h in holders)


def test_each_link_stands_beside_the_least_that_can_cross():
    found = answer("--reshards")["links"]
    assert found
    for row in found:
        assert row["crossing"] >= row["unique"] > 0
        assert row["seconds"] >= row["bound_s"] * (1 - 1e-9) > 0
        assert sum(nbytes for _, nbytes in row["links"]) >= row["crossing"]
    assert "beside the least that can cross" in explain("--reshards").output
