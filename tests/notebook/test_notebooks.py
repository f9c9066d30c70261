"""The notebooks of examples/notebooks run from top to bottom in a kernel, and end in a picture."""

from __future__ import annotations

import ast
import os
import pathlib
import re

import pytest

from tests.browser import OUTSIDE, VISIBLE, Browser, find_browser
from tests.notebook.test_in_browser import keep

ROOT = pathlib.Path(__file__).resolve().parents[2]
NOTEBOOKS = sorted((ROOT / "examples" / "notebooks").glob("*.py"))
pytestmark = pytest.mark.skipif(not NOTEBOOKS, reason="no notebooks beside these tests")
LIMIT_S = (
    300  # of one notebook, on a machine that does other work too; alone each takes a few seconds
)


def run(path):
    """Returns the executed notebook; any error in a cell raises."""
    jupytext = pytest.importorskip("jupytext", reason="the notebook extra is not installed")
    nbclient = pytest.importorskip("nbclient", reason="the notebook extra is not installed")
    notebook = jupytext.read(path)
    # The kernel is this Python, whatever else is installed; it finds hetjax where this process found it.
    here = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
    plain = {
        k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")
    }
    client = nbclient.NotebookClient(
        notebook,
        timeout=LIMIT_S,
        kernel_name="python3",
        resources={"metadata": {"path": str(ROOT)}},
    )
    client.execute(
        env={**plain, "PYTHONPATH": here, "JAX_PLATFORMS": "cpu", "IPYTHONDIR": os.devnull}
    )
    return notebook


@pytest.mark.notebooks
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_runs_and_ends_in_a_picture(path, tmp_path):
    notebook = run(path)
    shown = [o for c in notebook.cells if c.cell_type == "code" for o in c.outputs]
    assert not [o for o in shown if o.output_type == "error"]
    assert not [
        o.text
        for o in shown
        if o.output_type == "stream" and o.name == "stderr" and "Warning" in o.text
    ]
    last = [c for c in notebook.cells if c.cell_type == "code"][-1].outputs[-1]
    html, text = last["data"]["text/html"], last["data"]["text/plain"]
    assert "<svg" in html and text
    pages = [o["data"]["text/html"] for o in shown if "text/html" in o.get("data", {})]
    assert all(len(p) < 300_000 for p in pages)
    page = tmp_path / f"{path.stem}.html"
    page.write_text(
        "<!doctype html><meta charset='utf-8'><body style='background:#fff'>" + "".join(pages)
    )
    if find_browser() is not None:
        with Browser(tmp_path / "profile") as browser:
            seen = browser.open(page, [OUTSIDE, VISIBLE])
        assert seen.errors == [] and seen.requests == [] and seen.answers[0] == []
        assert all(
            w > 0 and h > 0 and n > 0 for found in seen.answers[1].values() for w, h, n in found
        )
        keep(f"notebook_{path.stem}", seen.screenshot)


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda p: p.stem)
def test_a_notebook_is_titled_by_its_question(path):
    text = path.read_text()
    title = re.search(r"^# # (.*)$", text, re.M)
    assert title is not None and title[1].rstrip().endswith("?")
    ast.parse(text)
    assert text.startswith("# ---\n# jupyter:") and "# %%" in text


def test_there_is_a_notebook_for_each_question():
    assert {p.stem for p in NOTEBOOKS} == {
        "first_steps", "why_this_plan", "two_sites_and_a_slow_link", "sharding_a_model_you_did_not_write",
        "slamb_against_lamb", "losing_two_hosts_with_eccheck", "rehearsing_736_devices",
    }  # fmt: skip
