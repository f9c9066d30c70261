"""`hetjax calibrate`: what is measured, what is not measured twice, what survives a kill, what is judged by it."""

import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys

import jax
import pytest
from click.testing import CliRunner

from hetjax.calibrate.layered import legal_counts, usual_sizes
from hetjax.cli.main import cli
from hetjax.ir.errors import MicrobatchError, PlanError
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.cost.judge import Judge
from hetjax.passes.cost.layers import layer_map, segments, step_layers
from hetjax.passes.cost.program_price import fragment_ops, num_arrays
from hetjax.passes.cost.store import ProfileStore

STEP = """
import optax
from tests.support import make_linen

def build():
    step, state, batch = make_linen(tx=optax.sgd(0.1), blocks=3)
    return step, state, [batch], {}
"""


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory):
    """A store made by the command, what it answered, and the target."""
    folder = tmp_path_factory.mktemp("calibrate")
    (folder / "step.py").write_text(STEP)
    target, store = f"{folder / 'step.py'}:build", folder / "profiles.json"
    words = ["calibrate", target, "--store", str(store), "--tp", "1", "--dp", "1,2", "--sizes", "2", "--json"]
    answer = json.loads(CliRunner().invoke(cli, words, standalone_mode=False).stdout)
    return answer, store, words


def bundle_of(**options):
    import optax

    import hetjax
    from tests.support import make_linen

    step, state, batch = make_linen(tx=optax.sgd(0.1), blocks=3)
    return hetjax.parallelize(step, num_microbatches=4, **options).lower(state, batch)._entry.bundle


def test_layers_are_measured_equal_ones_once(calibrated):
    answer, path, _ = calibrated
    assert answer["ok"] and answer["known"] == 0 and answer["measured"] == answer["total"] > 8
    store = ProfileStore.load(path)
    layers = [m for m in store.measured.values() if m.layer != "product"]
    assert {m.phase for m in layers} == {"forward", "backward", "update"}
    assert {(m.data, m.model, m.microbatch) for m in layers} == {(1, 1, 2), (2, 1, 2)}
    # Three equal blocks are one forward per mesh.
    blocks = [m for m in layers if "block" in m.layer and m.phase == "forward"]
    assert len(blocks) == 2
    assert all(m.seconds > 0 and m.runs >= 5 and m.arrays > 0 and m.host_s >= 0 for m in store.measured.values())
    assert all(m.source == "measured" and "jaxlib" in m.versions for m in store.measured.values())
    host = store.hosts["cpu"]
    assert host.processors == len(os.sched_getaffinity(0)) and 1 <= host.together <= host.processors
    assert host.drives and min(dataclasses.astuple(host)) >= 0
    assert ("cpu", 2) in store.calls and "cpu" in store.links
    assert store.efficiency["cpu"].source == "measured"
    assert 8 <= answer["forest"]["kinds"]["cpu"] <= len(store.measured) and answer["rows"]
    assert answer["fitted_error"] > 0 and -1 <= answer["fitted_rank"] <= 1


def test_what_is_known_is_not_measured_again(calibrated):
    answer, path, words = calibrated
    before = ProfileStore.load(path).measured
    again = json.loads(CliRunner().invoke(cli, words, standalone_mode=False).stdout)
    assert (again["measured"], again["known"]) == (0, answer["total"])
    assert ProfileStore.load(path).measured == before


def test_a_store_reads_back_and_merges(calibrated, tmp_path):
    _, path, _ = calibrated
    store = ProfileStore.load(path)
    assert ProfileStore.from_json(store.to_json()) == store
    keys = list(store.measured)
    half = [ProfileStore(measured={k: store.measured[k] for k in part}, kinds=store.kinds) for part in (keys[::2], keys[1::2])]
    half[0].save(tmp_path / "a.json")
    half[1].save(tmp_path / "b.json")
    words = ["calibrate", "--store", str(tmp_path / "c.json"), "--merge", str(tmp_path / "a.json"), "--merge", str(tmp_path / "b.json"), "--json"]
    assert json.loads(CliRunner().invoke(cli, words, standalone_mode=False).stdout)["ok"]
    assert ProfileStore.load(tmp_path / "c.json").measured.keys() == store.measured.keys()

    slow = {k: dataclasses.replace(m, seconds=2 * m.seconds, cluster="oslo") for k, m in store.measured.items()}
    said = store.disagreements(dataclasses.replace(store, measured=slow))
    assert len(said) == len(store.measured) and "(+100%)" in said[0] and "oslo" in said[0]
    assert store.disagreements(store) == []


