"""`hetjax simulate`: our plans, our bundles, published plans."""

import dataclasses
import json

import pytest
from click.testing import CliRunner

from hetjax.cli.main import cli, main
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.graph import Aval
from hetjax.ir.plan import Cut, Plan, StagePlan
from hetjax.ir.program import Fragment, Port, Program, StageMesh
from hetjax.ir.text import print_bundle
from hetjax.passes.insert_reshards import find_reshards
from hetjax.passes.schedule_tasks import schedule_tasks

CLUSTER = """
name = "two sites"
sites = [
  { name = "a", nodes = [{ kind = "cpu", devices = 1, link = "inside" }] },
  { name = "b", nodes = [{ kind = "cpu", devices = 1, link = "inside" }] },
]
[links.inside]
bandwidth_gb_s = 10
latency_us = 1
[links.wan]
between = ["a", "b"]
bandwidth_bytes_s = 100_000
latency_ms = 60
"""


def run(*words):
    return CliRunner().invoke(cli, ["simulate", *map(str, words)], standalone_mode=False)


@pytest.fixture
def files(tmp_path):
    """A cluster file, a plan for it and the plan's bundle with a program."""
    (tmp_path / "cluster.toml").write_text(CLUSTER)
    cluster = Cluster.from_toml(tmp_path / "cluster.toml")
    stages = tuple(
        StagePlan((s,), site, "cpu", (("data", 1),), Cut("block_1") if s else None, predicted_s=0.03)
        for s, site in enumerate("ab"))
    plan = Plan("step", cluster.name, cluster.hash, 12, 96, "virtual-1f1b", stages)
    plan.save(tmp_path / "plan.json")

    def port(ref, form="micro"):
        return Port(ref, form, ((), ()))

    fragments = (
        Fragment("s0/forward", 0, "forward", 0, (), (port(0),), (port(1),)),
        Fragment("s0/backward", 0, "backward", 0, (), (port(2),), (port(3, "sum"),)),
        Fragment("s1/forward", 1, "forward", 0, (), (port(1),), (port(4),)),
        Fragment("s1/backward", 1, "backward", 0, (), (port(4),), (port(2), port(5, "sum"))),
    )
    meshes = tuple(StageMesh(f"s{s}", "cpu", site, (("data", 1),), (s,)) for s, site in enumerate("ab"))
    avals = (Aval("f32", (8, 100)),) * 6
    program = Program("step", 12, "1f1b", meshes, avals, avals, fragments)
    program = program.replace(reshards=tuple(find_reshards(program)))
    program = program.replace(tasks=schedule_tasks(program, "1f1b"))
    (tmp_path / "step.hj").write_text(print_bundle(Bundle(cluster=cluster, plan=plan, program=program)))
    return tmp_path


def test_plan_file(files):
    facts = json.loads(run(files / "plan.json", "--cluster", files / "cluster.toml", "--json").stdout)
    # 12 microbatches of 0.03 s, the first one 0.01 + 0.06 later on stage 1, the way back 0.06 + 0.02.
    assert facts["iteration_s"] == pytest.approx(0.36 + 0.01 + 0.02 + 0.12)
    assert facts["lower_bound_s"] == pytest.approx(facts["iteration_s"])
    assert facts["peak_in_flight"] == [6, 1]
    assert "latency only" in facts["sources"]["bytes between stages"]
    assert facts["peak_bytes"] == [None, None] and facts["sources"]["memory"] == "not in this plan"


def test_a_plan_file_bears_bytes(files):
    plan = Plan.load(files / "plan.json")
    stages = [dataclasses.replace(s, peak_bytes=10**9 + i) for i, s in enumerate(plan.stages)]
    stages[0] = dataclasses.replace(stages[0], sent_bytes=4000)
    plan.with_(stages=tuple(stages), sources=(("memory", "measured"),)).save(files / "plan.json")
    facts = json.loads(run(files / "plan.json", "--cluster", files / "cluster.toml", "--json").stdout)
    assert facts["peak_bytes"] == [10**9, 10**9 + 1] and facts["sources"]["memory"] == "measured"
    # 4000 bytes at 100 kB/s take 0.04 s, longer than a stage's 0.03 s: the link is what counts.
    assert facts["iteration_s"] == pytest.approx(0.01 + 12 * 0.04 + 0.03 + 0.04 + 0.02 + 0.12)
    assert "peak memory          1, 1 GB" in run(files / "plan.json", "--cluster", files / "cluster.toml").stdout


STEP = """
import jax, optax
from tests.support import make_linen

def build():
    step, state, batch = make_linen(tx=optax.sgd(0.1))
    return step, state, [batch], {}
"""
NAMES = {"iteration_s", "lower_bound_s", "peak_bytes", "bubble", "exposed_comm_s", "sources"}


