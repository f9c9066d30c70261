"""`parallelize` searches for its plan where nothing is asked, keeps it, and gives plain jit's numbers."""

import logging
import pathlib

import jax
import pytest

import hetjax
from hetjax.frontend import default_plan
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from tests.support import assert_same, copy_tree, make_batch, make_linen

TWO_SITES = pathlib.Path(hetjax.__file__).parent / "demo" / "two_sites.toml"


def test_a_searched_plan_runs_like_plain_jit_and_is_kept_for_the_next_start(tmp_path, monkeypatch, caplog):
    monkeypatch.setenv("HETJAX_CACHE", str(tmp_path))
    caplog.set_level(logging.INFO, "hetjax")
    step, state, batch = make_linen(blocks=1)
    parallel = hetjax.parallelize(step, cluster=TWO_SITES)
    ours, theirs = copy_tree(state), copy_tree(state)
    for _ in range(2):  # the second with the state where the plan has it
        ours, out = parallel(ours, batch)
        theirs, expected = jax.jit(step)(theirs, batch)
    assert_same(ours, theirs)
    assert_same(out, expected)
    assert parallel.stats()["plan_from"] == "search"
    assert parallel.plan.evaluations and parallel.plan.seed == 0
    assert "plans judged" in parallel.explain()

    monkeypatch.setattr(default_plan, "search_step", None)  # a second search would fail
    again = hetjax.parallelize(step, cluster=TWO_SITES)
    assert again.plan_for(state, batch) == parallel.plan
    (kept,) = (tmp_path / "plans").iterdir()
    assert str(kept) in again.explain() and f"taken from {kept}" in caplog.text
    with pytest.raises(TypeError):  # another number of microbatches is another key
        hetjax.parallelize(step, cluster=TWO_SITES, num_microbatches=2).plan_for(state, batch)
    kept.write_text("{")
    with pytest.raises(TypeError):
        hetjax.parallelize(step, cluster=TWO_SITES).plan_for(state, batch)
    assert "is damaged" in caplog.text


def test_a_stage_recomputes_where_only_that_fits_and_gives_the_same_numbers(tmp_path, monkeypatch):
    monkeypatch.setenv("HETJAX_CACHE", str(tmp_path))
    step, state, _ = make_linen(blocks=2)
    batch = make_batch(96, length=16)
    toml, room = TWO_SITES.read_text(), 350_000  # what the step keeps for its backward takes most of it
    small = Cluster.parse(toml.replace('like = "cpu"\n', f'like = "cpu"\nmemory_bytes = {room}\n'))
    with pytest.raises(PlanError, match="GB"):
        hetjax.parallelize(step, cluster=small, num_microbatches=2, recompute="").plan_for(state, batch)
    parallel = hetjax.parallelize(step, cluster=small, num_microbatches=2)
    assert_same(parallel(copy_tree(state), batch), jax.jit(step)(state, batch))
    assert parallel.plan.recompute == "layer" and all(s.peak_bytes <= room for s in parallel.plan.stages)
    assert "recomputes by layer" in str(parallel.plan) and "recompute: residual bytes" in parallel.explain()


def test_what_is_asked_for_is_not_searched():
    step, state, batch = make_linen()
    local = hetjax.parallelize(step).plan_for(state, batch)
    assert local.num_stages == 1 and local.evaluations is None  # one host's processors
    asked = hetjax.parallelize(step, cluster=TWO_SITES, num_stages=2, num_microbatches=2).plan_for(state, batch)
    assert asked.num_stages == 2 and asked.evaluations is None
    off = hetjax.parallelize(step, cluster=TWO_SITES, num_microbatches=2, search_s=0).plan_for(state, batch)
    assert [s.site for s in off.stages] == ["near", "far"] and off.evaluations is None
    with pytest.raises(PlanError, match="search_s"):
        hetjax.parallelize(step, search_s=-1)


def test_no_plan_that_does_not_fit_is_returned():
    toml = TWO_SITES.read_text().replace('like = "cpu"\n', 'like = "cpu"\nmemory_bytes = 2000\n')
    step, state, batch = make_linen(blocks=1)
    small = Cluster.parse(toml)
    with pytest.raises(PlanError, match=r"fits.*\n?.*GB"):
        hetjax.parallelize(step, cluster=small, num_microbatches=2).plan_for(state, batch)
