"""Every schedule's task lists, executed as they are on one compiled program, give plain jit's parameters."""

import dataclasses

import jax
import pytest

import hetjax
from hetjax.errors import PlanError
from hetjax.ir.verify import verify_program
from hetjax.passes.schedule_tasks import schedule_tasks
from hetjax.passes.schedules import schedule_info
from hetjax.passes.split_backward import is_split, split_backward
from tests.support import assert_same, copy_tree, make_batch, make_linen


@pytest.fixture(scope="module")
def split_step():
    """A tied model with masked loss on three stages, compiled with its backward in two halves."""
    step, state, _ = make_linen(loss="masked", tied=True, blocks=3)
    batch = make_batch(10)
    parallel = hetjax.parallelize(step, num_stages=3, num_microbatches=5, mesh="1,1", schedule="zb-h1")
    ours, _ = parallel(state, batch)
    theirs, _ = jax.jit(step)(copy_tree(state), batch)
    assert_same(ours, theirs)
    return parallel, state, batch, theirs


def run_tasks(parallel, tasks, state, batch):
    """Returns the state after one step of the compiled program with other task lists."""
    from hetjax.frontend.calls import flatten_call, rebuild_result
    from hetjax.frontend.entry import Entry

    old = parallel._latest
    program = old.program.replace(tasks=tasks)
    verify_program(program)
    entry = Entry(old.bundle.replace(program=program), old.structure, old.returned)
    entry.adopt(old)
    leaves, _ = flatten_call((state, batch), {}, False)
    new, _ = rebuild_result(old.structure, old.returned, entry.run(leaves), (state, batch), {})
    return new


@pytest.mark.parametrize(
    "kind", ["gpipe", "1f1b", "eager-1f1b", "virtual-1f1b", "zb-h1", "zb-h2", "virtual-zb", "auto"]
)
def test_the_lists_of_a_schedule_run_as_they_are(split_step, kind):
    parallel, state, batch, theirs = split_step
    tasks = schedule_tasks(parallel._latest.program, kind, [1.0, 2.0, 1.0])
    assert_same(run_tasks(parallel, tasks, state, batch), theirs)


def test_warmups_of_a_plan_are_followed(split_step):
    parallel, state, batch, theirs = split_step
    program = parallel._latest.program
    tasks = schedule_tasks(program, "virtual-1f1b", warmups=(5, 3, 1))
    kinds = [[t.kind for t in items if t.kind in "FI"] for items in tasks]
    assert [k.index("I") for k in kinds] == [5, 3, 1]
    assert_same(run_tasks(parallel, tasks, state, batch), theirs)


def test_a_split_backward_passes_the_gradient_on_before_weights_are_added(split_step):
    program = split_step[0]._latest.program
    halves = {f.name: f for f in program.fragments if f.phase in ("backward", "weight")}
    assert set(halves) == {f"s{s}/{half}" for s in range(3) for half in ("backward", "weights")}
    for s in range(3):
        first, second = halves[f"s{s}/backward"], halves[f"s{s}/weights"]
        assert all(p.form == "sum" for p in second.outputs)
        assert not any(p.form == "sum" for p in first.outputs)
        kept = {p.ref for p in first.outputs} & {p.ref for p in second.inputs}
        assert kept or not first.ops
    assert not halves["s0/backward"].outputs  # nobody is upstream of the first stage
    dots = [sum(op.primitive == "dot_general" for op in halves[f"s1/{h}"].ops) for h in ("backward", "weights")]
    assert min(dots) > 0
    matrices = sum(program.avals[p.ref].ndim == 2 for p in halves["s1/weights"].outputs)
    assert dots[1] == matrices  # one product per weight gradient, and no other


def test_splitting_is_for_programs_that_are_whole(split_step):
    program = split_step[0]._latest.program
    assert is_split(program)
    assert split_backward(program.replace(fragments=tuple(f for f in program.fragments if f.phase == "forward"))) is not None
    whole = program.replace(fragments=tuple(
        dataclasses.replace(f, phase="backward", name=f.name + "'") if f.phase == "weight" else f
        for f in program.fragments if f.phase != "backward"))
    with pytest.raises(PlanError, match=r"zb-h1 runs the backward in two halves, and this program's backward"):
        schedule_tasks(whole, "zb-h1")


def test_a_schedule_is_asked_for_by_name():
    step, state, batch = make_linen()
    with pytest.raises(PlanError, match=r"unknown schedule '1f1bb'; did you mean 1f1b"):
        hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="1,1", schedule="1f1bb")(state, batch)
    assert schedule_info("zb-h1").split
