"""Runs the RUN lines of tests/golden/*.hj in process and matches their CHECK lines with filecheck.

A line `// RUN: hetjax opt %s -p label-regions | filecheck %s` runs the command on the file itself and
checks stdout; `2>&1` adds stderr, `not` expects a failure, `--check-prefix NAME` picks other lines.
"""

import dataclasses
import pathlib
import shlex

import pytest
from click.testing import CliRunner
from filecheck.matcher import Matcher
from filecheck.options import Options

from hetjax.cli.main import cli

FOLDER = pathlib.Path(__file__).resolve().parents[1] / "golden"


@dataclasses.dataclass(frozen=True)
class Run:
    """One RUN line."""

    file: pathlib.Path
    line: str

    @property
    def words(self):
        text = self.line.replace("%S", str(self.file.parent)).replace("%s", str(self.file))
        return shlex.split(text, comments=False)


def runs():
    for path in sorted(FOLDER.glob("*.hj")):
        lines = [
            x.partition("RUN:")[2].strip()
            for x in path.read_text().splitlines()
            if x.startswith("// RUN:")
        ]
        assert lines, f"{path.name} has no RUN line"
        for i, line in enumerate(lines):
            yield pytest.param(Run(path, line), id=f"{path.stem}{f'-{i}' if i else ''}")


@pytest.mark.parametrize("run", list(runs()))
def test_golden(run, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = run.words
    fails = words[0] == "not"
    words = words[fails:]
    assert words[0] == "hetjax"
    command, _, matcher = run.line.partition("|")
    words = words[1 : words.index("|")] if "|" in words else words[1:]
    both = "2>&1" in words
    words = [w for w in words if w != "2>&1"]
    result = CliRunner().invoke(cli, words, standalone_mode=False)
    text = result.output if both else result.stdout
    if result.exception is not None:
        text += f"{type(result.exception).__name__}: {result.exception}\n"
        message = getattr(result.exception, "format_message", None)
        text += f"{message()}\n" if message else ""
    code = 1 if result.exception is not None else result.return_value or 0
    hint = f"\nrun: hetjax {shlex.join(words)}\n{result.output}"
    assert bool(code) == fails, f"exit {code}{hint}"
    if not matcher:
        return
    output = tmp_path / "output.txt"
    output.write_text(text)
    prefix = shlex.split(matcher)
    name = prefix[prefix.index("--check-prefix") + 1] if "--check-prefix" in prefix else "CHECK"
    options = Options(match_filename=str(run.file), input_file=str(output), check_prefixes=[name])
    failed = Matcher.from_opts(options).run()
    assert not failed, capsys.readouterr().err + hint
