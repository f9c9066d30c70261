"""Wrong input to the cost model, from the command line: the key and the nearest valid name, exit code 1."""

import dataclasses
import json

import pytest

from hetjax.cli.main import main
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Cut, Plan, StagePlan
from hetjax.passes.cost.profiles import LayerKey, LayerTime, Profiles

CLUSTER = """name = "two"
[[sites]]
name = "lyon"
nodes = [{ kind = "t4", devices = 1 }]
[[sites]]
name = "oslo"
nodes = [{ kind = "v100-16g", devices = 1 }]
[links.wan]
between = ["lyon", "oslo"]
bandwidth_gbit_s = 10
latency_ms = 5
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "c.toml").write_text(CLUSTER)
    cluster = Cluster.parse(CLUSTER)
    stages = (
        StagePlan((0,), "lyon", "t4", (("data", 1),), None, predicted_s=0.01),
        StagePlan((1,), "oslo", "v100-16g", (("data", 1),), Cut("block_1"), predicted_s=0.01),
    )
    Plan("step", "two", cluster.hash, 4, 8, "1f1b", stages).save(tmp_path / "p.json")
    return tmp_path


def said(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(["simulate", *words])
    assert end.value.code == 1
    return capsys.readouterr().err


def changed(**fields):
    plan = Plan.load("p.json")
    second = dataclasses.replace(plan.stages[1], **fields)
    plan.with_(stages=(plan.stages[0], second)).save("p.json")


def test_the_right_input_is_right(folder):
    with pytest.raises(SystemExit) as end:
        main(["simulate", "p.json", "--cluster", "c.toml", "--json"])
    assert end.value.code == 0


@pytest.mark.parametrize(("old", "new", "says"), [
    ('kind = "v100-16g"', 'kind = "v100-16gb"', ("c.toml:7", "v100-16gb", "did you mean", "v100-16g")),
    ("bandwidth_gbit_s = 10", "bandwidth_gbit_s = -10", ("c.toml:10", "bandwidth")),
    ("latency_ms = 5", "latency_ms = -5", ("c.toml:11", "latency")),
    ('"lyon", "oslo"]', '"lyon", "olso"]', ("c.toml:9", "olso", "did you mean", "oslo")),
])
def test_a_wrong_cluster_names_line_key_and_nearest(folder, capsys, old, new, says):
    assert old in CLUSTER
    (folder / "c.toml").write_text(CLUSTER.replace(old, new))
    text = said(capsys, "p.json", "--cluster", "c.toml")
    assert all(part in text for part in says), text


@pytest.mark.parametrize(("fields", "says"), [
    ({"kind": "v100-16"}, "stages[1].kind: unknown kind 'v100-16'; did you mean 'v100-16g'"),
    ({"site": "Oslo"}, "stages[1].site: unknown site 'Oslo'; did you mean 'oslo'"),
    ({"devices": (7,)}, "stage 1: devices [7] do not exist; 'two' has 0 … 1"),
])
def test_a_plan_for_devices_that_are_not_there(folder, capsys, fields, says):
    changed(**fields)
    assert says in said(capsys, "p.json", "--cluster", "c.toml")


def test_profiles_that_are_missing_or_of_another_layer(folder, capsys):
    (folder / "step.hj").write_text("hetjax 1\n")
    assert "does not exist" in said(capsys, "p.json", "--cluster", "c.toml", "--profiles", "absent.json")
    table = Profiles([(LayerKey("gpt", "t4", 1, 4, "block_1"), LayerTime(1.0, 2.0, 0.1))])
    with pytest.raises(PlanError, match=r"no layer 'block_l'; did you mean 'block_1'"):
        table.time(LayerKey("gpt", "t4", 1, 4, "block_l"))
    with pytest.raises(PlanError, match=r"no kind 't44'; did you mean 't4'"):
        table.time(LayerKey("gpt", "t44", 1, 4, "block_1"))
    with pytest.raises(PlanError, match=r"no microbatch 8; there is: 4"):
        table.time(LayerKey("gpt", "t4", 1, 8, "block_1"))


def test_the_json_says_it_too(folder, capsys):
    changed(kind="v100-16")
    with pytest.raises(SystemExit) as end:
        main(["simulate", "p.json", "--cluster", "c.toml", "--json"])
    answer = json.loads(capsys.readouterr().out)
    assert end.value.code == 1 and answer["ok"] is False and "did you mean 'v100-16g'" in answer["error"]
