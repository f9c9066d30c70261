"""Whole train steps: which are proved, which are refused, and that numbers agree with the verdict."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from hetjax.ir.graph import Argument
from hetjax.passes.prover import explain, prove

BATCH, WIDTH = 8, 4


@pytest.fixture(autouse=True)
def double():
    with jax.enable_x64(True):
        yield


def data(seed=0):
    rng = np.random.default_rng(seed)
    params = {"a": rng.standard_normal((WIDTH, 6)), "b": rng.standard_normal(6), "c": rng.standard_normal((6, 3))}
    batch = {
        "x": rng.standard_normal((BATCH, WIDTH)), "y": rng.standard_normal((BATCH, 3)),
        "weight": (rng.random((BATCH, 1)) < 0.7).astype(np.float64),
    }  # fmt: skip
    return params, batch


def model(params, x):
    return jnp.tanh(x @ params["a"] + params["b"]) @ params["c"]


def step_of(loss, tx=None):
    """A train step as people write it; state is (params, optimizer state, count)."""
    tx = tx or optax.sgd(0.1)

    def step(state, batch):
        params, opt, count = state
        value, grads = jax.value_and_grad(loss)(params, batch, count)
        updates, opt = tx.update(grads, opt, params)
        return (optax.apply_updates(params, updates), opt, count + 1), value

    params, batch = data()
    return step, (params, tx.init(params), jnp.zeros((), jnp.int32)), batch


def mean_loss(p, b, count):
    return jnp.mean((model(p, b["x"]) - b["y"]) ** 2)


def sum_loss(p, b, count):
    return jnp.sum((model(p, b["x"]) - b["y"]) ** 2)


def weighted_loss(p, b, count):
    error = (model(p, b["x"]) - b["y"]) ** 2
    return jnp.sum(b["weight"] * error) / jnp.sum(b["weight"])


def decayed_loss(p, b, count):
    return mean_loss(p, b, count) + 0.01 * sum(jnp.sum(w**2) for w in jax.tree.leaves(p))


def dropout_loss(p, b, count):
    h = jnp.tanh(b["x"] @ p["a"] + p["b"])
    keep = jax.random.bernoulli(jax.random.fold_in(jax.random.key(7), count), 0.6, h.shape)
    return jnp.mean((jnp.where(keep, h / 0.6, 0) @ p["c"] - b["y"]) ** 2)


def tied_loss(p, b, count):
    h = jnp.tanh(b["x"] @ p["a"] + p["b"])
    return jnp.mean((h @ p["a"].T - b["x"]) ** 2) + 0 * jnp.sum(p["c"])


def batch_norm_loss(p, b, count):
    h = b["x"] @ p["a"] + p["b"]
    h = (h - h.mean(0)) / jnp.sqrt(h.var(0) + 1e-5)
    return jnp.mean((h @ p["c"] - b["y"]) ** 2)


def root_loss(p, b, count):
    return jnp.sqrt(mean_loss(p, b, count))


def contrastive_loss(p, b, count):
    z = model(p, b["x"])
    return jnp.mean(jax.nn.logsumexp(z @ z.T, axis=1))


def shuffled_loss(p, b, count):
    z = model(p, b["x"])
    order = jax.random.permutation(jax.random.fold_in(jax.random.key(1), count), z.shape[0])
    return jnp.mean((z - z[order]) ** 2)


def normalised_inputs(p, b, count):
    x = (b["x"] - b["x"].mean(0)) / b["x"].std(0)
    return jnp.mean((model(p, x) - b["y"]) ** 2)


PROVED = [mean_loss, sum_loss, weighted_loss, decayed_loss, dropout_loss, tied_loss, normalised_inputs]


@pytest.mark.quick
@pytest.mark.parametrize("loss", PROVED, ids=lambda f: f.__name__)
def test_proved_and_equal_in_numbers(traced, loss):
    step, state, batch = step_of(loss)
    run = traced(step, state, batch, roles="state batch", num_microbatches=4, labels=True)
    assert run.refusal is None
    assert run.disagreements() == []


@pytest.mark.parametrize("tx", [
    optax.chain(optax.clip_by_global_norm(0.1), optax.adamw(1e-2, mask=lambda p: jax.tree.map(lambda w: w.ndim > 1, p))),
    optax.adafactor(1e-2, min_dim_size_to_factor=2),
    optax.MultiSteps(optax.sgd(0.1), 2),
], ids=["clip+adamw", "adafactor", "multisteps"])  # fmt: skip
def test_optimizers_run_once_at_step_level(traced, tx):
    step, state, batch = step_of(mean_loss, tx)
    run = traced(step, state, batch, roles="state batch", num_microbatches=2, labels=True)
    assert run.refusal is None
    assert run.disagreements() == []
    updates = [op for op in run.full.ops if op.region == "update"]
    kinds = {run.proof.types[r].kind for op in updates for r in op.outputs}
    assert kinds <= {"R", "U", "Z"}, "no optimizer op may run per microbatch"


@pytest.mark.quick
@pytest.mark.parametrize(("loss", "words"), [
    (batch_norm_loss, ["sum or mean over the batch", "reduce_sum"]),
    (root_loss, ["'sqrt'", "not linear"]),
    (contrastive_loss, ["every example of the batch with every other"]),
    (shuffled_loss, ["picks examples of the batch by an index"]),
], ids=lambda v: getattr(v, "__name__", None))  # fmt: skip
def test_refused_with_the_reason(traced, loss, words):
    step, state, batch = step_of(loss)
    run = traced(step, state, batch, roles="state batch", labels=True)
    assert run.refusal is not None
    for word in words:
        assert word in run.refusal.reason
    assert "test_prover_steps.py" in run.refusal.source
    assert run.full.ops[run.refusal.op].primitive


@pytest.mark.parametrize("loss", [batch_norm_loss, root_loss, contrastive_loss], ids=lambda f: f.__name__)
def test_what_is_refused_would_have_been_wrong(loss):
    """Averaging the microbatches' gradients of the refused losses gives other numbers."""
    params, batch = data()
    whole = jax.grad(loss)(params, batch, 0)
    halves = (jax.tree.map(lambda x: x[:4], batch), jax.tree.map(lambda x: x[4:], batch))
    parts = [jax.grad(loss)(params, half, 0) for half in halves]
    mean = jax.tree.map(lambda a, b: (a + b) / 2, *parts)
    worst = max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(jax.tree.leaves(whole), jax.tree.leaves(mean)))
    assert worst > 1e-3


