"""`hetjax report`: one page of a dumped run, text that diffs, several steps, a measured run below."""

from __future__ import annotations

import json
import pathlib
import shutil
from urllib.parse import quote
from xml.etree import ElementTree

import pytest
from click.testing import CliRunner

import hetjax
from hetjax import notebook
from hetjax.cli.main import cli, main
from hetjax.demo.session import CLUSTER
from hetjax.ir.errors import PlanError
from hetjax.ir.parser import parse_bundle
from hetjax.passes.dumping import Dump
from hetjax.passes.manager import run_pipeline
from hetjax.render.gantt import read_gantt
from tests.browser import OUTSIDE, VISIBLE, Browser, find_browser
from tests.notebook.conftest import OPTIONS
from tests.notebook.test_in_browser import COLOURS, keep
from tests.support import make_linen


@pytest.fixture(scope="module")
def two_dumps(tmp_path_factory):
    """Returns a folder with the dumps of one step planned twice, and a trace of the second, measured."""
    root = tmp_path_factory.mktemp("dumps")
    step, state, batch = make_linen()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETJAX_DUMP", str(root / "dump"))
        hetjax.rehearse(step, str(CLUSTER), state, batch, options={**OPTIONS, "schedule": "gpipe"})
        parallel = hetjax.parallelize(step, cluster=str(CLUSTER), rehearse=True, **OPTIONS)
        state, _ = parallel(state, batch)
    parallel.measure(state, batch)
    notebook.save_trace(parallel, root / "trace.json")
    return root


@pytest.fixture(scope="module")
def one_dump(two_dumps):
    return sorted(p for p in (two_dumps / "dump").iterdir())[-1]


def run(*line):
    return CliRunner().invoke(cli, ["report", *map(str, line)], standalone_mode=False)


HEADINGS = [
    "Stages",
    "Timeline",
    "Memory",
    "Roofline",
    "Shardings",
    "Cluster",
    "Program",
    "Graph",
    "Passes",
]


def test_one_page_with_everything(one_dump, tmp_path):
    result = run(one_dump, "-o", tmp_path / "out", "--json")
    answer = json.loads(result.stdout)
    assert answer["ok"] and answer["files"] == [str(tmp_path / "out" / "index.html")]
    facts = answer["runs"][0]
    assert (
        facts["stages"] == 2
        and facts["step_s"] >= facts["lower_bound_s"]
        and facts["failed"] is None
    )
    text = (tmp_path / "out" / "index.html").read_text()
    tree = ElementTree.fromstring(text.removeprefix("<!doctype html>\n"))
    assert [e.text for e in tree.iter("h2")] == [*HEADINGS, *(["Notes"] if "Notes" in text else [])]
    assert "<script" not in text and "http" not in text.replace("http://www.w3.org/2000/svg", "")
    assert len(text) < 1_000_000
    svg = next(e for e in tree.iter() if e.attrib.get("data-picture") == "gantt")
    boxes = read_gantt(ElementTree.tostring(svg, encoding="unicode"))
    assert max(b.end for b in boxes) == facts["step_s"]


def test_plain_text_of_one_run_is_the_same_each_time(one_dump, tmp_path):
    first = run(one_dump, "--plain").stdout
    again = tmp_path / one_dump.name
    shutil.copytree(one_dump, again)
    log = [json.loads(line) for line in (again / "trace.jsonl").read_text().splitlines()]
    for entry in log:  # another run of the same passes takes other seconds
        if "seconds" in entry:
            entry["seconds"] *= 2
    (again / "trace.jsonl").write_text("\n".join(map(json.dumps, log)))
    assert run(again, "--plain").stdout == first
    assert "== Stages" in first and "== Passes" in first and "insert-reshards" in first
    assert run(one_dump, "--plain", "-o", tmp_path / "out").stdout.strip() == str(
        tmp_path / "out" / "report.txt"
    )
    assert (tmp_path / "out" / "report.txt").read_text() == first


