"""Casts move to where fewer bytes cross; a site gets a value once; the numbers stay plain jit's."""

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
from hetjax.ir.program import Fragment, Port, Program, StageMesh
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
