"""The demo's train steps, as a Flax user writes them."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx
from flax.training.train_state import TrainState

from hetjax.demo.models import GPT, Config, NnxGPT

LEARNING_RATE = 3e-3


def adamw(num_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with warm-up, cosine decay and global-norm clipping."""
    warmup = min(20, max(1, num_steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        LEARNING_RATE / 10, LEARNING_RATE, warmup, max(num_steps, warmup + 1), LEARNING_RATE / 10
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def mean_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()


def create_linen(config: Config, optimizer: optax.GradientTransformation, seed: int = 0) -> TrainState:
    """Returns a fresh linen train state."""
    model = GPT(config)
    params = model.init(jax.random.key(seed), jnp.zeros((1, config.length), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def linen_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the next state and the loss before it."""

    def loss_fn(params: Any) -> jax.Array:
        return mean_loss(state.apply_fn({"params": params}, batch["tokens"]), batch["targets"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def linen_eval(state: TrainState, batch: dict[str, Any]) -> jax.Array:
    """Returns the loss, without training."""
    return mean_loss(state.apply_fn({"params": state.params}, batch["tokens"]), batch["targets"])


def create_nnx(
    config: Config, optimizer: optax.GradientTransformation, seed: int = 0
) -> tuple[NnxGPT, nnx.Optimizer]:
    """Returns a fresh nnx model and its optimizer."""
    model = NnxGPT(config, nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def nnx_step(model: NnxGPT, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Trains model and optimizer in place and returns the loss before."""

    def loss_fn(model: NnxGPT) -> jax.Array:
        return mean_loss(model(batch["tokens"]), batch["targets"])

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def nnx_eval(model: NnxGPT, batch: dict[str, Any]) -> jax.Array:
    """Returns the loss, without training."""
    return mean_loss(model(batch["tokens"]), batch["targets"])
