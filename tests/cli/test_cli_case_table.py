"""The table of other people's train steps: finding cases, judging runs, fetching sources, the page."""

from __future__ import annotations

import os
import subprocess
import sys

import click
import pytest
from click.testing import CliRunner

from hetjax.cli import case_sources
from hetjax.cli.case_table import (
    Row,
    case_table,
    cases_in,
    is_right,
    keep_rows,
    kept_rows,
    markdown,
    row_of,
    run_case,
)
from hetjax.cli.target import load_case
from hetjax.ir.errors import HetjaxError

CASES = '''
import jax, jax.numpy as jnp
CASES = {}
def case(f): CASES[f.__name__] = f; return f
@case
def centred():
    def step(w, x):
        loss, g = jax.value_and_grad(lambda w: jnp.mean(jnp.square(jnp.tanh(x @ w) - jnp.tanh(x @ w).mean(0)) @ w))(w)
        return w - 0.1 * g, loss
    return step, (jnp.eye(4) + 0.1, jnp.arange(32.0).reshape(8, 4) / 32), {}
@case
def doubled():
    return (lambda w, x: jnp.tanh(x @ w)), (jnp.eye(4), jnp.ones((8, 4))), {}
'''


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "small.py").write_text(CASES)
    (tmp_path / "helper.py").write_text("x = 1\n")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "run.py").write_text("def build(): ...\n")
    (tmp_path / "scratch").mkdir()
    return tmp_path


@pytest.mark.quick
def test_cases_are_dictionaries_and_folders(folder):
    found = cases_in(folder, folder / "scratch")
    assert list(found) == ["centred", "doubled", "other"]
    assert found["other"] == f"{folder}/other/run.py:build"


BROKEN = '''
import jax.numpy as jnp
CASES = {}
def case(f): CASES[f.__name__] = f; return f
@case
def fails_with_fewer():
    def fn(w, x):
        if x.shape[0] < 8: raise RuntimeError("the disk is full")
        return jnp.tanh(x @ w)
    return fn, (jnp.eye(4), jnp.ones((8, 4))), {}
@case
def rows_only():
    return (lambda a, b: a @ b), (jnp.ones((4, 8)), jnp.ones((8, 4))), {}
@case
def square():
    return (lambda a, b: a.T @ b if a.shape == (4, 4) == b.shape else 1 / 0), (jnp.eye(4), jnp.eye(4)), {}
'''


@pytest.mark.quick
def test_an_adapter_takes_only_wrong_shapes_for_a_batch_that_cannot_be_halved(tmp_path):
    (tmp_path / "broken.py").write_text(BROKEN)
    found = cases_in(tmp_path, tmp_path)
    with pytest.raises(click.ClickException, match="RuntimeError: the disk is full"):  # not "it does not trace at half a batch"
        load_case(found["fails_with_fewer"])
    with pytest.raises(click.ClickException, match="square traces with neither argument halved"):
        load_case(found["square"])
    batch = next(iter(load_case(found["rows_only"]).batches))
    assert batch.shape == (4, 8)  # the contracted size cannot be halved in one argument alone; rows can


def test_a_refused_case_runs_again_with_one_microbatch(folder):
    found = cases_in(folder, folder / "scratch")
    rows = run_case("centred", found["centred"], 1, dict(os.environ))
    assert [(r.verdict, r.microbatches) for r in rows] == [("refused", 2), ("right", 1)], rows
    assert "a sum or mean over the batch" in rows[0].reason
    assert rows[1].residual_bytes and rows[1].max_rel is not None
    assert is_right(rows)


@pytest.mark.quick
def test_a_case_past_its_bound_runs_with_ever_less_rounding_of_its_own(monkeypatch):
    def check(name, target, microbatches, *, steps, environment, **how):
        right = how.get({"order": "sums", "fusions": "as_written", "cancels": "double"}[name])
        return Row(name, microbatches, "right" if right else "past its bound", **how)

    monkeypatch.setattr("hetjax.cli.case_table._check", check)
    ran = {name: run_case(name, "", 1, {}) for name in ("order", "fusions", "cancels")}
    assert all(is_right(rows) for rows in ran.values())
    assert [r.plain for r in ran["order"]] == [False, True, False]  # beside it, plain jit's own distance
    assert [(r.sums, r.as_written, r.double) for r in ran["cancels"]] == [
        ("", False, False), ("", False, False), ("whole", False, False), ("whole", True, False), ("", False, True)]
    assert len(ran["fusions"]) == 4
    page = markdown(ran["fusions"])
    assert "| fusions with whole sums, as written | 2 |" in page and "| fusions: plain jit on 2 devices | 2 |" in page


