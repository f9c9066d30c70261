"""`hetjax plan STEP`: searched, executable, repeatable, replayed elsewhere or refused line by line."""

import json
import pathlib

import jax
import pytest
from click.testing import CliRunner

import hetjax
from hetjax.cli import plan_step
from hetjax.cli.plan import plan as command
from hetjax.cli.target import load_case
from hetjax.ir.errors import HetjaxError
from hetjax.ir.plan import Plan
from hetjax.planning.fitting import lines_of
from tests.support import assert_same, copy_tree

TWO_SITES = pathlib.Path(hetjax.__file__).parent / "demo" / "two_sites.toml"
STEP = f"{pathlib.Path(__file__).parent / 'steps_to_check.py'}:build"


def run(*words, code=0):
    result = CliRunner().invoke(command, list(map(str, words)), standalone_mode=False)
    if result.exception is not None:
        raise result.exception
    assert result.return_value == code, result.output
    return result.stdout


@pytest.fixture(scope="module")
def pinned(tmp_path_factory):
    """A plan with its second stage pinned to the slow site, its file and what was printed."""
    folder = tmp_path_factory.mktemp("plan")
    words = [STEP, "--cluster", TWO_SITES, "--evaluations", 60, "--pin", "stage[1]=slow", "--pin", "stage[0]=near"]
    facts = json.loads(run(*words, "--microbatches", 2, "-o", folder / "plan.json", "--json"))
    return facts, folder / "plan.json", words


def test_a_pinned_plan_is_executable_and_gives_plain_jits_numbers(pinned):
    facts, file, _ = pinned
    plan = Plan.load(file)
    assert [s.site for s in plan.stages[:2]] == ["near", "far"] and plan.num_microbatches == 2
    assert json.loads(plan.to_json()) == facts["plan"] and plan.evaluations == facts["evaluations"] <= 60
    assert 0 < facts["lower_bound_s"] <= facts["search_value"] and 0 <= facts["gap"] < 1
    assert facts["iteration_s"] == pytest.approx(facts["search_value"], rel=0.15)  # both judges agree
    assert facts["devices_used"] == sum(len(s.devices) for s in plan.stages) and facts["global_batch"] == 8
    case = load_case(STEP)
    parallel = hetjax.parallelize(case.step, cluster=TWO_SITES, plan=file)
    ours, theirs = copy_tree(case.state), copy_tree(case.state)
    batches = iter(case.batches)
    for _ in range(2):
        batch = next(batches)
        ours, _ = parallel(ours, batch)
        theirs, _ = jax.jit(case.step)(theirs, batch)
    assert_same(ours, theirs)


def test_the_same_seed_and_evaluations_make_the_same_plan_and_the_log_tells_how(pinned, tmp_path):
    facts, file, words = pinned
    again = json.loads(run(*words, "--microbatches", 2, "-o", tmp_path / "plan.json", "--json"))
    assert (tmp_path / "plan.json").read_bytes() == file.read_bytes()
    log = [json.loads(line) for line in (tmp_path / "search.jsonl").read_text().splitlines()]
    assert [row["event"] for row in (log[0], log[1], log[-1])] == ["start", "search", "end"]
    better = [row["value"] for row in log if row["event"] == "better"]
    assert better == sorted(better, reverse=True) and better[-1] == again["search_value"]
    assert log[-1]["plan_hash"] == Plan.load(file).hash


def test_a_plan_is_replayed_on_another_batch_and_fewer_devices(pinned, tmp_path):
    _, file, _ = pinned
    fewer = tmp_path / "fewer.toml"
    fewer.write_text(TWO_SITES.read_text().replace("devices = 6", "devices = 4"))
    said = json.loads(run(STEP, "--cluster", fewer, "--load", file, "--gbs", 16, "--json"))
    assert said["global_batch"] == 16 and said["evaluations"] == 0 and said["changed"]
    assert [s["first"] for s in said["plan"]["stages"]] == [s["first"] for s in json.loads(file.read_text())["stages"]]
    same = json.loads(run(STEP, "--cluster", TWO_SITES, "--load", file, "--json"))
    assert not same["changed"] and same["plan"] == json.loads(file.read_text())


