"""Values carried by their pieces: the same bits on the other mesh, the bytes that were planned."""

import dataclasses
import math
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import RuntimeFault
from hetjax.frontend.calls import flatten_call, rebuild_result
from hetjax.frontend.entry import Entry
from hetjax.frontend.rehearsal import cluster_emulation
from hetjax.ir.cluster import Cluster
from hetjax.ir.dtypes import dtype_itemsize, short_dtype
from hetjax.ir.graph import Aval
from hetjax.ir.program import Piece, Reshard, StageMesh
from hetjax.ir.verify import verify_program
from hetjax.passes.reshard_plan import layout, plan_reshard
from hetjax.passes.reshard_plan.planner import candidates, possible_specs
from hetjax.runtime import instructions
from hetjax.runtime.meshes import jax_mesh, named_sharding
from hetjax.runtime.resharding import make_move
from tests import support
from tests.support import assert_same

DTYPES = ["f32", "bf16", "i32", "bool", "int4", "uint4", "float8_e4m3fn", "float8_e5m2", "c64", "key", "u8", "f16"]


def cluster_of(sites, wan="bandwidth_bytes_s = 1e8\nlatency_ms = 1"):
    """Returns a cluster of sites, each a tuple of its nodes' device counts."""
    text = 'name = "c"\n'
    for s, nodes in enumerate(sites):
        text += f'[[sites]]\nname = "t{s}"\nlink = "lan"\n'
        for k, n in enumerate(nodes):
            text += f'[[sites.nodes]]\nname = "n{s}{k}"\nkind = "box"\ndevices = {n}\nlink = "inside"\n'
    names = ", ".join(f'"t{s}"' for s in range(len(sites)))
    between = f'[links.wan]\nbetween = [{names}]\n{wan}\n' if len(sites) > 1 else ""
    return Cluster.parse(
        text + "[links.lan]\nbandwidth_gb_s = 1\nlatency_us = 20\n[links.inside]\nbandwidth_gb_s = 50\nlatency_us = 2\n"
        + between + '[kinds.box]\nlike = "cpu"\n')


CLUSTERS = [cluster_of(s) for s in (((4,), (4,)), ((2, 2), (2, 2)), ((4, 4),), ((8,),), ((1, 3), (3, 1)), ((2,) * 4,))]


def make_array(rng, shape, dtype):
    if dtype == "key":
        return jax.random.wrap_key_data(jnp.asarray(rng.integers(0, 2**32, (*shape, 2), dtype=np.uint32)))
    values = rng.integers(0, 2 if dtype == "bool" else 3, shape)
    names = {"f32": "float32", "bf16": "bfloat16", "i32": "int32", "c64": "complex64", "u8": "uint8", "f16": "float16"}
    return jnp.asarray(values).astype(names.get(dtype, dtype))


def plain(x):
    """Returns a value as a NumPy array of bits that compare."""
    x = jax.random.key_data(x) if jnp.issubdtype(x.dtype, jax.dtypes.prng_key) else x
    return np.asarray(x.astype(jnp.int8) if x.dtype.itemsize < 1 or "int4" in str(x.dtype) or "int2" in str(x.dtype) else x)


