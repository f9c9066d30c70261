"""Losses: every subset of at most m agents killed, replacements, one loss too many."""

import itertools
import os
import signal

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from hetjax.eccheck import ECCheckpointManager, EccheckWarning
from hetjax.eccheck.client import Client
from hetjax.eccheck.mend import mend
from hetjax.eccheck.reader import ObjectReader, survey
from hetjax.eccheck.snapshot import take
from hetjax.eccheck.tier import Tier
from hetjax.eccheck.trees import restore_tree
from hetjax.eccheck.writer import Request, save_object
from hetjax.ir.errors import CheckpointError

SAVE = """
import signal, sys
import orbax.checkpoint as ocp
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from hetjax.eccheck import handler_registry
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("d", "m"))
rng = np.random.default_rng(7)
w = rng.standard_normal((256, 512), np.float32)
state = {"w": jax.device_put(w, NamedSharding(mesh, P("d", "m"))),
         "b": jax.device_put(jnp.arange(301, dtype=jnp.bfloat16), NamedSharding(mesh, P())),
         "step": jnp.int32(5)}
with ocp.CheckpointManager(sys.argv[1], handler_registry=handler_registry(config)) as manager:
    manager.save(5, args=ocp.args.StandardSave(state))
    manager.wait_until_finished()
    os.kill(os.getpid(), signal.SIGKILL)
"""

RESTORE = """
import sys
import orbax.checkpoint as ocp
from hetjax.eccheck import handler_registry
w = np.random.default_rng(7).standard_normal((256, 512), np.float32)
with ocp.CheckpointManager(sys.argv[1], handler_registry=handler_registry(config)) as manager:
    assert manager.latest_step() == 5
    target = {"w": jax.ShapeDtypeStruct((256, 512), jnp.float32), "b": jax.ShapeDtypeStruct((301,), jnp.bfloat16),
              "step": jax.ShapeDtypeStruct((), jnp.int32)}
    state = manager.restore(5, args=ocp.args.StandardRestore(target))
    assert np.asarray(state["w"]).tobytes() == w.tobytes()
    assert np.array_equal(state["b"], jnp.arange(301, dtype=jnp.bfloat16))
    assert state["step"] == 5 and state["step"].dtype == jnp.int32
print("RESTORED")
"""


def _no_arrays_on_disk(path):
    files = [f for _, _, names in os.walk(path) for f in names]
    assert files and not any("ocdbt" in f or f in ("manifest.ocdbt", "_sharding", "array_metadatas")
                             or f.startswith("d") for f in files), files


def _expect_saved_tree(config):
    """Restores with a process state that has seen nothing of the save, and compares."""
    client = Client(config)
    seen = survey(client)
    reader = ObjectReader(client, seen.found[0], seen.silent)
    tree = restore_tree(reader, None, None)
    w = np.random.default_rng(7).standard_normal((256, 512), np.float32)
    assert np.asarray(tree["w"]).tobytes() == w.tobytes()
    assert np.array_equal(np.asarray(tree["b"], np.float32), np.asarray(
        jax.numpy.arange(301, dtype=jax.numpy.bfloat16), np.float32))
    assert tree["step"] == 5
    client.close()
    return reader


@pytest.mark.parametrize("k,m", [(2, 1), (2, 2), (4, 2)])
def test_every_subset_of_at_most_m_killed_agents(fleet, run_trainer, trainer_head, tmp_path, k, m):
    fleet.start(k + m)
    config = fleet.config(k, m)
    run_trainer(trainer_head + SAVE, tmp_path / "ck", config=config, check=False)
    _no_arrays_on_disk(tmp_path / "ck")
    first = True
    for count in range(1, m + 1):
        for lost in itertools.combinations(range(k + m), count):
            for i in lost:
                fleet.kill(fleet.hosts[i])
            # The trainer's host is one that still has its agent, or none: both are read.
            home = next(i for i in range(k + m) if i not in lost)
            reader = _expect_saved_tree(fleet.config(k, m, home=home if count % 2 else None))
            assert reader.read_bytes > 0
            if first and count == m:
                out = run_trainer(trainer_head + RESTORE, tmp_path / "ck",
                                  config=fleet.config(k, m, home=home))
                assert "RESTORED" in out
                first = False
            for i in lost:
                fleet.restart(fleet.hosts[i])
            client = Client(fleet.config(k, m, home=None))
            report = mend(client)
            assert not report["failed"] and len(report["repaired"]) == count
            assert survey(client).found[0].margin() == m
            client.close()