def test_what_does_not_fit_is_told_by_its_line(pinned, tmp_path):
    _, file, _ = pinned
    plan = json.loads(file.read_text())
    plan["stages"][1]["first"]["block"] = "MLP/hiddn_2"
    plan["stages"][0]["devices"], plan["stages"][0]["axes"] = [0, 1], [["data", 1], ["model", 2]]
    plan["state_specs"] = [["state/params/nowhere/kernel", [[], ["model"]]]]
    bad = tmp_path / "bad.json"
    bad.write_text(json.dumps(plan, indent=1))
    one = tmp_path / "one.toml"
    one.write_text(TWO_SITES.read_text().replace("devices = 2", "devices = 1"))
    with pytest.raises(HetjaxError) as caught:
        run(STEP, "--cluster", one, "--load", bad, "--gbs", 7)
    lines, where = str(caught.value).splitlines()[1:], lines_of(bad.read_text())
    keys = [("num_microbatches",), ("stages", 0, "devices"), ("state_specs", 0), ("stages", 1, "first", "block")]
    names = ["num_microbatches", "stages[0].devices", "state_specs[0]", "stages[1].first.block"]
    for key, name, line in zip(keys, names, lines, strict=True):
        assert line.startswith(f"  {bad}:{where[key]}: {name}: "), line
        assert f'"{key[-1]}"' in bad.read_text().splitlines()[where[key] - 1] or isinstance(key[-1], int)
    assert "there are 1" in lines[1] and "MLP/hidden_2" in lines[3]


def test_cost_counts_devices_and_pins_split_leaves(tmp_path):
    words = [STEP, "--cluster", TWO_SITES, "--evaluations", 80, "-o", tmp_path / "p.json", "--json"]
    refused = json.loads(run(*words, "--objective", "cost", "--price", "fast=1", code=1))
    assert not refused["ok"] and "price per device-hour of slow: give --price slow=" in refused["error"]
    cheap = json.loads(run(*words, "--objective", "cost", "--price", "fast=100", "--price", "slow=1"))
    assert {s["kind"] for s in cheap["plan"]["stages"]} == {"slow"}
    assert cheap["value"] == pytest.approx(cheap["iteration_s"] * cheap["devices_used"] / 3600)
    both = ("--pin", "params/.../hidden_0/kernel=(None,tp)", "--pin", "stage[0].sequence=true")
    split = json.loads(run(*words, *both, "--max-devices", 2))
    assert ["state/params/hidden_0/kernel", [[], ["model"]]] in split["plan"]["state_specs"]
    assert split["devices_used"] == 2 and split["plan"]["stages"][0]["sequence"]
    diff = json.loads(run("--diff", tmp_path / "p.json", tmp_path / "p.json", "--json"))
    assert diff["same"]
    for pin, why in [("stage[0]=h100", "no kind or site"), ("nowhere=(tp,)", "no leaf"), ("x=(zp)", "unknown axis 'zp'"), ("stage[9].sequence=true", "the best plan has stages 0 to")]:
        assert why in json.loads(run(*words, "--pin", pin, code=1))["error"]


def test_ctrl_c_keeps_the_best_plan_so_far(tmp_path, monkeypatch):
    improved = plan_step._Watch.improved

    def interrupt(self, found):
        improved(self, found)
        if found.evaluations > 1:
            raise KeyboardInterrupt

    monkeypatch.setattr(plan_step._Watch, "improved", interrupt)
    said = json.loads(run(STEP, "--cluster", TWO_SITES, "-o", tmp_path / "plan.json", "--json"))
    assert said["stopped"] == "interrupted" and not said["proved"]
    assert Plan.load(tmp_path / "plan.json").evaluations == said["evaluations"] < 60
    assert json.loads((tmp_path / "search.jsonl").read_text().splitlines()[-1])["stopped"] == "interrupted"


def test_a_pin_of_a_stage_beyond_the_devices_is_told_so_and_not_to_search_longer():
    with pytest.raises(HetjaxError, match=r"stage\[99\]=near: stages are counted from 0 .* devices make stages 0 to"):
        run(STEP, "--cluster", TWO_SITES, "--evaluations", 10, "--pin", "stage[99]=near")