@pytest.mark.quick
def test_a_run_goes_on_where_it_was_stopped(tmp_path, monkeypatch):
    rows = [Row("a", 2, "right", 3e-7, 1e-6, 12)]
    keep_rows(tmp_path / "rows", 2, rows)
    assert kept_rows(tmp_path / "rows", 2) == {"a": rows}
    assert kept_rows(tmp_path / "rows", 1) == {} and kept_rows(None, 2) == {}
    monkeypatch.setattr("hetjax.cli.case_table._code_digest", lambda: "other code")
    assert kept_rows(tmp_path / "rows", 2) == {}


@pytest.mark.quick
def test_a_run_is_judged_by_its_report():
    report = {"refused": False, "ok": False, "max_rel": "inf", "rtol": 1e-6, "residual_bytes": 3, "notes": [], "worst": [{"path": "a/b"}]}
    wrong = row_of("x", 2, report, 1.0)
    assert (wrong.verdict, wrong.max_rel, wrong.reason) == ("past its bound", float("inf"), "a/b")
    assert row_of("x", 2, report, 1.0, double=True).verdict == "wrong"
    failed = row_of("x", 2, {"ok": False, "refused": False, "error": "boom"}, 1.0)
    assert (failed.verdict, failed.reason) == ("failed", "boom")
    assert not is_right([wrong]) and not is_right([failed])


@pytest.mark.quick
def test_the_page_has_a_line_a_run_without_paths_of_this_machine():
    text = markdown([Row("a", 2, "right", 3e-7, 1e-6, 1234), Row("b", 2, "refused", reason="'sub' at /home/me/x.py:3\nin m|n")])
    assert "| a | 2 | 2 | 2 | right | 3.0e-07 | 1,234 |" in text
    assert "| b | 2 | 2 | 2 | refused: 'sub' at x.py:3 in m\\|n |  |  |" in text


@pytest.mark.quick
def test_sources_that_cannot_be_had_are_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("HETJAX_CASE_PEERS", raising=False)
    with pytest.raises(HetjaxError, match="offline was asked for"):
        case_sources.flax_examples(tmp_path, offline=True)
    monkeypatch.setattr(
        subprocess, "run", lambda *a, **k: subprocess.CompletedProcess(a, 1, "", "no network")
    )
    with pytest.raises(HetjaxError, match=r"could not be fetched[\s\S]*no network[\s\S]*--offline"):
        case_sources.flax_examples(tmp_path)
    monkeypatch.setenv("HETJAX_CASE_PEERS", str(tmp_path))
    with pytest.raises(HetjaxError, match="holds no flax/examples"):
        case_sources.flax_examples(tmp_path)


@pytest.mark.quick
def test_an_empty_folder_is_an_error(tmp_path, monkeypatch):
    monkeypatch.delenv("HETJAX_CASE_PEERS", raising=False)
    done = CliRunner().invoke(case_table, [str(tmp_path), "--offline", "--cache", str(tmp_path)])
    assert done.exit_code == 1
    assert "holds no cases" in done.output


def test_a_step_of_flax_as_it_is_published(shared_dir, tmp_path):
    """One of flax's examples; the others, test_every_shared_case, take minutes more.

    Its source is fetched where it is not cached, and the test fails where it cannot be had; HETJAX_OFFLINE=1
    leaves it out.
    """
    if os.environ.get("HETJAX_OFFLINE") == "1":
        pytest.skip("HETJAX_OFFLINE=1 leaves out what would be fetched")
    assert "| flax_vae | 2 | 2 | 2 | right |" in _table(shared_dir, tmp_path, "--only", "flax_vae", "--steps", "1", limit_s=300)


@pytest.mark.nightly
def test_every_shared_case(shared_dir, tmp_path):
    text = _table(shared_dir, tmp_path)
    # Of eight two run with one microbatch too; two are past their bound: plain jit, whole sums; one as written besides.
    assert text.count("| flax_") == 15
    assert text.count(" right") == 19


def _table(shared_dir, tmp_path, *more, limit_s=None):
    """Runs the command and returns its page; a limit is there to end a hang, and is no measure of speed."""
    page = tmp_path / "cases.md"
    offline = ["--offline"] if os.environ.get("HETJAX_OFFLINE") == "1" else []
    done = subprocess.run(
        [sys.executable, "-m", "hetjax.cli.case_table", str(shared_dir / "cases"), "--write", str(page), *more, *offline],
        capture_output=True, text=True, timeout=limit_s,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return page.read_text()
