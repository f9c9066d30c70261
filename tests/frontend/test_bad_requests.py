"""Requests that cannot be met: one clear error each, with the numbers and what to do."""

import dataclasses
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import hetjax
from hetjax.errors import ClusterError, MicrobatchError, PlanError
from tests.support import make_linen


def test_more_stages_than_devices():
    step, state, batch = make_linen()
    with pytest.raises(PlanError, match=r"9 stages need at least 9 devices; .* has 8"):
        hetjax.parallelize(step, num_stages=9)(state, batch)


def test_a_mesh_larger_than_the_devices():
    step, state, batch = make_linen()
    with pytest.raises(PlanError, match=r"stage 1 asks for 5 devices of one kind; left are 3"):
        hetjax.parallelize(step, num_stages=2, mesh="5,1")(state, batch)


def test_meshes_that_are_not_one_per_stage():
    step, state, batch = make_linen()
    with pytest.raises(PlanError, match="3 meshes are given for 2 stages"):
        hetjax.parallelize(step, num_stages=2, mesh="1,1;1,1;2,1")(state, batch)


@pytest.mark.parametrize("mesh", ["x", "2,1,1", "0,1", ""])
def test_a_mesh_that_is_not_understood(mesh):
    with pytest.raises(PlanError, match=r"is not understood; write data,model sizes"):
        hetjax.parallelize(make_linen()[0], mesh=mesh)


def test_microbatches_that_do_not_divide_the_batch():
    step, state, batch = make_linen()
    with pytest.raises(MicrobatchError, match=r"3 microbatches do not divide a batch of 8 .*1, 2, 4"):
        hetjax.parallelize(step, num_stages=2, num_microbatches=3)(state, batch)


def batch_statistics(state, batch):
    def loss_fn(params):
        logits = state.apply_fn({"params": params}, batch["tokens"])
        centred = logits - logits.mean(axis=0)
        # The model once more, so that what couples examples is no head at the end.
        scaled = jax.tree.map(lambda p: p * (1 + (centred**2).mean()), params)
        return (state.apply_fn({"params": scaled}, batch["tokens"]) ** 2).mean()

    loss, grads = jax.value_and_grad(loss_fn)(state.params)
    return state.apply_gradients(grads=grads), loss


def test_more_microbatches_than_can_be_proved_names_equation_module_and_line():
    _, state, batch = make_linen()
    with pytest.raises(MicrobatchError) as caught:
        hetjax.parallelize(batch_statistics, num_stages=2, num_microbatches=2)(state, batch)
    error = caught.value
    assert "test_bad_requests.py:" in error.source
    line = int(error.source.rpartition(":")[2])
    assert "centred" in pathlib.Path(__file__).read_text().splitlines()[line - 1]
    assert error.equation
    assert "num_microbatches=1" in str(error)


def test_the_number_not_given_falls_back_to_one_with_one_warning():
    _, state, batch = make_linen()
    parallel = hetjax.parallelize(batch_statistics, num_stages=2, mesh="1,1")
    with pytest.warns(UserWarning, match="as one microbatch") as caught:
        ours, _ = parallel(state, batch)
    assert len(caught) == 1
    assert parallel.plan.num_microbatches == 1
    assert "mean" in parallel.plan.microbatch_reason or "batch" in parallel.plan.microbatch_reason


def test_a_batch_size_written_into_the_step_cannot_be_split_but_runs_whole():
    _, state, batch = make_linen()
    weights = np.linspace(0.5, 1.5, 8, dtype=np.float32)

    def step(state, batch):
        def loss_fn(params):
            logits = state.apply_fn({"params": params}, batch["tokens"])
            return jnp.einsum("b,btv->", weights, logits**2) / 100

        loss, grads = jax.value_and_grad(loss_fn)(state.params)
        return state.apply_gradients(grads=grads), loss

    with pytest.raises(MicrobatchError, match="cannot be traced with 2 times fewer examples") as caught:
        hetjax.parallelize(step, num_stages=2, num_microbatches=2)(state, batch)
    line = int(caught.value.source.rpartition(":")[2])
    assert "einsum" in pathlib.Path(__file__).read_text().splitlines()[line - 1]


def test_a_step_that_returns_no_state():
    _, state, batch = make_linen()

    def evaluate(state, batch):
        return state.apply_fn({"params": state.params}, batch["tokens"]).mean()

    with pytest.raises(PlanError, match=r"evaluate returns no new state.*like=train_step"):
        hetjax.parallelize(evaluate)(state, batch)


def test_options_given_as_positions():
    with pytest.raises(PlanError, match="options are given by name"):
        hetjax.parallelize("cluster.toml")


