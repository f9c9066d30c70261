# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # SLAMB against LAMB: does a tenth of the bytes train as well?
#
# LAMB exchanges every gradient between the workers in every step. SLAMB exchanges a tenth of it, from a random place
# that all workers agree on, and averages parameters now and then. Eight workers, a teacher to learn from, both from the
# same start with the same data.

# %%
import os

os.environ["XLA_FLAGS"] = "--xla_force_host_platform_device_count=8"
os.environ["NPROC"] = "32"
os.environ["JAX_PLATFORMS"] = "cpu"

import jax
import jax.numpy as jnp
import optax
from jax.sharding import PartitionSpec as P

import hetjax
from hetjax.render.line_charts import Series, bars_picture, line_picture
from hetjax.render.units import human_bytes

WORKERS, STEPS, WIDTH = 8, 200, 64
mesh = jax.make_mesh((WORKERS,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
keys = jax.random.split(jax.random.key(0), 4)
start = {
    "first": jax.random.normal(keys[0], (32, WIDTH)) / 6,
    "second": jax.random.normal(keys[1], (WIDTH, 10)) / 8,
}
teacher = jax.random.normal(keys[2], (32, 10)) / 6
inputs = jax.random.normal(keys[3], (STEPS, 64, 32))


def loss_fn(params, x):
    logits = jnp.tanh(x @ params["first"]) @ params["second"]
    return optax.softmax_cross_entropy_with_integer_labels(logits, (x @ teacher).argmax(-1)).mean()


# %% [markdown]
# ## Both optimizers, one loop
#
# `hetjax.slamb` is an optax transformation: it takes the worker's own gradient and does the exchange itself.

# %%
rate = optax.cosine_decay_schedule(0.03, STEPS)
slamb = hetjax.slamb(rate, "data", min_size=500, sync_every=10)
lamb = optax.lamb(rate)


def train(transformation, exchange, average, params, inputs):
    """Returns the loss of every step; each worker sees its slice of the batch."""
    params = jax.lax.pcast(params, "data", to="varying")

    def step(carry, x):
        params, state = carry
        loss, grads = jax.value_and_grad(loss_fn)(params, x)
        updates, state = transformation.update(exchange(grads), state, params)
        params = average(optax.apply_updates(params, updates), state)
        return (params, state), jax.lax.pmean(loss, "data")

    return jax.lax.scan(step, (params, transformation.init(params)), inputs)[1]


def mean(grads):
    """Returns the gradient of the whole batch: every byte of it, in every step."""
    return jax.tree.map(lambda g: jax.lax.pcast(jax.lax.pmean(g, "data"), "data", to="varying"), grads)


arms = {
    "LAMB": (lamb, mean, lambda params, state: params),
    "SLAMB": (slamb, lambda grads: grads, lambda params, state: hetjax.slamb_average(params, state, "data")),
}
losses = {}
for name, (transformation, exchange, average) in arms.items():
    run = jax.shard_map(
        lambda p, x, t=transformation, e=exchange, a=average: train(t, e, a, p, x),
        mesh=mesh, in_specs=(P(), P(None, "data")), out_specs=P(),
    )  # fmt: skip
    losses[name] = jax.jit(run)(start, inputs)
    print(f"{name:6} loss {losses[name][0]:.3f} at the first step, {losses[name][-10:].mean():.3f} over the last ten")

# %% [markdown]
# ## The bytes
#
# What one worker gives to the exchanges of a step; the formula is held against the compiled program by a test. A tenth is
# the gradient's part. Averaging the parameters, here in every tenth step, adds another tenth; a larger `sync_every` adds less.

# %%
sizes = hetjax.slamb_bytes([p.shape for p in start.values()], min_size=500)
exchanged = {"LAMB": float(sizes.dense_bytes), "SLAMB": sizes.amortised_bytes(sync_every=10)}
assert exchanged["SLAMB"] < exchanged["LAMB"] / 2
bars_picture(list(exchanged.items()), "bytes a step, averaging of parameters included", human_bytes)

# %% [markdown]
# ## The answer
#
# The loss over the bytes each has sent so far: where it says the same loss, it says it further to the left.

# %%
series = []
for name, values in losses.items():
    smooth = [float(values[max(0, i - 4) : i + 1].mean()) for i in range(STEPS)]
    series.append(Series(name, [(exchanged[name] * (i + 1), v) for i, v in enumerate(smooth)][::4]))
line_picture(series, "loss over bytes sent by a worker", "bytes sent", "loss", x_words=human_bytes)
