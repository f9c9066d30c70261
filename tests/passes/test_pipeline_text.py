"""Pipeline strings parse to passes and back; every message names the place and the way on."""

import dataclasses
from typing import ClassVar, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hetjax.ir.errors import ParseError, PassError
from hetjax.passes import pipeline_text as pipeline_module
from hetjax.passes import registry
from hetjax.passes.pipeline_text import parse_pipeline, pipeline_text, resolve


@dataclasses.dataclass(frozen=True)
class Knobs:
    """Has one option of every type."""

    name: ClassVar[str] = "knobs"
    summary: ClassVar[str] = "for tests"
    stages: int = 0
    ratio: float = 1.0
    eager: bool = False
    schedule: Literal["gpipe", "1f1b"] = "1f1b"
    label: str = ""
    limit: int | None = None
    mesh: tuple[int, ...] = ()
    pair: tuple[str, int] = ("a", 1)
    odd: dict | None = None

    def apply(self, bundle):
        return bundle


@dataclasses.dataclass(frozen=True)
class Needy:
    """Has an option without a default."""

    name: ClassVar[str] = "needy"
    summary: ClassVar[str] = "for tests"
    path: str

    def __post_init__(self):
        if self.path == "bad":
            raise ValueError("path must not be bad")

    def apply(self, bundle):
        return bundle


@pytest.fixture(autouse=True)
def knobs(monkeypatch):
    monkeypatch.setitem(registry.PASSES, "knobs", "tests_pipeline_module:Knobs")
    monkeypatch.setitem(registry.PASSES, "needy", "tests_pipeline_module:Needy")
    real = registry.pass_class
    classes = {"knobs": Knobs, "needy": Needy}
    monkeypatch.setattr(pipeline_module, "pass_class", lambda name: classes.get(name) or real(name))


@pytest.mark.quick
@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", ()),
        ("  ", ()),
        ("knobs", (Knobs(),)),
        ("knobs,knobs{stages=4}", (Knobs(), Knobs(stages=4))),
        ("knobs{stages=-1 ratio=0.5,eager}", (Knobs(stages=-1, ratio=0.5, eager=True),)),
        ("knobs{eager=false}", (Knobs(),)),
        ("knobs{schedule=gpipe}", (Knobs(schedule="gpipe"),)),
        ('knobs{label="a, b}"}', (Knobs(label="a, b}"),)),
        ("knobs{limit=3}", (Knobs(limit=3),)),
        ("knobs{limit=none}", (Knobs(limit=None),)),
        ("knobs{mesh=(2,1), pair=(x,2)}", (Knobs(mesh=(2, 1), pair=("x", 2)),)),
        ("knobs{mesh=(2,)}", (Knobs(mesh=(2,)),)),
        ("knobs{mesh=()}", (Knobs(),)),
        ("knobs { stages = 4 } ,\n knobs", (Knobs(stages=4), Knobs())),
        ("needy{path=/tmp/x.hj}", (Needy("/tmp/x.hj"),)),
    ],
)
def test_pipelines_parse_and_print_back(text, expected):
    assert parse_pipeline(text) == expected
    assert parse_pipeline(pipeline_text(expected)) == expected


@given(
    st.builds(
        Knobs,
        st.integers(),
        st.floats(allow_nan=False),
        st.booleans(),
        st.sampled_from(["gpipe", "1f1b"]),
        st.text(),
        st.none() | st.integers(),
        st.lists(st.integers(), max_size=3).map(tuple),
        st.tuples(st.text(), st.integers()),
    )
)
def test_every_value_of_every_option_round_trips(passed):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry.PASSES, "knobs", "unused:Knobs")
        patch.setattr(pipeline_module, "pass_class", lambda name: Knobs)
        assert parse_pipeline(pipeline_text([passed])) == (passed,)