TWO_SITES = """
name = "two-sites"
[[sites]]
name = "east"
[[sites.nodes]]
kind = "a100-80g"
devices = 2
[[sites]]
name = "west"
[[sites.nodes]]
kind = "v100-16g"
devices = 2
[links.wan]
between = ["east", "west"]
bandwidth_gbit_s = 10
latency_ms = 5
"""


def test_a_cluster_that_is_not_at_hand_lists_both_and_the_ways_on(tmp_path):
    step, state, batch = make_linen()
    path = tmp_path / "cluster.toml"
    path.write_text(TWO_SITES)
    parallel = hetjax.parallelize(step, cluster=path, num_stages=2, num_microbatches=2)
    with pytest.raises(ClusterError, match=r"(?s)a100-80g.*cpu.*rehearse=True"):
        parallel(state, batch)
    assert [s.kind for s in parallel.plan_for(state, batch).stages] == ["a100-80g", "v100-16g"]
    rehearsal = hetjax.parallelize(step, cluster=path, num_stages=2, num_microbatches=2, rehearse=True)
    rehearsal(state, batch)
    assert rehearsal.plan.stages[1].site == "west"


def test_an_unequal_plan_is_refused(tmp_path):
    step, state, batch = make_linen()
    plan = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1").plan_for(state, batch)
    other = dataclasses.replace(plan, stages=(plan.stages[0], plan.stages[0]))
    with pytest.raises(hetjax.errors.HetjaxError, match="device"):
        hetjax.parallelize(step, plan=other)(state, batch)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"num_stages": 0}, "num_stages is 0; it must be at least 1"),
        ({"num_stages": -1}, "num_stages is -1; it must be at least 1"),
        ({"num_stages": "2", "num_microbatches": 1.5}, "(?s)num_stages is '2'.*num_microbatches is 1.5"),
        ({"schedule": 3}, "schedule is 3; it must be a name"),
        ({"plan": {}}, "plan is a dict"),
        ({"like": make_linen}, "like is the function make_linen; it must be a function that hetjax"),
        ({"progress": 1}, "progress is a int"),
    ],
    ids=lambda x: next(iter(x)) if isinstance(x, dict) else "",
)
def test_options_of_the_wrong_type_are_refused_before_anything_runs(options, match):
    with pytest.raises(PlanError, match=match):
        hetjax.parallelize(make_linen()[0], **options)


def test_a_cluster_that_is_no_cluster():
    with pytest.raises(ClusterError, match="cluster is a int"):
        hetjax.parallelize(make_linen()[0], cluster=3)


def test_a_parallel_function_is_not_parallelized_again_nor_called_inside_jit():
    step, state, batch = make_linen()
    parallel = hetjax.parallelize(step)
    with pytest.raises(PlanError, match="is parallel already"):
        hetjax.parallelize(parallel)
    for _ in range(2):  # before it has a plan, and after
        with pytest.raises(PlanError, match=r"called inside jax\.jit"):
            jax.jit(parallel)(state, batch)
        parallel(state, batch)


def test_like_that_is_no_parallel_function():
    step, state, _ = make_linen()
    with pytest.raises(PlanError, match="like is a function"):
        hetjax.place(state, like=step)


def test_a_step_that_returns_what_is_no_array():
    step, state, batch = make_linen()
    with pytest.raises(PlanError, match=r"out\[1\] is a str"):
        hetjax.parallelize(lambda s, b: (step(s, b)[0], "done"))(state, batch)


def test_branching_on_an_argument_names_it_and_the_way_on():
    step, state, batch = make_linen()

    def switched(state, batch, train):
        return step(state, batch) if train else (state, 0.0)

    with pytest.raises(jax.errors.TracerBoolConversionError) as caught:
        hetjax.parallelize(switched)(state, batch, True)
    notes = "\n".join(caught.value.__notes__)
    assert "is train" in notes and "functools.partial" in notes


def test_a_gradient_inside_a_loop_is_told_where_stages_are_asked_for():
    def step(w, batch):
        def add(grads, x):
            return jax.tree.map(jnp.add, grads, jax.grad(lambda w: jnp.mean(jnp.tanh(x @ w) ** 2))(w)), None

        grads, _ = jax.lax.scan(add, jnp.zeros_like(w), batch["x"].reshape(2, -1, batch["x"].shape[-1]))
        return w - 0.1 * grads, grads.sum()

    w, batch = jnp.eye(4), {"x": np.ones((8, 4), np.float32)}
    for options in ({"num_stages": 2}, {"mesh": "1,1;1,1"}):
        parallel = hetjax.parallelize(step, num_microbatches=1, **options)
        with pytest.warns(UserWarning, match=r"2 stages are asked for, but forward and backward lie inside 'scan' at .*py:\d+"):
            parallel.plan_for(w, batch)
        assert "stages: 2 stages are asked for" in parallel.explain()
