"""A start that another process has kept: the same numbers without planning, and never a stale one."""

import dataclasses
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

import hetjax
from hetjax.frontend import parallel_function
from hetjax.ir.cluster import Cluster
from hetjax.runtime import compiler

WIDTH = 16


def step(state, batch):
    def loss(params):
        x = batch["x"]
        for w in params:
            x = jnp.tanh(x @ w)
        return ((x - batch["y"]) ** 2).mean() * state["scale"]

    value, grads = jax.value_and_grad(loss)(state["params"])
    params = jax.tree.map(lambda p, g: p - 0.1 * g, state["params"], grads)
    return {**state, "params": params}, value


def arguments(batch_size=8):
    keys = jax.random.split(jax.random.key(0), 4)
    params = [jax.random.normal(k, (WIDTH, WIDTH)) / 4 for k in keys[:2]]
    batch = {"x": jax.random.normal(keys[2], (batch_size, WIDTH)), "y": jax.random.normal(keys[3], (batch_size, WIDTH))}
    return {"params": params, "scale": jnp.ones(())}, batch


def parallel(fn=step, **options):
    return hetjax.parallelize(fn, **{"num_stages": 2, "mesh": "2,1", "num_microbatches": 2, **options})


@pytest.fixture
def cache(tmp_path):
    names = {
        "jax_compilation_cache_dir": str(tmp_path), "jax_persistent_cache_min_compile_time_secs": 0.0,
        "jax_persistent_cache_min_entry_size_bytes": -1,
    }
    before = {name: getattr(jax.config, name) for name in names}
    compilation_cache.reset_cache()
    for name, value in names.items():
        jax.config.update(name, value)
    yield tmp_path / "hetjax"
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


@pytest.fixture
def planned(monkeypatch):
    """How often a plan was made."""
    made = []

    def build(*args):
        made.append(args)
        return plain(*args)

    plain = parallel_function.build_bundle
    monkeypatch.setattr(parallel_function, "build_bundle", build)
    return made


def equal(a, b):
    return all(np.array_equal(x, y) for x, y in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True))


def test_a_second_start_plans_nothing_and_gives_the_same_bits(cache, planned):
    state, batch = arguments()
    first = parallel()
    results = [first(state, batch)]
    results.append(first(results[0][0], batch))
    again = parallel()
    after = again(state, batch)
    assert len(planned) == 1 and equal(results[0], after)
    assert equal(results[1], again(after[0], batch))
    assert again.explain() == first.explain() and again.plan == first.plan
    assert again.stats()["bytes_between_stages"] == first.stats()["bytes_between_stages"]


def test_what_follows_a_kept_start_runs(cache, planned):
    state, batch = arguments()
    parallel()(state, batch)
    again = parallel()
    state, _ = again(state, batch)

    def norm(state):
        return sum(jnp.sum(p**2) for p in state["params"])

    assert np.allclose(hetjax.parallelize(norm, like=again)(state), norm(jax.device_get(state)), rtol=1e-6)
    assert len(planned) == 1


@pytest.mark.parametrize(
    "options", [{"num_microbatches": 4}, {"mesh": "1,2"}, {"donate": True}],
    ids=lambda o: next(iter(o)),
)
def test_other_options_are_another_start(cache, planned, options):
    parallel()(*arguments())
    parallel(**options)(*arguments())
    assert len(planned) == 2


def test_an_edited_step_is_another_start(cache, planned):
    def edited(state, batch):
        state, value = step(state, batch)
        return state, value * 2

    edited.__name__ = "step"
    _, value = parallel()(*arguments())
    _, doubled = parallel(edited)(*arguments())
    assert len(planned) == 2 and float(doubled) == 2 * float(value)


def test_another_precision_is_another_start(cache, planned):
    parallel()(*arguments())
    with jax.default_matmul_precision("float32"):
        parallel()(*arguments())
    assert len(planned) == 2


def test_another_description_of_the_devices_is_another_start(cache, planned):
    local = Cluster.local()
    renamed = dataclasses.replace(local, name=f"{local.name}-of-old")
    parallel(cluster=local)(*arguments())
    parallel(cluster=renamed)(*arguments())
    assert len(planned) == 2


