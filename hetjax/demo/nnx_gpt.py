"""A small GPT in nnx and its train step: ordinary Flax code that knows nothing of hetjax."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from hetjax.demo.training import Config, mean_loss


class Block(nnx.Module):
    """Pre-norm attention and MLP."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        self.norm_1 = nnx.LayerNorm(c.width, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(c.num_heads, c.width, decode=False, rngs=rngs)
        self.norm_2 = nnx.LayerNorm(c.width, rngs=rngs)
        self.up = nnx.Linear(c.width, 4 * c.width, rngs=rngs)
        self.down = nnx.Linear(4 * c.width, c.width, rngs=rngs)

    def __call__(self, x):
        mask = nnx.make_causal_mask(jnp.zeros(x.shape[:2]))
        x = x + self.attention(self.norm_1(x), mask=mask)
        return x + self.down(nnx.gelu(self.up(self.norm_2(x))))


class GPT(nnx.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocab_size]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        self.embed = nnx.Embed(c.vocab_size, c.width, rngs=rngs)
        self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.length, c.width)))
        self.blocks = nnx.List([Block(c, rngs) for _ in range(c.num_layers)])
        self.norm = nnx.LayerNorm(c.width, rngs=rngs)
        self.head = nnx.Linear(c.width, c.vocab_size, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def create(
    config: Config, optimizer: optax.GradientTransformation, seed: int = 0
) -> tuple[GPT, nnx.Optimizer]:
    """Returns a fresh nnx model and its optimizer."""
    model = GPT(config, nnx.Rngs(seed))
    return model, nnx.Optimizer(model, optimizer, wrt=nnx.Param)


def train_step(model: GPT, optimizer: nnx.Optimizer, batch: dict[str, Any]) -> dict[str, jax.Array]:
    """Trains model and optimizer in place and returns the loss before."""

    def loss_fn(model: GPT) -> jax.Array:
        return mean_loss(model(batch["tokens"]), batch["targets"])

    loss, grads = nnx.value_and_grad(loss_fn)(model)
    optimizer.update(model, grads)
    return {"loss": loss}


def evaluate(model: GPT, batch: dict[str, Any]) -> jax.Array:
    """Returns the loss, without training."""
    return mean_loss(model(batch["tokens"]), batch["targets"])
