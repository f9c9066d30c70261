"""User scripts with unchanged orbax calls: v0, v1, the two-tier manager, iterators, retention."""

import dataclasses
import json
import os
import pathlib
import shutil
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import orbax.checkpoint as ocp
import pytest

from hetjax.eccheck import ECCheckpointManager, EccheckWarning, handler_registry
from hetjax.eccheck.reader import survey
from hetjax.eccheck.tier import tier_of
from hetjax.ir.errors import CheckpointError

V0_SCRIPT = """
import sys
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
import orbax.checkpoint as ocp
import hetjax.eccheck
mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("d", "m"))
state = lambda s: {"params": {"w": jax.device_put(jnp.full((64, 32), float(s)), NamedSharding(mesh, P("d", "m")))},
                   "step": s}
options = ocp.CheckpointManagerOptions(max_to_keep=2, best_fn=lambda m: m["loss"], best_mode="min")
with ocp.CheckpointManager(sys.argv[1], options=options,
                           handler_registry=hetjax.eccheck.handler_registry(config)) as manager:
    for s in range(1, 6):
        manager.save(s, metrics={"loss": abs(s - 3.0)}, args=ocp.args.Composite(
            state=ocp.args.StandardSave(state(s)), ema=ocp.args.PyTreeSave(state(10 * s)),
            meta=ocp.args.JsonSave({"epoch": s})))
    manager.wait_until_finished()
    assert manager.latest_step() in (2, 3, 4) and manager.best_step() == 3, manager.all_steps()
    got = manager.restore(3, args=ocp.args.Composite(
        state=ocp.args.StandardRestore(jax.tree.map(ocp.utils.to_shape_dtype_struct, state(0))),
        meta=ocp.args.JsonRestore()))
    assert (got.state["params"]["w"] == 3).all() and got.state["step"] == 3 and got.meta == {"epoch": 3}
    part = manager.restore(3, args=ocp.args.Composite(ema=ocp.args.PyTreeRestore({"step": 0})))
    assert part.ema == {"step": 30}
    print("STEPS", sorted(manager.all_steps()))
import sys
assert not [m for m in sys.modules if m.startswith(("hetjax.passes", "hetjax.frontend", "hetjax.runtime"))]
"""

V1_SCRIPT = """
import sys
from jax.sharding import Mesh, NamedSharding, PartitionSpec as P
from orbax.checkpoint.experimental import v1 as ocp
import hetjax.eccheck
mesh, other = (Mesh(np.array(jax.devices()).reshape(s), ("d", "m")) for s in ((4, 2), (2, 4)))
state = lambda s: {"w": jax.device_put(jnp.full((64, 32), float(s)), NamedSharding(mesh, P("d", "m"))), "b": jnp.ones(3)}
with hetjax.eccheck.checkpoint_context(config):
    with ocp.training.Checkpointer(sys.argv[1], preservation_policy=ocp.training.preservation_policies.LatestN(2)) as c:
        for s in range(4):
            c.save_async(s, state(s), metrics={"loss": 1.0 / (s + 1)}).result()
        assert [m.step for m in c.checkpoints] == [2, 3]
        target = {"w": jax.ShapeDtypeStruct((64, 32), jnp.float32, sharding=NamedSharding(other, P("m", "d")))}
        got = c.load(3, target)
        assert (np.asarray(got["w"]) == 3).all() and got["w"].sharding == target["w"].sharding and list(got) == ["w"]
        assert (np.asarray(c.load(2)["w"]) == 2).all()
        assert c.metrics(3)["loss"] == 0.25 if hasattr(c, "metrics") else True
        # Names that orbax binds, and names it does not.
        c.save_checkpointables_async(9, {"state": state(9), "pytree": state(8), "anything": {"z": jnp.ones(2)},
                                         "config": {"lr": 0.5}}).result()
        loaded = c.load_checkpointables(9)
        assert (np.asarray(loaded["pytree"]["w"]) == 8).all() and loaded["config"] == {"lr": 0.5}
"""


def _files(path):
    return sorted(os.path.relpath(p, path) for p in pathlib.Path(path).rglob("*") if p.is_file())


def _expect_no_arrays(path):
    files = _files(path)
    assert any(f.endswith("hetjax_eccheck.json") for f in files)
    assert not [f for f in files if "ocdbt" in f or "/d/" in f or f.endswith("_sharding")], files
    assert sum((pathlib.Path(path) / f).stat().st_size for f in files) < 300_000