def test_one_loss_too_many_names_the_chunks_and_falls_back(fleet, tmp_path):
    fleet.start(4)
    config = fleet.config(2, 2)
    options = ocp.CheckpointManagerOptions(save_interval_steps=10, max_to_keep=2)
    state = {"w": jax.numpy.full((64, 64), 10.0)}
    with ECCheckpointManager(tmp_path, options, config=config, memory_every=5) as manager:
        for step in (10, 15):
            manager.save(step, args=ocp.args.StandardSave({"w": jax.numpy.full((64, 64), float(step))}))
        manager.wait_until_finished()
        assert manager.memory_steps() == [10, 15]  # 15, and 10 until something needs its room
        assert manager.latest_step() == 15 and list(manager.all_steps()) == [10, 15]
        for host in fleet.hosts[1:3]:
            fleet.kill(host)
        assert manager.latest_step() == 15
        fleet.kill(fleet.hosts[3])
        assert manager.latest_step() == 10
        restored = manager.restore(None, args=ocp.args.StandardRestore(state))
        assert np.array_equal(restored["w"], np.full((64, 64), 10.0))
        with pytest.raises(CheckpointError, match="step 15 cannot be restored") as error:
            manager.restore(15, args=ocp.args.StandardRestore(state))
        assert "on disk: [10]" in str(error.value)
        tier = Tier(config)
        found = tier.survey().found[0]
        with pytest.raises(CheckpointError, match="has 1 of the 2 chunks") as error:
            tier.reader(found, tier.survey())
        for host in fleet.hosts[1:]:
            assert host.address in str(error.value)
        # Reading all the same (a caller that did not ask first) must fail too, not give wrong data.
        with pytest.raises(CheckpointError, match=r"stripe \d has 1 of the 2 chunks it needs"):
            restore_tree(ObjectReader(tier.client, found), None, None)
        tier.client.close()


def test_repair_then_loss_of_the_others(fleet):
    fleet.start(4)
    state = {"w": np.random.default_rng(1).integers(0, 256, 700_001, np.uint8)}
    client = Client(fleet.config(2, 2))
    save_object(client, take(state), Request("x", 1))
    for i in (0, 2):
        fleet.kill(fleet.hosts[i])
        fleet.restart(fleet.hosts[i])
    report = mend(client)
    assert not report["failed"] and {r["position"] for r in report["repaired"]} == {0, 2}
    for i in (1, 3):
        fleet.kill(fleet.hosts[i])
    fresh = Client(fleet.config(2, 2, home=None))
    seen = survey(fresh)
    assert seen.found[0].margin() == 0
    tree = restore_tree(ObjectReader(fresh, seen.found[0], seen.silent), None, None)
    assert tree["w"].tobytes() == state["w"].tobytes()
    for c in (client, fresh):
        c.close()


def test_a_spare_agent_takes_the_place_of_a_lost_one(fleet):
    fleet.start(4)
    members, spare = fleet.hosts[:3], fleet.hosts[3]
    client = Client(fleet.config(2, 1, hosts=members))
    state = {"w": np.arange(100_000)}
    save_object(client, take(state), Request("x", 1))
    fleet.kill(members[1])
    fresh = Client(fleet.config(2, 1, hosts=[members[0], spare, members[2]], home=None))
    report = mend(fresh)
    assert [r["agent"] for r in report["repaired"]] == [spare.address] and not report["failed"]
    fleet.kill(members[0])
    seen = survey(fresh)
    tree = restore_tree(ObjectReader(fresh, seen.found[0], seen.silent), None, None)
    assert np.array_equal(tree["w"], state["w"])
    assert mend(fresh)["failed"], "two members and no spare are left: that must be said"
    for c in (client, fresh):
        c.close()


def test_saving_while_degraded_declares_what_it_still_survives(fleet, tmp_path):
    fleet.start(4)
    config = fleet.config(2, 2, home=None)
    state = {"w": jax.numpy.arange(50_000.0)}
    with ECCheckpointManager(tmp_path, ocp.CheckpointManagerOptions(save_interval_steps=100),
                             config=config) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        fleet.kill(fleet.hosts[3])
        manager.save(2, args=ocp.args.StandardSave(state))
        with pytest.warns(EccheckWarning, match="3 agents instead of 4: 1\\+2"):
            manager.wait_until_finished()
        assert manager.latest_step() == 2
        saved = manager._tier.last
        assert (saved.k, saved.m) == ((1,), (2,))
        for host in fleet.hosts[1:3]:
            fleet.kill(host)
        restored = manager.restore(2, args=ocp.args.StandardRestore(state))
        assert np.array_equal(restored["w"], state["w"])


def test_a_stopped_agent_is_an_error_in_time_and_training_goes_on(fleet, tmp_path):
    fleet.start(4)
    config = fleet.config(2, 2, home=None, rpc_timeout_s=1.0)
    state = {"w": jax.numpy.arange(50_000.0)}
    import time

    with ECCheckpointManager(tmp_path, ocp.CheckpointManagerOptions(save_interval_steps=100),
                             config=config) as manager:
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        os.kill(fleet.hosts[2].process.pid, signal.SIGSTOP)
        started = time.monotonic()
        assert manager.save(2, args=ocp.args.StandardSave(state))
        blocked = time.monotonic() - started
        with pytest.warns(EccheckWarning, match="no answer within the deadline"):
            manager.wait_until_finished()
        assert blocked < 1.0, "the trainer must not wait for a stopped agent"
        assert time.monotonic() - started < 15
        assert manager.latest_step() == 2
        os.kill(fleet.hosts[2].process.pid, signal.SIGCONT)
        restored = manager.restore(2, args=ocp.args.StandardRestore(state))
        assert np.array_equal(restored["w"], state["w"])
