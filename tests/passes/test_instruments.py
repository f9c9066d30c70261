"""Instruments print, verify, time and dump what passes did; a dump's commands and reproducers run."""

import dataclasses
import json
from typing import ClassVar

import pytest

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError, VerifyError
from hetjax.ir.parser import parse_bundle, parse_graph
from hetjax.passes.diffing import changed, diff, render
from hetjax.passes.dumping import (
    Dump,
    Reproducer,
    environment_instruments,
    reproducer_pipeline,
)
from hetjax.passes.instruments import Diff, Print, Time, VerifyEach, bytes_between, changed_parts
from hetjax.passes.manager import ambient, phase, run_pipeline

TEXT = """graph step {
  in %0:f32[3] state "w"
  in %1:f32[3] batch(0) "x"
  %2:f32[3] = mul %0 %1
  %3:f32[3] = add %2 %0
  out %3 "w" updates 0
}
"""


@dataclasses.dataclass(frozen=True)
class Edit:
    """Replaces text."""

    name: ClassVar[str] = "edit"
    summary: ClassVar[str] = "replace text"
    old: str = ""
    new: str = ""

    def apply(self, bundle):
        with phase("inner"):
            text = str(bundle.graph).replace(self.old, self.new)
        graph = parse_graph(text)
        return bundle if graph == bundle.graph else bundle.replace(graph=graph)


@dataclasses.dataclass(frozen=True)
class Boom:
    """Raises."""

    name: ClassVar[str] = "boom"
    summary: ClassVar[str] = "raise"

    def apply(self, bundle):
        raise ValueError("went wrong\nwith more lines")


@pytest.fixture
def bundle():
    return Bundle(graph=parse_graph(TEXT))


SUB, NOTHING, BAD = Edit("add", "sub"), Edit("zzz", "y"), Edit("add %2", "add %7")


def test_changed_parts_are_those_that_differ(bundle):
    assert changed_parts(bundle, bundle) == ()
    assert changed_parts(bundle, Bundle(graph=parse_graph(TEXT))) == ()
    assert changed_parts(bundle, bundle.note("a", "b")) == ("notes",)


def test_print_shows_what_was_asked_for(bundle):
    for which, expected in (
        ("changed", ["after edit{old=add,new=sub} (1 of 2), which changed graph"]),
        ("all", ["after edit{old=add,new=sub} (1 of 2)", "after edit{old=zzz,new=y} (2 of 2)"]),
        (("other",), []),
    ):
        out = []
        run_pipeline(bundle, [SUB, NOTHING], [Print(which, out.append)])
        assert [t.splitlines()[0] for t in out] == [f"// ----- {e} -----" for e in expected]
        assert all("%3:f32[3] = sub %2 %0" in t for t in out)
    out = []
    run_pipeline(bundle, [SUB], [Print(("edit",), out.append, before=True)])
    assert [t.splitlines()[0] for t in out] == [
        "// ----- before edit{old=add,new=sub} (1 of 1) -----",
        "// ----- after edit{old=add,new=sub} (1 of 1) -----",
    ]


def test_diff_shows_changed_ops_and_folds_the_rest(bundle):
    out = []
    run_pipeline(bundle, [SUB, NOTHING], [Diff(out.append)])
    assert out == [
        "// ----- edit{old=add,new=sub} (1 of 2) changed graph -----\n"
        "  … 3 lines unchanged\n"
        '    in %1:f32[3] batch(0) "x"\n'
        "    %2:f32[3] = mul %0 %1\n"
        "-   %3:f32[3] = add %2 %0\n"
        "+   %3:f32[3] = sub %2 %0\n"
        '    out %3 "w" updates 0\n'
        "  }",
        "// ----- edit{old=zzz,new=y} (2 of 2): nothing changed -----",
    ]


def test_a_new_part_is_counted_and_not_spelled_out(bundle):
    @dataclasses.dataclass(frozen=True)
    class Adds(Boom):
        def apply(self, bundle):
            return bundle.note("topic", "sentence")

    out = []
    run_pipeline(bundle, [Adds()], [Diff(out.append)])
    assert out == [
        "// ----- boom (1 of 1) changed notes -----\n"
        "  … 1 lines unchanged\n"
        "+ notes: 1 lines, new; --print=boom shows them"
    ]


def test_renumbering_is_no_difference_and_a_swapped_operand_is():
    before = "%1:f32[] = neg %0\n%2:f32[] = exp %1\n%3:f32[] = sub %1 %2"
    shifted = "%5:f32[] = iota\n%6:f32[] = neg %0\n%7:f32[] = exp %6\n%8:f32[] = sub %6 %7"
    assert [line.mark for line in diff(before, shifted)] == ["+", " ", " ", " "]
    swapped = shifted.replace("sub %6 %7", "sub %7 %6")
    assert [line.mark for line in diff(before, swapped)] == ["+", " ", " ", "~"]
    assert not changed(diff(before, before))
    assert render(diff(before, before)) == "  … 3 lines unchanged"


def test_diff_in_two_columns_and_colours():
    lines = diff("a\nb\nc", "a\nc\nd")
    assert render(lines, side=True, width=20) == "\n".join(
        ["a         a", "b       <", "c         c", "        > d"]
    )
    assert render(lines, colour=True).splitlines()[1] == "\x1b[31m- b\x1b[0m"
    long = "%0:f32[] = neg " + "%1 " * 40
    assert "…" in render(diff(long, "x"), side=True, width=40)


