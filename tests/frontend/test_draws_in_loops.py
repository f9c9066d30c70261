"""Dropout inside scan and checkpoint, in microbatches: the numbers of the plain step."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax.training.train_state import TrainState

import hetjax

RNG = np.random.default_rng(1)


def make():
    params = {"w": RNG.standard_normal((3, 4, 4)).astype(np.float32) / 2, "out": RNG.standard_normal((4, 2)).astype(np.float32)}
    state = TrainState.create(apply_fn=None, params=params, tx=optax.sgd(0.1))
    batch = {"x": RNG.standard_normal((8, 4)).astype(np.float32), "y": RNG.standard_normal((8, 2)).astype(np.float32)}

    def step(state, batch):
        def loss(params):
            @jax.checkpoint
            def layer(h, a):
                w, key = a
                h = jnp.tanh(h @ w)
                return jnp.where(jax.random.bernoulli(key, 0.5, h.shape), h * 2, 0)

            keys = jax.random.split(jax.random.fold_in(jax.random.key(0), state.step), 3)
            h, _ = jax.lax.scan(lambda h, a: (layer(h, a), None), batch["x"], (params["w"], keys))
            return jnp.mean((h @ params["out"] - batch["y"]) ** 2)

        value, grads = jax.value_and_grad(loss)(state.params)
        return state.apply_gradients(grads=grads), value

    return step, state, batch


def test_dropout_in_a_checkpointed_scan_equals_plain_jit():
    step, state, batch = make()
    plain = jax.jit(step)
    parallel = hetjax.parallelize(step, num_stages=1, num_microbatches=4, mesh="1,1")
    theirs = ours = state
    for _ in range(2):
        theirs, _ = plain(theirs, batch)
        ours, loss = parallel(ours, batch)
    assert parallel.plan.num_microbatches == 4 and np.isfinite(loss)
    for a, b in zip(jax.tree.leaves(theirs.params), jax.tree.leaves(ours.params)):
        np.testing.assert_allclose(a, b, rtol=2e-6, atol=2e-7)
