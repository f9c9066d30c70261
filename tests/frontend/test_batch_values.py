"""Values that depend on the batch alone, with one microbatch and with two."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np

import hetjax


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
