"""Every form a bundle is written in: jaxlib's parsers and verifiers are the oracle where they can be."""

import json
import pathlib
import xml.etree.ElementTree

import pytest
from click.testing import CliRunner

from hetjax.cli.emitters import EMITTERS, emit
from hetjax.cli.main import cli
from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import LoweringError
from hetjax.ir.parser import parse_bundle
from hetjax.passes.manager import run_pipeline

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden" / "lowering.hj"


@pytest.fixture(scope="module")
def bundle():
    return run_pipeline(parse_bundle(GOLDEN.read_text()), "default")


@pytest.mark.parametrize("form", EMITTERS)
def test_every_form_is_written_from_the_command_line(form, bundle, tmp_path):
    path = tmp_path / "x.hj"
    path.write_text(emit(bundle, "hj"))
    result = CliRunner().invoke(cli, ["opt", str(path), "--emit", form], standalone_mode=False)
    assert result.return_value == 0, result.output
    assert len(result.stdout) > 100


def test_stablehlo_is_what_jax_lowers_and_verifies(bundle):
    text = emit(bundle, "stablehlo")
    assert _jax.parse_module(text).operation.verify()
    assert text.count("stablehlo.dot_general") == sum(
        op.primitive == "dot_general" for op in bundle.graph.ops
    )


def test_mpmd_is_verified_by_jaxlib_and_holds_every_task(bundle):
    text = emit(bundle, "mpmd")
    assert _jax.parse_module(text).operation.verify()
    tasks = [t for tasks in bundle.program.tasks for t in tasks]
    calls = sum(t.kind in ("F", "B", "update", "prologue") for t in tasks)
    zeros = sum(any(p.form == "sum" for p in f.outputs) for f in bundle.program.fragments)
    assert text.count("mpmd.fragment_call<") == calls + zeros
    assert text.count("mpmd.transfer") == sum(t.kind == "send" for t in tasks)


def test_jaxlib_refuses_a_transfer_to_a_mesh_that_is_not_there(bundle):
    text = emit(bundle, "mpmd")
    at = text.index("mpmd.transfer")
    arrow = text.index("->", at)
    broken = text[:arrow] + text[arrow:].replace('"s1"', '"s9"', 1)
    with pytest.raises(ValueError, match="s9"):
        _jax.parse_module(broken)


def test_dot_draws_modules_or_fragments(bundle):
    graph = emit(Bundle(graph=bundle.graph), "dot")
    assert 'label="MLP/Dense_0\\nforward, 1 ops"' in graph
    program = emit(bundle, "dot")
    assert program.count("subgraph cluster_") == 2
    assert program.count("color=red") == len(bundle.program.reshards)


def test_html_is_one_page_without_network_or_script(bundle):
    page = emit(bundle.note("a topic", "a <sentence>"), "html")
    assert "a &lt;sentence&gt;" in page
    assert "<script" not in page and "http" not in page.replace("http://www.w3.org/2000/svg", "")
    assert "<svg" in page and "x6:s0&gt;s1" in page
    # Well formed, so that no text broke out of its element.
    xml.etree.ElementTree.fromstring(
        page.removeprefix("<!doctype html>\n")
        .replace('<meta charset="utf-8">', "")
        .replace("&rarr;", "to")
    )


def test_a_chrome_trace_has_an_event_per_task(bundle):
    events = json.loads(emit(bundle, "chrome-trace"))["traceEvents"]
    ran = [e for e in events if e["ph"] == "X" and e["cat"] in ("F", "B")]
    assert len(ran) == sum(t.kind in ("F", "B") for tasks in bundle.program.tasks for t in tasks)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        ("stablehlo", "there is no graph"),
        ("mpmd", "there is no program with task lists"),
        ("dot", "neither a graph nor a program"),
        ("html", "nothing to show"),
        ("chrome-trace", "needs a plan"),
    ],
)
def test_what_is_missing_is_named(form, words):
    with pytest.raises(LoweringError, match=words):
        emit(Bundle(), form)
