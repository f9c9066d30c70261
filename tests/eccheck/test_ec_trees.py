"""Trees: every kind of leaf, other meshes, parts, and what happens right after the save."""

import collections

import flax.linen as nn
import flax.nnx as nnx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import pytest
from flax.training.train_state import TrainState
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax.eccheck import handler_registry
from hetjax.eccheck.client import Client
from hetjax.eccheck.reader import ObjectReader, survey
from hetjax.eccheck.snapshot import take
from hetjax.eccheck.tier import tier_of
from hetjax.eccheck.trees import restore_tree
from hetjax.eccheck.wishes import of_target
from hetjax.eccheck.writer import Request, save_object
from hetjax.ir.errors import CheckpointError

Pair = collections.namedtuple("Pair", "left right")


@pytest.fixture
def served(fleet, tmp_path):
    """Three agents and an orbax manager over them; its directory must never hold arrays."""
    fleet.start(3)
    config = fleet.config(2, 1)
    manager = ocp.CheckpointManager(
        tmp_path, options=ocp.CheckpointManagerOptions(max_to_keep=1),
        handler_registry=handler_registry(config),
    )
    yield manager
    manager.close()
    assert not any("ocdbt" in p.name or p.name == "d" for p in tmp_path.rglob("*")), "arrays on disk"
    client = tier_of(config).client
    assert client.local_bytes + client.sent_bytes > 0, "no byte went to an agent"


def _same(got, want, path=""):
    if isinstance(want, jax.Array) and jnp.issubdtype(want.dtype, jax.dtypes.prng_key):
        assert got.dtype == want.dtype, path
        got, want = jax.random.key_data(got), jax.random.key_data(want)
    if isinstance(want, (jax.Array, np.ndarray, np.generic)):
        assert type(got) is type(want) or (
            isinstance(want, jax.Array) and isinstance(got, jax.Array)), path
        assert got.dtype == want.dtype and got.shape == want.shape, (path, got.dtype, got.shape)
        assert np.asarray(got).tobytes() == np.asarray(want).tobytes(), path
        if isinstance(want, jax.Array):
            assert got.aval.weak_type == want.aval.weak_type, path
    else:
        assert type(got) is type(want) and got == want, (path, got, want)


def _same_tree(got, want):
    flat, treedef = jax.tree_util.tree_flatten_with_path(want, is_leaf=lambda x: x is None)
    others, other = jax.tree_util.tree_flatten(got, is_leaf=lambda x: x is None)
    assert treedef == other
    for (path, leaf), mine in zip(flat, others):
        _same(mine, leaf, jax.tree_util.keystr(path))


def _zoo():
    mesh = Mesh(np.array(jax.devices()).reshape(4, 2), ("d", "m"))
    tied = jax.device_put(jnp.arange(64.0).reshape(8, 8), NamedSharding(mesh, P("d", "m")))
    grid = jnp.linspace(-3, 3, 24)
    return {
        "bf16": grid.astype(jnp.bfloat16), "f16": grid.astype(jnp.float16),
        "i4": jnp.arange(-8, 8).astype(jnp.int4), "i2": jnp.arange(-2, 2).astype(jnp.int2),
        "u4": jnp.arange(16).astype(jnp.uint4), "f8a": grid.astype(jnp.float8_e4m3fn),
        "f8b": grid.astype(jnp.float8_e5m2), "f4": grid.astype(jnp.float4_e2m1fn),
        "bool": grid > 0, "c64": (grid + 1j * grid).astype(jnp.complex64),
        "nan": jnp.array([jnp.nan, -0.0, jnp.inf]),
        "key": jax.random.key(3), "keys": jax.random.split(jax.random.key(4, impl="rbg"), 5),
        "raw_key": jax.random.PRNGKey(9),
        "scalar": jnp.float32(3.5), "weak": jnp.asarray(2.5), "weak_int": jnp.asarray(3),
        "empty": jnp.zeros((0, 4)), "none": None, "int": 7, "big": 2**200, "float": 0.1,
        "str": "hello", "yes": True, "complex": 1 + 2j,
        "np": np.arange(5), "np64": np.float64(1.25), "np_str": np.array(["a", "bc"]),
        "np_f": np.asfortranarray(np.arange(12.0).reshape(3, 4)), "np_big_endian": np.arange(3, dtype=">i4"),
        "tied": tied, "tied_too": tied, "alone": [tied, (tied,)], "ints": {3: jnp.ones(2), 1: jnp.zeros(2)},
        "odd": jax.device_put(jnp.arange(12 * 3).reshape(12, 3), NamedSharding(mesh, P("d"))),
        "pair": Pair(jnp.ones(3), [np.int8(4), None]),
    }


