"""Small trainings: digits, and workers that disagree, against LAMB with the dense exchange."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

# An installed wheel is tested outside the source tree, where there are no benchmarks.
arms = pytest.importorskip("benchmarks._slamb_arms", reason="no benchmarks beside these tests")
tasks = pytest.importorskip("benchmarks._slamb_tasks", reason="no benchmarks beside these tests")

WORKERS = 8


@functools.lru_cache(None)
def figures(task_name, arm_name, seeds, rate):
    """The mean of a task's figure over seeds; averaged parameters of 8 workers."""
    task, steps, figure = {
        "digits": lambda: (tasks.digits(), 60, "accuracy_percent"),
        "quadratic": lambda: (tasks.quadratic(), 500, "excess"),
        # A tenth of the unknowns: every one is a problem of its own, so the floor is the same mean.
        "small quadratic": lambda: (tasks.quadratic(shape=(40, 50)), 500, "excess")}[task_name]()
    sizes = dict(min_size=1000, every=50 if task_name == "digits" else 100)
    arm, workers = {
        "lamb": lambda: (arms.lamb(0.0), 1),
        "published": lambda: (arms.slamb(decay=0.0, **sizes), WORKERS),
        "held": lambda: (arms.slamb(
            decay=0.0, compensation="held", nu_ratio=0.1, **sizes), WORKERS),
        "dropped": lambda: (arms.unsent_dropped(decay=0.0, min_size=1000), WORKERS)}[arm_name]()
    train = tasks.trainer(arm, task, steps, workers)
    return np.mean([float(task.measure(train(rate, seed)[0])[figure]) for seed in range(seeds)])


@pytest.mark.nightly
def test_digits_after_sixty_steps_are_within_half_a_point_of_lamb():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    lamb = figures("digits", "lamb", 3, 0.02)
    assert lamb > 95.0  # LAMB has learned them
    assert figures("digits", "published", 3, 0.02) >= lamb - 0.5


@pytest.mark.nightly
def test_dropping_what_is_not_sent_loses_ten_points():
    pytest.importorskip("sklearn", reason="the digits come with scikit-learn")
    assert figures("digits", "dropped", 3, 0.02) <= figures("digits", "published", 3, 0.02) - 10.0


@pytest.mark.parametrize("task,seeds", [
    ("small quadratic", 1), pytest.param("quadratic", 3, marks=pytest.mark.nightly)])
def test_workers_that_disagree_reach_lambs_floor_when_moments_are_held(task, seeds):
    lamb = figures(task, "lamb", seeds, 0.01)  # the best rate of both, of 0.005 to 0.04
    assert figures(task, "held", seeds, 0.01) <= 1.2 * lamb
    assert figures(task, "dropped", seeds, 0.01) >= 3.0 * lamb


@pytest.mark.nightly
def test_dropping_what_is_not_sent_stays_above_lambs_floor_at_its_own_best_rate():
    lamb = figures("quadratic", "lamb", 3, 0.01)
    for rate in (0.005, 0.02, 0.04):
        assert figures("quadratic", "dropped", 3, rate) >= 3.0 * lamb


@pytest.mark.nightly
def test_a_run_cut_in_mid_cycle_goes_on_bit_for_bit(tmp_path, monkeypatch):
    """Of the benchmark's long trainings, with everything SLAMB keeps: eight bits, ages, counts."""
    runs = pytest.importorskip("benchmarks._slamb_runs")
    monkeypatch.setattr(runs, "PIECE_STEPS", 7)
    task = tasks.quadratic(shape=(8, 10))
    arm = arms.slamb("third", compress_ratio=1 / 3, comm_dtype=jnp.float8_e4m3fn,
                     exchange="direction", every=5, min_size=0)
    once = runs.Runs()
    whole = once.one(task, arm, 14, WORKERS, 0.01, 0)
    clock = iter(range(1000))
    monkeypatch.setattr(runs.time, "monotonic", lambda: next(clock))
    path = tmp_path / "results.jsonl"
    cut = runs.Runs(path, deadline_s=1, _steppers=once._steppers)  # compiled once
    assert cut.one(task, arm, 14, WORKERS, 0.01, 0) is None
    assert not path.exists()
    got = runs.Runs(path, _steppers=once._steppers).one(task, arm, 14, WORKERS, 0.01, 0)
    assert got is not None and got["run_s"] >= 2
    assert {**got, "run_s": 0} == {**whole, "run_s": 0}
    assert runs.Runs(path).one(task, arm, 14, WORKERS, 0.01, 0) == got
