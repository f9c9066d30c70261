"""`hetjax opt`: results on stdout, all else on stderr, exit codes, dumps and reproducers that run."""

import dataclasses
import json
import os
import pathlib
import re
import shlex
import subprocess
import sys
from typing import ClassVar

import pytest
from click.testing import CliRunner

from hetjax.cli.main import cli
from hetjax.ir.errors import MicrobatchError
from hetjax.ir.parser import parse_bundle
from hetjax.passes import registry

ROOT = pathlib.Path(__file__).resolve().parents[2]

STEP = """hetjax 1
graph step {
  in %0:f32[3] state "w"
  in %1:f32[3] batch(0) "x"
  %2:f32[3] = mul %0 %1
  %3:f32[3] = add %2 %0
  out %3 "w" updates 0
}
"""


@dataclasses.dataclass(frozen=True)
class Misbehave:
    """Fails as it is told.

    Attributes:
      how: crash, refuse or break.
    """

    name: ClassVar[str] = "misbehave"
    summary: ClassVar[str] = "fail as told"
    how: str = "crash"

    def apply(self, bundle):
        if self.how == "crash":
            raise RuntimeError("planted")
        if self.how == "refuse":
            raise MicrobatchError("cannot be split", reason="planted")
        ops = (dataclasses.replace(bundle.graph.ops[0], inputs=(0, 9)), *bundle.graph.ops[1:])
        return bundle.replace(graph=bundle.graph.replace(ops=ops))


@pytest.fixture(autouse=True)
def planted(monkeypatch, tmp_path):
    monkeypatch.setitem(registry.PASSES, "misbehave", f"{__name__}:Misbehave")
    monkeypatch.setitem(
        sys.modules, __name__, sys.modules.get(__name__) or sys.modules["test_cli_opt"]
    )
    monkeypatch.chdir(tmp_path)
    (tmp_path / "step.hj").write_text(STEP)


def opt(*args, text=None):
    return CliRunner().invoke(cli, ["opt", *args], input=text, standalone_mode=False)


@pytest.mark.quick
def test_the_result_alone_is_on_stdout():
    result = opt("step.hj", "-p", "label-regions", "--print=all", "--diff", "--timing", "--stats")
    assert result.return_value == 0
    assert parse_bundle(result.stdout).graph.ops[0].region == "update"
    assert "after label-regions (1 of 1)" in result.stderr
    assert "label-regions (1 of 1) changed graph" in result.stderr
    assert "in all" in result.stderr and "bytes between stages" in result.stderr


def test_stdin_stdout_and_files():
    assert parse_bundle(opt("-", text=STEP).stdout) == parse_bundle(STEP)
    assert parse_bundle(opt(text=STEP).stdout) == parse_bundle(STEP)
    result = opt("step.hj", "-o", "out.hj")
    assert (result.stdout, pathlib.Path("out.hj").read_text()) == ("", STEP)


def test_diff_and_timing_take_a_value_or_none():
    side = opt("--diff=side", "step.hj", "-p", "label-regions").stderr
    assert "> " in side and "+ " not in side
    # The file's name is not taken for the option's value.
    assert opt("--diff", "step.hj", "-p", "label-regions").return_value == 0
    timing = json.loads(opt("--timing=json", "step.hj", "-p", "label-regions").stderr)
    assert timing[0]["text"] == "label-regions"


def test_print_takes_names_and_shows_inputs():
    result = opt("step.hj", "-p", "label-regions,label-blocks", "--print=label-blocks", "--before")
    assert "before label-blocks (2 of 2)" in result.stderr
    assert "after label-regions" not in result.stderr
    assert opt("step.hj", "-p", "label-regions", "--print=none").stderr == ""