def test_leaf_zoo_through_orbax(served):
    state = _zoo()
    served.save(1, args=ocp.args.StandardSave(state))
    served.wait_until_finished()
    _same_tree(served.restore(1, args=ocp.args.StandardRestore(state)), state)


def test_leaf_zoo_without_a_target_comes_back_as_saved(served):
    state = _zoo()
    served.save(1, args=ocp.args.PyTreeSave(state))
    served.wait_until_finished()
    got = served.restore(1)
    assert got["ints"].keys() == {1, 3} and got["big"] == 2**200 and got["none"] is None
    assert got["tied"].sharding == state["tied"].sharding
    state["pair"] = {"left": state["pair"].left, "right": state["pair"].right}
    state["alone"] = [state["tied"], [state["tied"]]]
    _same_tree(got, state)


def test_64_bit_leaves(served):
    with jax.enable_x64(True):
        state = {"f64": jnp.linspace(0, 1, 7), "i64": jnp.arange(2**40, 2**40 + 4), "c128": jnp.ones(2, complex)}
        assert state["f64"].dtype == jnp.float64
    served.save(1, args=ocp.args.StandardSave(state))
    served.wait_until_finished()
    _same_tree(served.restore(1, args=ocp.args.StandardRestore(state)), state)


def test_optax_flax_and_nnx_trees(served):
    params = nn.Dense(4).init(jax.random.key(0), jnp.ones((1, 3)))
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(1e-3))
    train = TrainState.create(apply_fn=nn.Dense(4).apply, params=params, tx=optimizer)
    model = nnx.Linear(3, 5, rngs=nnx.Rngs(0))
    state = {"train": train, "nnx": nnx.state(model), "masked": optax.masked(optax.sgd(0.1, 0.9), {"a": True, "b": False}).init({"a": jnp.ones(2), "b": jnp.ones(3)})}
    served.save(1, args=ocp.args.StandardSave(state))
    served.wait_until_finished()
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, state)
    _same_tree(served.restore(1, args=ocp.args.StandardRestore(abstract)), state)
    part = served.restore(1, args=ocp.args.StandardRestore({"train": {"params": abstract["train"].params}}))
    _same_tree(part["train"]["params"], params)


@pytest.mark.quick
def test_leaves_that_cannot_be_saved_are_all_named():
    with pytest.raises(CheckpointError) as error:
        take({"f": print, "o": np.array([object()]), "fine": 1, "s": {"t": {1, 2}}})
    for part in ("f: builtin_function", "o: numpy array of dtype object", "s/t: set"):
        assert part in str(error.value)


