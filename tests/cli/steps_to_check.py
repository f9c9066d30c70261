"""Train steps that `hetjax check` is run on: right, refused, and wrong in the ways a user is wrong."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training.train_state import TrainState

# Wide enough that a plan of two stages cuts between the layers: a smaller model is cheaper whole.
WIDTH = 64


class MLP(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(3):
            x = nn.tanh(nn.Dense(WIDTH, name=f"hidden_{i}")(x))
        return nn.Dense(4, name="out")(x)


class Whitened(nn.Module):
    """Couples examples where most of the model comes after, so that it is no loss head."""

    @nn.compact
    def __call__(self, x):
        out = nn.tanh(nn.Dense(WIDTH, name="before")(x))
        x = (out - out.mean(0)) / out.std(0)
        return MLP(name="after")(x)


class NnxMLP(nnx.Module):
    def __init__(self, rngs):
        self.hidden = nnx.List([nnx.Linear(8 if i == 0 else WIDTH, WIDTH, rngs=rngs) for i in range(3)])
        self.dropout = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(WIDTH, 4, rngs=rngs)

    def __call__(self, x):
        for layer in self.hidden:
            x = self.dropout(nnx.tanh(layer(x)))
        return self.out(x)


def batches(size=8):
    rng = np.random.default_rng(0)
    batch = {"x": rng.normal(size=(size, 8)).astype(np.float32), "y": rng.normal(size=(size, 4)).astype(np.float32)}
    return itertools.repeat(batch)


def state(tx, model=None):
    model = model or MLP()
    return TrainState.create(apply_fn=model.apply, params=model.init(jax.random.key(0), jnp.ones((1, 8)))["params"], tx=tx)


def step_of(loss):
    def step(state, batch):
        def loss_fn(params):
            return loss(state.apply_fn({"params": params}, batch["x"]), batch["y"])

        value, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), {"loss": value}

    return step


def mean_square(out, y):
    return jnp.mean((out - y) ** 2)


def build():
    return step_of(mean_square), state(optax.adam(1e-2)), batches(), {"name": "mlp"}


def build_nnx():
    model = NnxMLP(nnx.Rngs(0))
    optimizer = nnx.Optimizer(model, optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(objects, batch):
        model, optimizer = objects
        loss, grads = nnx.value_and_grad(lambda m: mean_square(m(batch["x"]), batch["y"]))(model)
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer), batches(), {"framework": "nnx"}


def build_batch_statistics():
    return step_of(mean_square), state(optax.sgd(0.1), Whitened()), batches(), {}


def build_no_state():
    def step(state, batch):
        return mean_square(state.apply_fn({"params": state.params}, batch["x"]), batch["y"])

    return step, state(optax.sgd(0.1)), batches(), {}


def build_wrong_shapes():
    return step_of(lambda out, y: jnp.mean(out @ y)), state(optax.sgd(0.1)), batches(), {}


def build_two_batches():
    return step_of(mean_square), state(optax.sgd(0.1)), list(itertools.islice(batches(), 2)), {}


def build_three_values():
    return step_of(mean_square), state(optax.sgd(0.1)), batches()


def build_wrong_kinds():
    return "step", state(optax.sgd(0.1)), 3, {"framework": "torch"}


def build_raises():
    raise KeyError("no such data set")


def build_half():
    """Computes in bf16: XLA rounds less where it fuses, and a stage is fused otherwise than the whole step."""
    rng = np.random.default_rng(0)
    weights = [jnp.asarray(rng.standard_normal((8, 8)), jnp.float32) for _ in range(3)]
    batch = {"x": rng.standard_normal((8, 16, 8)).astype(np.float32)}

    def step(weights, batch):
        def loss(weights):
            h, *w = (a.astype(jnp.bfloat16) for a in (batch["x"], *weights))
            for layer in w:
                h = h + nn.gelu(h @ layer) * (h @ layer.T)
                h = h.astype(jnp.float32)
                h = (h * jax.lax.rsqrt(jnp.square(h).mean(-1, keepdims=True))).astype(jnp.bfloat16)
            return jnp.mean(jnp.square(h.astype(jnp.float32) - batch["x"]))

        value, grads = jax.value_and_grad(loss)(weights)
        return jax.tree.map(lambda a, g: a - 0.1 * g, weights, grads), value

    return step, weights, itertools.repeat(batch), {}
