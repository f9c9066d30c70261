"""A small GPT, once in linen and once in nnx: ordinary Flax code that knows nothing of hetjax."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
from flax import linen as nn
from flax import nnx


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of the model."""

    vocab_size: int
    length: int = 64
    width: int = 64
    num_heads: int = 4
    num_layers: int = 4


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


class NnxBlock(nnx.Module):
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


class NnxGPT(nnx.Module):
    """Tokens `[batch, length]` to logits `[batch, length, vocab_size]`."""

    def __init__(self, config: Config, rngs: nnx.Rngs):
        c = config
        self.embed = nnx.Embed(c.vocab_size, c.width, rngs=rngs)
        self.position = nnx.Param(nnx.initializers.normal(0.02)(rngs.params(), (c.length, c.width)))
        self.blocks = nnx.List([NnxBlock(c, rngs) for _ in range(c.num_layers)])
        self.norm = nnx.LayerNorm(c.width, rngs=rngs)
        self.head = nnx.Linear(c.width, c.vocab_size, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens) + self.position[: tokens.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))
