"""whole-sums: plain jit's numbers to the last bit, where devices and microbatches would else add parts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

import hetjax
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Plan
from hetjax.passes.whole_sums import summed_dims

WIDTH = 8


def inputs():
    rng = np.random.default_rng(0)
    w = [jnp.asarray(rng.standard_normal((WIDTH, WIDTH)), jnp.float32) for _ in range(3)]
    return w, {"x": rng.standard_normal((16, WIDTH)).astype(np.float32), "t": rng.integers(0, WIDTH, 16).astype(np.int32)}


def step(w, batch):
    def loss(w):
        h = jnp.tanh(batch["x"] @ w[0]) + w[2][batch["t"]]
        return jnp.mean(jnp.square(jnp.tanh(jnp.tanh(h @ w[1]) @ w[2])))

    value, grads = jax.value_and_grad(loss)(w)
    return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value


def differing(parallel):
    """Returns how many new weights are not plain jit's; the loss is equal but for what XLA fuses with its sum."""
    (want, loss), (got, ours) = jax.jit(parallel.plain)(*inputs()), parallel(*inputs())
    np.testing.assert_allclose(ours, loss, rtol=2e-7)
    return sum(int(np.sum(np.asarray(a) != np.asarray(b))) for a, b in zip(got, want, strict=True))


@pytest.mark.parametrize(("num", "mesh", "words"), [
    (1, "2,1", "bytes a step are exchanged inside stages"), (4, "1,1", "wait for all 4 microbatches"),
    (2, "2,2", "bytes are kept for them until the update"),
])
def test_no_bit_differs_from_plain_jit(num, mesh, words):
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=num, mesh=mesh, sums="whole")
    assert differing(parallel) == 0
    assert parallel.plan.num_stages == 2 and words in parallel.explain()
    assert Plan.from_json(parallel.plan.to_json()).sums == "whole"


def test_in_parts_bits_differ():
    """The control: the numbers above are not equal by themselves."""
    assert differing(hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,2")) > 5


def test_batch_statistics_are_those_of_one_device():
    def normed(w, batch):
        def loss(w):
            h = batch["x"] @ w[0]
            h = (h - h.mean(0)) * lax.rsqrt(h.var(0) + 1e-5)
            return jnp.mean(jnp.square(jnp.tanh(h @ w[1]) @ w[2]))

        value, grads = jax.value_and_grad(loss)(w)
        return jax.tree.map(lambda a, g: a - 0.1 * g, w, grads), value

    whole, parts = (
        differing(hetjax.parallelize(normed, num_stages=1, num_microbatches=1, mesh="4,1", sums=sums)) for sums in ("whole", "")
    )
    assert 4 * whole < parts  # what is left is how XLA fuses the centring


@pytest.mark.quick
@pytest.mark.parametrize(("fn", "expected"), [
    (lambda x: x.sum(0), [(0, (0,))]), (lambda x: x.max(0), []), (lambda x: lax.cumsum(x, 1), [(0, (1,))]),
    (lambda x: jnp.einsum("bi,bj->ij", x, x), [(0, (0,)), (1, (0,))]),
    (lambda x: jnp.zeros((8, 4)).at[jnp.arange(4)].add(x), [(1, (0, 1)), (2, (0,))]),
    (lambda x: lax.conv(x[:, None], x[:, None], (1,), "SAME"), [(0, (1, 2)), (1, (1, 2))]),
])  # fmt: skip
def test_what_an_op_sums_over(fn, expected):
    eqns = jax.make_jaxpr(fn)(jnp.ones((4, 4))).jaxpr.eqns
    assert [found for e in eqns if (found := summed_dims(e))] == ([expected] if expected else [])


@pytest.mark.quick
def test_what_cannot_be_asked_for():
    with pytest.raises(PlanError, match="sums is 'all'; it may be '' or 'whole'"):
        hetjax.parallelize(step, sums="all")
    split = hetjax.parallelize(step, num_stages=2, num_microbatches=2, schedule="zb-h1", sums="whole")
    with pytest.raises(PlanError, match="they all wait for the update"):
        split.plan_for(*inputs())