@pytest.mark.parametrize(
    ("text", "column", "message"),
    [
        ("label-regoins", 1, "there is no pass 'label-regoins'; did you mean 'label-regions'?"),
        ("knobs,zzzzz", 7, "there is no pass 'zzzzz'; valid: "),
        ("knobs knobs", 7, "expected ',' before the next pass, found 'knobs'"),
        ("knobs,", 7, "expected a pass's name, found the end"),
        (",knobs", 1, "expected a pass's name, found ','"),
        ("knobs{stage=4}", 7, "pass 'knobs' has no option 'stage'; did you mean 'stages'?"),
        ("knobs{stages=4,stages=5}", 23, "option 'stages' of pass 'knobs' is given twice"),
        (
            "knobs{stages=four}",
            14,
            "option 'stages' of pass 'knobs' takes a whole number, not 'four'",
        ),
        ("knobs{stages}", 7, "option 'stages' of pass 'knobs' takes a whole number, not 'stages'"),
        ("knobs{ratio=x}", 13, "option 'ratio' of pass 'knobs' takes a number, not 'x'"),
        (
            "knobs{eager=maybe}",
            13,
            "option 'eager' of pass 'knobs' takes true or false, not 'maybe'",
        ),
        (
            "knobs{schedule=2f2b}",
            16,
            "option 'schedule' of pass 'knobs' takes one of gpipe, 1f1b, not '2f2b'",
        ),
        (
            "knobs{limit=x}",
            13,
            "option 'limit' of pass 'knobs' takes a whole number or none, not 'x'",
        ),
        ("knobs{mesh=2}", 12, "option 'mesh' of pass 'knobs' takes a list (int, ...), not '2'"),
        (
            "knobs{pair=(a,1,2)}",
            12,
            "option 'pair' of pass 'knobs' takes a list (str, int), not '(a,1,2)'",
        ),
        (
            "knobs{odd=x}",
            11,
            "option 'odd' of pass 'knobs' takes no text (its type is dict) or none, not 'x'",
        ),
        ("knobs{stages=}", 14, "expected a value, found '}'"),
        ("knobs{stages=4", 15, "expected an option's name or '}', found the end"),
        ("knobs{mesh=(1 2)}", 15, "expected ',' or ')', found '2'"),
        ("knobs{mesh=(1,", 15, "expected a value, found the end"),
        ("knobs{mesh=((((((((((1))))))))))}", 21, "values nest more than 8 deep"),
        ('knobs{label="a', 13, "a string that is not closed"),
        ('knobs{label="\\q"}', 13, 'not a string: "\\q"'),
        ("needy", 1, "pass 'needy' needs the option 'path': needy{path=…}"),
        ("needy{path=bad}", 1, "pass 'needy': path must not be bad"),
    ],
)
def test_errors_name_the_column_and_the_nearest_name(text, column, message):
    with pytest.raises(ParseError) as caught:
        parse_pipeline(text)
    assert caught.value.message.startswith(message)
    assert (caught.value.line, caught.value.column) == (1, column)
    assert str(caught.value).splitlines()[1:] == ["  " + text, "  " + " " * (column - 1) + "^"]


@given(st.text(alphabet='knobs{}(),="\\ 1\n', max_size=30))
def test_any_text_parses_or_raises_a_parse_error(text):
    try:
        parse_pipeline(text)
    except ParseError as error:
        assert error.line >= 1


def test_every_registered_pass_loads_and_says_what_it_does():
    for name in registry.PASSES:
        if name in ("knobs", "needy"):
            continue
        cls = registry.pass_class(name)
        assert cls.name == name
        assert cls.summary and not cls.summary.endswith(".")
        assert dataclasses.is_dataclass(cls) and cls.__dataclass_params__.frozen
        assert cls.__doc__
        parse_pipeline(name)


def test_the_default_is_what_the_decorator_runs():
    from hetjax.passes.pipeline import ANALYSIS, LOWERING

    assert registry.ALIASES["default"].split(",") == [*ANALYSIS, "prove-microbatching", *LOWERING]
    assert [p.name for p in parse_pipeline("default,verify")][-2:] == ["verify", "verify"]


def test_loading_faults_name_the_target(monkeypatch):
    with pytest.raises(PassError, match=r"there is no pass|there is no such pass"):
        registry.pass_class("nope")
    monkeypatch.setitem(registry.PASSES, "gone", "hetjax.nowhere:Gone")
    with pytest.raises(PassError, match=r"cannot be loaded from hetjax\.nowhere:Gone"):
        registry.pass_class("gone")
    monkeypatch.setitem(registry.PASSES, "other", registry.PASSES["label-regions"])
    with pytest.raises(PassError, match="calls itself 'label-regions'; both names must agree"):
        registry.pass_class("other")


def test_resolve_takes_objects_and_refuses_what_is_no_pass():
    assert resolve([Knobs()]) == (Knobs(),)
    with pytest.raises(PassError, match="is not a pass"):
        resolve([object()])  # type: ignore[list-item]
