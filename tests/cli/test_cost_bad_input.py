"""Wrong input to the cost model, from the command line: the key and the nearest valid name, exit code 1."""

import dataclasses
import json

import pytest

from hetjax.cli.main import main
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Cut, Plan, StagePlan
from hetjax.passes.cost.profiles import LayerKey, LayerTime, Profiles
from hetjax.passes.cost.sailor import read_plan
from hetjax.passes.cost.store import ProfileStore

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


@pytest.mark.parametrize(("part", "says"), [
    ('"efficiency": {"cpu": {"tip": 0.4}}', "p.json: efficiency.cpu.tip: unknown field; did you mean 'top'"),
    ('"hosts": {"cpu": {"procesors": 2}}', "p.json: hosts.cpu.procesors: unknown field; did you mean 'processors'"),
    ('"hosts": {"cpu": {"move_s": -1}}', "p.json: hosts.cpu.move_s: must be a number, at least 0, not -1"),
    ('"links": {"cpu": {"bandwidth_bytes_s": -1.0}}', "p.json: links.cpu.bandwidth_bytes_s: must be a number, at least 0"),
    ('"calls": [{"kind": "cpu", "devices": 1, "bas_s": 1}]', "p.json: calls[0].bas_s: unknown field; did you mean 'base_s'"),
    ('"measurd": []', "p.json: measurd: unknown field; did you mean 'measured'"),
])
def test_a_wrong_profile_store_names_key_and_nearest(part, says):
    with pytest.raises(PlanError) as error:
        ProfileStore.from_json('{"hetjax_profiles": 1, ' + part + "}", "p.json")
    assert says in str(error.value)


@pytest.mark.parametrize(("changes", "says"), [
    ({"num_stages": 3}, "num_stages: 3, and layers_per_stage has 2"),
    ({"dp": [1, 2]}, "dp: [1, 2], and tmp_per_stage has [1, 1] replicas"),
    ({"layers_per_stage": [[0, 1], [1, 2]]}, "layers must be whole numbers, each more than the one before"),
    ({"tmp_per_stage": [[[[["GH-69", 4, "z"]], 4]], [[[["GH-96", 2, "z"]], 4]]]}, "unknown GPU 'GH-69'; did you mean 'GH-96'"),
    ({"tmp_per_stage": [[[[["GH-96", 4, "z"]], 4]], [[[["GH-96", 2, "z"]], 4]]]}, "a replica of 4 GPUs on a node of 2"),
    ({"max_mem": "lots"}, "max_mem: must be a number, not 'lots'"),
])
def test_a_published_plan_that_contradicts_itself_is_refused(changes, says):
    replica = [[[["GH-96", 4, "z"]], 4]]
    pipeline = {"num_stages": 2, "layers_per_stage": [[0, 1], [2, 3]], "tmp_per_stage": [replica, replica], "dp": [1, 1]}
    plan = {"pipeline_list": [pipeline], "mbs": 2, "gbs": 8, "max_mem": 5}
    assert read_plan(json.dumps(plan)).num_stages == 2
    for key, value in changes.items():
        (pipeline if key in pipeline else plan)[key] = value
    with pytest.raises(PlanError) as error:
        read_plan(json.dumps(plan), "p.json")
    assert says in str(error.value)