def _counters(fleet, host):
    from hetjax.eccheck.client import Client

    client = Client(fleet.config(home=None))
    reply, _ = client.pool.peer(host.address).call("status", timeout_s=5)
    client.close()
    return reply["counters"]


@pytest.mark.parametrize("script", [V0_SCRIPT, V1_SCRIPT], ids=["v0", "v1"])
def test_user_script_with_unchanged_calls(fleet, run_trainer, trainer_head, tmp_path, script):
    fleet.start(3, versions=4)
    run_trainer(trainer_head + script, tmp_path / "ck", config=fleet.config(2, 1))
    _expect_no_arrays(tmp_path / "ck")
    for host in fleet.hosts:
        counters = _counters(fleet, host)
        assert counters.get("received", 0) + counters.get("local", 0) > 8192, counters


class Numbers:
    """A data iterator as grain's are: it has a state, and two processes go on alike from it."""

    def __init__(self, seed):
        self._random, self.count = np.random.default_rng(seed), 0

    def __next__(self):
        self.count += 1
        return self._random.integers(1 << 30, size=4)

    def get_state(self):
        return json.dumps({"rng": self._random.bit_generator.state, "count": self.count}).encode()

    def set_state(self, state):
        fields = json.loads(state)
        self._random.bit_generator.state, self.count = fields["rng"], fields["count"]


class NumbersHandler(ocp.CheckpointHandler):
    """As grain's handler: a file a process, the iterator set in place."""

    def save(self, directory, item=None, args=None):
        (directory / f"process_{jax.process_index()}.json").write_bytes(args.item.get_state())

    def restore(self, directory, item=None, args=None):
        args.item.set_state((directory / f"process_{jax.process_index()}.json").read_bytes())
        return args.item


@ocp.args.register_with_handler(NumbersHandler, for_save=True)
@dataclasses.dataclass
class NumbersSave(ocp.args.CheckpointArgs):
    item: Numbers


@ocp.args.register_with_handler(NumbersHandler, for_restore=True)
@dataclasses.dataclass
class NumbersRestore(ocp.args.CheckpointArgs):
    item: Numbers


@pytest.mark.parametrize("dead", [0, 1])
def test_killed_training_goes_on_with_the_same_examples(fleet, tmp_path, dead):
    """The first run is abandoned in the middle; the second sees the sequence it would have seen."""
    fleet.start(3)
    config = fleet.config(2, 1)
    options = ocp.CheckpointManagerOptions(save_interval_steps=1000)

    def train(manager, numbers, weights, steps):
        seen = []
        for step in steps:
            batch = next(numbers)
            seen.append(batch.tolist())
            weights = weights * 0.9 + batch.sum()
            manager.save(step, args=ocp.args.Composite(
                state=ocp.args.StandardSave({"w": weights}), data=NumbersSave(numbers),
                meta=ocp.args.JsonSave({"step": step})))
        return seen, weights

    first = ECCheckpointManager(tmp_path, options, config=config, memory_every=3)
    numbers = Numbers(1)
    train(first, numbers, jnp.zeros(4), range(1, 12))
    first.wait_until_finished()
    expected_numbers, expected_weights = Numbers(1), jnp.zeros(4)
    with ECCheckpointManager(tmp_path / "plain", options, config=fleet.config(2, 1, job="test"),
                             memory_every=1000) as plain:
        expected, expected_weights = train(plain, expected_numbers, expected_weights, range(1, 20))
    for host in fleet.hosts[1 : 1 + dead]:
        fleet.kill(host)
    with ECCheckpointManager(tmp_path, options, config=config, memory_every=3) as second:
        assert second.latest_step() == 9
        numbers = Numbers(999)
        got = second.restore(args=ocp.args.Composite(
            state=ocp.args.StandardRestore({"w": jax.ShapeDtypeStruct((4,), jnp.float32)}),
            data=NumbersRestore(numbers), meta=ocp.args.JsonRestore()))
        assert got.meta == {"step": 9} and numbers.count == 9
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            seen, weights = train(second, numbers, got.state["w"], range(10, 20))
            second.wait_until_finished()
        assert any("2 agents instead of 3" in str(w.message) for w in told) == bool(dead)
    assert seen == expected[9:]
    assert np.array_equal(weights, expected_weights)
    first.close()