def test_token_weights_and_dropout_bits_are_hoisted(traced):
    step, state, batch = step_of(weighted_loss)
    run = traced(step, state, batch, roles="state batch", labels=True)
    summary = explain(run.proof, run.full)
    assert summary.proved and summary.hoisted == 1 and summary.hoisted_bytes == 8
    step, state, batch = step_of(dropout_loss)
    run = traced(step, state, batch, roles="state batch", labels=True)
    # Of the random bits only the mask is kept: one byte an element.
    summary = explain(run.proof, run.full)
    assert summary.hoisted == 1 and summary.hoisted_bytes == BATCH * 6
    assert "proved" in str(summary)


def test_structure_that_depends_on_the_batch_size_names_the_first_op(traced):
    def step(w, x):
        y = x @ w
        return jnp.sum(jnp.sin(y) if x.shape[0] > 4 else jnp.cos(y))

    run = traced(step, jnp.ones((WIDTH, 2)), jnp.ones((8, WIDTH)), roles="state batch")
    assert run.refusal.equation == "sin"
    assert "structure depends on the batch size" in run.refusal.reason
    assert "cos" in run.refusal.reason


def test_second_update_in_one_step_names_the_second_forward(traced):
    def step(state, batch):
        params, opt, count = state
        for _ in range(2):
            value, grads = jax.value_and_grad(mean_loss)(params, batch, count)
            params = jax.tree.map(lambda p, g: p - 0.1 * g, params, grads)
        return (params, opt, count + 1), value

    _, state, batch = step_of(mean_loss)
    run = traced(step, state, batch, roles="state batch", labels=True)
    assert "second forward" in run.refusal.reason and "test_prover_steps.py" in run.refusal.source


