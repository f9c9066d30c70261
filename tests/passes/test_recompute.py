"""recompute-residuals: fewer bytes kept, the same numbers; the cut is a cheapest one."""

from __future__ import annotations

import dataclasses
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import PlanError, VerifyError
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.recompute_residuals import _cheapest_cut
from hetjax.passes.residuals import residual_bytes
from tests.support import assert_same, make_batch, make_linen


def gelu_layers():
    """Four layers with gelu and dropout: much that is cheap to make again."""

    def step(params, batch):
        keys = jax.random.split(jax.random.key(3), len(params))

        def loss_fn(params):
            x = batch["x"]
            for w, key in zip(params, keys, strict=True):
                x = jax.nn.gelu(x @ w) * jax.random.bernoulli(key, 0.9, x.shape)
            return jnp.sum(jnp.square(x).mean(-1) * batch["mask"]) / batch["mask"].sum()

        loss, grads = jax.value_and_grad(loss_fn)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, grads), loss

    rng = np.random.default_rng(0)
    draw = lambda *shape: rng.standard_normal(shape).astype(np.float32)  # noqa: E731
    return step, [jnp.asarray(draw(16, 16) / 4) for _ in range(4)], {"x": draw(8, 16), "mask": (np.arange(8) % 3 > 0).astype(np.float32)}


@pytest.mark.parametrize(("microbatches", "schedule"), [(1, "zb-h1"), (2, "1f1b")])
def test_fewer_bytes_and_the_same_numbers(microbatches, schedule):
    step, state, batch = gelu_layers()
    want = jax.jit(step)(state, batch)
    kept = {}
    for mode in ("", "cheap", "layer", "stage"):
        parallel = hetjax.parallelize(
            step, num_stages=2, num_microbatches=microbatches, mesh="2,1", recompute=mode, schedule=schedule
        )
        got = parallel(state, batch)
        assert_same(jax.device_get(got), jax.device_get(want))
        kept[mode] = parallel.stats()["residual_bytes"]
        assert parallel.plan.recompute == mode
        if mode:
            assert "recompute: residual bytes per microbatch: s0 " in parallel.explain()
    # Without modules the step has one layer.
    assert kept["stage"] == kept["layer"] < kept["cheap"] < 0.7 * kept[""]


def test_a_stage_that_runs_its_forward_again_keeps_what_it_was_given():
    step, state, batch = gelu_layers()
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, recompute="stage")
    parallel.plan_for(state, batch)
    kept = residual_bytes(parallel._in_use().program)
    # Stage 0 is given the batch, an input; stage 1 one activation, which it received and did not make.
    assert kept[0] == 0
    assert kept[1] <= batch["x"].size // 2 * 4


def test_what_layers_were_given_is_kept_and_little_else_is_there_at_a_time():
    step, state, _ = make_linen(blocks=4)
    batch = make_batch(64, length=16)
    memory = {}
    for mode in ("", "layer", "stage"):
        parallel = hetjax.parallelize(step, num_stages=1, num_microbatches=4, schedule="gpipe", recompute=mode)
        parallel.plan_for(state, batch)
        bundle = parallel._in_use().bundle
        (memory[mode],) = estimate_program(bundle).memory
    assert memory["stage"].activations < memory["layer"].activations < 0.4 * memory[""].activations
    # A stage's values at once, or a layer's.
    assert memory["layer"].temporaries < 0.7 * memory["stage"].temporaries


def test_only_the_stages_that_the_plan_names_run_again():
    step, state, batch = make_linen(blocks=2)
    plan = hetjax.parallelize(step, num_stages=2, num_microbatches=2).plan_for(state, batch)
    before, after = (
        residual_bytes(_planned(step, p, state, batch))
        for p in (plan, dataclasses.replace(plan, recompute="layer", recompute_stages=(0,)))
    )
    assert after[0] < before[0] and after[1] == before[1]
    with pytest.raises(VerifyError, match="recompute_stages: there is no stage 2"):
        _planned(step, dataclasses.replace(plan, recompute="layer", recompute_stages=(2,)), state, batch)


def _planned(step, plan, state, batch):
    parallel = hetjax.parallelize(step, plan=plan)
    parallel.plan_for(state, batch)
    return parallel._in_use().program


@pytest.mark.quick
def test_unknown_modes_are_refused():
    with pytest.raises(PlanError, match="may be '', 'cheap', 'layer', 'stage' or None"):
        hetjax.parallelize(lambda s, b: (s, b), recompute="all")


def enough(wanted, sources, kept):
    """Whether all that is wanted is kept or can be made."""
    return all(r in kept or (r in sources and enough(sources[r], sources, kept)) for r in wanted)


@pytest.mark.quick
def test_the_cut_is_a_cheapest_one():
    rng = np.random.default_rng(0)
    for _ in range(60):
        count = int(rng.integers(4, 9))
        costs = rng.integers(1, 9, count)
        sources = {r: tuple(int(x) for x in rng.choice(r, size=min(r, 2), replace=False)) for r in range(2, count) if rng.random() < 0.7}
        wanted = sorted({count - 1, int(rng.integers(1, count))})
        found = _cheapest_cut(wanted, sources, lambda r, costs=costs: int(costs[r]))
        assert enough(wanted, sources, found)
        best = min(
            sum(int(costs[r]) for r in kept)
            for n in range(count + 1)
            for kept in itertools.combinations(range(count), n)
            if enough(wanted, sources, kept)
        )
        assert sum(int(costs[r]) for r in found) == best


def test_a_plan_carries_the_choice(tmp_path):
    step, state, batch = gelu_layers()
    hetjax.parallelize(step, num_stages=2, num_microbatches=2, recompute="cheap").plan_for(state, batch).save(tmp_path / "plan.json")
    again = hetjax.parallelize(step, plan=tmp_path / "plan.json")
    again.plan_for(state, batch)
    assert again.plan.recompute == "cheap" and "recompute: residual bytes" in again.explain()