def test_two_tiers_newest_recoverable_first(fleet, tmp_path):
    fleet.start(3)
    options = ocp.CheckpointManagerOptions(save_interval_steps=10, max_to_keep=2)
    state = lambda s: {"w": jnp.full(1000, float(s))}  # noqa: E731
    with ECCheckpointManager(tmp_path, options, config=fleet.config(2, 1), memory_every=2) as manager:
        assert manager.latest_step() is None
        with pytest.raises(FileNotFoundError):
            manager.restore()
        saved = [s for s in range(1, 26) if manager.save(
            s, args=ocp.args.StandardSave(state(s)), metrics={"loss": 1.0 / s})]
        # Orbax writes the first step it sees, too.
        assert saved == [1, *range(2, 26, 2)]
        manager.wait_until_finished()
        assert manager.latest_step() == 24 and set(manager.memory_steps()) == {22, 24}
        assert set(manager.all_steps()) == {10, 20, 22, 24}
        assert manager.metrics(24) == {"loss": 1.0 / 24}
        assert (manager.restore(24, args=ocp.args.StandardRestore(state(0)))["w"] == 24).all()
        assert (manager.restore(10, args=ocp.args.StandardRestore(state(0)))["w"] == 10).all()
        assert (manager.restore()["w"] == 24).all()
        assert not manager.should_save(25) and manager.should_save(26) and manager.should_save(30)
        assert manager.item_metadata(24)["w"].shape == (1000,)
        manager.delete(24)
        assert manager.latest_step() == 22
        manager.delete(20)
        assert set(manager.all_steps()) == {10, 22}
        with pytest.raises(CheckpointError, match="In memory: \\[22\\]; on disk: \\[10\\]"):
            manager.restore(24, args=ocp.args.StandardRestore(state(0)))


def test_composite_is_recoverable_only_as_a_whole(fleet, tmp_path):
    """An item nobody can save stops the whole step; the one before stays the newest."""
    fleet.start(3)
    options = ocp.CheckpointManagerOptions(save_interval_steps=1000)
    with ECCheckpointManager(tmp_path, options, config=fleet.config(2, 1)) as manager:
        manager.save(1, args=ocp.args.Composite(
            a=ocp.args.StandardSave({"w": jnp.ones(3)}), m=ocp.args.JsonSave({"x": 1})))
        manager.wait_until_finished()
        before = manager.all_steps()
        with pytest.raises(TypeError):
            manager.save(2, args=ocp.args.Composite(
                a=ocp.args.StandardSave({"w": jnp.ones(3)}), m=ocp.args.JsonSave({"x": object()})))
        assert manager.all_steps() == before
        assert manager.restore().m == {"x": 1}
        with pytest.raises(CheckpointError, match="has no item z"):
            manager._restore_memory(manager._survey()[0], ocp.args.Composite(z=ocp.args.JsonRestore()))


