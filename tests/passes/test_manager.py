"""The manager runs passes in order, tells the instruments, and says which pass failed."""

import dataclasses
from typing import ClassVar

import pytest

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Graph
from hetjax.passes.facts import FACTS
from hetjax.passes.manager import Instrument, phase, record_phases, run_pipeline
from hetjax.passes.rewrites import limit_rewrites, rewrite

EMPTY = Graph("g", (), (), (), ())


@dataclasses.dataclass(frozen=True)
class Note:
    """Adds a note."""

    name: ClassVar[str] = "note"
    summary: ClassVar[str] = "add a note"
    text: str = "a"

    def apply(self, bundle):
        return bundle.note("t", self.text)


@dataclasses.dataclass(frozen=True)
class Fails:
    """Raises."""

    name: ClassVar[str] = "fails"
    summary: ClassVar[str] = "raise"

    def apply(self, bundle):
        raise KeyError("inside")


@dataclasses.dataclass(frozen=True)
class NoBundle:
    """Returns nothing."""

    name: ClassVar[str] = "no-bundle"
    summary: ClassVar[str] = "return nothing"

    def apply(self, bundle):
        return None


class Log(Instrument):
    def __init__(self):
        self.calls = []

    def begin(self, bundle, passes):
        self.calls.append(("begin", len(passes)))

    def before(self, step, bundle):
        self.calls.append(("before", step.number, step.text))

    def after(self, step, before, after):
        self.calls.append(("after", step.number, before is after))

    def failed(self, step, bundle, error):
        self.calls.append(("failed", step.number, type(error).__name__))

    def finish(self, bundle):
        self.calls.append(("finish", len(bundle.notes)))


@pytest.mark.quick
def test_passes_run_in_order_and_instruments_are_told():
    log = Log()
    result = run_pipeline(Bundle(), [Note("a"), Note("b c")], [log])
    assert [n for _, n in result.notes] == ["a", "b c"]
    assert log.calls == [
        ("begin", 2),
        ("before", 1, "note"),
        ("after", 1, False),
        ("before", 2, 'note{text="b c"}'),
        ("after", 2, False),
        ("finish", 2),
    ]


def test_a_failure_keeps_its_type_and_gains_the_pass_and_position():
    log = Log()
    with pytest.raises(KeyError) as caught:
        run_pipeline(Bundle(), [Note(), Fails()], [log])
    assert caught.value.__notes__ == ["in pass 2 of 2: fails"]
    assert log.calls[-1] == ("failed", 2, "KeyError")


def test_a_failing_instrument_counts_as_the_pass_failing():
    class Checks(Instrument):
        def after(self, step, before, after):
            raise ValueError("not valid")

    log = Log()
    with pytest.raises(ValueError, match="not valid"):
        run_pipeline(Bundle(), [Note()], [log, Checks()])
    assert log.calls[-1] == ("failed", 1, "ValueError")


def test_a_pass_must_return_a_bundle():
    with pytest.raises(
        PassError, match=r"pass 'no-bundle': apply\(\) must return a Bundle, not NoneType"
    ):
        run_pipeline(Bundle(), [NoBundle()])


@pytest.mark.parametrize("fact", sorted(FACTS))
def test_a_missing_requirement_names_the_fact_and_the_remedy(fact):
    @dataclasses.dataclass(frozen=True)
    class Needs(Note):
        name: ClassVar[str] = "needs"
        requires: ClassVar[tuple[str, ...]] = (fact,)

    with pytest.raises(PassError) as caught:
        run_pipeline(Bundle(), [Needs()])
    assert str(caught.value) == f"pass 'needs': it needs {fact}: {FACTS[fact][1]}"


def test_an_unknown_requirement_is_a_fault_of_the_pass():
    @dataclasses.dataclass(frozen=True)
    class Odd(Note):
        requires: ClassVar[tuple[str, ...]] = ("moonlight",)

    with pytest.raises(PassError, match="requires unknown facts"):
        run_pipeline(Bundle(), [Odd()])


def test_a_requirement_that_holds_lets_the_pass_run():
    @dataclasses.dataclass(frozen=True)
    class Needs(Note):
        requires: ClassVar[tuple[str, ...]] = ("graph", "graph.regions")

    assert run_pipeline(Bundle(graph=EMPTY), [Needs()]).notes == (("t", "a"),)


def test_phases_nest_and_cost_nothing_when_nobody_listens():
    with phase("alone"):
        pass
    with record_phases() as phases, phase("outer"), phase("inner"):
        pass
    assert [(depth, name) for depth, name, _ in phases] == [(0, "outer"), (1, "inner")]
    assert phases[0][2] >= phases[1][2] >= 0


def test_rewrites_are_counted_and_cut_off():
    assert rewrite("fold")
    with limit_rewrites(1) as log:
        assert [rewrite("fold", "%1"), rewrite("fold", "%2"), rewrite("drop", "%3")] == [
            True,
            False,
            False,
        ]
    assert log.names == [("fold", "%1"), ("fold", "%2"), ("drop", "%3")]
    with limit_rewrites(None) as log:
        assert rewrite("fold", "%1")
