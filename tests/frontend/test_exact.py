"""A step in double precision, and what it decides; values of the batch alone with one microbatch."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hetjax
from hetjax.frontend.compare import Leaf, compare_step
from hetjax.frontend.double import in_double


def double_of(fn, *args):
    closed = jax.make_jaxpr(fn)(*args)
    with jax.enable_x64(True):
        return jax.jit(in_double(closed))(*jax.tree.leaves(args))


def test_floats_are_wide_and_draws_are_the_same():
    def fn(key, w, x):
        keep = jax.random.bernoulli(key, 0.5, x.shape)
        y = lax.scan(lambda c, v: (jnp.tanh(c @ v), c.sum()), jnp.where(keep, x, 0), jnp.stack([w, w]))
        z = jax.checkpoint(lambda a: lax.cond(a.sum() > 0, jnp.sin, jnp.cos, a))(y[0].astype(jnp.bfloat16))
        return keep, y, z, jnp.zeros((3, 4)).at[x.astype(int)[:, 0] % 3].add(x)

    rng = np.random.default_rng(0)
    args = jax.random.key(3), rng.standard_normal((4, 4)).astype(np.float32), rng.standard_normal((6, 4)).astype(np.float32)
    plain, wide = jax.tree.leaves(jax.jit(fn)(*args)), double_of(fn, *args)
    np.testing.assert_array_equal(plain[0], wide[0])
    assert [w.dtype for w in wide[1:]] == [np.float64] * 4
    for p, w, tol in zip(plain[1:], wide[1:], (1e-6, 1e-6, 2e-2, 1e-6), strict=True):
        np.testing.assert_allclose(np.asarray(p, np.float64), w, atol=tol)
    with jax.enable_x64(True):
        y = np.where(np.asarray(plain[0]), args[2].astype(np.float64), 0)
        for _ in range(2):
            y = np.tanh(y @ args[1].astype(np.float64))
    np.testing.assert_allclose(wide[1], y, atol=1e-14)


def test_host_integers_stay_what_jax_makes_of_them():
    assert double_of(lambda i, x: x * (i < lax.iota(jnp.int32, 3)), np.arange(3), np.ones(3, np.float32))[0].dtype == np.float64


def leaves(**values):
    return {tuple(k.split("_")): Leaf(np.asarray(v, np.float32), False, "float32") for k, v in values.items()}


@pytest.mark.quick
def test_cancelling_sums_are_judged_by_what_plain_jit_loses():
    asked = []

    def exact():
        asked.append(1)
        return {("state", "a"): np.zeros(2), ("state", "b"): np.full(2, 0.5)}

    plain = leaves(a=[4e-8, -4e-8], b=[0.5, 0.5])
    judge = lambda got: {d.path: d for d in compare_step(plain, (plain, {}), (got, {}), exact=exact)}  # noqa: E731
    assert all(d.ok for d in judge(leaves(a=[4e-8, -3.9e-8], b=[0.5, 0.5])).values()) and not asked
    noisy = judge(leaves(a=[-9e-8, 1e-8], b=[0.5, 0.5]))
    assert noisy["state/a"].ok and "off by 4e-08" in noisy["state/a"].note and asked
    wrong = judge(leaves(a=[4e-7, 0.0], b=[0.5001, 0.5]))
    assert not wrong["state/a"].ok and not wrong["state/b"].ok


def test_values_of_the_batch_alone_run_before_the_one_forward():
    def step(w, batch):
        weight = (batch["x"].sum(-1) > 0).astype(jnp.float32)  # outside of the loss: neither forward nor update
        count = batch["x"].shape[0]

        def loss(w):
            hidden = jnp.tanh(jnp.tanh(batch["x"] @ w[0]) @ w[1])
            return jnp.sum(weight * jnp.square(hidden @ w[2]).sum(-1)) / weight.sum()

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), {"loss": value, "count": count, "rows": jnp.asarray(2.0) * count}

    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(3)]
    batch = {"x": rng.standard_normal((8, 8)).astype(np.float32)}
    want = jax.jit(step)(w, batch)
    for count in (1, 2):
        got = hetjax.parallelize(step, num_stages=2, num_microbatches=count, mesh="2,1")(w, batch)
        for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
            np.testing.assert_allclose(a, b, rtol=2e-6, atol=1e-7)
            assert (a.dtype, a.weak_type) == (b.dtype, b.weak_type)
