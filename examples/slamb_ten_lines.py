"""SLAMB in a bare shard_map loop: public jax and optax, eight workers, no other part of hetjax."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

from hetjax import slamb, slamb_average

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
tx = slamb(optax.cosine_decay_schedule(0.05, 300), "data", min_size=100, sync_every=10)
target = jax.random.normal(jax.random.key(0), (20, 10))


def train(params, inputs):
    """Each worker's slice of `inputs` `[steps, examples, 20]`; returns averaged parameters, losses."""
    params = jax.lax.pcast(params, "data", to="varying")  # the workers' parameters will differ

    def step(carry, x):
        params, state = carry
        loss, grads = jax.value_and_grad(lambda p: jnp.mean((x @ p - x @ target) ** 2))(params)
        updates, state = tx.update(grads, state, params)
        params = slamb_average(optax.apply_updates(params, updates), state, "data")
        return (params, state), jax.lax.pmean(loss, "data")

    state = tx.init(params)
    (params, _), losses = jax.lax.scan(step, (params, state), inputs)
    return jax.lax.pmean(params, "data"), losses


if __name__ == "__main__":
    run = jax.jit(jax.shard_map(train, mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P()))
    start = jax.random.normal(jax.random.key(1), (20, 10))
    _, losses = run(start, jax.random.normal(jax.random.key(2), (301, 64, 20)))
    print(f"loss {losses[0]:.3f} at the first step, {losses[-1]:.5f} at the last")
