"""What the linen and the nnx demo share: the size of the model, the loss, the optimizer."""

from __future__ import annotations

import dataclasses

import jax
import optax

LEARNING_RATE = 3e-3


@dataclasses.dataclass(frozen=True)
class Config:
    """The size of the model."""

    vocab_size: int
    length: int = 64
    width: int = 64
    num_heads: int = 4
    num_layers: int = 4


def adamw(num_steps: int) -> optax.GradientTransformation:
    """Returns AdamW with warm-up, cosine decay and global-norm clipping."""
    warmup = min(20, max(1, num_steps // 10))
    schedule = optax.warmup_cosine_decay_schedule(
        LEARNING_RATE / 10, LEARNING_RATE, warmup, max(num_steps, warmup + 1), LEARNING_RATE / 10
    )
    return optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(schedule, weight_decay=0.01))


def mean_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
    return optax.softmax_cross_entropy_with_integer_labels(logits, targets).mean()
