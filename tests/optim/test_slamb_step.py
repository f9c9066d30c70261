"""The arithmetic of one SLAMB step against numpy in float64, against optax.lamb, and its contracts."""

import functools
import itertools
import zlib

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.optim._slamb import (
    _LeafPlan,
    average_params,
    scale_by_slamb,
    slamb,
    slamb_average,
)

AXIS = "data"


def workers(tree, n):
    """The tree with a leading worker axis of n equal slices; numpy, which compiles nothing."""
    return jax.tree.map(lambda a: np.broadcast_to(np.asarray(a), (n, *np.shape(a))), tree)


def spread(tree):
    return max(np.max(np.abs(a - a[:1])) for a in map(np.asarray, jax.tree.leaves(tree)))


def largest_difference(a, b):
    pairs = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return max(np.max(np.abs(np.asarray(x) - np.asarray(y))) for x, y in pairs)


def decay_matrices(params):
    return jax.tree.map(lambda p: p.ndim > 1, params)


@functools.lru_cache(None)
def built(make, *args, **kwargs):
    """The optimizer of these arguments, one object however often asked for: its step compiles once."""
    return make(*args, **kwargs)


def floating(a):
    return jnp.issubdtype(a.dtype, jnp.floating)


@functools.lru_cache(None)
def step_of(tx, average):
    """The jitted step of all workers by vmap; state that is not floating has no worker axis."""
    def one(params, state, grads):
        updates, state = tx.update(grads, state, params)
        params = optax.apply_updates(params, updates)
        return slamb_average(params, state, AXIS) if average else params, state

    @jax.jit
    def step(params, state, grads):
        axes = jax.tree.map(lambda a: 0 if floating(a) else None, state)
        mapped = jax.vmap(one, in_axes=(0, axes, 0), out_axes=(0, axes), axis_name=AXIS)
        return mapped(params, state, grads)

    return step


def trajectory(tx, params, grads_of_step, n, average=False):
    """Yields (parameters, state) of n workers in lockstep, by vmap, before and after every step."""
    start, step = tx.init(params), step_of(tx, average)
    params = workers(params, n)
    state = jax.tree.map(lambda a: workers(a, n) if floating(a) else a, start)
    yield params, state
    for t in itertools.count(1):
        params, state = step(params, state, grads_of_step(t, params))
        yield params, state


def run(tx, params, grads_of_step, steps, n, average=False):
    """The parameters and states of n workers after `steps` steps."""
    return next(itertools.islice(
        trajectory(tx, params, grads_of_step, n, average), steps, None))


def gradient(n, same=False):
    """(step, stacked parameters) -> stacked gradients: noise by worker and step, and a pull to zero."""
    def of_step(t, params):
        def draw(path, a):
            a = np.asarray(a)
            seed = zlib.crc32(jax.tree_util.keystr(path).encode())
            noise = [np.random.default_rng([t, 0 if same else i, seed]).normal(size=a.shape[1:])
                     for i in range(n)]
            return np.array(noise, np.float32) + np.float32(0.1) * a

        return jax.tree_util.tree_map_with_path(draw, params)

    return of_step


@pytest.fixture
def params():
    rng = np.random.default_rng(0)
    return {"w": rng.normal(size=(100, 120)).astype(np.float32), "b": np.full(120, 0.1, np.float32)}


# ---- 1. one worker, everything sent: LAMB


@pytest.mark.quick
@pytest.mark.parametrize("n,kwargs", [
    (1, {}), (8, {}), (8, dict(compensation="held", nu_ratio=0.1)),
    pytest.param(8, dict(bound_direction=True), marks=pytest.mark.nightly),
    pytest.param(1, dict(compensation="held"), marks=pytest.mark.nightly)])
