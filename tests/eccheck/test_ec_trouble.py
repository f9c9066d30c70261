"""Trouble that must not stop a training, hang a command or lose the step a restart looks for."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from hetjax.eccheck import (
    Config,
    ECCheckpointManager,
    EccheckWarning,
    checkpoint_context,
    handler_registry,
)
from hetjax.eccheck.agent import AgentOptions
from hetjax.eccheck.arena import Arena
from hetjax.eccheck.client import Client
from hetjax.eccheck.config import Tls, load_config
from hetjax.eccheck.layout import Layout
from hetjax.eccheck.mend import mend
from hetjax.eccheck.reader import ObjectReader, survey
from hetjax.eccheck.snapshot import take
from hetjax.eccheck.store import COMMITTED, Refused, Store
from hetjax.eccheck.tier import tier_of
from hetjax.eccheck.trees import restore_tree
from hetjax.eccheck.wishes import of_target
from hetjax.eccheck.writer import Request, save_object
from hetjax.ir.errors import CheckpointError


def _state():
    mesh = jax.make_mesh((8,), ("x",), axis_types=(jax.sharding.AxisType.Auto,))
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("x"))
    return {"w": jax.device_put(jnp.arange(80_000.0), rows), "k": jax.random.key(3),
            "h": jnp.arange(6, dtype=jnp.bfloat16), "n": np.arange(10), "none": None, "i": 3}


def _same(a, b):
    def plain(x):
        keys = hasattr(x, "dtype") and jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
        return np.asarray(jax.random.key_data(x) if keys else x)

    jax.tree.map(lambda x, y: np.testing.assert_array_equal(plain(x), plain(y)), a, b)


def _donate_and_change(state):
    jax.jit(lambda x: x * 0, donate_argnums=0)(state["w"])
    state["n"][:] = -1


def test_a_save_goes_to_disk_when_all_agents_are_gone(fleet, tmp_path):
    fleet.start(3)
    config = fleet.config(2, 1)
    manager = ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(config))
    manager.save(0, args=ocp.args.StandardSave(_state()))
    manager.wait_until_finished()
    for host in fleet.hosts:
        fleet.kill(host)
    state = _state()
    manager.save(1, args=ocp.args.StandardSave(state))
    _donate_and_change(state)  # after this only the snapshot has the bytes
    manager.wait_until_finished()
    with pytest.warns(EccheckWarning, match="step 1 .* was written to disk only: no checkpoint agent answers"):
        tier_of(config).tell()
    assert manager.latest_step() == 1
    want = _state()
    got = manager.restore(1, args=ocp.args.StandardRestore(want))
    _same(got, want)
    assert got["w"].sharding == want["w"].sharding
    manager.close()


def test_the_v1_interface_goes_to_disk_too(fleet, tmp_path):
    from orbax.checkpoint.experimental import v1

    fleet.start(3)
    config = fleet.config(2, 1)
    want = {"w": jnp.arange(1000.0), "n": np.arange(3)}
    with checkpoint_context(config), v1.training.Checkpointer(tmp_path) as checkpointer:
        checkpointer.save(0, want)
        for host in fleet.hosts:
            fleet.kill(host)
        checkpointer.save_async(1, want).result()
        with pytest.warns(EccheckWarning, match="step 1 .* was written to disk only"):
            tier_of(config).tell()
        _same(checkpointer.load(1, want), want)


def test_a_process_that_was_replaced_writes_nowhere(fleet, tmp_path):
    fleet.start(3)
    config = fleet.config(2, 1)
    manager = ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(config))
    manager.save(0, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
    manager.wait_until_finished()
    for host in fleet.hosts:
        tier_of(config).client.pool.peer(host.address).call("fence", epoch=9, timeout_s=5)
    manager.save(1, args=ocp.args.StandardSave({"w": jnp.zeros(3)}))
    with pytest.raises(CheckpointError, match="was replaced and must not write"):
        manager.wait_until_finished()
    assert list(manager.all_steps(read=True)) == [0]
    manager.close()


def test_the_two_tier_manager_goes_on_with_agents_that_refuse_it(fleet, tmp_path):
    fleet.start(2)
    with ECCheckpointManager(tmp_path, config=fleet.config(1, 1, job="another")) as manager:
        with (
            pytest.warns(EccheckWarning, match="saving to disk only"),
            pytest.warns(EccheckWarning, match="nothing is looked for in memory: .* job 'test', not 'another'"),
        ):
            assert manager.latest_step() is None
            manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
            manager.wait_until_finished()
        assert manager.latest_step() == 1
        assert (manager.restore()["w"] == 1).all()


def test_a_damaged_manifest_of_one_step_hinders_no_other(fleet, tmp_path):
    fleet.start(2)
    manager = ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(fleet.config(1, 1)))
    for step in range(3):
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(5, step)}))
        manager.wait_until_finished()
        if step == 0:
            (tmp_path / "0" / "default" / "hetjax_eccheck.json").write_text("{")
    assert (manager.restore(2)["w"] == 2).all()
    assert (tmp_path / "2" / "default" / "hetjax_eccheck.json").exists(), "it went to disk"
    with pytest.raises(CheckpointError, match=r"0/default/hetjax_eccheck\.json: not a checkpoint manifest"):
        manager.restore(0)
    manager.close()


def test_memory_of_an_agent_that_was_started_anew_is_not_written(fleet, tmp_path, monkeypatch):
    fleet.start(3)
    config = fleet.config(2, 1)
    client = tier_of(config).client
    manager = ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(config))
    manager.save(0, args=ocp.args.StandardSave({"w": np.zeros(90_000)}))
    manager.wait_until_finished()
    probe = client.probe

    def probe_and_lose():  # the home agent is replaced between the sign of life and the save
        answers = probe()
        monkeypatch.setattr(client, "probe", probe)
        fleet.kill(fleet.hosts[0])
        fleet.restart(fleet.hosts[0])
        return answers

    monkeypatch.setattr(client, "probe", probe_and_lose)
    manager.save(1, args=ocp.args.StandardSave({"w": np.arange(90_000.0)}))
    manager.wait_until_finished()
    fresh = Client(config)
    for host in fleet.hosts:
        assert fresh.pool.peer(host.address).call("scrub", timeout_s=10)[0]["damaged"] == []
    assert (manager.restore(1)["w"] == np.arange(90_000.0)).all()
    manager.close()


def test_a_lone_holder_is_no_failed_repair_and_scrub_ends_beside_a_stopped_agent(fleet, tmp_path):
    fleet.start(2)
    config = fleet.config(1, 1)
    with ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(config)) as manager:
        manager.save(1, args=ocp.args.StandardSave({"w": jnp.arange(5000.0)}))
    fleet.kill(fleet.hosts[1])
    (line,) = mend(tier_of(config).client)["failed"]
    assert "no agent is free to take it" in line
    fleet.restart(fleet.hosts[1])
    report = mend(Client(config))
    assert not report["failed"] and len(report["repaired"]) == 1
    os.kill(fleet.hosts[1].process.pid, signal.SIGSTOP)
    done = subprocess.run(
        [sys.executable, "-m", "hetjax", "ckpt", "scrub", "--agents", ",".join(config.agents), "--job",
         "test", "--timeout", "1"], capture_output=True, text=True, timeout=30, cwd=pathlib.Path(__file__).resolve().parents[2])
    assert done.returncode == 1 and "no answer within the deadline" in done.stderr


def test_a_step_that_too_few_agents_took_is_made_stronger_and_found_under_its_old_name(fleet, tmp_path):
    """All through orbax: the step directory still names the object that was there before."""
    fleet.start(3, versions=3)
    config = fleet.config(2, 1)
    with ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=2), handler_registry=handler_registry(config)
    ) as manager:
        for host in fleet.hosts[1:]:
            fleet.kill(host)
        want = {"w": jnp.arange(200_000.0), "n": np.arange(5)}
        manager.save(1, args=ocp.args.StandardSave(want))
        manager.wait_until_finished()
        with pytest.warns(EccheckWarning, match="1 agents survive the loss of 0, not of 1"):
            tier_of(config).tell()
        assert mend(Client(config))["strengthened"] == []  # nobody to hold more
        for host in fleet.hosts[1:]:
            fleet.restart(host)
        own = Client(config)
        old = survey(own).found[0]
        report = mend(own)
        assert not report["failed"] and [r["survives"] for r in report["strengthened"]] == [1]
        (found,) = survey(own).found
        assert found.oid != old.oid and found.margin() == 1 and len(found.holders) == 3
        assert found.created_s >= old.created_s and mend(own)["strengthened"] == []
        while len(tier_of(config).client.probe()[0]) < 3:
            pass  # gRPC tries a dead address again after a second at most
        # Later saves keep it while the directory lists it, and the first that finds it gone frees it.
        for step in (2, 3, 4):
            manager.save(step, args=ocp.args.StandardSave({**want, "n": np.arange(5) + step}))
            manager.wait_until_finished()
            assert (1 in {f.step for f in survey(own).found}) == (step < 4)
            if step == 2:
                lone = Client(dataclasses.replace(config, agents=config.agents[1:], socket=""))
                seen = next(f for f in survey(lone).found if f.step == 1)
                _same(restore_tree(ObjectReader(lone, seen), want, of_target()), want)
                _same(manager.restore(1, args=ocp.args.StandardRestore(want)), want)
                lone.close()
        own.close()


def test_two_writers_of_one_state_are_made_stronger_and_a_save_of_the_training_goes_first(fleet):
    from concurrent.futures import ThreadPoolExecutor

    fleet.start(2, memory="6MiB")
    parts = [{"a": np.random.default_rng(0).integers(0, 256, 3 << 20, np.uint8)}, {"b": np.arange(40_000)}]

    def save(number):
        own = Client(fleet.config(2, 2, home=number))
        snapshot = take(parts[number], writer=number, count=2, shared=False)
        save_object(own, snapshot, Request("x", 1, writer=number, count=2, run="r1"))
        own.close()

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(save, range(2)))
    first = fleet.hosts[:]
    fleet.start(2, memory="6MiB")
    own = Client(fleet.config(1, 1, home=None))  # asked for 2+2 then: that counts, not the repairer's code
    (stronger,) = mend(own)["strengthened"]
    assert (stronger["survived"], stronger["survives"]) == (1, 2)
    for host in first:
        fleet.kill(host)
    seen = survey(own)
    tree = restore_tree(ObjectReader(own, seen.found[0], seen.silent), None, None)
    assert np.array_equal(tree["a"], parts[0]["a"]) and np.array_equal(tree["b"], parts[1]["b"])
    own.close()


def test_what_is_made_again_gives_way_to_a_save_of_the_training():
    layout = Layout(1, 0, 4096, ((0, 0, 6 * 4096),), ("a:1",))
    store = Store(Arena(12 * 4096))
    common = {"name": "x", "epoch": 1, "group": 0, "position": 0, "layout": layout}
    old, _ = store.begin(oid="s1", step=1, live=set(), protect=set(), **common)
    old.state = COMMITTED
    store.begin(oid="s1~1", step=1, live=set(), protect=set(), keep_all=True, **common)
    with pytest.raises(Refused, match="needs 24576 bytes"):
        store.begin(oid="s1~2", step=1, live=set(), protect=set(), keep_all=True, **common)
    entry, evicted = store.begin(oid="s2", step=2, live={"s1"}, protect={"s1"}, **common)
    assert set(store.entries) == {"s1", "s2"} and not evicted and not store.evictions
    entry.state = COMMITTED
    store.begin(oid="s3", step=3, live={"s1", "s2"}, protect={"s2~1"}, **common)
    assert set(store.entries) == {"s2", "s3"}  # s2~1 would be the same save


def test_a_call_of_unknown_length_ends_when_its_agent_stops(fleet):
    fleet.start(1)
    peer = tier_of(fleet.config(1, 1)).client.pool.peer(fleet.hosts[0].address)
    with pytest.raises(CheckpointError, match="no answer within the deadline"), peer.watched(0.3):
        os.kill(fleet.hosts[0].process.pid, signal.SIGSTOP)
        peer.call("collect", box="never", count=1, wait_s=60, timeout_s=60)


def test_drain_has_the_step_that_the_directory_lists(fleet, tmp_path):
    drained = tmp_path / "drained"
    fleet.start(3, extra=("--drain-dir", str(drained)))
    config = fleet.config(2, 1, drain_dir=str(drained))
    steps = tmp_path / "steps"
    with ocp.CheckpointManager(steps, handler_registry=handler_registry(config)) as manager:
        for step in range(3):
            manager.save(step, args=ocp.args.StandardSave({"w": np.full(20_000, step)}))
    shutil.rmtree(steps / "2")  # the trainer died when the agents had it and orbax had not renamed it
    for host in fleet.hosts:
        host.process.terminate()
        assert host.process.wait(20) == 0
        host.process.stdout.close()
    with ocp.CheckpointManager(steps, handler_registry=handler_registry(config)) as manager:
        assert manager.latest_step() == 1
        assert (manager.restore(1)["w"] == 1).all()
    assert len(list((drained / "test").iterdir())) == 2  # and step 0 is not


def test_old_drains_are_swept_and_half_a_drain_costs_nothing(fleet, tmp_path):
    fleet.start(3)
    own, steps = Client(fleet.config(2, 1)), tmp_path / "test"

    def drain(*hosts):
        return [own.pool.peer(h.address).call("drain", dir=str(tmp_path), timeout_s=20)[0] for h in hosts]

    def drained():
        return {json.loads((f / "manifest.json").read_text())["step"] for f in steps.iterdir()}

    for step in (1, 2, 7):
        save_object(own, take({"w": np.full(20_000, step)}), Request("x", step))
        drain(*fleet.hosts)
    assert drained() == {2, 7}
    # The run went back and counts from 3 again; one agent of three drains: not enough to read it.
    save_object(own, take({"w": np.full(20_000, 3)}), Request("x", 3))
    assert drain(fleet.hosts[0])[0]["pruned"] == []
    assert drained() == {2, 3, 7}
    (reply,) = drain(fleet.hosts[1])
    assert len(reply["pruned"]) == 1 and drained() == {3, 7}
    for host in fleet.hosts:
        fleet.kill(host)
    fresh = Client(fleet.config(2, 1, home=None, rpc_timeout_s=0.5))
    found = next(f for f in survey(fresh, str(tmp_path)).found if f.step == 3)
    assert (restore_tree(ObjectReader(fresh, found), None, None)["w"] == 3).all()
    for each in (own, fresh):
        each.close()


@pytest.mark.parametrize("wrong, told", [
    ({"listen": "127.0.0.1"}, "not HOST:PORT"), ({"listen": "127.0.0.1:99999"}, "not HOST:PORT"),
    ({"rpc_timeout_s": -1.0, "min_rate_bytes_s": 0.0}, "rpc-timeout .*; min-rate"),
    ({"scrub_interval_s": float("nan")}, "scrub-interval"), ({"metrics_port": 99999}, "not a port"),
    ({"token": "sü"}, "printable ASCII"),
])
def test_an_agent_refuses_options_that_cannot_be(wrong, told):
    with pytest.raises(CheckpointError, match=told):
        AgentOptions(**wrong)


def test_configuration_of_the_wrong_type_is_an_error_by_name(tmp_path):
    for text in ('k = "two"', "tls = {nonsense = 1}", "agents = [1]", "writer = [0]", "rpc_timeout_s = nan", "eccheck = 3",
                 'agents = "a:1"', 'domains = ["a"]'):
        (tmp_path / "c.toml").write_text(text)
        with pytest.raises(CheckpointError):
            load_config(tmp_path / "c.toml")
    with pytest.raises(CheckpointError, match="printable ASCII"):
        Config(token="sü")
    secured = Config(agents=("127.0.0.1:1",), tls=Tls("/nowhere/ca", "/nowhere/cert", "/nowhere/key"))
    with pytest.raises(CheckpointError, match=r"cannot read a file for TLS.*/nowhere/ca"):
        Client(secured).pool.peer("127.0.0.1:1")


def test_a_target_that_does_not_fit_is_refused_by_name(fleet, tmp_path):
    fleet.start(3)
    manager = ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(fleet.config(2, 1)))
    with pytest.raises(CheckpointError, match="r: numpy array of records"):
        manager.save(0, args=ocp.args.StandardSave({"r": np.zeros(2, [("a", "i4"), ("b", "f4")])}))
    manager.save(1, args=ocp.args.StandardSave({"n": 3, "a": jnp.arange(3.0), "k": jax.random.key(0)}))
    manager.wait_until_finished()
    target = {"n": jnp.zeros(3), "a": 1, "k": jax.random.key(0, impl="rbg")}
    with pytest.raises(CheckpointError) as told:
        manager.restore(1, args=ocp.args.StandardRestore(target))
    for part in ("n: saved a Python value, asked for [3]", "a: saved [3], asked for a number", "k: saved keys of"):
        assert part in str(told.value)
    target = {"n": 0, "a": None, "k": jax.random.key(0)}
    assert manager.restore(1, args=ocp.args.StandardRestore(target))["a"] is None
    manager.close()
