"""HETJAX_DUMP dumps what passes did from an unmodified run, and the dump runs again as text."""

import json
import pathlib
import shlex

import jax
import pytest
from click.testing import CliRunner

import hetjax
from hetjax.cli.main import cli
from hetjax.errors import PassError
from hetjax.explaining.memory import stage_peaks
from hetjax.explaining.movements import movements
from hetjax.ir.parser import parse_bundle
from hetjax.ir.verify import verify_bundle
from tests.support import make_linen


@pytest.fixture(scope="module")
def dump(tmp_path_factory):
    """The dump of one planned step: two stages, two microbatches, dropout, a masked loss."""
    folder = tmp_path_factory.mktemp("dump")
    step, state, batch = make_linen(loss="masked", dropout=0.1)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,2")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETJAX_DUMP", str(folder))
        parallel.plan_for(state, batch)
    (found,) = folder.iterdir()
    return found


def files(dump):
    return sorted(p for p in dump.iterdir() if p.suffix == ".hj")


def test_every_file_parses_and_is_valid(dump):
    assert [p.name.split("_", 1)[1] for p in files(dump)][:4] == [
        "input.hj",
        "inline-calls.hj",
        "label-regions.hj",
        "label-blocks.hj",
    ]
    for path in files(dump):
        verify_bundle(parse_bundle(path.read_text()))
    log = [json.loads(line) for line in (dump / "trace.jsonl").read_text().splitlines()]
    assert {e["pass"] for e in log} >= {"cut-stages", "schedule", "plan-donation"}


def test_every_command_of_the_dump_gives_its_file_from_text(dump, monkeypatch, tmp_path):
    """What the passes do to the traced step they do to its text: no pass may lean on what text lacks."""
    monkeypatch.chdir(dump)
    ran = 0
    for path in files(dump):
        command = path.read_text().splitlines()[1]
        if not command.startswith("// hetjax opt"):
            continue
        words = shlex.split(command.removeprefix("// "))
        words[-1] = str(tmp_path / path.name)
        result = CliRunner().invoke(cli, words[1:], standalone_mode=False)
        assert result.return_value == 0, result.output
        assert parse_bundle(pathlib.Path(words[-1]).read_text()) == parse_bundle(path.read_text()), path.name
        ran += 1
    assert ran >= 8


def test_the_last_file_can_be_explained_and_lowered(dump):
    bundle = parse_bundle(files(dump)[-1].read_text())
    assert any(m.kind == "transfer" for m in movements(bundle))
    for peak in stage_peaks(bundle):
        assert sum(h.nbytes for h in peak.holders) == peak.memory.peak_bytes
    path = files(dump)[-1]
    result = CliRunner().invoke(cli, ["opt", str(path), "--emit", "mpmd"], standalone_mode=False)
    assert result.return_value == 0, result.output
    sends = sum(t.kind == "send" for tasks in bundle.program.tasks for t in tasks)
    assert result.stdout.count("mpmd.transfer") == sends


def test_nothing_is_dumped_unless_asked(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HETJAX_DUMP", raising=False)
    step, state, batch = make_linen()
    hetjax.parallelize(step, num_stages=1).plan_for(state, batch)
    assert list(tmp_path.iterdir()) == []
    assert jax.devices()


@pytest.mark.quick
def test_a_dump_that_cannot_be_written_says_so(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HETJAX_DUMP", str(tmp_path / "file" / "below"))
    step, state, batch = make_linen(blocks=1)
    with pytest.raises(PassError, match=r"cannot write to .*below.*HETJAX_DUMP"):
        hetjax.parallelize(step, num_stages=1).plan_for(state, batch)