def test_a_step_is_traced_planned_and_simulated_and_its_plan_bears_the_numbers(files, monkeypatch):
    (files / "step.py").write_text(STEP)
    target, words = f"{files / 'step.py'}:build", ["--stages", 2, "--microbatches", 4, "--cluster", files / "cluster.toml"]
    facts = json.loads(run(target, *words, "--json").stdout)
    assert set(facts) >= NAMES and facts["stages"] == 2 and facts["microbatches"] == 4
    assert 0 < facts["lower_bound_s"] <= facts["iteration_s"] and all(n > 0 for n in facts["peak_bytes"])
    from hetjax.cli.explain import complete_bundle

    bundle = complete_bundle(target, str(files / "cluster.toml"), None, {"stages": 2, "microbatches": 4})
    plan = bundle.plan
    assert [s.peak_bytes for s in plan.stages] == facts["peak_bytes"]
    assert plan.predicted_s == pytest.approx(facts["iteration_s"])
    assert dict(plan.sources)["memory"] == dict(plan.sources)["stage times"] == "analytic"
    # From the plan's file alone: no task lists, no optimizer, yet the same link and the same stages.
    plan.save(files / "made.json")
    alone = json.loads(run(files / "made.json", "--cluster", files / "cluster.toml", "--json").stdout)
    assert set(alone) >= NAMES and alone["peak_bytes"] == facts["peak_bytes"]
    assert alone["iteration_s"] == pytest.approx(facts["iteration_s"], rel=0.1)
    # The saved plan lowers to the same program again, and stays as it is.
    again = complete_bundle(target, str(files / "cluster.toml"), str(files / "made.json"), {})
    assert again.plan == plan and again.program.tasks == bundle.program.tasks


def test_a_plan_that_cuts_where_no_module_is_names_key_and_nearest(files):
    (files / "step.py").write_text(STEP)
    plan = Plan.load(files / "plan.json").with_(batch_size=8, num_microbatches=4)
    second = dataclasses.replace(plan.stages[1], first=Cut("Model/block_l"))
    plan.with_(stages=(plan.stages[0], second)).save(files / "plan.json")
    words = [f"{files / 'step.py'}:build", "--plan", files / "plan.json", "--cluster", files / "cluster.toml"]
    said = json.loads(run(*words, "--json").stdout)["error"]
    assert "stages[1].first.block: this step has no module 'Model/block_l'; did you mean 'Model/block_" in said


def test_bundle_runs_its_own_lists_with_its_own_bytes(files):
    facts = json.loads(run(files / "step.hj", "--json", "--trace", files / "t.json").stdout)
    # 1f1b: two microbatches for each way there and back, 3200 bytes at 100 kB/s both ways.
    assert facts["iteration_s"] > 6 * 2 * (0.06 + 0.032)
    assert facts["sources"]["task lists"] == "the program's own"
    events = json.loads((files / "t.json").read_text())["traceEvents"]
    assert sum(e["ph"] == "X" for e in events) == 2 * 2 * 12 + 2 * 12
    assert "bound by" in run(files / "step.hj").stdout


def test_published_plan(shared_dir, tmp_path):
    path = next((shared_dir / "data/sailor/measured/clariden/OPT-350/N8").glob("*.json"))
    facts = json.loads(run(path, "--format", "sailor", "--json", "--trace", tmp_path / "t.json").stdout)
    assert facts["model"] == "OPT-350" and facts["ok"]
    assert abs(facts["error"]) < 0.2 and facts["iteration_s"] >= facts["lower_bound_s"]
    assert len(facts["peak_bytes"]) == facts["stages"]
    assert json.loads((tmp_path / "t.json").read_text())["traceEvents"]
    assert json.loads(run(path, "--json").stdout) == facts  # the format is recognised


@pytest.mark.parametrize(("words", "message"), [
    (["plan.json"], "names the cluster 'two sites' but does not describe it; give --cluster"),
    (["plan.json", "--cluster", "cluster.toml", "--model", "OPT-350"], "--model: only published plans"),
    (["unpriced.json", "--cluster", "cluster.toml"], "stage(s) 1 of plan 'step' have no predicted_s"),
    (["other.json", "--cluster", "cluster.toml"], "virtual"),
])
def test_bad_input_exits_with_1(files, words, message, capsys, monkeypatch):
    monkeypatch.chdir(files)
    plan = Plan.load("plan.json")
    first = plan.stages[0]
    plan.with_(stages=(first, dataclasses.replace(plan.stages[1], predicted_s=None))).save("unpriced.json")
    plan.with_(schedule="virtual").save("other.json")
    with pytest.raises(SystemExit) as exit_:
        main(["simulate", *words])
    assert exit_.value.code == 1
    assert message in capsys.readouterr().err


def test_unknown_model_names_the_nearest(shared_dir):
    path = next((shared_dir / "data/sailor/measured/mit/N2").glob("*.json"))
    facts = json.loads(run(path, "--model", "OPT-3500", "--json").stdout)
    assert facts["ok"] is False and "did you mean 'OPT-350'" in facts["error"]