def test_other_meshes_and_partial_reads(fleet):
    fleet.start(3)
    client = Client(fleet.config(2, 1))
    devices = np.array(jax.devices())
    want = np.arange(512 * 96, dtype=np.float32).reshape(512, 96)
    mesh = Mesh(devices.reshape(4, 2), ("d", "m"))
    state = {
        "w": jax.device_put(want, NamedSharding(mesh, P("d", "m"))),
        "big": jax.device_put(jnp.ones(1 << 19), NamedSharding(mesh, P("d"))),
        "replicated": jax.device_put(want[:3], NamedSharding(mesh, P())),
    }
    save_object(client, take(state), Request("x", 1))
    targets = [
        NamedSharding(Mesh(devices.reshape(2, 4), ("d", "m")), P("m", "d")),
        NamedSharding(Mesh(devices, ("x",)), P("x")),
        NamedSharding(Mesh(devices, ("x",)), P(None, "x")),
        NamedSharding(Mesh(devices[:1], ("x",)), P()),
        jax.sharding.SingleDeviceSharding(jax.devices()[5]),
    ]
    for sharding in targets:
        found = survey(client).found[0]
        reader = ObjectReader(client, found)
        target = {"w": jax.ShapeDtypeStruct(want.shape, want.dtype, sharding=sharding)}
        got = restore_tree(reader, target, of_target())["w"]
        assert got.sharding == sharding and np.asarray(got).tobytes() == want.tobytes()
        # Of the neighbours nothing is read but the rest of the blocks at the ends of the shards.
        layout = found.manifest.layouts[0]
        leaf = next(x for x in found.manifest.leaves if x["p"][0][1] == "w")
        blocks = {
            b for _, offset, length, _ in leaf["x"]
            for b in range(offset // layout.block_bytes, (offset + length - 1) // layout.block_bytes + 1)
        }
        assert reader.read_bytes == len(blocks) * layout.block_bytes
        assert reader.read_bytes < want.nbytes * 1.5
    # Rows of a leaf: only the blocks of those rows.
    reader = ObjectReader(client, survey(client).found[0])
    row = jax.ShapeDtypeStruct((1 << 19,), jnp.float32, sharding=targets[1])
    restore_tree(reader, {"big": row}, of_target())
    assert reader.read_bytes <= (1 << 21) + 16 * layout.block_bytes
    with pytest.raises(CheckpointError, match="w: saved \\[512, 96\\], asked for \\[5, 96\\]"):
        restore_tree(reader, {"w": jax.ShapeDtypeStruct((5, 96), np.float32)}, of_target())
    with pytest.raises(CheckpointError, match="has no nowhere, w/deeper"):
        restore_tree(reader, {"nowhere": 1, "w": {"deeper": 2}}, of_target())
    client.close()


def test_donation_and_mutation_right_after_the_save(served):
    weights, host = jnp.arange(1 << 18, dtype=jnp.float32), np.arange(1 << 16)
    expected, expected_host = np.array(weights), host.copy()
    step = jax.jit(lambda w: w * 2 + 1, donate_argnums=0)
    served.save(1, args=ocp.args.StandardSave({"w": weights, "h": host}))
    for _ in range(20):
        weights = step(weights)
        host += 1
    jax.block_until_ready(weights)
    served.wait_until_finished()
    got = served.restore(1, args=ocp.args.StandardRestore({"w": weights, "h": host}))
    assert np.array_equal(got["w"], expected) and np.array_equal(got["h"], expected_host)


def test_restored_arrays_do_not_change_when_the_agents_memory_does(served):
    for step in range(1, 4):
        served.save(step, args=ocp.args.StandardSave({"w": jnp.full(1 << 18, float(step))}))
        served.wait_until_finished()
        if step == 1:
            first = served.restore(1)["w"]
    assert np.array_equal(first, np.full(1 << 18, 1.0))


def test_casting_restore_args_and_save_args(served):
    state = {"w": jnp.arange(8.0), "n": np.arange(4), "i": 3}
    served.save(1, args=ocp.args.PyTreeSave(
        state, save_args={"w": ocp.SaveArgs(dtype=jnp.bfloat16), "n": ocp.SaveArgs(), "i": ocp.SaveArgs()}))
    served.wait_until_finished()
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[2])
    got = served.restore(1, args=ocp.args.PyTreeRestore(state, restore_args={
        "w": ocp.ArrayRestoreArgs(sharding=sharding, dtype=jnp.float32),
        "n": ocp.RestoreArgs(restore_type=np.ndarray, dtype=np.int16), "i": ocp.RestoreArgs(restore_type=int)}))
    assert got["w"].dtype == jnp.float32 and got["w"].sharding == sharding
    assert np.array_equal(got["w"], np.arange(8.0)) and got["n"].dtype == np.int16 and got["i"] == 3
    as_saved = served.restore(1, args=ocp.args.PyTreeRestore(state))
    assert as_saved["w"].dtype == jnp.bfloat16
    padded = served.restore(1, args=ocp.args.StandardRestore(
        {"w": jax.ShapeDtypeStruct((10,), jnp.bfloat16)}, strict=False))
    assert np.array_equal(np.asarray(padded["w"], np.float32), [*range(8), 0, 0])
    with pytest.raises(CheckpointError, match="transforms are not supported"):
        served.restore(1, args=ocp.args.PyTreeRestore(state, transforms={}))


def test_item_metadata_is_orbax_own(served):
    state = {"w": _zoo()["tied"], "s": "x", "i": 4}
    served.save(1, args=ocp.args.StandardSave(state, custom_metadata={"note": 1}))
    served.wait_until_finished()
    metadata = served.item_metadata(1)
    assert isinstance(metadata.tree["w"], ocp.metadata.ArrayMetadata)
    assert metadata["w"].shape == (8, 8) and metadata["w"].dtype == jnp.float32
    assert metadata["w"].sharding.to_jax_sharding() == state["w"].sharding
    assert isinstance(metadata["s"], ocp.metadata.StringMetadata)
    assert metadata.custom_metadata == {"note": 1}