def test_verify_blames_the_input_the_pass_or_the_result(bundle):
    broken = bundle.replace(graph=parse_graph(TEXT.replace("add %2", "add %7")))
    for start, passes, when, note in (
        (broken, [NOTHING], "each", "found in the input, before any pass"),
        (
            bundle,
            [SUB, Edit("sub %2", "sub %7")],
            "each",
            "found after pass 'edit', which had a valid input: a fault of that pass",
        ),
        (bundle, [BAD], "end", "found in the result"),
    ):
        with pytest.raises(VerifyError) as caught:
            run_pipeline(start, passes, [VerifyEach(when)])
        assert note in caught.value.__notes__
    run_pipeline(bundle, [SUB], [VerifyEach()])


def test_timing_and_statistics(bundle):
    watch = Time()
    run_pipeline(bundle, [SUB, NOTHING], [watch])
    assert [(t.text, t.changed, t.ops_before, t.ops_after) for t in watch.timings] == [
        ("edit{old=add,new=sub}", ("graph",), 2, 2),
        ("edit{old=zzz,new=y}", (), 2, 2),
    ]
    assert [name for _, name, _ in watch.timings[0].phases] == ["inner"]
    assert all(t.seconds >= t.phases[0][2] > 0 for t in watch.timings)
    assert watch.tree().splitlines()[2].endswith("    inner")
    assert watch.statistics().splitlines()[1].split()[:4] == ["2", "2", "0", "graph"]
    assert json.loads(json.dumps(watch.as_dict()))[0]["number"] == 1
    assert bytes_between(bundle) == 0


def test_a_dump_has_numbered_files_commands_and_a_log(bundle, tmp_path):
    folder = tmp_path / "dump"
    run_pipeline(bundle, [SUB, NOTHING, Edit("mul", "max")], [Dump(folder)])
    assert sorted(p.name for p in folder.iterdir()) == [
        "000_input.hj",
        "001_edit.hj",
        "003_edit.hj",
        "trace.jsonl",
    ]
    assert (folder / "003_edit.hj").read_text().splitlines()[:2] == [
        "// after pass 3 of 3: edit{old=mul,new=max}",
        "// hetjax opt 001_edit.hj -p 'edit{old=mul,new=max}' -o 003_edit.hj",
    ]
    log = [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]
    assert [(e["pass"], e["file"]) for e in log] == [
        ("", "000_input.hj"),
        ("edit{old=add,new=sub}", "001_edit.hj"),
        ("edit{old=zzz,new=y}", "001_edit.hj"),
        ("edit{old=mul,new=max}", "003_edit.hj"),
    ]
    assert parse_bundle((folder / "000_input.hj").read_text()) == bundle
    # A second dump replaces the first and nothing else.
    (folder / "mine.txt").write_text("keep")
    run_pipeline(bundle, [NOTHING], [Dump(folder)])
    assert sorted(p.name for p in folder.iterdir()) == ["000_input.hj", "mine.txt", "trace.jsonl"]


def test_a_dump_refuses_a_folder_it_did_not_write(tmp_path):
    (tmp_path / "thesis.tex").write_text("x")
    with pytest.raises(PassError, match=r"holds thesis.tex, which no dump wrote"):
        Dump(tmp_path)
    assert (tmp_path / "thesis.tex").exists()


def test_a_dump_logs_the_failure(bundle, tmp_path):
    with pytest.raises(ValueError, match="went wrong"):
        run_pipeline(bundle, [Boom()], [Dump(tmp_path)])
    last = json.loads((tmp_path / "trace.jsonl").read_text().splitlines()[-1])
    assert last["pass"] == "boom" and last["error"].startswith("ValueError: went wrong")


def test_a_reproducer_holds_the_input_and_the_rest_of_the_pipeline(bundle, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    written = []
    for _ in range(2):
        with pytest.raises(ValueError, match="went wrong"):
            run_pipeline(
                bundle, [SUB, Boom(), NOTHING], [Reproducer(None, written.append, "hetjax opt x")]
            )
    assert [p.name for p in written] == ["hetjax-repro-boom.hj", "hetjax-repro-boom-2.hj"]
    text = written[0].read_text()
    lines = text.splitlines()
    assert lines[0] == "// reproducer: ValueError in pass 'boom': went wrong"
    assert any(line.startswith("// jaxlib ") for line in lines)
    assert "// found by: hetjax opt x" in lines
    assert reproducer_pipeline(text) == "boom,edit{old=zzz,new=y}"
    assert parse_bundle(text).graph == SUB.apply(bundle).graph
    assert reproducer_pipeline("graph g { }") is None
    assert reproducer_pipeline("// only a comment") is None


def test_the_environment_dumps_every_pipeline_of_a_run(bundle, tmp_path, monkeypatch):
    assert environment_instruments("step") == []
    monkeypatch.setenv("HETJAX_DUMP", str(tmp_path))
    for _ in range(2):
        with ambient(environment_instruments("my step")):
            run_pipeline(bundle, [SUB])
            run_pipeline(bundle, [Edit("mul", "max")])
    folders = sorted(p for p in tmp_path.iterdir())
    assert len(folders) == 2 and all(p.name.endswith("_my_step") for p in folders)
    assert sorted(p.name for p in folders[1].glob("*.hj")) == [
        "000_input.hj",
        "001_edit.hj",
        "002_input.hj",
        "003_edit.hj",
    ]
