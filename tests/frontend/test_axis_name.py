"""Steps written for pmap: their axis bound, with the numbers pmap gives on as many devices."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax

import hetjax
from hetjax.errors import PlanError
from hetjax.frontend.axis import bind_axis

WIDTH = 8


def pmap_step(state, batch):
    """Per-replica masked means and dropout keys, gradients averaged: what splitting the batch changes."""
    key = jax.random.fold_in(jax.random.key(3), lax.axis_index("batch"))

    def loss_fn(params):
        hidden = jnp.tanh(batch["x"] @ params["in"])
        hidden = jnp.where(jax.random.bernoulli(key, 0.8, hidden.shape), hidden, 0)
        each = jnp.square(hidden @ params["out"] - batch["y"]).sum(-1)
        return (each * batch["mask"]).sum() / batch["mask"].sum()

    loss, grads = jax.value_and_grad(loss_fn)(state["params"])
    grads = lax.pmean(grads, "batch")
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {"params": params}, {"loss": lax.pmean(loss, "batch"), "examples": lax.psum(batch["mask"].sum(), "batch")}


def inputs():
    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    state = {"params": {"in": jnp.asarray(draw(WIDTH, WIDTH)), "out": jnp.asarray(draw(WIDTH, WIDTH))}}
    batch = {"x": draw(8, WIDTH), "y": draw(8, WIDTH), "mask": np.array([1, 1, 1, 1, 1, 0, 1, 0], np.float32)}
    return state, batch


def under_pmap(step, state, batch, replicas):
    copies = jax.tree.map(lambda x: jnp.stack([x] * replicas), state)
    parts = jax.tree.map(lambda x: x.reshape(replicas, -1, *x.shape[1:]), batch)
    return jax.pmap(step, axis_name="batch", devices=jax.devices()[:replicas])(copies, parts)


@pytest.mark.parametrize("replicas", [1, 2, 4])
def test_equal_to_pmap_on_as_many_devices(replicas):
    state, batch = inputs()
    want = jax.tree.map(lambda x: x[0], under_pmap(pmap_step, state, batch, replicas))
    parallel = hetjax.parallelize(
        pmap_step, axis_name="batch", replicas=replicas, num_stages=2, num_microbatches=2 if replicas == 1 else 1, mesh="2,1"
    )
    got = parallel(state, batch)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(a, b, rtol=3e-6, atol=1e-6)
    assert f"bound to {'one replica' if replicas == 1 else f'{replicas} replicas'}" in parallel.explain()


def test_replicas_matter():
    state, batch = inputs()
    one, two = (jax.jit(bind_axis(pmap_step, "batch", n))(state, batch)[1] for n in (1, 2))
    assert abs(one["loss"] - two["loss"]) > 1e-4
    assert one["examples"] == two["examples"] == batch["mask"].sum()


@pytest.mark.quick
def test_results_that_differ_keep_the_axis_pmap_gives_them():
    state, batch = inputs()

    def step(state, batch):
        loss = batch["x"].sum() + 0 * state["params"]["in"].sum()
        return state, {"own": loss, "mean": lax.pmean(loss, "batch")}

    got, want = jax.jit(bind_axis(step, "batch", 2))(state, batch)[1], under_pmap(step, state, batch, 2)[1]
    np.testing.assert_allclose(got["own"], want["own"], rtol=1e-6)
    np.testing.assert_allclose(got["mean"], want["mean"][0], rtol=1e-6)


@pytest.mark.quick
def test_what_cannot_be_bound_is_told():
    state, batch = inputs()

    def forgets(state, batch):
        grads = jax.grad(lambda p: jnp.sum(batch["x"] @ p["in"]))(state["params"])
        return {"params": jax.tree.map(jnp.add, state["params"], grads)}, lax.psum(1, "batch")

    with pytest.raises(PlanError, match=r"differs between the replicas of axis 'batch' \(params/in\)[\s\S]*pmean"):
        bind_axis(forgets, "batch", 2)(state, batch)
    with pytest.raises(PlanError, match="3 replicas, which do not divide a batch of 8"):
        bind_axis(pmap_step, "batch", 3)(state, batch)
    with pytest.raises(PlanError, match="must be at least 1"):
        hetjax.parallelize(pmap_step, axis_name="batch", replicas=0)
    with pytest.raises(PlanError, match=r"uses the axis name 'batch'[\s\S]*axis_name='batch'"):
        hetjax.parallelize(pmap_step)(state, batch)


def test_a_linen_style_state_with_an_optimizer():
    tx = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2))
    params, batch = inputs()[0]["params"], inputs()[1]
    state = {"params": params, "opt": tx.init(params)}

    def step(state, batch):
        loss, grads = jax.value_and_grad(lambda p: jnp.mean(jnp.square(jnp.tanh(batch["x"] @ p["in"]) @ p["out"])))(state["params"])
        grads = lax.pmean(grads, axis_name="batch")
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, lax.pmean(loss, "batch")

    got = hetjax.parallelize(step, axis_name="batch", replicas=2, num_stages=2, num_microbatches=2)(state, batch)
    want = jax.tree.map(lambda x: x[0], under_pmap(step, state, batch, 2))
    np.testing.assert_allclose(got[1], want[1], rtol=1e-6)
    for a, b in zip(jax.tree.leaves(got[0]["opt"]), jax.tree.leaves(want[0]["opt"]), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7)
