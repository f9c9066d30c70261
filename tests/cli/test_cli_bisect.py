"""`hetjax bisect` finds a planted wrong rewrite, by numbers, by the verifier and by a command."""

import dataclasses
import json
import sys
from typing import ClassVar

import pytest
from click.testing import CliRunner

from hetjax.cli.main import cli
from hetjax.ir.graph import Graph, Literal
from hetjax.ir.parser import parse_bundle
from hetjax.passes import registry
from hetjax.passes.rewrites import rewrite

STEP = """graph step {
  in %0:f32[3] state "w"
  in %1:f32[3] batch(0) "x"
  %2:f32[3] = add %0 0.0:f32
  %3:f32[3] = mul %1 1.0:f32 {out_dtype=None}
  %4:f32[3] = sub %3 %2
  %5:f32[3] = sub %2 %3
  %6:f32[3] = add %4 0.0:f32
  %7:f32[3] = mul %6 %5 {out_dtype=None}
  out %7 "w" updates 0
}
"""


@dataclasses.dataclass(frozen=True)
class FoldNeutral:
    """Drops `x + 0` and `x * 1`; by a planted mistake, also takes `x - y` for commutative.

    Attributes:
      fault: what the mistake is: swap, crash or break.
    """

    name: ClassVar[str] = "fold-neutral"
    summary: ClassVar[str] = "drop what changes nothing"
    fault: str = "swap"

    def apply(self, bundle):
        graph: Graph = bundle.graph
        ops = list(graph.ops)
        seen_sub = 0
        for i, op in enumerate(ops):
            if op.primitive == "sub":
                seen_sub += 1
                if seen_sub == 2 and rewrite("sort-operands", f"%{op.outputs[0]}"):
                    if self.fault == "crash":
                        raise RuntimeError("planted")
                    wrong = (99, op.inputs[1]) if self.fault == "break" else op.inputs[::-1]
                    ops[i] = dataclasses.replace(op, inputs=wrong)
            elif isinstance(op.inputs[-1], Literal) and rewrite(
                f"drop-{op.primitive}", f"%{op.outputs[0]}"
            ):
                ops[i] = dataclasses.replace(op, primitive="copy", inputs=op.inputs[:1], params=())
        return bundle.replace(graph=graph.replace(ops=tuple(ops)))


@pytest.fixture(autouse=True)
def planted(monkeypatch):
    monkeypatch.setitem(registry.PASSES, "fold-neutral", f"{__name__}:FoldNeutral")
    monkeypatch.setitem(
        sys.modules, __name__, sys.modules.get(__name__) or sys.modules["test_cli_bisect"]
    )


def run(tmp_path, *args):
    path = tmp_path / "step.hj"
    path.write_text(STEP)
    return CliRunner().invoke(cli, ["bisect", str(path), *args], standalone_mode=False)


PIPELINE = "label-regions,fold-neutral,label-blocks,annotate-costs"


def test_a_planted_wrong_rewrite_is_found_by_its_numbers(tmp_path):
    result = run(
        tmp_path, "-p", PIPELINE, "--check", "numbers", "--json", "-o", str(tmp_path / "out")
    )
    found = json.loads(result.output)
    assert found["pass"] == {"number": 2, "text": "fold-neutral", "raised": None}
    assert found["rewrite"] == {"number": 3, "of": 4, "name": "sort-operands", "where": "%5"}
    good, bad = (
        parse_bundle((tmp_path / "out" / f"{n}.hj").read_text()).graph for n in ("good", "bad")
    )
    assert [op.inputs for op in good.ops if op.primitive == "sub"] == [(3, 2), (2, 3)]
    assert [op.inputs for op in bad.ops if op.primitive == "sub"] == [(3, 2), (3, 2)]


def test_the_report_for_people_shows_the_change(tmp_path):
    result = run(tmp_path, "-p", PIPELINE, "--check", "numbers")
    assert result.output.splitlines()[:2] == [
        "first bad pass: fold-neutral (number 2)",
        "first bad rewrite: sort-operands at %5 (3 of 4)",
    ]
    assert (
        "-   %5:f32[3] = sub %2 %3\n+   %5:f32[3] = sub %3 %2" in result.output
        or "~" in result.output
    )


def test_invalid_ir_is_found_by_the_verifier(tmp_path):
    found = json.loads(
        run(tmp_path, "-p", "label-regions,fold-neutral{fault=break}", "--json").output
    )
    assert found["pass"]["number"] == 2
    assert found["rewrite"]["name"] == "sort-operands"


def test_a_crash_is_found(tmp_path):
    found = json.loads(
        run(tmp_path, "-p", "label-regions,fold-neutral{fault=crash},label-blocks", "--json").output
    )
    assert found["pass"] == {
        "number": 2,
        "text": "fold-neutral{fault=crash}",
        "raised": "RuntimeError: planted",
    }
    assert found["rewrite"]["name"] == "sort-operands"


def test_a_command_decides(tmp_path):
    command = (
        f"{sys.executable} -c \"import sys; sys.exit(open(sys.argv[1]).read().count('copy') > 1)\""
    )
    found = json.loads(run(tmp_path, "-p", PIPELINE, "--check", command, "--json").output)
    assert (found["rewrite"]["number"], found["rewrite"]["name"]) == (2, "drop-mul")
    braces = json.loads(
        run(tmp_path, "-p", PIPELINE, "--check", "! grep -q copy {}", "--json").output
    )
    assert (braces["rewrite"]["number"], braces["rewrite"]["name"]) == (1, "drop-add")


def test_nothing_to_find_and_a_bad_input_are_said(tmp_path):
    clean = run(tmp_path, "-p", "label-regions,label-blocks")
    assert (clean.output, clean.return_value) == ("every pass passes the check\n", 0)
    bad = run(tmp_path, "-p", "label-regions", "--check", "false #", "--json")
    assert json.loads(bad.output) == {
        "ok": False,
        "error": "pass 'bisect': the input fails the check before any pass runs",
    }
    assert bad.return_value == 1


def test_a_pass_that_is_bad_without_rewrites_is_blamed_whole(tmp_path):
    found = json.loads(
        run(
            tmp_path,
            "-p",
            PIPELINE,
            "--check",
            "! grep -q forward {} && ! grep -q 'update$' {} && ! grep -q '\\[update\\]' {}",
            "--json",
        ).output
    )
    assert (found["pass"]["number"], found["rewrite"]) == (1, None)


def test_a_check_that_cannot_tell_stops_the_search(tmp_path):
    result = run(tmp_path, "-p", PIPELINE, "--check", "exit 125 #")
    assert (
        result.exception is not None and "the check exited 125" in result.exception.format_message()
    )


def test_a_step_with_relu_is_checked_by_its_numbers(tmp_path):
    """A relu that is not yet inlined carries its derivative as `#name`, which text cannot say."""
    import jax

    from hetjax.frontend.calls import flatten_call
    from hetjax.frontend.tracing import trace_call

    def step(w, x):
        return w - 0.1 * jax.grad(lambda w: jax.nn.relu(x @ w).sum())(w), x.sum()

    leaves, structure = flatten_call((jax.numpy.ones((3, 3)), jax.numpy.ones((4, 3))), {}, True)
    path = tmp_path / "step.hj"
    path.write_text(str(trace_call(step, structure, leaves, name="step").graph))
    assert "#" in path.read_text()
    command = ["bisect", str(path), "-p", "inline-calls,label-regions", "--check", "numbers", "--json"]
    result = CliRunner().invoke(cli, command, standalone_mode=False)
    assert json.loads(result.output)["ok"] is True, result.output