@pytest.mark.parametrize(
    ("args", "code", "words"),
    [
        (("nowhere.hj",), 1, "there is no file 'nowhere.hj'"),
        (("step.hj", "-p", "nope"), 1, "there is no pass 'nope'"),
        (("step.hj", "-p", "shard-stages"), 1, "it needs program: run 'cut-stages'"),
        (("step.hj", "-p", "misbehave"), 2, "RuntimeError: planted"),
        (
            ("step.hj", "-p", "misbehave{how=break}"),
            2,
            "found after pass 'misbehave', which had a valid input: a fault of that pass",
        ),
        (("step.hj", "-p", "misbehave{how=break}", "--verify=end"), 1, "found in the result"),
        (("step.hj", "-p", "misbehave{how=break}", "--verify=off"), 0, ""),
        (("step.hj", "-p", "misbehave{how=refuse}"), 3, "refused: cannot be split"),
        (("step.hj", "--emit", "mpmd"), 1, "there is no program with task lists"),
        (
            ("step.hj", "-p", "label-regions", "--start-at", "nope"),
            1,
            "--start-at: 'nope' is not in the pipeline",
        ),
        (
            (
                "step.hj",
                "-p",
                "label-regions,label-blocks",
                "--start-at",
                "label-blocks",
                "--stop-after",
                "label-regions",
            ),
            1,
            "comes before --start-at",
        ),
        (("step.hj", "--json"), 1, "--json prints to stdout"),
        (("step.hj", "--run-repro", "step.hj"), 1, "step.hj is no reproducer"),
    ],
    ids=range(13),
)
def test_exit_codes_and_messages(args, code, words):
    done = subprocess_free_main(*args)
    assert done == (code, done[1])
    assert words in done[1]


def subprocess_free_main(*args):
    """Runs the root command as the console script does; returns (exit code, stderr)."""
    import contextlib
    import io

    from hetjax.cli.main import main

    out, err = io.StringIO(), io.StringIO()
    with (
        contextlib.redirect_stdout(out),
        contextlib.redirect_stderr(err),
        pytest.raises(SystemExit) as ended,
    ):
        main(["opt", *args])
    return ended.value.code, err.getvalue()


def test_invalid_input_is_the_users_and_is_still_printed_when_not_verified():
    broken = STEP.replace("mul %0 %1", "mul %0 %9")
    pathlib.Path("broken.hj").write_text(broken)
    code, text = subprocess_free_main("broken.hj", "-p", "label-regions")
    assert code == 1 and "found in the input, before any pass" in text
    assert "mul %0 %9" in opt("broken.hj", "--verify=off").stdout


def test_the_pipeline_can_be_cut():
    args = ("step.hj", "-p", "label-regions,label-blocks,annotate-costs", "--stats")

    def ran(*more):
        return [line.split()[-1] for line in opt(*args, *more).stderr.splitlines()[1:]]

    assert ran("--stop-after", "label-blocks") == ["label-regions", "label-blocks"]
    assert ran("--start-at", "label-blocks") == ["label-blocks", "annotate-costs"]
    assert ran("--limit", "1") == ["label-regions"]
    assert ran("--limit", "0") == []


def test_the_commands_in_a_dump_make_the_files_they_head(tmp_path):
    assert (
        opt(
            "step.hj",
            "-p",
            "label-regions,label-blocks,annotate-costs",
            "--dump",
            "dump",
            "-o",
            "out.hj",
        ).return_value
        == 0
    )
    files = sorted(p for p in os.listdir("dump") if p.endswith(".hj"))
    assert files == ["000_input.hj", "001_label-regions.hj", "003_annotate-costs.hj"]
    os.chdir("dump")
    for name in files[1:]:
        command = pathlib.Path(name).read_text().splitlines()[1].removeprefix("// ")
        words = shlex.split(command)
        assert words[:2] == ["hetjax", "opt"]
        wanted = parse_bundle(pathlib.Path(name).read_text())
        os.unlink(name)
        assert opt(*words[2:]).return_value == 0
        assert parse_bundle(pathlib.Path(name).read_text()) == wanted


def test_a_reproducer_fails_the_same_way_and_its_path_comes_last():
    code, text = subprocess_free_main(
        "step.hj", "-p", "label-regions,misbehave,label-blocks", "--repro", "r.hj"
    )
    assert code == 2 and text.rstrip().splitlines()[-1] == "reproducer: r.hj"
    assert "// pipeline: misbehave,label-blocks" in pathlib.Path("r.hj").read_text()
    code, text = subprocess_free_main("--run-repro", "r.hj", "--repro", "again.hj")
    assert code == 2 and "RuntimeError: planted" in text
    # With other passes given, it is a file like any other.
    assert opt("--run-repro", "r.hj", "-p", "label-blocks").return_value == 0