def test_200_saves_leak_nothing(fleet, tmp_path):
    fleet.start(3, memory="1MiB", versions=3)
    config = fleet.config(2, 1)
    state = {"w": np.random.default_rng(0).integers(0, 256, 1_000_000, np.uint8)}
    tier = tier_of(config)

    def measure():
        replies = [tier.client.pool.peer(h.address).call("status", timeout_s=5)[0] for h in fleet.hosts]
        return [r["rss_bytes"] for r in replies], [sum(o["bytes"] for o in r["objects"]) for r in replies]

    options = ocp.CheckpointManagerOptions(max_to_keep=2, step_prefix="run")
    with ocp.CheckpointManager(tmp_path, options=options, handler_registry=handler_registry(config)) as manager:
        for step in range(200):
            state["w"][0] = step
            manager.save(step, args=ocp.args.StandardSave(state))
            if step == 20:
                manager.wait_until_finished()
                early, _ = measure()
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [198, 199]
        late, live = measure()
    bound = 3 * 1.5 * 1_000_000 / 3  # three versions of n/k of the state, a third on each agent
    assert all(b <= bound * 1.05 for b in live), live
    assert all(b - a < 4 << 20 for a, b in zip(early, late)), (early, late)
    # The trainer dies after orbax has deleted a step and before any sweep: the next save sweeps.
    shutil.rmtree(tmp_path / "run_198")
    with ocp.CheckpointManager(tmp_path, options=options, handler_registry=handler_registry(config)) as manager:
        manager.save(200, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
        assert list(manager.all_steps()) == [199, 200]
        assert {f.step for f in survey(tier.client).found} == {199, 200}
        assert manager.restore(199)["w"][0] == 199


def test_a_failed_save_leaves_no_orphan_and_the_older_steps(fleet, tmp_path):
    fleet.start(3, memory="1MiB")
    config = fleet.config(2, 1)
    small, large = {"w": np.ones(1_000_000, np.uint8)}, {"w": np.ones(9_000_000, np.uint8)}
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    manager = ocp.CheckpointManager(tmp_path, options=options, handler_registry=handler_registry(config))
    for step in (0, 1):
        manager.save(step, args=ocp.args.StandardSave(small))
    manager.wait_until_finished()
    manager.save(2, args=ocp.args.StandardSave(large))
    manager.wait_until_finished()
    with pytest.warns(EccheckWarning, match="step 2 .*to disk only: .*start the agent with more --memory"):
        assert (manager.restore(2, args=ocp.args.StandardRestore(large))["w"] == 1).all()
        tier_of(config).tell()
    assert sorted(manager.all_steps(read=True)) == [0, 1, 2]
    objects = [o for h in fleet.hosts for o in tier_of(config).client.pool.peer(h.address).call(
        "list", timeout_s=5)[0]["objects"]]
    assert {o["state"] for o in objects} == {"committed"}
    assert (manager.restore(1)["w"] == 1).all()
    manager.save(3, args=ocp.args.StandardSave(small))
    manager.wait_until_finished()
    assert 3 in manager.all_steps()
    assert (manager.restore(3)["w"] == 1).all()
    manager.close()


def test_too_few_versions_for_max_to_keep_is_said(fleet, tmp_path):
    fleet.start(3, memory="1MiB", versions=2)
    config = fleet.config(2, 1)
    options = ocp.CheckpointManagerOptions(max_to_keep=3)
    manager = ocp.CheckpointManager(tmp_path, options=options, handler_registry=handler_registry(config))
    for step in range(3):
        manager.save(step, args=ocp.args.StandardSave({"w": np.full(1_500_000, step, np.uint8)}))
        manager.wait_until_finished()
    with pytest.warns(EccheckWarning, match="step 0 had to make room; start the agents with more --versions"):
        manager.save(3, args=ocp.args.StandardSave({"w": np.full(1_500_000, 3, np.uint8)}))
    manager.wait_until_finished()
    with pytest.raises(CheckpointError, match="overwritten, or the agents were restarted"):
        manager.restore(1)
    assert (manager.restore(3)["w"] == 3).all()
    manager.close()


def test_without_agents_orbax_saves_to_disk_and_says_so(fleet, tmp_path):
    from hetjax.eccheck import Config

    state = {"w": jnp.arange(5.0)}
    manager = ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(Config()))
    with pytest.warns(EccheckWarning, match="none is configured.*saving to disk only"):
        manager.save(1, args=ocp.args.StandardSave(state))
        manager.wait_until_finished()
    assert np.array_equal(manager.restore(1, args=ocp.args.StandardRestore(state))["w"], state["w"])
    assert any("ocdbt" in f for f in _files(tmp_path))
    manager.close()
    # The same directory, once agents are there: old steps from disk, new ones from memory.
    fleet.start(3)
    manager = ocp.CheckpointManager(tmp_path, handler_registry=handler_registry(fleet.config(2, 1)))
    manager.save(2, args=ocp.args.StandardSave({"w": jnp.zeros(5)}))
    manager.wait_until_finished()
    for step, want in ((1, state["w"]), (2, jnp.zeros(5))):
        got = manager.restore(step, args=ocp.args.StandardRestore(state))
        assert np.array_equal(got["w"], want)
    assert not any("ocdbt" in f for f in _files(tmp_path / "2"))
    manager.close()


def test_the_manager_without_agents_is_the_disk_tier(tmp_path):
    from hetjax.eccheck import Config

    with ECCheckpointManager(tmp_path, config=Config()) as manager:
        with pytest.warns(EccheckWarning, match="saving to disk only"):
            manager.save(1, args=ocp.args.StandardSave({"w": jnp.ones(3)}))
        manager.wait_until_finished()
        assert manager.latest_step() == 1 and (manager.restore(1)["w"] == 1).all()
