"""Experts split over tensor-parallel devices: found by the same candidates as columns and rows, from products' batch dimensions."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax.training import train_state

import hetjax
from hetjax.explaining.movements import movements
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.pipeline import analyse
from hetjax.planning.traced_table import TracedTable
from tests.support import assert_same, copy_tree

EXPERTS, CHOSEN = 4, 2
NODE = 'name = "node"\n[[sites]]\nname = "here"\n[[sites.nodes]]\nkind = "a100-80g"\ndevices = 8\n'


class Routed(nn.Module):
    """A mixture of experts: the best two of each token, a capacity for each expert, dispatch by einsum (GShard, 2020)."""

    width: int
    capacity: int

    @nn.compact
    def __call__(self, x):
        gates = jax.nn.softmax(nn.Dense(EXPERTS, use_bias=False, name="gate")(x))
        best, chosen = jax.lax.top_k(gates, CHOSEN)  # [batch, tokens, chosen]
        wanted = jax.nn.one_hot(chosen, EXPERTS, dtype=jnp.int32)
        order = jnp.cumsum(wanted.reshape(x.shape[0], -1, EXPERTS), axis=1).reshape(wanted.shape) - 1
        slot = jax.nn.one_hot(jnp.where(wanted > 0, order, -1).max(-1), self.capacity)  # none for who comes too late
        wanted = wanted.astype(x.dtype)
        weighed = best / best.sum(-1, keepdims=True)
        dispatch = jnp.einsum("btke,btkc->btec", wanted, slot)
        combine = jnp.einsum("btk,btke,btkc->btec", weighed, wanted, slot)
        init = nn.initializers.lecun_normal(batch_axis=(0,))
        up = self.param("up", init, (EXPERTS, self.width, 4 * self.width))
        down = self.param("down", init, (EXPERTS, 4 * self.width, self.width))
        given = jnp.einsum("btec,btd->becd", dispatch, x)
        made = jnp.einsum("becf,efd->becd", jax.nn.gelu(jnp.einsum("becd,edf->becf", given, up)), down)
        return jnp.einsum("btec,becd->btd", combine, made)


class Mixed(nn.Module):
    width: int
    capacity: int
    layers: int

    @nn.compact
    def __call__(self, x):
        for i in range(self.layers):
            x = x + Routed(self.width, self.capacity, name=f"routed_{i}")(nn.LayerNorm(name=f"norm_{i}")(x))
        return x


def make(width, length, batch, layers=2):
    model = Mixed(width, max(1, CHOSEN * length // EXPERTS), layers)

    def step(state, x):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((state.apply_fn({"params": p}, x) - 1) ** 2))(state.params)
        return state.apply_gradients(grads=grads), loss

    def create():
        params = model.init(jax.random.key(0), jnp.ones((1, length, width)))["params"]
        return train_state.TrainState.create(apply_fn=model.apply, params=params, tx=optax.sgd(0.1, momentum=0.9))

    return step, create, (batch, length, width)


@pytest.fixture(scope="module")
def table():
    step, create, shape = make(width=256, length=512, batch=8)
    state, x = jax.eval_shape(create), jax.ShapeDtypeStruct(shape, jnp.float32)
    traced = hetjax.parallelize(step, num_stages=1, num_microbatches=1).lower(state, x)._entry.graph
    graph = analyse(Bundle(graph=traced)).graph
    assert graph is not None
    return TracedTable(Bundle(graph=graph, microbatching=one_microbatch(graph)), Cluster.parse(NODE))


def test_experts_are_split_and_their_exchange_is_priced(table):
    specs = {path: spec for path, (_, spec) in table.tensor_specs(4).items()}
    for i in range(2):
        for name in ("up", "down"):
            assert specs[f"state/params/routed_{i}/{name}"] == (("model",), (), ())
            assert specs[f"state/opt_state/0/trace/routed_{i}/{name}"] == (("model",), (), ())
    moved = [(kind, n) for work in table._degree(4).works for kind, n, _ in (*work.ahead, *work.back)]
    assert any(kind in ("all-reduce", "all-to-all", "reduce-scatter") and n >= 512 * 256 * 4 for kind, n in moved)
    one, four = table.times("a100-80g", 1, 8), table.times("a100-80g", 4, 8)
    assert sum(four.forward_s) < 0.75 * sum(one.forward_s)


@pytest.mark.parametrize("sequence", [False, pytest.param(True, marks=pytest.mark.nightly)])
def test_experts_apart_have_plain_jits_numbers(table, sequence):
    layers = 1 + sequence
    step, create, shape = make(width=16, length=8, batch=4, layers=layers)
    state, x = create(), np.random.default_rng(0).normal(size=shape).astype(np.float32)
    plan = hetjax.parallelize(step, num_stages=1, num_microbatches=2, mesh="1,4").plan_for(state, x)
    specs = tuple((path, spec) for path, (_, spec) in sorted(table.tensor_specs(4).items()) if layers == 2 or "_0" in path)
    stages = tuple(dataclasses.replace(s, sequence=sequence) for s in plan.stages)
    parallel = hetjax.parallelize(step, plan=dataclasses.replace(plan, state_specs=specs, stages=stages))
    ours, theirs = copy_tree(state), copy_tree(state)
    for _ in range(2):
        ours, out = parallel(ours, x)
        theirs, expected = jax.jit(step)(theirs, x)
    assert ours.params["routed_0"]["up"].addressable_shards[0].data.shape[0] == 1
    assert_same(jax.device_get((ours, out)), jax.device_get((theirs, expected)))
    assert any("axis model" in m.where and m.nbytes >= 64 for m in movements(parallel._in_use().bundle))