def test_two_losses_of_the_same_parameters_are_proved(traced):
    """Several value_and_grad in one step, none of which reads what another updated."""

    def step(state, batch):
        params, opt, count = state
        a, first = jax.value_and_grad(mean_loss)(params, batch, count)
        b, second = jax.value_and_grad(weighted_loss)(params, batch, count)
        params = jax.tree.map(lambda p, g, h: p - 0.1 * g - 0.2 * h, params, first, second)
        return (params, opt, count + 1), a + b

    _, state, batch = step_of(mean_loss)
    run = traced(step, state, batch, roles="state batch", labels=True)
    assert run.refusal is None and run.disagreements() == []


def penalty(p, b, count, reduce):
    """A gradient penalty: second-order gradients in a step."""
    inner = jax.grad(lambda x: reduce(jnp.sum(model(p, x) ** 2, 1)))(b["x"])
    return mean_loss(p, b, count) + jnp.mean((jnp.sqrt(jnp.sum(inner**2, 1) + 1e-6) - 1) ** 2)


def test_gradient_penalty_of_a_sum_is_proved_of_a_mean_refused(traced):
    """The gradient of a mean is scaled by the batch size, and its norm less one is not linear in that."""
    step, state, batch = step_of(lambda p, b, c: penalty(p, b, c, jnp.sum))
    run = traced(step, state, batch, roles="state batch", labels=True)
    assert run.refusal is None and run.disagreements() == []
    step, state, batch = step_of(lambda p, b, c: penalty(p, b, c, jnp.mean))
    run = traced(step, state, batch, roles="state batch", labels=True)
    assert "scale differently" in run.refusal.reason


def test_dynamic_loss_scale_is_proved(traced):
    from flax.training.dynamic_scale import DynamicScale

    def step(state, batch):
        params, opt, count, scale = state
        scale, finite, value, grads = scale.value_and_grad(mean_loss)(params, batch, count)
        updated = jax.tree.map(lambda p, g: jnp.where(finite, p - 0.1 * g, p), params, grads)
        return (updated, opt, count + 1, scale), value

    _, (params, opt, count), batch = step_of(mean_loss)
    run = traced(step, (params, opt, count, DynamicScale()), batch, roles="state batch", labels=True)
    assert run.refusal is None and run.disagreements() == []


def test_metrics_beside_the_loss_are_finished_at_step_level(traced):
    """Accuracy, perplexity and a median: sums are accumulated, the rest computed from the whole."""

    def loss(params, batch):
        logits = model(params, batch["x"])
        value = jnp.mean((logits - batch["y"]) ** 2)
        return value, {
            "perplexity": jnp.exp(value), "hits": (jnp.argmax(logits, 1) == jnp.argmax(batch["y"], 1)).mean(),
            "median": jnp.median(logits), "logits": logits,
        }  # fmt: skip

    def step(params, batch):
        (value, metrics), grads = jax.value_and_grad(loss, has_aux=True)(params, batch)
        spread = jnp.std(metrics["logits"], axis=0)
        return jax.tree.map(lambda p, g: p - g, params, grads), value, metrics, spread

    params, batch = data()
    run = traced(step, params, batch, roles="state batch", labels=True)
    assert run.refusal is None and run.disagreements() == []
    assert run.outputs()[3:] == ["S1", "S1", "B0@0", "U", "U", "U"]


def test_an_evaluation_step_is_proved_and_a_shuffling_one_refused(traced):
    def evaluate(params, batch):
        logits = model(params, batch["x"])
        error = jnp.sqrt(jnp.mean((logits - batch["y"]) ** 2))
        return {"rmse": error, "hits": jnp.sum(jnp.argmax(logits, 1) == jnp.argmax(batch["y"], 1)), "logits": logits}

    params, batch = data()
    run = traced(evaluate, params, batch, roles="state batch", labels=True)
    assert run.refusal is None and run.outputs() == ["S0", "B0@0", "U"] and run.disagreements() == []

    def centred(params, batch):
        h = batch["x"] @ params["a"]
        return (h - h.mean(0)) @ params["c"]

    run = traced(centred, params, batch, roles="state batch", labels=True)
    assert "as batch normalisation does" in run.refusal.reason