def test_two_plans_differ_where_they_differ(two_dumps):
    a, b = (
        sorted(p for p in (two_dumps / "dump").iterdir())[::1][0],
        sorted((two_dumps / "dump").iterdir())[-1],
    )
    before, after = run(a, "--plain").stdout.splitlines(), run(b, "--plain").stdout.splitlines()
    assert any("gpipe" in line for line in before) and any("1f1b" in line for line in after)
    cluster = before[before.index("== Cluster") : before.index("== Program")]
    assert [line for line in cluster if line in after][1:] and 0 < sum(
        x != y for x, y in zip(before, after)
    ) < len(after) / 2


def test_several_steps_get_a_page_each_and_a_list(two_dumps, tmp_path):
    result = run(two_dumps / "dump", "-o", tmp_path)
    names = sorted(p.name for p in (two_dumps / "dump").iterdir())
    assert result.stdout.split() == [
        str(tmp_path / n) for n in ("index.html", *(f"{n}.html" for n in names))
    ]
    index = (tmp_path / "index.html").read_text()
    assert all(f'href="{quote(f"./{n}.html")}"' in index for n in names) and "gpipe" in index


def test_a_measured_run_stands_below(two_dumps, one_dump, tmp_path):
    result = run(one_dump, "-o", tmp_path, "--measured", two_dumps / "trace.json")
    assert result.return_value == 0, result.output
    text = (tmp_path / "index.html").read_text()
    assert (
        'data-run="measured"' in text
        and "Predicted and measured" in text
        and 'data-picture="scatter"' in text
    )


def test_a_run_that_failed_says_where(tmp_path):
    bundle = parse_bundle((pathlib.Path(__file__).parents[1] / "golden" / "lowering.hj").read_text()).replace(plan=None)
    with pytest.raises(PlanError):
        run_pipeline(bundle, "inline-calls,plan-stages{stages=99}", instruments=[Dump(tmp_path / "d")])
    answer = json.loads(run(tmp_path / "d", "-o", tmp_path / "out", "--json").stdout)
    assert "99 stages need at least 99 devices" in answer["runs"][0]["failed"]
    assert "failed: " in (tmp_path / "out" / "index.html").read_text()


@pytest.mark.parametrize(
    ("line", "words"),
    [
        (["{empty}", "-o", "{empty}"], "holds no dump"),
        (["{dump}"], "give the folder to write to"),
        (["{dump}", "-o", "{empty}", "--measured", "{dump}/trace.jsonl"], "is no trace of hetjax"),
    ],
)
def test_bad_input_exits_with_1(line, words, one_dump, tmp_path, capsys):
    with pytest.raises(SystemExit) as exit_:
        main(["report", *(w.format(empty=tmp_path, dump=one_dump) for w in line)])
    assert exit_.value.code == 1
    assert words in capsys.readouterr().err


def test_a_damaged_dump_says_what_is_missing(one_dump, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(one_dump, copy)
    next(copy.glob("*_cut-stages.hj")).unlink()
    answer = json.loads(run(copy, "-o", tmp_path / "out", "--json").stdout)
    assert not answer["ok"] and "cut-stages.hj" in answer["error"]


@pytest.mark.skipif(
    find_browser() is None, reason="no Chromium on this machine: the report page was not opened"
)
def test_the_page_in_a_browser(two_dumps, one_dump, tmp_path):
    run(one_dump, "-o", tmp_path, "--measured", two_dumps / "trace.json")
    with Browser(tmp_path / "profile") as browser:
        for dark in (False, True):
            seen = browser.open(tmp_path / "index.html", [OUTSIDE, VISIBLE, COLOURS], dark=dark)
            outside, visible, (text, ground) = seen.answers
            assert seen.errors == [] and seen.requests == [] and outside == []
            assert {"gantt", "memory", "roofline", "tiles", "cluster", "stepper", "scatter"} <= set(
                visible
            )
            assert all(w > 0 and h > 0 and n > 0 for found in visible.values() for w, h, n in found)
            assert (text > ground) == dark
            keep(f"report{'_dark' if dark else ''}", seen.screenshot)