def test_json_has_the_passes_the_file_and_the_error():
    result = opt("step.hj", "-p", "label-regions", "-o", "out.hj", "--json")
    report = json.loads(result.stdout)
    assert report["ok"] and report["file"] == "out.hj"
    assert [(p["text"], p["changed"]) for p in report["passes"]] == [("label-regions", ["graph"])]
    result = opt("step.hj", "-p", "misbehave", "-o", "out.hj", "--json", "--repro", "r.hj")
    report = json.loads(result.stdout)
    assert (report["ok"], report["reproducer"], result.return_value) == (False, "r.hj", 2)
    assert "RuntimeError: planted" in report["error"]
    result = opt("step.hj", "-p", "nope", "-o", "out.hj", "--json")
    assert "there is no pass 'nope'" in json.loads(result.stdout)["error"]
    result = opt("nowhere.hj", "-o", "out.hj", "--json")
    assert json.loads(result.stdout) == {
        "ok": False,
        "error": "there is no file 'nowhere.hj'",
        "passes": [],
    }


def test_pieces_of_a_file_run_apart():
    two = STEP + "// -----\n" + STEP.replace('"w"', '"v"')
    out = opt("-", "--split-input-file", "-p", "label-regions", text=two).stdout
    first, second = out.split("// -----\n")
    assert parse_bundle(first).graph.inputs[0].path == "w"
    assert parse_bundle(second).graph.inputs[0].path == "v"
    report = json.loads(opt("-", "--split-input-file", "-o", "o.hj", "--json", text=two).stdout)
    assert report["ok"] and len(report["pieces"]) == 2
    bad = STEP + "// -----\ngrph x { }\n"
    result = opt("-", "--split-input-file", text=bad)
    assert result.return_value == 1 and "<stdin>:10:1: expected graph" in result.stderr


def test_expected_errors_must_come_and_no_others():
    for text, code, words in (
        ("// expected-error@+1 {{expected graph}}\ngrph x\n", 0, ""),
        (
            "// expected-error@+2 {{expected graph}}\ngrph x\n",
            1,
            "line 1: expected an error at line 3 that says: expected graph",
        ),
        ("grph x\n", 1, "unexpected error at line 1: expected graph"),
        (
            "// expected-error {{anything}}\n" + STEP,
            1,
            "line 1: expected an error that says: anything",
        ),
    ):
        result = opt("-", "--verify-diagnostics", text=text)
        assert (result.return_value, result.stdout) == (code, "")
        assert words in result.stderr


def test_colours_only_on_a_terminal_and_not_against_the_users_wish(monkeypatch):
    from hetjax.cli.opt import use_colour

    monkeypatch.setattr(sys, "stderr", type("Terminal", (), {"isatty": lambda self: True})())
    monkeypatch.delenv("NO_COLOR", raising=False)
    assert use_colour()
    monkeypatch.setenv("NO_COLOR", "1")
    assert not use_colour()


def test_passes_are_listed_and_explained():
    listing = opt("--list").stdout
    assert re.search(r"^label-regions +read forward, backward and update off the name stacks", listing, re.M)
    assert re.search(r"^default += inline-calls,", listing, re.M)
    assert {
        "name": "verify",
        "summary": "check every invariant of graph and program",
    } in json.loads(opt("--list", "--json").stdout)
    text = opt("--help-pass", "plan-donation").stdout
    assert "state (bool, default false): whether state leaves may be donated at all" in text
    assert "Requires:\n  graph: trace a step with `hetjax trace`" in text
    facts = json.loads(opt("--help-pass", "misbehave", "--json").stdout)
    assert facts["options"] == [
        {
            "name": "how",
            "type": "str",
            "default": "crash",
            "required": False,
            "help": "crash, refuse or break.",
        }
    ]
    code, text = subprocess_free_main("--help-pass", "verfy")
    assert code == 1 and "did you mean 'verify'?" in text


def test_the_script_starts_quickly_and_completes(tmp_path):
    """The whole program, as a shell starts it."""
    environment = {
        **os.environ,
        "_HETJAX_COMPLETE": "bash_complete",
        "COMP_WORDS": "hetjax opt -p label-r",
        "COMP_CWORD": "3",
    }
    done = subprocess.run(
        [sys.executable, "-m", "hetjax"],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.stdout == "plain,label-regions\n"
    script = CliRunner().invoke(cli, ["completion", "zsh"]).output
    assert "_HETJAX_COMPLETE=zsh_complete" in script