def test_with_all_sent_and_equal_gradients_it_is_lamb(params, n, kwargs):
    lamb = built(optax.lamb, 0.01, weight_decay=0.01, mask=decay_matrices)
    ours = slamb(0.01, AXIS, compress_ratio=1.0, weight_decay=0.01, min_size=0, **kwargs)
    expected, _ = run(lamb, params, gradient(n, same=True), 20, n)
    got, state = run(ours, params, gradient(n, same=True), 20, n)
    assert largest_difference(expected, got) <= 1e-6
    assert int(state[0].count) == 20


def test_without_an_axis_it_is_lamb_on_one_worker(params):
    lamb = built(optax.lamb, 0.01, weight_decay=0.01, mask=decay_matrices)
    ours = slamb(0.01, compress_ratio=1.0, weight_decay=0.01, min_size=0)
    expected, _ = run(lamb, params, gradient(1), 20, 1)
    got, state, step = params, ours.init(params), jax.jit(ours.update)
    for t in range(1, 21):
        grads = jax.tree.map(lambda a: a[0], gradient(1)(t, workers(got, 1)))
        updates, state = step(grads, state, got)
        got = optax.apply_updates(got, updates)
    assert largest_difference(expected, workers(got, 1)) <= 1e-6


# ---- 2. identical workers stay identical


@pytest.mark.parametrize("compensation", ["local", "held"])
def test_workers_with_equal_gradients_stay_bit_identical(params, compensation):
    tx = slamb(0.01, AXIS, min_size=0, compensation=compensation, nu_ratio=0.1)
    got, state = run(tx, params, gradient(8, same=True), 20, 8)
    assert spread(got) == 0.0
    assert spread(state[0]._replace(count=None, skipped=None, sync_due=None)) == 0.0
    lamb, _ = run(built(optax.lamb, 0.01), params, gradient(8, same=True), 20, 8)
    assert largest_difference(lamb, got) > 1e-4  # nine tenths are late, or trusted apart


# ---- 6. the equations, in numpy


