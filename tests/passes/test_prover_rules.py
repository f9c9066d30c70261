"""One rule at a time: what it types, the twin next to it that it must not type, and the numbers.

Each function gets `w`, parameters of 4 by 4, and `x`, a batch of 8 by 4; `h = x @ w` is one row per
example and depends on parameters, so nothing about it can be hoisted. Of what a rule cannot type the
result is "U": no heavy op follows, so it may be computed after the microbatches.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from hetjax.passes.prover.batch_types import RULES

RNG = np.random.default_rng(3)
W = RNG.standard_normal((4, 4))
X = RNG.standard_normal((8, 4))


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def rows(x):
    """The batch size, as users write it."""
    return x.shape[0]


# name: (function of w and x, types of the results)
TYPED = {
    # elementwise
    "nonlinear": (lambda w, x: jnp.exp(x @ w), "B0@0"),
    "nonlinear of a sum": (lambda w, x: jnp.exp((x @ w).sum(0)), "U"),
    "nonlinear of a scaled value": (lambda w, x: jnp.exp((x @ w) / rows(x)), "U"),
    "scaled by the batch size": (lambda w, x: (x @ w) / rows(x), "B1@0"),
    "scaled back": (lambda w, x: jnp.exp((x @ w) / rows(x) * rows(x)), "B0@0"),
    "scaled parameter": (lambda w, x: w * rows(x), "R-1"),
    "terms of one scale": (lambda w, x: x @ w / rows(x) + (x @ w) ** 2 / rows(x), "B1@0"),
    "terms of two scales": (lambda w, x: x @ w / rows(x) + x @ w, "U"),
    "product of scales": (lambda w, x: (x @ w) / rows(x) * (w.sum() * rows(x)), "B0@0"),
    "quotient of scales": (lambda w, x: (x @ w / rows(x)) / (w.sum() * rows(x)), "B2@0"),
    "square of a scaled value": (lambda w, x: jnp.square(x @ w / rows(x)), "B2@0"),
    "root of a square": (lambda w, x: jnp.sqrt(jnp.square(x @ w / rows(x))), "B1@0"),
    "root of an odd power": (lambda w, x: jnp.sqrt(jnp.abs(x @ w / rows(x))), "U"),
    "reciprocal root": (lambda w, x: lax.rsqrt(jnp.square(x @ w / rows(x))), "B-1@0"),
    "integer power": (lambda w, x: (x @ w / rows(x)) ** 3, "B3@0"),
    "literal power": (lambda w, x: jnp.abs(x @ w / rows(x)) ** 2.0, "B2@0"),
    "maximum with zero": (lambda w, x: jnp.maximum(x @ w / rows(x), 0), "B1@0"),
    "maximum with one": (lambda w, x: jnp.maximum(x @ w / rows(x), 1), "U"),
    "comparison of a scaled value with zero": (lambda w, x: x @ w / rows(x) > 0, "B0@0"),
    "comparison of a scaled value with one": (lambda w, x: x @ w / rows(x) > 1, "U"),
    "sign": (lambda w, x: jnp.sign(x @ w / rows(x)), "B0@0"),
    "select": (lambda w, x: jnp.where(x @ w > 0, x, w[0]), "B0@0"),
    "select with zero": (lambda w, x: jnp.where(x @ w > 0, x @ w / rows(x), 0), "B1@0"),
    "select by a scaled test": (lambda w, x: jnp.where(x @ w / rows(x) > 1, x, 0), "U"),
    "rounding": (lambda w, x: (x @ w).astype(jnp.int32), "B0@0"),
    "rounding a scaled value": (lambda w, x: (x @ w / rows(x)).astype(jnp.int32), "U"),
    "lower precision": (lambda w, x: (x @ w).astype(jnp.float32).astype(jnp.float64), "B0@0"),
    "clip": (lambda w, x: jnp.clip(x @ w, -1, 1), "B0@0"),
    "clip of a scaled value": (lambda w, x: jnp.clip(x @ w / rows(x), -0.1, 0.1), "U"),
    "remainder": (lambda w, x: jnp.fmod(x @ w, 0.7), "B0@0"),
    "complex parts": (lambda w, x: jnp.real(lax.complex(x @ w, x)), "B0@0"),
    "finite": (lambda w, x: jnp.isfinite(x @ w), "B0@0"),
    # sums over the batch
    "sum": (lambda w, x: (x @ w).sum(0), "S0"),
    "mean": (lambda w, x: (x @ w).sum(0) * (1 / rows(x)), "U"),
    "sum over features": (lambda w, x: (x @ w).sum(1), "B0@0"),
    "sum of a scaled value": (lambda w, x: (x @ w / rows(x)).sum(), "S1"),
    "maximum over features": (lambda w, x: (x @ w).max(1), "B0@0"),
    "maximum over the batch": (lambda w, x: (x @ w).max(0), "U"),
    "maximum of a scaled value": (lambda w, x: (x @ w / rows(x)).max(1), "B1@0"),
    "product over features": (lambda w, x: (x @ w).prod(1), "B0@0"),
    "product over features, scaled": (lambda w, x: (x @ w / rows(x)).prod(1), "U"),
    "all over features": (lambda w, x: (x @ w > 0).all(1), "B0@0"),
    "any over the batch": (lambda w, x: (x @ w > 0).any(0), "U"),
    "argmax": (lambda w, x: jnp.argmax(x @ w / rows(x), 1), "B0@0"),
    "argmax over the batch": (lambda w, x: jnp.argmax(x @ w, 0), "U"),
    "count": (lambda w, x: (x @ w > 0).sum(), "S0"),
    "running sum over features": (lambda w, x: jnp.cumsum(x @ w, 1), "B0@0"),
    "running sum over the batch": (lambda w, x: jnp.cumsum(x @ w, 0), "U"),
    "running product": (lambda w, x: jnp.cumprod(x @ w, 1), "B0@0"),
    "running maximum, scaled": (lambda w, x: lax.cummax(x @ w / rows(x), 1), "B1@0"),
    "running log-sum-exp": (lambda w, x: lax.cumlogsumexp(x @ w, 1), "B0@0"),
    "sort": (lambda w, x: jnp.sort(x @ w / rows(x), 1), "B1@0"),
    "sort over the batch": (lambda w, x: jnp.sort(x @ w, 0), "U"),
    "sort by a key": (lambda w, x: lax.sort_key_val(x @ w, x, dimension=1)[1], "B0@0"),
    "top k": (lambda w, x: lax.top_k(x @ w / rows(x), 2), "B1@0 B0@0"),
    "top k over the batch": (lambda w, x: lax.top_k((x @ w).T, 2)[0], "U"),
    "pooling": (lambda w, x: lax.reduce_window(x @ w, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID"), "B0@0"),
    "pooling sums": (lambda w, x: lax.reduce_window(x @ w / rows(x), 0.0, lax.add, (1, 2), (1, 1), "SAME"), "B1@0"),
    "pooling over the batch": (lambda w, x: lax.reduce_window(x @ w, 0.0, lax.add, (2, 1), (2, 1), "VALID"), "U"),
    "pooling's gradient": (
        lambda w, x: jax.grad(lambda h: lax.reduce_window(h, -jnp.inf, lax.max, (1, 2), (1, 2), "VALID").sum())(x @ w),
        "B0@0",
    ),
    "fourier": (lambda w, x: jnp.fft.rfft(x @ w / rows(x), axis=1), "B1@0"),
    "fourier over the batch": (lambda w, x: jnp.fft.fft(x @ w, axis=0), "U"),
    # shapes
    "transpose": (lambda w, x: (x @ w).T, "B0@1"),
    "merge": (lambda w, x: (x @ w).reshape(-1), "B0@0"),
    "merge and split": (lambda w, x: (x @ w).reshape(-1).reshape(-1, 2, 2), "B0@0"),
    "merge the other way": (lambda w, x: (x @ w).T.reshape(-1), "U"),
    "split features": (lambda w, x: (x @ w).reshape(-1, 2, 2), "B0@0"),
    "split the batch": (lambda w, x: (x @ w).reshape(2, -1, 4), "U"),
    "merge halves of an example": (lambda w, x: (x @ w).reshape(-1, 2), "B0@0"),
    "reverse features": (lambda w, x: (x @ w)[:, ::-1], "B0@0"),
    "reverse the batch": (lambda w, x: (x @ w)[::-1], "U"),
    "slice features": (lambda w, x: (x @ w)[:, 1:3], "B0@0"),
    "slice the batch": (lambda w, x: (x @ w)[: rows(x) // 2], "U"),
    "stride over the batch": (lambda w, x: (x @ w)[::2], "U"),
    "split": (lambda w, x: jnp.split(x @ w, 2, axis=1), "B0@0 B0@0"),
    "split batch": (lambda w, x: jnp.split(x @ w, 2, axis=0)[0], "U"),
    "concatenate features": (lambda w, x: jnp.concatenate([x, x @ w], 1), "B0@0"),
    "concatenate scales": (lambda w, x: jnp.concatenate([x / rows(x), x @ w], 1), "U"),
    "concatenate batches": (lambda w, x: jnp.concatenate([x, x @ w], 0), "U"),
    "concatenate with zeros": (lambda w, x: jnp.concatenate([jnp.zeros((rows(x), 1)), x @ w / rows(x)], 1), "B1@0"),
    "stack": (lambda w, x: jnp.stack([x, x @ w], 1), "B0@0"),
    "stack in front": (lambda w, x: jnp.stack([x, x @ w]), "B0@1"),
    "tile features": (lambda w, x: jnp.tile(x @ w, (1, 2)), "B0@0"),
    "tile the batch": (lambda w, x: jnp.tile(x @ w, (2, 1)), "U"),
    "tile parameters to the batch": (lambda w, x: jnp.tile(w, (rows(x), 1)), "B0@0"),
    "pad features": (lambda w, x: jnp.pad(x @ w / rows(x), ((0, 0), (1, 1))), "B1@0"),
    "pad the batch": (lambda w, x: jnp.pad(x @ w, ((1, 1), (0, 0))), "U"),
    "broadcast parameters": (lambda w, x: jnp.broadcast_to(w[0], x.shape), "B0@0"),
    "broadcast a sum": (lambda w, x: jnp.broadcast_to((x @ w).sum(0), x.shape), "U"),
    "squeeze": (lambda w, x: (x @ w)[:, None, :].squeeze(1), "B0@0"),
    "repeat each example": (lambda w, x: jnp.broadcast_to((x @ w)[:, None], (rows(x), 3, 4)).reshape(-1, 4), "B0@0"),
    # contractions
    "gradient of a matrix": (lambda w, x: x.T @ jnp.tanh(x @ w), "S0"),
    "scaled gradient": (lambda w, x: x.T @ (jnp.tanh(x @ w) / rows(x)), "S1"),
    "similarity matrix": (lambda w, x: (x @ w) @ x.T, "U"),
    "batched product": (lambda w, x: jnp.einsum("bi,bj->bij", x @ w, x), "B0@0"),
    "batched product, batch last": (lambda w, x: jnp.einsum("bi,bj->ijb", x @ w, x), "B0@2"),
    "sum times parameter": (lambda w, x: w @ (x @ w).sum(0), "S0"),
    "feature covariance": (lambda w, x: (x @ w).T @ x, "S0"),
    # indexing
    "embedding": (lambda w, x: w[(x[:, 0] > 0).astype(int)], "B0@0"),
    "embedding gradient": (lambda w, x: jax.grad(lambda w: jnp.sum(w[(x[:, 0] > 0).astype(int)] ** 2))(w), "S0"),
    "label lookup": (
        lambda w, x: jnp.take_along_axis(x @ w, jnp.argmax(x, 1)[:, None], axis=1),
        "B0@0",
    ),
    "label lookup by position": (lambda w, x: (x @ w)[jnp.arange(rows(x)), jnp.argmax(x, 1)], "B0@0"),
    "gradient of a lookup by position": (
        lambda w, x: jax.grad(lambda h: jnp.sum(h[jnp.arange(rows(x)), jnp.argmax(x, 1)] ** 2))(x @ w),
        "B0@0",
    ),
    "write by position": (lambda w, x: (x @ w).at[jnp.arange(rows(x)), jnp.argmax(x, 1)].set(w[0, 0]), "B0@0"),
    "shifted position": (lambda w, x: (x @ w)[(jnp.arange(rows(x)) + 1) % rows(x)], "U"),
    "positions swapped": (lambda w, x: jnp.take(x @ w, jnp.argmax(x, 1), axis=0), "U"),
    "some column": (lambda w, x: jnp.take(x @ w, 2, axis=1), "B0@0"),
    "column by parameter": (lambda w, x: jnp.take(x @ w, jnp.argmax(w[0]), axis=1), "B0@0"),
    "first example": (lambda w, x: (x @ w)[0], "U"),
    "write a column": (lambda w, x: (x @ w).at[:, 1].set(0), "B0@0"),
    "write an example": (lambda w, x: (x @ w).at[0].set(0), "U"),
    "gradient of a column": (lambda w, x: jax.grad(lambda h: jnp.sum(h[:, 1] ** 2))(x @ w), "B0@0"),
    "dynamic slice": (lambda w, x: lax.dynamic_slice_in_dim(x @ w, jnp.argmax(w[0]) % 3, 2, axis=1), "B0@0"),
    "dynamic slice of the batch": (lambda w, x: lax.dynamic_slice_in_dim(x @ w, jnp.argmax(w[0]) % 3, 2, axis=0), "U"),
    "dynamic update": (
        lambda w, x: lax.dynamic_update_slice_in_dim(x @ w, x[:, :2], jnp.argmax(w[0]) % 3, axis=1),
        "B0@0",
    ),
    "histogram": (lambda w, x: jnp.zeros(4, int).at[jnp.argmax(x @ w, 1)].add(1), "S0"),
    "last one wins": (lambda w, x: jnp.zeros(4).at[jnp.argmax(x @ w, 1)].set(x[:, 0]), "U"),
    "scatter to the maximum": (lambda w, x: jnp.zeros(4).at[jnp.argmax(x @ w, 1)].max(x[:, 0]), "U"),
    "one-hot": (lambda w, x: jax.nn.one_hot(jnp.argmax(x @ w, 1), 4), "B0@0"),
    "lookup by position, then a metric of all": (
        lambda w, x: jnp.sort((x @ w)[jnp.arange(rows(x)), jnp.argmax(x @ w, 1)], axis=0), "U"
    ),
    "positions returned": (lambda w, x: (jnp.arange(rows(x)), (x @ w)[jnp.arange(rows(x)), 1]), "B0@0 B0@0"),
    # positions along the batch, used as numbers
    "position embedding over the batch": (lambda w, x: x @ w + w.sum(0)[jnp.arange(rows(x)) % 4][:, None], "B0@0"),
    "weight by position": (lambda w, x: (x @ w) * jnp.arange(rows(x))[:, None], "B0@0"),
    # control flow
    "call": (lambda w, x: jax.checkpoint(lambda w: jnp.sum(jnp.sin(jnp.tanh(x @ w))))(w), "S0"),
    "remat gradient": (lambda w, x: jax.grad(jax.checkpoint(lambda w: jnp.sum(jnp.sin(x @ w))))(w), "S0"),
    "scan over layers": (
        lambda w, x: lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, jnp.stack([w, w * 0.5, w - 1]))[0],
        "B0@0",
    ),
    "scan over layers, gradient": (
        lambda w, x: jax.grad(
            lambda ws: jnp.sum(lax.scan(lambda c, v: (jnp.tanh(c @ v), None), x, ws)[0])
        )(jnp.stack([w, w * 0.5])),
        "S0",
    ),
    "scan over time": (
        lambda w, x: lax.scan(
            lambda c, v: (jnp.tanh(c + v[:, None] * w[0]), c.sum(1)), jnp.zeros((rows(x), 4)), (x @ w).T
        ),
        "B0@0 B0@1",
    ),
    "scan over the batch": (lambda w, x: lax.scan(lambda c, v: (c + v, None), jnp.zeros(4), x @ w)[0], "U"),
    "scan that accumulates sums": (
        lambda w, x: lax.scan(lambda c, v: (c + (x @ w * v).sum(0), None), jnp.zeros(4), w[0])[0],
        "S0",
    ),
    "scan that rescales": (lambda w, x: lax.scan(lambda c, v: (c / rows(x), None), x @ w, w[0])[0], "U"),
    "while over a count": (
        lambda w, x: lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, jnp.tanh(s[1] @ w)), (0, x))[1],
        "B0@0",
    ),
    "while over a sum": (
        lambda w, x: lax.while_loop(lambda s: jnp.sum(s) > 1.0, lambda s: s * 0.5, jnp.abs(x @ w)),
        "U",
    ),
    "cond on a parameter": (lambda w, x: lax.cond(w[0, 0] > 0, lambda: x @ w, lambda: jnp.zeros_like(x)), "B0@0"),
    "cond on the batch": (lambda w, x: lax.cond((x @ w).sum() > 0, lambda: x @ w, lambda: x), "U"),
    "cond between sum and parameter": (
        lambda w, x: lax.cond(w[0, 0] > 0, lambda: (x @ w / rows(x)).sum(0), lambda: w[0]),
        "S1",
    ),
    "custom gradient": (lambda w, x: jax.nn.relu(x @ w), "B0@0"),
    # linear algebra per example
    "cholesky": (lambda w, x: jnp.linalg.cholesky((x @ w)[:, :2, None] ** 2 * jnp.eye(2) + jnp.eye(2)), "B0@0"),
    "triangular solve": (
        lambda w, x: lax.linalg.triangular_solve(
            jnp.eye(2) * (1 + jnp.abs(x @ w)[:, :1, None]), x[:, :2, None] / rows(x), left_side=True, lower=True
        ),
        "B1@0",
    ),
    "eigenvalues": (lambda w, x: jnp.linalg.eigvalsh((x @ w)[:, :2, None] * jnp.eye(2)), "B0@0"),
    "factor the batch": (lambda w, x: jnp.linalg.qr(x @ w)[1], "U"),
}  # fmt: skip


@pytest.mark.parametrize("name", TYPED)
def test_rule(traced, name):
    fn, expected = TYPED[name]
    run = traced(fn, W, X, roles="state batch")
    if name == "mean":
        # A sum is finished at step level: what follows it is computed once.
        assert run.outputs() == ["U"] and run.disagreements() == []
        return
    assert run.outputs() == expected.split(), [
        (op.primitive, [run.type_of(r) for r in op.outputs]) for op in run.full.ops
    ]
    assert run.disagreements() == []


def test_vmapped_rng_needs_no_hoist(traced):
    """A key per example draws per example; one key for all is hoisted."""

    def per_example(w, x, keys):
        return x @ w + jax.vmap(lambda k: jax.random.normal(k, (4,)))(keys)

    def one_key(w, x, key):
        return x @ w + jax.random.normal(key, x.shape)

    keys = jax.random.split(jax.random.key(0), 8)
    run = traced(per_example, W, X, keys, roles="state batch batch")
    assert run.outputs() == ["B0@0"] and not run.proof.hoisted and run.disagreements() == []
    run = traced(one_key, W, X, jax.random.key(0), roles="state batch input")
    assert run.outputs() == ["B0@0"] and run.proof.hoisted and run.disagreements() == []
    raw = traced(one_key, W, X, jax.random.PRNGKey(0), roles="state batch input")
    assert raw.outputs() == ["B0@0"] and raw.proof.hoisted and raw.disagreements() == []


def test_user_written_accumulation_runs_on_hoisted_slices(traced):
    """[B, …] to [k, B/k, …] interleaves microbatches, but of the batch it can be done once, whole."""

    def step(w, x):
        parts = x.reshape(2, -1, 4)
        return lax.scan(lambda g, part: (g + part.T @ jnp.tanh(part @ w), None), jnp.zeros((4, 4)), parts)[0]

    run = traced(step, W, X, roles="state batch")
    assert run.refusal is None and run.outputs() == ["S0"] and run.proof.hoisted
    assert run.disagreements() == []


def test_convolution_and_its_gradients(traced):
    def conv(k, x, groups=1):
        return lax.conv_general_dilated(
            x, k, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"), feature_group_count=groups
        )

    x = RNG.standard_normal((4, 5, 5, 2))
    k = RNG.standard_normal((3, 3, 2, 4))
    run = traced(lambda k, x: jnp.tanh(conv(k, x)), k, x, roles="state batch")
    assert run.outputs() == ["B0@0"] and run.disagreements() == []
    run = traced(lambda k, x: jax.grad(lambda k: jnp.sum(conv(k, x) ** 2))(k), k, x, roles="state batch")
    assert run.outputs() == ["S0"] and run.disagreements() == []
    grouped = RNG.standard_normal((3, 3, 1, 4))
    run = traced(lambda k, x: jax.grad(lambda k: jnp.sum(conv(k, x, 2) ** 2))(k), grouped, x, roles="state batch")
    assert run.outputs() == ["S0"] and run.disagreements() == []
    per_example = jax.vmap(lambda k, x: conv(k, x[None])[0])
    run = traced(
        lambda k, x: per_example(k * x[:, :1, :1, :1, None], x), k, x, roles="state batch"
    )
    assert run.outputs() == ["U"] and run.disagreements() == []
    over_batch = jax.vmap(lambda x: lax.conv(x[None, None], jnp.ones((1, 1, 2)), (1,), "SAME")[0, 0], 1, 1)
    run = traced(lambda w, x: over_batch(x @ w), W, X, roles="state batch")
    assert run.outputs() == ["U"] and run.disagreements() == []


def test_batch_size_equal_to_a_feature_size_is_no_trap(traced):
    """Only dimensions that differ between the traces are batch dimensions."""
    square = RNG.standard_normal((4, 4))
    run = traced(lambda w, x: (x @ w, x.T @ x @ w, w @ w), square, square, roles="state batch", num_microbatches=4)
    assert run.outputs() == ["B0@0", "R0", "R0"] and run.disagreements() == []
    # Of one example per microbatch, [1, 4] + [4, 4] broadcasts: shapes agree, values do not.
    run = traced(lambda w, x: x @ w + w, square, square, roles="state batch", num_microbatches=4)
    assert run.outputs() == ["U"] and run.disagreements() == []


def test_batch_axis_other_than_zero(traced):
    run = traced(lambda w, x: (jnp.tanh(w.T @ x), (w.T @ x).sum(1)), W, X.T.copy(), roles="state batch", axis=1)
    assert run.outputs() == ["B0@1", "S0"] and run.disagreements() == []


def test_unknown_primitives_get_a_conservative_answer(traced):
    from hetjax.passes.prover.dispatch import Typer

    known = RULES.pop("tanh")
    try:
        run = traced(lambda w, x: (jnp.tanh(x @ w), jnp.tanh(w)), W, X, roles="state batch")
        assert run.outputs() == ["U", "R0"] and run.disagreements() == []
        run = traced(lambda w, x: jnp.tanh(x @ w) @ w, W, X, roles="state batch")
        assert "no rule for 'tanh'" in run.refusal.reason
    finally:
        RULES["tanh"] = known
    assert Typer(2)


def test_a_failing_rule_is_a_refusal_not_a_crash(traced):
    """A parameter of a form nobody foresaw must not stop the user."""
    import dataclasses

    from hetjax.ir.importer import import_jaxpr
    from hetjax.passes.prover import prove

    known = RULES["tanh"]
    RULES["tanh"] = dataclasses.replace(known, rule=lambda site: site.params["no such parameter"])
    try:
        graphs = [
            import_jaxpr(
                jax.make_jaxpr(lambda w, x: jnp.tanh(x @ w) @ w)(W, X[:n]), name="f",
                arguments=_arguments(),
            )
            for n in (8, 4)
        ]  # fmt: skip
        assert "form hetjax does not know" in prove(*graphs, 2).refusal.reason
        with pytest.raises(KeyError):
            prove(*graphs, 2, strict=True)
    finally:
        RULES["tanh"] = known


def _arguments():
    from hetjax.ir.graph import Argument

    return [Argument(0, "w", "state"), Argument(0, "x", "batch", 0)]
