"""Casts move to where fewer bytes cross; a site gets a value once; the numbers stay plain jit's."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

import hetjax
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.graph import Aval, Op
from hetjax.ir.program import Fragment, Port, Program, Return, StageMesh
from hetjax.ir.verify import verify_program
from hetjax.passes.free_specs import is_free
from hetjax.passes.insert_reshards import find_reshards
from hetjax.passes.optimise_reshards import OptimiseReshards
from tests.support import assert_same

FLAT = ((), ())


def chain(first, last):
    """Returns a program in which stage 0 makes %2 from %1 by `first`, and stage 1 reads %2 and makes %3 by `last`."""
    names = ("f32", first, last, "f32") if isinstance(first, str) else None
    cast = lambda a, b: Op("convert_element_type", (a,), (b,))  # noqa: E731
    avals = tuple(Aval(d, (4, 8)) for d in names)
    fragments = (
        Fragment("s0/forward", 0, "forward", 0, (Op("tanh", (0,), (1,)), cast(1, 2)), (Port(0, "micro", FLAT),), (Port(2, "micro", FLAT),)),
        Fragment("s1/forward", 1, "forward", 0, (cast(2, 3), Op("tanh", (3,), (4,))), (Port(2, "micro", FLAT),), (Port(4, "micro", FLAT),)),
    )
    meshes = tuple(StageMesh(f"s{s}", "box", "ab"[s], (("data", 1),), (s,)) for s in range(2))
    program = Program("step", 2, "", meshes, (*avals, avals[3]), (*avals, avals[3]), fragments)
    return program.replace(reshards=tuple(find_reshards(program)))


def test_a_widening_cast_is_done_by_the_receiver():
    program = chain("bf16", "f32")
    after = OptimiseReshards().apply(Bundle(program=program)).program
    (r,) = after.reshards
    assert (r.ref, r.nbytes, program.reshards[0].nbytes) == (1, 64, 128)
    assert [op.outputs for op in after.fragment("s1/forward").ops] == [(2,), (3,), (4,)]
    assert [p.ref for p in after.fragment("s0/forward").outputs] == [1]
    again = OptimiseReshards().apply(Bundle(program=after))
    assert again.program is after


def test_a_narrowing_cast_is_done_by_the_sender():
    program = chain("f32", "f32")
    avals = tuple(Aval("bf16", (4, 8)) if i >= 3 else a for i, a in enumerate(program.avals))
    program = program.replace(avals=avals, micro_avals=avals)
    program = program.replace(reshards=tuple(find_reshards(program)))
    after = OptimiseReshards().apply(Bundle(program=program)).program
    (r,) = after.reshards
    assert (r.ref, r.nbytes) == (3, 64)
    assert [op.outputs for op in after.fragment("s0/forward").ops] == [(1,), (2,), (3,)]
    assert [op.outputs for op in after.fragment("s1/forward").ops] == [(4,)]


def boundary(first, last, shapes, specs=None):
    """Returns a program: %1 = tanh %0 and %2 = first %1 on stage 0, %3 = last %2 and %4 = tanh %3 on stage 1."""
    avals = tuple(Aval("f32", s) for s in (shapes[0], *shapes, shapes[-1]))
    specs = specs or [tuple(() for _ in s) for s in shapes]
    source, target = first[1:], last[1:]
    fragments = (
        Fragment("s0/forward", 0, "forward", 0, (Op("tanh", (0,), (1,)), Op(first[0], (1,), (2,), source)),
                 (Port(0, "micro", specs[0]),), (Port(2, "micro", specs[1]),)),
        Fragment("s1/forward", 1, "forward", 0, (Op(last[0], (2,), (3,), target), Op("tanh", (3,), (4,))),
                 (Port(2, "micro", specs[1]),), (Port(4, "micro", specs[2]),)),
    )
    meshes = tuple(StageMesh(f"s{s}", "box", "ab"[s], (("data", 2),), (2 * s, 2 * s + 1)) for s in range(2))
    program = Program("step", 2, "", meshes, avals, avals, fragments)
    return program.replace(reshards=tuple(find_reshards(program)))


DATA = ("data",)


@pytest.mark.parametrize("last, shape, spec, sent", [
    (("reduce_max", ("axes", (1,))), (4,), (DATA,), True),
    (("slice", ("start_indices", (0, 0)), ("limit_indices", (4, 2)), ("strides", None)), (4, 2), (DATA, ()), True),
    (("reduce_sum", ("axes", (0,))), (8,), ((),), False),  # over what is split: the sender would need a collective
    (("slice", ("start_indices", (0, 0)), ("limit_indices", (2, 8)), ("strides", None)), (2, 8), (DATA, ()), False),
    (("tanh",), (4, 8), (DATA, ()), False),
])
def test_a_receiver_that_shrinks_a_value_first_gets_it_shrunk(last, shape, spec, sent):
    program = boundary(("tanh",), last, [(4, 8), (4, 8), shape], [(DATA, ()), (DATA, ()), spec])
    after = OptimiseReshards().apply(Bundle(program=program)).program
    (r,) = after.reshards
    assert r.ref == (3 if sent else 2)
    if sent:
        assert (r.nbytes, r.source_spec, r.target_spec) == (4 * math.prod(shape), spec, spec)


def test_a_broadcast_is_done_by_the_receiver():
    program = boundary(
        ("broadcast_in_dim", ("shape", (4, 8)), ("broadcast_dimensions", (0,)), ("sharding", None)), ("tanh",),
        [(4,), (4, 8), (4, 8)], [(DATA,), (DATA, ()), (DATA, ())])
    after = OptimiseReshards().apply(Bundle(program=program)).program
    (r,) = after.reshards
    assert (r.ref, r.nbytes, r.source_spec, r.target_spec) == (1, 16, (DATA,), (DATA,))
    assert [op.primitive for op in after.fragment("s1/forward").ops] == ["broadcast_in_dim", "tanh", "tanh"]


def test_a_cast_that_others_read_too_stays():
    """Stage 1 also reads the wide value itself: narrowing early would send both."""
    program = chain("f32", "f32")
    avals = tuple(Aval("bf16", (4, 8)) if i >= 3 else a for i, a in enumerate(program.avals))
    reader = program.fragments[1]
    reader = Fragment(reader.name, 1, "forward", 0, (*reader.ops, Op("neg", (2,), (4,))), reader.inputs, reader.outputs)
    program = program.replace(avals=avals, micro_avals=avals, fragments=(program.fragments[0], reader))
    bundle = Bundle(program=program.replace(reshards=tuple(find_reshards(program))))
    assert OptimiseReshards().apply(bundle) is bundle


TWO_SITES = """
name = "two sites"
[[sites]]
name = "a"
[[sites.nodes]]
kind = "box"
devices = 2
link = "inside"
[[sites]]
name = "b"
[[sites.nodes]]
kind = "box"
devices = 4
link = "inside"
[links.inside]
bandwidth_gb_s = 10
latency_us = 0.1
[links.wan]
between = ["a", "b"]
bandwidth_gb_s = 10
latency_us = 0.1
[kinds.box]
like = "cpu"
"""


class Skips(nn.Module):
    """Nine blocks that all read the first features."""

    @nn.compact
    def __call__(self, x):
        first = nn.Dense(16, name="first")(x)
        y = first
        for i in range(9):
            y = nn.Dense(16, name=f"block_{i}")(nn.tanh(y + first))
        return nn.Dense(1, name="head")(y)


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
def test_a_value_that_two_stages_of_a_site_read_crosses_once(schedule):
    model = Skips()
    batch = {"x": jax.random.normal(jax.random.key(1), (8, 16)), "y": jnp.ones((8, 1))}
    params = model.init(jax.random.key(0), batch["x"])["params"]
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1))

    def step(state, batch):
        loss = lambda p: ((state.apply_fn({"params": p}, batch["x"]) - batch["y"]) ** 2).mean()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    parallel = hetjax.parallelize(
        step, cluster=Cluster.parse(TWO_SITES), num_stages=3, num_microbatches=2, mesh="1,2", schedule=schedule)
    mine, _ = parallel(state, batch)
    expected, _ = jax.jit(step)(state, batch)
    assert_same(mine, expected)
    program = parallel._latest.program
    forward = {(r.ref, r.source, r.target) for r in program.reshards if r.form == "micro" and r.source < r.target}
    both = {ref for ref, s, t in forward if (s, t) == (0, 1)} & {ref for ref, s, t in forward if (s, t) == (1, 2)}
    assert both, forward  # a value that went on from stage 1
    assert not any((ref, 0, 2) in forward for ref in both)


ONE_NODE = """
name = "one node"
[[sites]]
name = "a"
[[sites.nodes]]
kind = "box"
devices = 8
link = "inside"
[links.inside]
bandwidth_gb_s = 1
latency_us = 0.1
[kinds.box]
like = "cpu"
"""


class Watched(nn.Module):
    @nn.compact
    def __call__(self, x):
        first = nn.Dense(4096, name="first")(x)
        y = first[:, :256]
        for i in range(6):
            y = nn.Dense(256, name=f"block_{i}")(nn.tanh(y))
        return first, y


def test_a_value_that_is_only_summed_comes_in_shares():
    """A metric of a wide value: each of four devices gets a quarter; what a product reads stays whole."""
    model = Watched()
    batch = {"x": jax.random.normal(jax.random.key(1), (8, 16)), "y": jnp.ones((8, 256))}
    state = train_state.TrainState.create(
        apply_fn=model.apply, params=model.init(jax.random.key(0), batch["x"])["params"], tx=optax.sgd(0.1))

    def step(state, batch):
        def loss_fn(p):
            first, y = state.apply_fn({"params": p}, batch["x"])
            seen = jax.lax.stop_gradient((jnp.square(first) * y.sum(1, keepdims=True)).mean())
            return ((y - batch["y"]) ** 2).mean(), seen

        (value, seen), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        return state.apply_gradients(grads=grads), (value, seen)

    parallel = hetjax.parallelize(
        step, cluster=Cluster.parse(ONE_NODE), num_stages=2, num_microbatches=2, mesh="1,4")
    mine, out = parallel(state, batch)
    expected, theirs = jax.jit(step)(state, batch)
    assert_same(mine, expected)
    assert_same(out, theirs)
    program = parallel._latest.program
    verify_program(program)
    wide, narrow = sorted(
        (r for r in program.reshards if r.source < r.target and program.micro_avals[r.ref].ndim == 2),
        key=lambda r: -r.nbytes)
    assert program.meshes[1].parts(wide.target_spec) in ((4, 1), (1, 4))
    ports = [p for f in program.fragments if f.stage == 1 for p in f.inputs if p.ref == wide.ref]
    assert {p.spec for p in ports} == {wide.target_spec}
    moved = sum(math.prod(b - a for a, b in zip(p.start, p.stop)) * 4 for p in wide.pieces)
    assert moved == wide.nbytes == 4 * 4096 * 4
    assert narrow.target_spec == ((), ())


def test_what_makes_a_receiver_free():
    """Elementwise work that ends in one number, or handing on; not a product, a residual or a result."""
    base = chain("f32", "f32")

    def reader(*ops, outputs=()):
        avals = (*base.avals, Aval("f32", ()), Aval("f32", (4,)))
        f = dataclasses.replace(base.fragments[1], ops=ops, outputs=outputs)
        program = base.replace(avals=avals, micro_avals=avals, fragments=(base.fragments[0], f))
        return is_free(program, 1, 2)

    square, total = Op("square", (2,), (3,)), Op("reduce_sum", (3,), (5,))
    assert reader(square, total, outputs=(Port(5, "sum", ()),))
    assert reader(outputs=(Port(2, "micro", FLAT),))
    assert not reader(square, outputs=(Port(3, "micro", FLAT),))
    assert not reader(square, Op("reduce_sum", (3,), (6,)))
    assert not reader(Op("dot_general", (2, 2), (3,)))
    result = base.replace(returns=(Return(0, 1, Port(2, "step", FLAT)),))
    assert not is_free(result, 1, 2)