def sent_at(leaf_seed, size, chunks, step):
    """bool[size], written from the description of the layout: row r sends column (t + o_r) mod C."""
    rows = -(-size // chunks)
    with np.errstate(over="ignore"):
        x = np.arange(rows, dtype=np.uint32) * np.uint32(0x9E3779B9) + np.uint32(leaf_seed)
        x = (x ^ (x >> np.uint32(16))) * np.uint32(0x85EBCA6B)
        x = (x ^ (x >> np.uint32(13))) * np.uint32(0xC2B2AE35)
        x = x ^ (x >> np.uint32(16))
    column = (step + (x % np.uint32(chunks)).astype(int)) % chunks
    index = np.arange(size)
    return index // rows == column[index % rows]


def oracle(params, grads, *, lr, ratios, b1, b2, b3, eps, decay, min_size, every, lo, hi, form,
           seed=44):
    """float64 SLAMB for N workers, as published, held, or by directions; age is counted, not derived."""
    held = form == "held"
    n = len(grads[0])
    names = sorted(params)
    w = [{k: params[k].astype(np.float64) for k in names} for _ in range(n)]
    m = [{k: np.zeros(params[k].shape) for k in names} for _ in range(n)]
    v = [{k: np.zeros(params[k].shape) for k in names} for _ in range(n)]
    age = {k: np.zeros(params[k].shape) for k in names}
    last_mean = {k: np.zeros(params[k].shape) for k in names}

    def ratio(x, y):
        x, y = np.linalg.norm(x), np.linalg.norm(y)
        return 1.0 if x == 0 or y == 0 else x / y

    for t, workers_grads in enumerate(grads, start=1):
        chunks = int(1 / [r for first, r in ratios if first < t][-1] + 1e-9)
        for k in names:
            shape, size = params[k].shape, params[k].size
            large = len(shape) > 1 and size >= min_size and chunks > 1
            leaf_seed = zlib.crc32(f"{seed}['{k}']".encode())
            sent = (sent_at(leaf_seed, size, chunks, t).reshape(shape) if large
                    else np.ones(shape, bool))
            for i in range(n):
                g = workers_grads[i][k]
                m[i][k] = b1 * m[i][k] + (1 - b1) * g
                v[i][k] = b2 * v[i][k] + (1 - b2) * g * g
            # What each worker divides by before the exchange and multiplies with after it.
            root = [(np.sqrt(v[i][k] / (1 - b2**t)) + eps) * (1 - b1**t) if form == "direction" else 1.0
                    for i in range(n)]
            mean = np.mean([m[i][k] / root[i] for i in range(n)], axis=0)
            mean_v = np.mean([v[i][k] for i in range(n)], axis=0)
            last_mean[k] = np.where(sent, mean, last_mean[k])
            age[k] = np.where(sent, 0, age[k] + 1)
            for i in range(n):
                if held:
                    v_sent = np.ones(shape, bool) if len(shape) <= 1 or size < min_size else sent_at(
                        leaf_seed, size, 4, t).reshape(shape)
                    v[i][k] = np.where(v_sent, mean_v, v[i][k])
                else:
                    m[i][k] = np.where(sent, mean * root[i], m[i][k])
                u = (last_mean[k] if held else m[i][k]) / (1 - b1**t) / (np.sqrt(v[i][k] / (1 - b2**t)) + eps)
                weight = w[i][k]
                if len(shape) <= 1:
                    w[i][k] = weight - lr * ratio(weight, u) * u
                    continue
                u = u + decay * weight
                if held:
                    w[i][k] = weight - lr * np.clip(ratio(weight, u), lo, hi) * u
                    continue
                r = b3 ** age[k]
                phi = r * ratio(weight[sent], u[sent]) + (1 - r) * ratio(weight[~sent], u[~sent])
                step_size = r * lr + (1 - r) * lr / np.sqrt(n)
                w[i][k] = weight - step_size * np.clip(phi, lo, hi) * u
        if every and (every == 1 or t % every == 1):
            for k in names:
                mean = np.mean([w[i][k] for i in range(n)], axis=0)
                for i in range(n):
                    w[i][k] = mean.copy()
    return w, m, v


ORACLE_CASES = {
    "two workers, half": dict(n=2, shapes={"a": (4, 5)}, steps=6, ratios=((0, 0.5),), every=0),
    "tenth, several leaves": dict(
        n=3, shapes={"a": (30, 41), "b": (17,), "c": (5, 6), "s": (), "z": (8, 9)}, steps=37,
        ratios=((0, 0.1),), every=10),
    "every step": dict(n=2, shapes={"a": (9, 7)}, steps=5, ratios=((0, 0.3),), every=1),
    "stages": dict(n=2, shapes={"a": (30, 41), "b": (3,)}, steps=30,
                   ratios=((0, 1.0), (4, 0.5), (11, 0.1)), every=7),
    "clamped below": dict(n=2, shapes={"a": (12, 9)}, steps=5, ratios=((0, 0.25),), every=0,
                          scale=1e-6),
    "clamped above": dict(n=2, shapes={"a": (12, 9)}, steps=5, ratios=((0, 0.25),), every=0,
                          scale=1e6),
}


NIGHTLY = {("every step", "held"), ("clamped below", "held"), ("clamped above", "held")}


@pytest.mark.quick
@pytest.mark.parametrize("name,form", [
    pytest.param(name, form, marks=pytest.mark.nightly if (name, form) in NIGHTLY else ())
    for name in ORACLE_CASES for form in ("local", "held")] + [("two workers, half", "direction")])
def test_matches_the_equations_in_numpy(name, form):
    case = ORACLE_CASES[name]
    n, steps = case["n"], case["steps"]
    rng = np.random.default_rng(0)
    scale = case.get("scale", 1.0)
    params = {k: scale * rng.normal(size=s) for k, s in case["shapes"].items()}
    if "z" in params:
        params["z"] = params["z"] * 0
    grads = [[{k: rng.normal(size=s) + 0.3 * i for k, s in case["shapes"].items()}
              for i in range(n)] for _ in range(steps)]
    kw = dict(b1=0.9, b2=0.999, b3=0.9, eps=1e-6)
    # Bounds that bind: ||w|| / ||u|| is about the scale.
    w, m, v = oracle(params, grads, lr=0.01, ratios=case["ratios"], decay=0.01, min_size=20,
                     every=case["every"], lo=0.01, hi=1000.0, form=form, **kw)
    tx = built(slamb, 0.01, AXIS, compress_ratio=case["ratios"], weight_decay=0.01, min_size=20,
               sync_every=case["every"], compensation="held" if form == "held" else "local",
               nu_ratio=0.25 * (form == "held"),
               exchange="direction" if form == "direction" else "momentum", **kw)
    def stack(trees):
        return {k: jnp.array(np.stack([x[k] for x in trees]), jnp.float32)
                               for k in case["shapes"]}
    start = {k: jnp.array(x, jnp.float32) for k, x in params.items()}
    got, state = run(tx, start, lambda t, _: stack(grads[t - 1]), steps, n, average=True)
    for k in params:
        reach = max(1.0, np.abs(params[k]).max())
        for i in range(n):
            np.testing.assert_allclose(got[k][i], w[i][k], atol=1e-6 * reach, rtol=1e-6)
            np.testing.assert_allclose(state[0].mu[k][i], m[i][k], atol=1e-6)
            np.testing.assert_allclose(state[0].nu[k][i], v[i][k], atol=1e-6)


@pytest.mark.parametrize("b1,b2", [
    (0.9, 0.999), pytest.param(0.5, 0.9, marks=pytest.mark.nightly),
    pytest.param(0.0, 0.99, marks=pytest.mark.nightly)])
def test_no_sequence_of_gradients_reaches_the_bound_on_the_direction(b1, b2):
    """Against the gradients that come nearest: growing by b2 / b1 a step (Cauchy-Schwarz's equality)."""
    growth = b2 / max(b1, 0.05)
    params = {"w": jnp.ones(1)}
    steps = {}
    for bound in (False, True):
        tx = optax.scale_by_adam(b1, b2, eps=0) if not bound else scale_by_slamb(
            b1=b1, b2=b2, eps=0, bound_direction=True)
        state, update = tx.init(params), jax.jit(tx.update)
        for t in range(60):
            direction, state = update({"w": jnp.array([growth**(t - 60.0)])}, state, params)
        steps[bound] = direction
    # Slamb's is scaled by ||w|| / ||u||, so compare what is left of it: it is not clipped away.
    limit = (1 - b1) / ((1 - b2) * (1 - b1 * b1 / b2)) ** 0.5
    assert float(steps[False]["w"][0]) <= limit * (1 + 1e-4)
    np.testing.assert_allclose(steps[True]["w"], 1.0, rtol=1e-5)


@pytest.mark.parametrize("bound", [False, True])
def test_a_row_only_other_workers_saw_fills_the_norm_unless_bounded(bound):
    """As published, the mean moment over a zero second moment is a million; the leaf's norm is its."""
    n, rows = 2, 50
    rng = np.random.default_rng(0)
    table = rng.normal(size=(rows, 8)).astype(np.float32)
    grads = rng.normal(size=(n, rows, 8)).astype(np.float32)
    grads[1, 0] = 0.0  # worker 1 has not seen row 0
    tx = scale_by_slamb(
        AXIS, min_size=0, compress_ratio=1.0, bound_direction=bound)
    (before, _), (after, _) = itertools.islice(
        trajectory(tx, {"w": table}, lambda t, p: {"w": grads}, n), 2)
    moved = np.linalg.norm(np.asarray(after["w"] - before["w"])[1, 1:])  # of all that it did see
    whole = np.linalg.norm(np.asarray(after["w"] - before["w"])[0])
    assert (moved > 0.3 * whole) == bound


def test_the_bounds_of_the_trust_ratio_bind():
    grads = {"w": np.ones((4, 5), np.float32)}
    tx = scale_by_slamb(min_size=0, compress_ratio=0.5)
    update = jax.jit(tx.update)
    for scale, expected in ((1e-6, 0.01), (1e6, 1000.0), (2.0, 2.0)):
        params = {"w": np.full((4, 5), scale, np.float32)}
        updates, _ = update(grads, tx.init(params), params)
        # the first step's direction is g / (|g| + eps) = 1, so the update is the ratio
        np.testing.assert_allclose(updates["w"], expected, rtol=1e-5)


def test_leaves_of_zeros_move_and_zero_gradients_stay_finite():
    params = {"zero_w": jnp.zeros((6, 7)), "zero_b": jnp.zeros(5), "w": jnp.ones((6, 7))}
    grads = {"zero_w": jnp.ones((6, 7)), "zero_b": jnp.ones(5), "w": jnp.zeros((6, 7))}
    tx = scale_by_slamb(min_size=0, compress_ratio=0.5)
    updates, _ = jax.jit(tx.update)(grads, tx.init(params), params)
    np.testing.assert_allclose(updates["zero_w"], 1.0, rtol=1e-5)  # ratio 1
    np.testing.assert_allclose(updates["zero_b"], 1.0, rtol=1e-5)
    assert np.all(np.asarray(updates["w"]) == 0.0)


# ---- 4. coverage and age


# Few shapes, so that few programs compile; seeds, cycles and steps vary freely within them.
SHAPES = ((3, 4), (1, 7), (9, 40), (31, 13))


@functools.lru_cache(None)
def masks_and_ages(shape, chunks):
    """(leaf_seed, steps[T], firsts) -> masks and ages [T, *shape] of a plan with these stages."""
    def of(leaf_seed, steps, firsts):
        ages = jax.vmap(
            lambda t: _LeafPlan(shape, list(chunks), list(firsts), leaf_seed, t).age)(steps)
        return ages == 0, ages

    return jax.jit(of)


@pytest.mark.quick
@settings(max_examples=30, deadline=None)
@given(shape=st.sampled_from(SHAPES), chunks=st.sampled_from((2, 3, 10, 13)),
       start=st.integers(1, 10**6), leaf_seed=st.integers(0, 2**32 - 1))
def test_every_coordinate_is_sent_once_in_any_c_steps(shape, chunks, start, leaf_seed):
    steps = np.arange(start, start + chunks, dtype=np.int32)
    masks, ages = masks_and_ages(shape, (chunks,))(
        np.uint32(leaf_seed), steps, np.zeros(1, np.int32))
    masks = np.asarray(masks)
    assert np.all(masks.sum(axis=0) == 1)
    assert np.array_equal(masks, np.asarray(ages) == 0)
    for t, mask in zip(steps, masks):
        assert np.array_equal(mask.ravel(), sent_at(leaf_seed, mask.size, chunks, int(t)))


@settings(max_examples=20, deadline=None)
@given(leaf_seed=st.integers(0, 2**32 - 1), chunks=st.sampled_from(((3,), (2, 7), (3, 7, 2))),
       lengths=st.lists(st.integers(1, 12), min_size=3, max_size=3))
def test_age_in_closed_form_is_age_as_counted(leaf_seed, chunks, lengths):
    """Over stages of several ratios and any lengths, against a counter."""
    shape, counted = (3, 4), np.zeros((3, 4), int)
    firsts = [0, *np.cumsum(lengths)]
    for i in range(len(chunks)):
        steps = np.arange(firsts[i] + 1, firsts[i] + 13, dtype=np.int32)
        masks, ages = masks_and_ages(shape, chunks[: i + 1])(
            np.uint32(leaf_seed), steps, np.array(firsts[: i + 1], np.int32))
        for t, mask, age in list(zip(steps, np.asarray(masks), np.asarray(ages)))[: lengths[i]]:
            assert np.array_equal(mask.ravel(), sent_at(leaf_seed, 12, chunks[i], int(t)))
            counted = np.where(mask, 0, counted + 1)
            assert np.array_equal(age, counted)


@pytest.mark.parametrize("shape,chunks", [*((shape, 7) for shape in SHAPES), ((31, 13), 100)])
def test_what_is_taken_is_spread_back_where_it_was(shape, chunks):
    values = jnp.arange(1.0, 1.0 + shape[0] * shape[1]).reshape(shape)

    @jax.jit
    def there_and_back(t):
        plan = _LeafPlan(shape, [chunks], [0], 5, t)
        taken = plan.take(values)
        return taken, plan.receive(jnp.zeros(shape), taken), plan.age == 0

    for t in (1, 2, 8):
        taken, got, mask = there_and_back(jnp.int32(t))
        assert taken.size == -(-values.size // chunks)
        assert np.array_equal(got, np.where(mask, values, 0))
        assert np.count_nonzero(mask) == np.count_nonzero(taken)


def test_age_is_bounded_by_the_cycle():
    ages = jax.jit(lambda t: _LeafPlan((100, 120), [10], [0], 7, t).age)
    for t in (1, 5, 9, 10, 37, 1000):
        age = np.asarray(ages(jnp.int32(t)))
        assert age.max() == min(9, t)
        assert abs(np.mean(age == 0) - 0.1) < 1e-3


def test_small_and_flat_leaves_are_sent_whole(params):
    params["v"] = jnp.ones((40, 50))
    tx = scale_by_slamb(AXIS, min_size=9000)
    _, state = run(tx, params, gradient(4), 3, 4)
    assert spread({"b": state.mu["b"], "v": state.mu["v"]}) == 0.0  # flat; 2,000 elements
    assert spread({"w": state.mu["w"]}) > 0.0  # 12,000 elements


# ---- 5. the momentum contract


def test_sent_momentum_is_the_mean_and_the_rest_is_untouched(params):
    n = 8
    tx = scale_by_slamb(AXIS, min_size=0, b1=0.9, b2=0.999)
    steps = list(itertools.islice(trajectory(tx, params, gradient(n), n), 7))
    (reached, before), (final, after) = steps[5:]
    grads = gradient(n)(6, reached)
    first = jax.jit(lambda m, g: 0.9 * m + (1 - 0.9) * g)
    second = jax.jit(lambda v, g: 0.999 * v + (1 - 0.999) * g * g)
    for k in ("w",):
        local = np.asarray(first(before.mu[k], grads[k]))
        seed = zlib.crc32(f"44['{k}']".encode())
        sent = sent_at(seed, params[k].size, 10, 6).reshape(params[k].shape)
        mu = np.asarray(after.mu[k])
        assert np.array_equal(mu[:, ~sent], local[:, ~sent])  # bit for bit
        assert np.all(mu[:, sent] == mu[:1, sent])
        np.testing.assert_allclose(mu[0][sent], local.mean(0)[sent], atol=1e-7)
        nu = np.asarray(after.nu[k])
        assert np.array_equal(nu, np.asarray(second(before.nu[k], grads[k])))
        assert spread({"nu": after.nu[k]}) > 0
    assert spread(final) > 0


def test_held_keeps_each_workers_own_moment_and_shares_what_was_sent(params):
    n = 4
    tx = scale_by_slamb(AXIS, min_size=0, compensation="held", nu_ratio=0.1)
    steps = list(itertools.islice(trajectory(tx, params, gradient(n), n), 7))
    (reached, before), (_, after) = steps[5:]
    grads = gradient(n)(6, reached)
    own = jax.jit(lambda m, g: 0.9 * m + (1 - 0.9) * g)(before.mu["w"], grads["w"])
    assert np.array_equal(after.mu["w"], own)  # nothing received is written into it
    sent = sent_at(zlib.crc32(b"44['w']"), params["w"].size, 10, 6).reshape(params["w"].shape)
    held, nu = np.asarray(after.held["w"]), np.asarray(after.nu["w"])
    assert spread(after.held) == 0.0
    np.testing.assert_allclose(held[0][sent], np.asarray(own).mean(0)[sent], atol=1e-7)
    assert np.array_equal(held[:, ~sent], np.asarray(before.held["w"])[:, ~sent])
    assert np.all(nu[:, sent] == nu[:1, sent])
    assert np.any(nu[:, ~sent] != nu[:1, ~sent])


def test_a_moment_in_eight_bits_dies_when_its_gradient_does(params):
    """Rounded whole, 0.94 came back as 0.94 on eight workers for ever; kept in eight bits, 0.008."""
    def fading(t, stacked):
        return jax.tree.map(lambda a: a * np.float32(t <= 5), gradient(8)(t, stacked))

    tx = scale_by_slamb(AXIS, compress_ratio=1 / 3, min_size=0, exchange="direction",
                        comm_dtype=jnp.float8_e4m3fn)
    path = [state for _, state in itertools.islice(trajectory(tx, params, fading, 8), 66)]
    fed, starved = path[5], path[-1]
    for k in params:  # 0.9 ** 60 is 0.0018
        assert np.abs(starved.mu[k]).max() < 0.003 * np.abs(fed.mu[k]).max()
        assert np.abs(fed.held[k]).max() > 0.1  # what is known is in use
    assert spread(fed.held) == spread(starved.held) == 0.0


@pytest.mark.nightly
def test_held_workers_stay_together_where_local_ones_part(params):
    apart = {c: spread(run(slamb(0.01, AXIS, min_size=0, compensation=c, nu_ratio=0.1), params, gradient(8), 30,
                           8)[0]) for c in ("held", "local")}
    assert apart["held"] < 0.25 * apart["local"]


# ---- 7. parameter averaging


@pytest.mark.quick
@pytest.mark.parametrize("every,due", [
    (3, {1, 4, 7}), (1, {1, 2, 3, 4, 5, 6, 7}), (((0, 1), (3, 2)), {1, 2, 3, 5, 7}),
    pytest.param(0, set(), marks=pytest.mark.nightly),
    pytest.param(2, {1, 3, 5, 7}, marks=pytest.mark.nightly)])
def test_parameters_are_averaged_at_one_past_each_period(every, due):
    params = {"w": jnp.ones((30, 40))}
    tx = slamb(0.01, AXIS, sync_every=every, min_size=0)
    steps = trajectory(tx, params, gradient(3), 3, average=True)
    for t, (got, state) in enumerate(itertools.islice(steps, 8)):
        if t == 0:
            continue
        assert bool(state[0].sync_due) == (t in due)
        assert (spread(got) == 0.0) == (t in due)
        assert spread(state[0].mu) > 0  # averaging leaves moments alone


def test_average_is_the_mean_and_the_same_bits_everywhere():
    rng = np.random.default_rng(1)
    tree = {"f32": rng.normal(size=(8, 33, 7)).astype(np.float32),
            "bf16": rng.normal(size=(8, 50)).astype(jnp.bfloat16)}
    got = jax.jit(jax.vmap(lambda p: average_params(p, AXIS), axis_name=AXIS))(tree)
    assert spread(got) == 0.0
    assert got["bf16"].dtype == jnp.bfloat16
    np.testing.assert_allclose(got["f32"][0], np.asarray(tree["f32"]).mean(0), atol=1e-6)
    exact = np.asarray(tree["bf16"]).astype(np.float32).mean(0).astype(jnp.bfloat16)
    assert np.array_equal(np.asarray(got["bf16"][0]), exact)  # summed in float32, rounded once


def test_averaging_needs_a_slamb_state():
    params = {"w": jnp.ones(3)}
    with pytest.raises(ValueError, match="holds no ScaleBySlambState"):
        slamb_average(params, optax.adam(0.1).init(params), None)
