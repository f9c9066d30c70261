"""Models whose layers are one nn.scan, cut between their layers: state, evaluation, saved plans."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from flax.training import train_state

import hetjax
from hetjax.errors import PlanError
from tests.support import VOCAB, assert_same, make_batch

WIDTH = 16


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        y = nn.Dense(WIDTH)(nn.gelu(nn.Dense(2 * WIDTH)(nn.LayerNorm()(x))))
        return x + nn.Dropout(0.1, deterministic=False)(y), None


class Scanned(nn.Module):
    layers: int = 4
    remat: bool = False

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, WIDTH, name="embed")(tokens)
        layer = nn.remat(Layer, prevent_cse=False) if self.remat else Layer
        loop = nn.scan(layer, variable_axes={"params": 0}, split_rngs={"params": True, "dropout": True}, length=self.layers)
        return nn.Dense(VOCAB, name="head")(loop(name="layers")(x, None)[0])


def scanned(layers=4, remat=False):
    model, batch = Scanned(layers, remat), make_batch()
    params = model.init({"params": jax.random.key(0), "dropout": jax.random.key(1)}, batch["tokens"])["params"]
    tx = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(0.1, momentum=0.9))
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, batch):
        key = jax.random.fold_in(jax.random.key(7), state.step)

        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"], rngs={"dropout": key})
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            return (each * batch["mask"]).sum() / batch["mask"].sum()

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": loss}

    return step, state, batch


def train(step, state, batch, steps=2):
    for _ in range(steps):
        state, out = step(state, batch)
    return state, out


@pytest.mark.parametrize(
    ("layers", "remat", "stages", "microbatches", "mesh", "edges"),
    [(4, False, 2, 2, "2,1", (0, 2, 4)), (3, True, 3, 2, "1,1", (0, 1, 2, 3)), (3, False, 2, 1, "2,1", (0, 2, 3))],
)
def test_equal_to_plain_jit(layers, remat, stages, microbatches, mesh, edges):
    step, state, batch = scanned(layers, remat)
    parallel = hetjax.parallelize(step, num_stages=stages, num_microbatches=microbatches, mesh=mesh)
    got, want = train(parallel, state, batch), train(jax.jit(step), state, batch)
    assert parallel.plan.layer_edges == (edges,)
    assert_same(jax.device_get(got), jax.device_get(want))
    # One activation each way per microbatch and cut; beside it scalars: the loss, the parts of a global norm.
    activation = batch["tokens"].size * WIDTH * 4
    moved = 2 * (stages - 1) * activation
    if len({b - a for a, b in itertools.pairwise(edges)}) == 1:
        assert moved <= parallel.stats()["bytes_between_stages"] <= moved + 256


def test_rows_stay_on_the_stages_that_use_them():
    step, state, batch = scanned()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1")
    state, _ = train(parallel, state, batch)
    kernel, trace = state.params["layers"]["Dense_0"]["kernel"], state.opt_state[1][0].trace["layers"]["Dense_0"]["kernel"]
    for leaf in (kernel, trace):
        rows = {shard.index[0].indices(4)[:2] for shard in leaf.addressable_shards}
        assert rows == {(0, 2), (2, 4)} and len(leaf.sharding.device_set) == 4
    assert parallel.abstract_state().params["layers"]["Dense_0"]["kernel"].sharding == kernel.sharding
    before = parallel.stats()["bytes_between_stages"]
    train(parallel, state, batch, 1)
    assert parallel.stats()["bytes_between_stages"] == before
    # Leaves work like any others: on the host, doubled, in a function that follows the plan.
    np.testing.assert_array_equal(np.asarray(kernel * 2), 2 * np.asarray(kernel))
    norm = hetjax.parallelize(lambda s: optax.tree.norm(s.params), like=parallel)
    np.testing.assert_allclose(norm(state), optax.tree.norm(jax.device_get(state.params)), rtol=1e-6)


def test_a_saved_plan_splits_the_same_way(tmp_path):
    step, state, batch = scanned()
    first = hetjax.parallelize(step, num_stages=2, num_microbatches=2)
    first.plan_for(state, batch).save(tmp_path / "plan.json")
    again = hetjax.parallelize(step, plan=tmp_path / "plan.json")
    again.plan_for(state, batch)
    assert again.plan.hash == first.plan.hash
    other, state, batch = scanned(layers=5)
    with pytest.raises(PlanError, match=r"loops over \[4\] layers; this step has loops over \[5\]"):
        hetjax.parallelize(other, plan=tmp_path / "plan.json").plan_for(state, batch)


def test_nnx_layers():
    class Layers(nnx.Module):
        def __init__(self, rngs):
            self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
            make = nnx.vmap(lambda rngs: nnx.Linear(WIDTH, WIDTH, rngs=rngs), in_axes=0, out_axes=0)
            self.layers = nnx.split_rngs(splits=4)(make)(rngs)
            self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

        def __call__(self, tokens):
            forward = nnx.scan(lambda x, layer: x + jnp.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            return self.head(forward(self.embed(tokens), self.layers))

    def step(model, optimizer, batch):
        def loss_fn(model):
            return optax.softmax_cross_entropy_with_integer_labels(model(batch["tokens"]), batch["targets"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    def made():
        model = Layers(nnx.Rngs(0))
        return model, nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    batch, ours, plain = make_batch(), made(), made()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1")
    for _ in range(2):
        losses = parallel(*ours, batch), nnx.jit(step)(*plain, batch)
    np.testing.assert_allclose(*losses, rtol=1e-6)
    ((first, cut, last),) = parallel.plan.layer_edges
    assert (first, last) == (0, 4) and 0 < cut < 4
    assert_same(jax.device_get(nnx.state(ours)), jax.device_get(nnx.state(plain)))
