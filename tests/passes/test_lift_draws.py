"""Draws leave loops and checkpointed blocks; the program's numbers stay what they are, bit for bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hetjax.ir.graph import Argument, subgraphs
from hetjax.ir.importer import import_jaxpr, inline_calls
from hetjax.passes.lift_draws import DRAWS, lift_draws
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.prover.replay import execute

RNG = np.random.default_rng(0)
W = RNG.standard_normal((3, 4, 4)).astype(np.float32)
X = RNG.standard_normal((8, 4)).astype(np.float32)
KEY = jax.random.key(3)


def dropout(key, h):
    return jnp.where(jax.random.bernoulli(key, 0.7, h.shape), h / 0.7, 0)


def over_layers(w, x, key):
    """A key per layer, scanned over."""
    return lax.scan(lambda h, a: (dropout(a[1], jnp.tanh(h @ a[0])), None), x, (w, jax.random.split(key, 3)))[0]


def carried_key(w, x, key):
    """The key is carried and split in every iteration, as recurrent samplers do."""

    def body(carry, v):
        h, key, count = carry
        key, sub = jax.random.split(key)
        h = dropout(sub, jnp.tanh(h @ v))
        return (h, key, count + 1), h.sum(1)

    (h, _, count), ys = lax.scan(body, (x, key, 0), w)
    return h, ys, count


def folded_count(w, x, key):
    """One key for the loop, folded with a carried counter."""
    return lax.fori_loop(0, 3, lambda i, h: dropout(jax.random.fold_in(key, i), jnp.tanh(h @ w[0])), x)


def checkpointed(w, x, key):
    return jax.checkpoint(lambda w: dropout(key, jnp.tanh(x @ w[0])).sum())(w)


def checkpointed_gradient(w, x, key):
    return jax.grad(jax.checkpoint(lambda w: (dropout(key, jnp.tanh(x @ w[0])) ** 2).sum()))(w)


def checkpointed_layers_gradient(w, x, key):
    """nn.remat within nn.scan, differentiated."""

    def loss(w):
        block = jax.checkpoint(lambda h, a: dropout(a[1], jnp.tanh(h @ a[0])))
        return (lax.scan(lambda h, a: (block(h, a), None), x, (w, jax.random.split(key, 3)))[0] ** 2).sum()

    return jax.value_and_grad(loss)(w)


def branches(w, x, key):
    return lax.cond(w[0, 0, 0] > 0, lambda: dropout(key, x @ w[0]), lambda: x + jax.random.normal(key, x.shape))


def noise(w, x, key):
    """Normal noise: as many bytes as its bits, so it may be lifted whole."""
    return lax.scan(lambda h, a: (h @ a[0] + jax.random.normal(a[1], h.shape), None), x, (w, jax.random.split(key, 3)))[0]


def raw_key(w, x, key):
    return carried_key(w, x, jax.random.key_data(key))


CASES = [
    over_layers, carried_key, folded_count, checkpointed, checkpointed_gradient,
    checkpointed_layers_gradient, branches, noise, raw_key,
]  # fmt: skip


def graph_of(fn, *args):
    arguments = [Argument(0, "w", "state"), Argument(0, "x", "batch", 0), Argument(0, "key", "input")]
    return inline_calls(import_jaxpr(jax.make_jaxpr(fn)(*args), name=fn.__name__, arguments=arguments))


def hidden_draws(graph, within=False):
    """Counts draws inside ops that also multiply matrices; a scan that only draws hides nothing."""
    count = 0
    for op in graph.ops:
        nested = list(subgraphs(op))
        count += within and op.primitive in DRAWS
        count += sum(hidden_draws(g, within or any(map(multiplies, nested))) for g in nested)
    return count


def multiplies(graph):
    return any(op.primitive == "dot_general" or any(map(multiplies, subgraphs(op))) for op in graph.ops)


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_numbers_are_the_same_bit_for_bit(fn):
    before = graph_of(fn, W, X, KEY)
    after = lift_draws(before)
    assert after is not before and hidden_draws(before) and not hidden_draws(after)
    got = execute(after, one_microbatch(after), [W, X, KEY])
    for a, b in zip(jax.tree.leaves(fn(W, X, KEY)), got, strict=True):
        if jnp.issubdtype(a.dtype, jnp.floating):
            np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-6)
        else:
            assert np.array_equal(a, b)


@pytest.mark.parametrize("fn", CASES, ids=lambda f: f.__name__)
def test_what_was_refused_is_proved(traced, fn):
    refused = traced(fn, W, X, KEY, roles="state batch input")
    scanned = {t.kind for t in refused.proof.types}
    assert refused.refusal is not None or "U" in scanned
    run = traced(fn, W, X, KEY, roles="state batch input", change=lift_draws)
    assert run.refusal is None and "U" not in {t.kind for t in run.proof.types}
    assert run.proof.hoisted and run.disagreements(1e-5) == []


def test_dropout_lifts_the_mask_and_not_the_bits():
    lifted = lift_draws(graph_of(over_layers, W, X, KEY))
    draws = next(op for op in lifted.ops if op.primitive == "scan")
    assert [lifted.avals[r].dtype for r in draws.outputs] == ["bool"]
    assert lifted.avals[draws.outputs[0]].shape == (3, 8, 4)


def test_a_draw_that_depends_on_the_loop_stays():
    """A key made from data of the loop cannot be drawn before it."""

    def fn(w, x, key):
        def body(h, v):
            h = h @ v
            sub = jax.random.fold_in(key, jnp.argmax(h[0]))
            return dropout(sub, h), None

        return lax.scan(body, x, w)[0]

    lifted = lift_draws(graph_of(fn, W, X, KEY))
    assert hidden_draws(lifted) == 1
    got = execute(lifted, one_microbatch(lifted), [W, X, KEY])
    np.testing.assert_allclose(fn(W, X, KEY), got[0], rtol=1e-6)


def test_a_graph_without_hidden_draws_is_left_alone():
    graph = graph_of(lambda w, x, key: dropout(key, x @ w[0]), W, X, KEY)
    assert lift_draws(graph) is graph


def test_regions_and_blocks_survive():
    from hetjax.passes.label_blocks import label_blocks
    from hetjax.passes.label_regions import label_regions

    def fn(w, x, key):
        with jax.named_scope("net"):
            return over_layers(w, x, key)

    def step(w, x, key):
        return jax.grad(lambda w: (fn(w, x, key) ** 2).sum())(w)

    plain = label_blocks(label_regions(graph_of(step, W, X, KEY)))
    lifted = label_blocks(label_regions(lift_draws(graph_of(step, W, X, KEY))))
    of = lambda g: [(op.region, op.block) for op in g.ops if op.primitive == "scan"]  # noqa: E731
    assert set(of(plain)) <= set(of(lifted))
    assert {region for region, _ in of(lifted)} <= {"prologue", "forward", "backward"}
