"""Small models and comparisons that several tests share."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx
from flax.training import train_state

VOCAB, WIDTH, LENGTH = 17, 16, 6


class Block(nn.Module):
    """A pre-norm residual MLP block with attention over time, small enough to compile quickly."""

    dropout: float = 0.0

    @nn.compact
    def __call__(self, x, deterministic):
        y = nn.LayerNorm(name="norm")(x)
        scores = jnp.einsum("btd,bsd->bts", nn.Dense(WIDTH, name="query")(y), y)
        mask = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        y = jax.nn.softmax(jnp.where(mask, scores, -1e9)) @ y
        y = nn.Dense(WIDTH, name="down")(nn.gelu(nn.Dense(2 * WIDTH, name="up")(y)))
        return x + nn.Dropout(self.dropout, deterministic=deterministic)(y)


class Model(nn.Module):
    """Embedding, two blocks, a head that may be tied to the embedding."""

    dropout: float = 0.0
    tied: bool = False
    blocks: int = 2

    @nn.compact
    def __call__(self, tokens, deterministic=True):
        embed = nn.Embed(VOCAB, WIDTH, name="embed")
        x = embed(tokens)
        for i in range(self.blocks):
            x = Block(self.dropout, name=f"block_{i}")(x, deterministic)
        return embed.attend(x) if self.tied else nn.Dense(VOCAB, name="head")(x)


def make_batch(size=8, seed=0, length=LENGTH):
    rng = np.random.default_rng(seed)
    return {
        "tokens": rng.integers(0, VOCAB, (size, length)).astype(np.int32),
        "targets": rng.integers(0, VOCAB, (size, length)).astype(np.int32),
        "mask": (rng.random((size, length)) < 0.7).astype(np.float32),
    }


def make_linen(loss="mean", dropout=0.0, tied=False, tx=None, blocks=2):
    """Returns (step, state, batch) of a linen TrainState step that returns loss and accuracy."""
    model = Model(dropout=dropout, tied=tied, blocks=blocks)
    batch = make_batch()
    params = model.init(jax.random.key(0), batch["tokens"])["params"]
    tx = tx or optax.sgd(0.1, momentum=0.9)
    state = train_state.TrainState.create(apply_fn=model.apply, params=params, tx=tx)

    def step(state, batch):
        rng = jax.random.fold_in(jax.random.key(7), state.step)

        def loss_fn(params):
            logits = state.apply_fn(
                {"params": params}, batch["tokens"], dropout == 0.0, rngs={"dropout": rng}
            )
            each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
            if loss == "sum":
                return each.sum(), logits
            if loss == "masked":
                return (each * batch["mask"]).sum() / batch["mask"].sum(), logits
            return each.mean(), logits

        (value, logits), grads = jax.value_and_grad(loss_fn, has_aux=True)(state.params)
        accuracy = (logits.argmax(-1) == batch["targets"]).mean()
        return state.apply_gradients(grads=grads), {"loss": value, "accuracy": accuracy}

    return step, state, batch


class NnxBlock(nnx.Module):
    def __init__(self, rngs, dropout):
        self.up = nnx.Linear(WIDTH, 2 * WIDTH, rngs=rngs)
        self.down = nnx.Linear(2 * WIDTH, WIDTH, rngs=rngs)
        self.drop = nnx.Dropout(dropout, rngs=rngs)

    def __call__(self, x):
        return x + self.drop(self.down(nnx.gelu(self.up(x))))


class NnxModel(nnx.Module):
    def __init__(self, rngs, dropout=0.1):
        self.embed = nnx.Embed(VOCAB, WIDTH, rngs=rngs)
        self.blocks = nnx.List([NnxBlock(rngs, dropout) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def make_nnx(dropout=0.1, tx=None):
    """Returns (step, (model, optimizer), batch); the step mutates in place and returns the loss."""
    model = NnxModel(nnx.Rngs(0), dropout)
    optimizer = nnx.Optimizer(model, tx or optax.sgd(0.1, momentum=0.9), wrt=nnx.Param)

    def step(model, optimizer, batch):
        def loss_fn(model):
            logits = model(batch["tokens"])
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"]).mean()

        loss, grads = nnx.value_and_grad(loss_fn)(model)
        optimizer.update(model, grads)
        return loss

    return step, (model, optimizer), make_batch()


def assert_same(actual, expected, rtol=1e-6, atol=1e-7):
    """Every leaf: max|difference| <= rtol * max|leaf| + atol * max over the tree; ints and keys exact.

    Moments and momenta get 1e-5, as in `hetjax check`: they are gradients, and hold their rounding.
    """
    got, want = jax.tree.leaves_with_path(actual), jax.tree.leaves_with_path(expected)
    assert [p for p, _ in got] == [p for p, _ in want]
    arrays = []
    for (path, a), (_, b) in zip(got, want):
        assert a.dtype == b.dtype, jax.tree_util.keystr(path)
        assert a.shape == b.shape, jax.tree_util.keystr(path)
        if jax.dtypes.issubdtype(a.dtype, jax.dtypes.prng_key):
            a, b = jax.random.key_data(a), jax.random.key_data(b)
        arrays.append((path, np.asarray(a), np.asarray(b)))
    largest = max(
        (np.abs(b).max() for _, _, b in arrays if b.size and np.issubdtype(b.dtype, np.inexact)),
        default=0.0,
    )
    for path, a, b in arrays:
        name = jax.tree_util.keystr(path)
        if not np.issubdtype(b.dtype, np.inexact):
            np.testing.assert_array_equal(a, b, err_msg=name)
        elif b.size:
            share = max(rtol, 1e-5) if "opt_state" in name and rtol else rtol
            bound = share * np.abs(b).max() + atol * largest
            assert np.abs(a - b).max() <= bound, (name, np.abs(a - b).max(), bound)


def copy_tree(tree):
    return jax.tree.map(jnp.array, tree)