def random_mesh(pick, name, devices):
    """Returns a mesh of two axes over some of the devices."""
    size = pick.choice([n for n in (1, 2, 3, 4, 6, 8) if n <= len(devices)])
    first = pick.choice([n for n in (1, 2, 3, 4, 8) if size % n == 0])
    at = pick.sample(devices, size) if pick.random() < 0.3 else sorted(pick.sample(devices, size))
    return StageMesh(name, "box", "t0", (("data", first), ("model", size // first)), tuple(at))


def random_pair(seed):
    """Returns (cluster, source, source spec, target, target spec, array) number `seed`."""
    pick = random.Random(seed)
    cluster = CLUSTERS[seed % len(CLUSTERS)]
    devices = list(range(8))
    if pick.random() < 0.85:  # else the meshes may share devices
        pick.random() < 0.5 and pick.shuffle(devices)
        half = pick.choice([2, 4, 4, 6])
        ends = (devices[:half], devices[half:])
    else:
        ends = (devices, devices)
    source, target = (random_mesh(pick, n, e) for n, e in zip(("s0", "s1"), ends))
    shape = tuple(pick.choice([0, 1, 2, 3, 4, 4, 5, 6, 7, 8, 8, 12]) if pick.random() < 0.95 else 0 for _ in range(pick.randint(0, 3)))
    dtype = pick.choice(DTYPES)
    specs = [pick.choice(possible_specs(m, shape)) for m in (source, target)]
    array = make_array(np.random.default_rng(seed), shape, dtype)
    return cluster, source, specs[0], target, specs[1], array


def itemsize_of(array):
    return 8 if jnp.issubdtype(array.dtype, jax.dtypes.prng_key) else dtype_itemsize(short_dtype(array.dtype.name))


def carry(cluster, source, source_spec, target, target_spec, array, way=None):
    """Returns the plan (or a way of that number instead), what carried the array, and the array on the target mesh."""
    item = itemsize_of(array)
    plan = plan_reshard(cluster, source, source_spec, target, target_spec, array.shape, item)
    if way is not None:
        held, wanted = layout(source, source_spec, array.shape), layout(target, target_spec, array.shape)
        ways = list(candidates(cluster, held, wanted, item))
        plan = dataclasses.replace(plan, route=ways[way % len(ways)])
    reshard = Reshard("x", 0, "micro", 0, 1, source_spec, target_spec, array.size * item, plan.pieces)
    devices = jax.devices()
    meshes = [jax_mesh(m, devices) for m in (source, target)]
    placed = jax.device_put(array, named_sharding(meshes[0], source_spec))
    wanted = named_sharding(meshes[1], target_spec)
    move = make_move(reshard, Aval(short_dtype(array.dtype.name), array.shape), source, target, meshes[1], dict(enumerate(devices)))
    if move is None:
        return plan, None, jax.device_put(placed, wanted)
    there = move(placed)
    assert there.sharding.is_equivalent_to(wanted, there.ndim)
    return plan, move, there


def check_pair(seed):
    moved = check_way(seed, None)
    if seed % 3 == 0:  # also a way that the planner may not have taken
        check_way(seed, seed // 3)
    return moved


def check_way(seed, way):
    cluster, source, source_spec, target, target_spec, array = random_pair(seed)
    plan, move, there = carry(cluster, source, source_spec, target, target_spec, array, way)
    assert there.dtype == array.dtype and there.shape == array.shape
    np.testing.assert_array_equal(plain(there), plain(array))
    blocks = target.blocks(target_spec, array.shape)
    for shard in there.addressable_shards:  # every replica, not only the first
        start, stop = blocks[shard.device.id]
        np.testing.assert_array_equal(plain(shard.data), plain(array[tuple(map(slice, start, stop))]))
    if move is None:
        return 0
    item = itemsize_of(array)
    planned = {}
    for p in plan.pieces:
        inside = move.completes and p.source in target.devices and p.source not in source.devices
        if p.source != p.target and not inside:
            size = item * math.prod(b - a for a, b in zip(p.start, p.stop))
            planned[p.source, p.target] = planned.get((p.source, p.target), 0) + size
    assert dict(move.bytes_sent) == planned
    return 1


@pytest.mark.parametrize("part", range(6))
def test_random_pairs_arrive_unchanged(part):
    moved = sum(check_pair(seed) for seed in range(part, 60, 6))
    assert moved >= 4


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(8))
def test_two_thousand_random_pairs_arrive_unchanged(part):
    for seed in range(1000 + part, 3000, 8):
        check_pair(seed)


def test_replicas_of_a_value_that_does_not_divide():
    """Four replicas to three, five rows: shares differ by one row, and devices pass them on."""
    source = StageMesh("s0", "box", "t0", (("model", 4),), (0, 1, 2, 3))
    target = StageMesh("s1", "box", "t1", (("model", 3),), (4, 5, 6))
    array = jnp.arange(5 * 1024.0).reshape(5, 1024)
    cluster = cluster_of(((4,), (1, 1, 2)))
    _, move, there = carry(cluster, source, ((), ()), target, ((), ()), array)
    np.testing.assert_array_equal(there, array)
    assert move.bytes_between == array.nbytes


def test_the_target_mesh_completes_shares_with_a_collective():
    source = StageMesh("s0", "box", "t0", (("model", 4),), (0, 1, 2, 3))
    target = StageMesh("s1", "box", "t0", (("model", 4),), (4, 5, 6, 7))
    array = jnp.arange(1024 * 1024.0).reshape(1024, 1024)
    _, move, there = carry(CLUSTERS[3], source, ((), ()), target, ((), ()), array)
    carried = sum(move.bytes_sent.values())
    np.testing.assert_array_equal(there, array)
    if move.completes:
        assert carried == array.nbytes


def test_a_value_that_lies_elsewhere_is_refused():
    source = StageMesh("s0", "box", "t0", (("model", 4),), (0, 1, 2, 3))
    target = StageMesh("s1", "box", "t0", (("model", 4),), (4, 5, 6, 7))
    array = jnp.arange(64.0).reshape(8, 8)
    _, move, _ = carry(CLUSTERS[0], source, ((), ()), target, ((), ()), array)
    mesh = jax_mesh(source, jax.devices())
    with pytest.raises(RuntimeFault, match=r"x: device .* holds \(2, 8\) of a value \(8, 8\); the plan has the block"):
        move(jax.device_put(array, named_sharding(mesh, (("model",), ()))))
    with pytest.raises(RuntimeFault, match=r"holds .* the plan has nothing of"):
        move(jax.device_put(array, jax.devices()[7]))
    with pytest.raises(RuntimeFault, match="the value lies on 1 devices; the plan has it on 4"):
        move(jax.device_put(array, jax.devices()[0]))


def two_sites(first=4, second=2):
    """Returns two sites with a link quick enough that so small a step is cut in its middle."""
    return cluster_of(((first,), (second,)), "bandwidth_gb_s = 10\nlatency_us = 0.01")


def test_one_activation_crosses_per_microbatch_and_direction(monkeypatch):
    """tp 4 to tp 2 over a slow link: parameters of plain jit, and not a byte twice."""
    step, state, batch = support.make_linen(blocks=4)
    parallel = hetjax.parallelize(step, cluster=two_sites(), num_stages=2, num_microbatches=2, mesh="1,4;1,2")
    expected, _ = jax.jit(step)(state, batch)
    mine, _ = parallel(state, batch)
    assert_same(mine, expected)
    without = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,4;1,2", plan=parallel.plan, cluster=two_sites())
    with monkeypatch.context() as patch:  # whole copies instead: the same bits
        patch.setattr(instructions, "make_move", lambda *_: None)
        theirs, _ = without(state, batch)
    assert_same(mine, theirs, rtol=0, atol=0)
    program = parallel._latest.program
    activation = 4 * support.LENGTH * support.WIDTH * 4  # four examples of a microbatch, f32
    micro = [r for r in program.reshards if r.form == "micro"]
    assert [r.nbytes for r in micro] == [activation] * 2
    stats = parallel.stats()
    others = sum(r.nbytes for r in program.reshards if r.form != "micro")
    assert stats["steps"] and stats["bytes_between_stages"] == stats["steps"] * (2 * 2 * activation + others)
    for r in micro:
        crossing = [p for p in r.pieces if (p.source < 4) != (p.target < 4)]
        assert sum(math.prod(b - a for a, b in zip(p.start, p.stop)) * 4 for p in crossing) == activation
    check_lanes(parallel, state, batch, mine)


def in_shares(program, reshard):
    """Returns a reshard of a replicated value that comes in one share a target device, which then pass theirs on."""
    sources, targets = (program.meshes[s].devices for s in (reshard.source, reshard.target))
    shape = program.micro_avals[reshard.ref].shape
    n = shape[0] // len(targets)
    share = lambda k: ((n * k, *(0 for _ in shape[1:])), (n * k + n, *shape[1:]))  # noqa: E731
    entry = [Piece(sources[k % len(sources)], t, *share(k)) for k, t in enumerate(targets)]
    swaps = [Piece(a, b, *share(k)) for k, a in enumerate(targets) for b in targets if a != b]
    return dataclasses.replace(reshard, pieces=(*entry, *swaps))


def check_lanes(parallel, state, batch, expected):
    """Pieces on link threads, shares completed by the receiving lane: the same bits, in the time of the links."""
    old, cluster = parallel._latest, two_sites()
    program = old.program.replace(
        reshards=tuple(in_shares(old.program, r) if r.form == "micro" else r for r in old.program.reshards))
    verify_program(program)
    micro = {r.name for r in program.reshards if r.form == "micro"}
    for emulation in (None, cluster_emulation(cluster, program)):
        entry = Entry(old.bundle.replace(program=program), old.structure, old.returned)
        entry.adopt(old, threads=True, emulation=emulation)
        leaves, _ = flatten_call((state, batch), {}, False)
        for _ in range(2):
            new, _ = rebuild_result(entry.structure, entry.returned, entry.run(leaves, True), (state, batch), {})
            assert_same(new, expected, rtol=0, atol=0)
        sends = [t for t in entry.executor.times if t.task.kind == "send"]
        assert entry.executor.counters.bytes_between_stages == 2 * sum(t.nbytes for t in sends)
        if emulation is None:
            assert {t.task.work for t in entry.executor.times if t.task.kind == "recv"} == micro
        for t in sends if emulation else ():
            price = emulation.transfers[t.task.work]
            assert t.end_s - t.start_s >= price.serialisation_s + price.latency_s - 1e-9