@pytest.mark.parametrize("kind", ["start", "executable"])
def test_a_damaged_file_is_made_anew_and_said(cache, planned, caplog, kind):
    first = parallel()(*arguments())
    for file in cache.glob(f"*.{kind}"):
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)
    # With JAX's executable, which cannot be serialised again, there would be nothing to keep.
    for path in cache.parent.glob("*-cache"):
        path.unlink()
    with caplog.at_level(logging.WARNING, "hetjax"):
        assert equal(parallel()(*arguments()), first)
    assert len(planned) == 2 and "damaged" in caplog.text
    assert equal(parallel()(*arguments()), first) and len(planned) == 2  # written again


def test_an_executable_from_jaxs_cache_is_not_kept_a_second_time(cache, planned):
    """Function wrapped_tanh not found: XLA's CPU backend cannot serialise what it has loaded."""
    first = parallel()(*arguments())
    for path in cache.iterdir():
        path.unlink()
    jax.monitoring.clear_event_listeners()  # anyone may
    for _ in range(2):
        assert equal(parallel()(*arguments()), first)
    assert len(planned) == 3 and not list(cache.iterdir())


def test_fragments_that_an_edit_left_alone_are_not_lowered_again(cache, planned, monkeypatch):
    def edited(state, batch):
        state, value = step(state, batch)
        return state, value * 2

    edited.__name__ = "step"
    first = parallel()
    first(*arguments())
    lowered = []
    plain = compiler._lower
    monkeypatch.setattr(compiler, "_lower", lambda *a: lowered.append(a) or plain(*a))
    parallel(edited)(*arguments())
    assert len(planned) == 2 and 0 < len(lowered) < len(first._latest.program.fragments)


def test_without_jaxs_cache_nothing_is_kept(cache, planned):
    jax.config.update("jax_compilation_cache_dir", None)
    parallel()(*arguments())
    parallel()(*arguments())
    assert len(planned) == 2 and not cache.exists()


def test_quick_compilations_are_not_kept(cache, planned):
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1e3)
    parallel()(*arguments())
    assert not cache.exists()


def test_a_step_that_means_what_a_microbatch_means_is_never_taken_from_before(cache, planned):
    """The trace at the whole batch, which names the start, does not show what a microbatch means."""

    def coupled(state, batch, at_one_microbatch):
        by = 1.0 if batch["x"].shape[0] == 8 else at_one_microbatch
        loss = lambda p: ((batch["x"] @ p[0] @ p[1]).std(0) ** 2).sum() * by  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state["params"])
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    for by in (2.0, 3.0):
        fn = functools.partial(coupled, at_one_microbatch=by)
        parallel(fn, per_microbatch=True)(*arguments())
    assert len(planned) == 2


def test_a_kept_refusal_to_split_warns_again(cache, planned):
    def coupled(state, batch):
        # What couples examples comes first, so that it is no loss head.
        loss = lambda p: ((batch["x"] @ p[0] / (batch["x"] @ p[0]).std(0) @ p[1]) ** 2).sum()  # noqa: E731
        value, grads = jax.value_and_grad(loss)(state["params"])
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    for _ in range(2):
        with pytest.warns(UserWarning, match="one microbatch"):
            parallel(coupled, num_microbatches=None)(*arguments())
    assert len(planned) == 1


def test_a_batch_size_taken_out_of_the_step_ends_a_kept_refusal(cache, planned):
    """The trace at the whole batch is the same before and after; only one at a microbatch shows it."""
    examples = [8]

    def sized(state, batch):
        def loss(params):
            x = jnp.tanh(batch["x"] @ params[0]) @ params[1]
            return (x.reshape(examples[0] or batch["x"].shape[0], WIDTH) ** 2).mean()

        value, grads = jax.value_and_grad(loss)(state["params"])
        return {**state, "params": jax.tree.map(lambda p, g: p - g, state["params"], grads)}, value

    with pytest.warns(UserWarning, match="one microbatch"):
        parallel(sized, num_microbatches=None)(*arguments())
    examples[0] = 0
    mended = parallel(sized, num_microbatches=None)
    mended(*arguments())
    assert mended.plan.num_microbatches > 1
