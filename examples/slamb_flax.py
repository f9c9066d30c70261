"""A plain Flax train step with SLAMB on eight workers: two lines differ from the ordinary program."""

import os

os.environ.setdefault("XLA_FLAGS", "--xla_force_host_platform_device_count=8")

import flax.linen as nn
import jax
import jax.numpy as jnp
import optax
from flax.training.train_state import TrainState

import hetjax


class Mlp(nn.Module):
    @nn.compact
    def __call__(self, x):
        return nn.Dense(10)(nn.relu(nn.Dense(128)(x)))


def train_step(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def main():
    mesh = jax.make_mesh((8,), ("data",))
    rate = optax.cosine_decay_schedule(0.02, 200)
    tx = hetjax.slamb(rate, "data", min_size=1000, sync_every=10)  # was optax.lamb(rate)
    step = hetjax.data_parallel_step(train_step, mesh, "data")  # was jax.jit(train_step)

    model, keys = Mlp(), jax.random.split(jax.random.key(0), 3)
    params = model.init(keys[0], jnp.ones((1, 32)))["params"]
    state = TrainState.create(apply_fn=model.apply, params=params, tx=tx)
    teacher = jax.random.normal(keys[1], (32, 10))
    for t in range(200):
        x = jax.random.normal(jax.random.fold_in(keys[2], t), (256, 32))
        state, metrics = step(state, {"x": x, "y": (x @ teacher).argmax(-1)})
        if t % 50 == 49:
            print(f"step {int(state.step)}: loss {metrics['loss']:.3f}")
    averaged = state.params  # read through: the mean over workers
    print(f"averaged parameters: {sum(a.size for a in jax.tree.leaves(averaged)):,}")


if __name__ == "__main__":
    main()
