"""A small GPT in linen and its train step: ordinary Flax code that knows nothing of hetjax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax.training.train_state import TrainState

from hetjax.demo.training import Config, mean_loss


class Block(nn.Module):
    """Pre-norm attention and MLP."""

    config: Config

    @nn.compact
    def __call__(self, x):
        c = self.config
        mask = nn.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + nn.MultiHeadDotProductAttention(c.num_heads, name="attention")(nn.LayerNorm()(x), mask=mask)
        h = nn.Dense(4 * c.width, name="up")(nn.LayerNorm()(x))
        return x + nn.Dense(c.width, name="down")(nn.gelu(h))


class GPT(nn.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocab_size]`."""

    config: Config

    @nn.compact
    def __call__(self, tokens):
        c = self.config
        x = nn.Embed(c.vocab_size, c.width, name="embed")(tokens)
        x = x + self.param("position", nn.initializers.normal(0.02), (c.length, c.width))[: tokens.shape[1]]
        for i in range(c.num_layers):
            x = Block(c, name=f"block_{i}")(x)
        return nn.Dense(c.vocab_size, name="head")(nn.LayerNorm(name="norm")(x))


def create(config: Config, optimizer: optax.GradientTransformation, seed: int = 0) -> TrainState:
    """Returns a fresh linen train state."""
    model = GPT(config)
    init = jax.jit(model.init)  # as one program: a small one for every leaf takes longer to compile
    params = init(jax.random.key(seed), jnp.zeros((1, config.length), jnp.int32))["params"]
    return TrainState.create(apply_fn=model.apply, params=params, tx=optimizer)


def train_step(state: TrainState, batch: dict[str, Any]) -> tuple[TrainState, dict[str, jax.Array]]:
    """Returns the next state and the loss before it."""

    def loss_fn(params: Any) -> jax.Array:
        return mean_loss(state.apply_fn({"params": params}, batch["tokens"]), batch["targets"])

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), {"loss": loss}


def evaluate(state: TrainState, batch: dict[str, Any]) -> jax.Array:
    """Returns the loss, without training."""
    return mean_loss(state.apply_fn({"params": state.params}, batch["tokens"]), batch["targets"])