def test_one_microbatch_needs_no_proof(traced):
    step, state, batch = step_of(batch_norm_loss)
    run = traced(step, state, batch, roles="state batch", num_microbatches=1, labels=True)
    assert run.refusal is None and run.proof.num_microbatches == 1


def test_inputs_that_do_not_divide_are_named(traced):
    with pytest.raises(AssertionError):  # the control: the same leaf divided evenly is fine
        assert traced(lambda w, x: jnp.sum(x @ w), jnp.ones((4, 2)), jnp.ones((8, 4)), roles="state batch").refusal
    from hetjax.ir.importer import import_jaxpr

    def graph(n):
        closed = jax.make_jaxpr(lambda x: x.sum())(jnp.ones((n,)))
        return import_jaxpr(closed, name="f", arguments=[Argument(0, "batch/x", "batch", 0)])

    proof = prove(graph(9), graph(4), 2, strict=True)
    assert "batch/x" in proof.refusal.reason


@pytest.mark.parametrize("loss", [batch_norm_loss, root_loss, contrastive_loss], ids=lambda f: f.__name__)
@pytest.mark.parametrize("num_microbatches", [2, 4])
def test_accepted_per_microbatch_is_the_average_of_the_microbatches(traced, loss, num_microbatches):
    """What `per_microbatch` means: each microbatch by its own statistics, gradients averaged."""
    step, state, batch = step_of(loss)
    run = traced(
        step, state, batch, roles="state batch", num_microbatches=num_microbatches, labels=True, accept=True
    )
    assert run.refusal is not None and run.proof.accepted
    got = jax.tree.unflatten(jax.tree.structure((state, 0.0)), run.execute())
    size = BATCH // num_microbatches
    parts = [
        jax.value_and_grad(loss)(state[0], jax.tree.map(lambda x: x[m * size : (m + 1) * size], batch), 0)  # noqa: B023
        for m in range(num_microbatches)
    ]
    mean = jax.tree.map(lambda *xs: sum(xs) / num_microbatches, *parts)
    expected = jax.tree.map(lambda p, g: p - 0.1 * g, state[0], mean[1])
    assert float(got[1]) == pytest.approx(float(mean[0]), rel=1e-12)
    for a, b in zip(jax.tree.leaves(got[0][0]), jax.tree.leaves(expected)):
        np.testing.assert_allclose(a, b, rtol=1e-10, atol=1e-12)


def test_accepting_changes_nothing_where_the_proof_holds(traced):
    step, state, batch = step_of(weighted_loss)
    strict = traced(step, state, batch, roles="state batch", labels=True)
    run = traced(step, state, batch, roles="state batch", labels=True, accept=True)
    assert run.refusal is None and not run.proof.accepted
    assert run.proof.types == strict.proof.types and run.proof.hoisted == strict.proof.hoisted


def test_running_statistics_are_chained_when_accepted(traced):
    def step(state, batch):
        def loss(params):
            h = batch["x"] @ params["a"]
            mean, var = h.mean(0), h.var(0)
            running = jax.tree.map(lambda old, new: 0.9 * old + 0.1 * new, state["stats"], (mean, var))
            h = (h - mean) / jnp.sqrt(var + 1e-5)
            return jnp.mean((h @ params["c"] - batch["y"]) ** 2), running

        (value, running), grads = jax.value_and_grad(loss, has_aux=True)(state["params"])
        return {"params": jax.tree.map(lambda p, g: p - g, state["params"], grads), "stats": running}, value

    params, batch = data()
    state = {"params": params, "stats": (np.zeros(6), np.ones(6))}
    run = traced(step, state, batch, roles="state batch", labels=True, accept=True)
    names = {a.ref: a.path for a in run.full.inputs}
    assert [names[i] for i, _ in run.proof.chained] == ["0stats/0", "0stats/1"]