def test_measured_layers_price_a_plan_and_say_so(calibrated):
    _, path, _ = calibrated
    judge = Judge.load(path)
    bundle = bundle_of(num_stages=1, mesh="1,1")
    found = estimate_program(bundle, judge=judge)
    share = dict(found.sources)["op costs"]
    assert share.startswith("measured") and found.iteration_s >= found.lower_bound_s > 0
    # Every forward and backward is the sum of layers that were measured, and one call.
    store, program = judge.store, bundle.program
    layers = layer_map(bundle.graph, bundle.microbatching, step_layers(bundle.graph, bundle.microbatching))
    fragment = program.fragment("s0/forward")
    parts = segments(program, fragment, fragment_ops(program, fragment, bundle.cluster), layers)
    by_signature = {m.signature: m for m in store.measured.values() if (m.data, m.model) == (1, 1)}
    expected = sum(store.net_s(by_signature[s.signature]) for s in parts)
    expected += store.calls["cpu", 1].seconds(num_arrays(program, fragment))
    assert found.fragments["s0/forward"].seconds == pytest.approx(expected)
    assert found.host_bound_s > 0 and found.iteration_s >= found.host_bound_s


def test_a_kind_that_was_never_measured_stays_analytic_and_says_so(calibrated):
    from hetjax.ir.cluster import Cluster

    _, path, _ = calibrated
    text = 'name = "x"\n[[sites]]\nname = "a"\nnodes = [{ kind = "t4", devices = 2 }]\n'
    bundle = bundle_of(num_stages=1, mesh="1,1", cluster=Cluster.parse(text))
    judged, plain = estimate_program(bundle, judge=Judge.load(path)), estimate_program(bundle)
    assert judged.iteration_s == plain.iteration_s
    assert "kind 't4'" in dict(judged.sources)["kind t4"] and dict(judged.sources)["op costs"] == "analytic"


def test_a_session_that_is_killed_goes_on_where_it_was(tmp_path):
    (tmp_path / "step.py").write_text(STEP)
    path = tmp_path / "profiles.json"
    words = ["calibrate", f"{tmp_path / 'step.py'}:build", "--store", str(path), "--tp", "1", "--dp", "1", "--sizes", "2", "--json"]
    child = subprocess.Popen([sys.executable, "-m", "hetjax", *words], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    first = {}
    while child.poll() is None and len(first) < 3:
        with contextlib.suppress(subprocess.TimeoutExpired):
            child.wait(0.1)
        if path.exists():
            first = dict(ProfileStore.load(path).measured)
    assert child.poll() is None  # it had not ended before it could be killed
    child.send_signal(signal.SIGKILL)
    child.wait()
    first = dict(ProfileStore.load(path).measured)  # whole, whatever moment it was
    answer = json.loads(CliRunner().invoke(cli, words, standalone_mode=False).stdout)
    assert answer["known"] == len(first) and answer["measured"] == answer["total"] - len(first) > 0
    after = ProfileStore.load(path).measured
    assert all(after[k] == m for k, m in first.items())


@pytest.mark.parametrize(("change", "says"), [
    ({"measured": [{"signature": "x"}]}, r"measured\[0\].kind: missing field"),
    ({"measured": [{"signature": "", "kind": "cpu", "phase": "forwards", "seconds": 1, "work": {}}]}, "unknown phase 'forwards'; did you mean 'forward'"),
    ({"measured": [{"signature": "", "kind": "cpu", "phase": "forward", "seconds": -1, "work": {}}]}, r"measured\[0\].seconds: must be a number of seconds above 0, not -1"),
    ({"mesured": []}, "mesured: unknown field; did you mean 'measured'"),
    ({"calls": [{"kind": "cpu"}]}, "calls: not as it should be"),
    ({"layers": [{"model": "a"}]}, r"layers\[0\].kind: must be a string"),
])
def test_a_store_that_is_wrong_says_where(change, says):
    with pytest.raises(PlanError, match=says):
        ProfileStore.from_json(json.dumps({"hetjax_profiles": 1, **change}), "p.json")


def test_sizes_and_degrees_that_cannot_be_had(tmp_path):
    assert legal_counts(12, [3, 6]) == [4, 2] and usual_sizes(16) == [2, 4, 8]
    with pytest.raises(MicrobatchError, match="microbatches of 5 do not divide a batch of 12; nearest: 3, 4, 6"):
        legal_counts(12, [5])
    (tmp_path / "step.py").write_text(STEP)
    words = ["calibrate", f"{tmp_path / 'step.py'}:build", "--store", str(tmp_path / "p.json"), "--tp", str(len(jax.devices()) + 1), "--json"]
    said = json.loads(CliRunner().invoke(cli, words, standalone_mode=False).stdout)
    assert not said["ok"] and "local devices" in said["error"]


def test_published_tables_are_imported(shared_dir, tmp_path):
    words = ["calibrate", "--store", str(tmp_path / "p.json"), "--import", str(shared_dir / "data/sailor"), "--model", "OPT-350", "--json"]
    answer = json.loads(CliRunner().invoke(cli, words, standalone_mode=False).stdout)
    store = ProfileStore.load(tmp_path / "p.json")
    assert answer["imported"] > 500 and {m.source for m in store.measured.values()} == {"imported"}
    assert len(store.layers) > 1000 and answer["forest"]["kinds"]["gh200"] > 50
    held = answer["held_out"]
    assert held["within clusters"]["forest_error"] < held["within clusters"]["analytic_error"]
    assert "a cluster left out" in held
