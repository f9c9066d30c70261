"""What prints parses back equal, and no text makes the parser raise anything but its own errors."""

import contextlib
import dataclasses
import math
import pathlib
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import ClusterError, ParseError, PlanError, VerifyError
from hetjax.ir.graph import (
    REGIONS,
    Argument,
    Aval,
    Cost,
    Graph,
    Handle,
    Literal,
    Op,
    Record,
    Result,
    Symbol,
)
from hetjax.ir.microbatching import BatchType, Microbatching, Refusal
from hetjax.ir.parser import parse_bundle, parse_graph, parse_program
from hetjax.ir.program import (
    FORMS,
    PHASES,
    TASK_KINDS,
    Feed,
    Fragment,
    Piece,
    Port,
    Program,
    Reshard,
    Return,
    StageMesh,
    Task,
)
from hetjax.ir.text import print_bundle, print_graph
from hetjax.ir.verify import verify_bundle, verify_graph, verify_program

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / "golden"
SMALL = settings(max_examples=60, deadline=None)

texts = st.text(max_size=8)
names = st.one_of(
    st.sampled_from(
        ["train_step", "s0", "x3:s0>s1", "s1/forward", "scatter-add", "1f1b", "in", "graph"]
    ),
    st.text(min_size=1, max_size=6),
)
counts = st.integers(-2, 10**12)
dtypes = st.sampled_from(["f32", "bf16", "i32", "bool", "key<fry>", "float0", "f8e4m3fn", "token"])
shapes = st.lists(st.integers(0, 4096), max_size=4).map(tuple)
avals = st.builds(Aval, dtypes, shapes, st.booleans())
floats = st.floats().map(lambda x: math.nan if math.isnan(x) else x)
numbers = st.one_of(st.booleans(), st.integers(), floats)
literals = st.builds(
    Literal,
    st.one_of(numbers, st.complex_numbers()),
    st.builds(Aval, dtypes, st.just(()), st.booleans()),
)
keys = st.one_of(st.sampled_from(["axes", "dimension_numbers", "mode"]), texts)
simple_values = st.one_of(
    st.none(),
    numbers,
    texts,
    avals,
    st.builds(Symbol, names),
    st.builds(Handle, names),
    st.complex_numbers(allow_nan=False),
)


@st.composite
def graphs(draw, depth=1):
    """Graphs of random shape: refs stay in range, everything else is free, also what is invalid."""
    table = tuple(draw(st.lists(avals, max_size=8)))
    refs = st.integers(0, len(table) - 1) if table else st.nothing()
    atoms = st.one_of(literals, refs) if table else literals
    values = params_values(depth)
    arguments = st.builds(Argument, refs, texts, names, st.none() | st.integers(-1, 3))
    ops = st.builds(
        Op,
        names,
        st.lists(atoms, max_size=3).map(tuple),
        st.lists(refs, max_size=2).map(tuple) if table else st.just(()),
        st.lists(st.tuples(keys, values), max_size=2).map(tuple),
        st.sampled_from(["", *REGIONS, "odd region", "in"]),
        texts,
        texts,
        st.lists(st.tuples(st.sampled_from(["scope", "transform", "odd"]), texts), max_size=2).map(
            tuple
        ),
        st.none() | st.builds(Cost, counts, counts, counts),
    )
    return Graph(
        draw(names),
        tuple(draw(st.lists(arguments, max_size=3))) if table else (),
        tuple(draw(st.lists(ops, max_size=4))),
        tuple(
            draw(
                st.lists(st.builds(Result, atoms, texts, st.none() | st.integers(0, 9)), max_size=2)
            )
        ),
        table,
    )


def params_values(depth):
    leaves = simple_values if depth == 0 else st.one_of(simple_values, graphs(depth - 1))
    return st.recursive(
        leaves,
        lambda inner: st.one_of(
            st.lists(inner, max_size=3).map(tuple),
            st.builds(Record, names, st.lists(st.tuples(keys, inner), max_size=2).map(tuple)),
        ),
        max_leaves=4,
    )


axis_names = st.sampled_from(["data", "model", "odd axis", "-"])


@st.composite
def programs(draw):
    """Programs whose refs stay in range; every other field is free."""
    table = draw(st.lists(avals, min_size=1, max_size=6))
    micro = [
        draw(
            st.one_of(
                st.just(a),
                avals,
                st.just(Aval(a.dtype, tuple(n // 2 for n in a.shape), a.weak_type)),
            )
        )
        for a in table
    ]
    refs = st.integers(0, len(table) - 1)
    specs = st.lists(st.lists(axis_names, max_size=2).map(tuple), max_size=3).map(tuple)
    stages = st.integers(0, 3)
    optional = st.none() | st.integers(0, 3)

    @st.composite
    def ports(draw):
        ref = draw(refs)
        fitting = st.lists(
            st.lists(st.sampled_from(["data", "model"]), max_size=2).map(tuple),
            min_size=table[ref].ndim,
            max_size=table[ref].ndim,
        ).map(tuple)
        return Port(
            ref,
            draw(st.sampled_from(FORMS)),
            draw(fitting | specs),
            draw(st.just(1.0) | floats),
            draw(optional),
        )

    port_lists = st.lists(ports(), max_size=2).map(tuple)
    atoms = st.one_of(literals, refs)
    ops = st.builds(
        Op,
        names,
        st.lists(atoms, max_size=2).map(tuple),
        st.lists(refs, max_size=2).map(tuple),
        st.lists(st.tuples(keys, simple_values), max_size=1).map(tuple),
        st.sampled_from(["", *REGIONS]),
        texts,
    )
    bounds = st.lists(st.integers(0, 99), max_size=2).map(tuple)
    fragments = st.builds(
        Fragment,
        names,
        stages,
        st.sampled_from(PHASES),
        stages,
        st.lists(ops, max_size=2).map(tuple),
        port_lists,
        port_lists,
        st.lists(st.integers(0, 3), max_size=3).map(tuple),
    )
    reshards = st.builds(
        Reshard,
        names,
        refs,
        st.sampled_from(FORMS),
        stages,
        stages,
        specs,
        specs,
        counts,
        st.lists(st.builds(Piece, stages, stages, bounds, bounds), max_size=2).map(tuple),
    )
    tasks = st.builds(
        Task, st.sampled_from(TASK_KINDS) | names, stages, st.none() | st.integers(0, 9), texts
    )
    meshes = st.builds(
        StageMesh,
        names,
        names,
        names,
        st.lists(st.tuples(names, counts), max_size=2).map(tuple),
        st.lists(st.integers(0, 9), max_size=3).map(tuple),
    )

    def some(what, most=2):
        return tuple(draw(st.lists(what, max_size=most)))

    return Program(
        draw(names),
        draw(st.integers(1, 8)),
        draw(names),
        some(meshes),
        tuple(table),
        tuple(micro),
        some(fragments),
        some(reshards),
        some(st.lists(tasks, max_size=3).map(tuple)),
        some(st.builds(Feed, stages, stages, st.sampled_from(FORMS), specs, optional)),
        some(st.builds(Return, stages, optional, st.none() | ports())),
        some(st.builds(Result, atoms, texts, optional)),
    )


batch_types = st.builds(
    BatchType,
    st.sampled_from(["R", "B", "S", "Z", "U"]),
    st.integers(-2, 2),
    st.none() | st.integers(0, 3),
)
microbatchings = st.builds(
    Microbatching,
    st.integers(1, 64),
    graphs(0),
    st.lists(batch_types, max_size=12).map(tuple),
    st.frozensets(st.integers(0, 9), max_size=4),
    st.frozensets(st.integers(0, 9), max_size=4),
    st.none() | st.builds(Refusal, texts, st.none() | st.integers(0, 9), texts, texts, texts),
    st.booleans(),
    st.frozensets(st.integers(0, 9), max_size=4),
    st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=3).map(tuple),
)


@SMALL
@given(graphs())
def test_a_graph_prints_and_parses_back(graph):
    text = print_graph(graph, scopes=True)
    back = parse_graph(text)
    assert back == graph
    assert [op.scopes for op in back.ops] == [op.scopes for op in graph.ops]
    assert parse_graph(str(graph)) == graph
    assert print_graph(back, scopes=True) == text


@SMALL
@given(programs())
def test_a_program_prints_and_parses_back(program):
    text = str(program)
    back = parse_program(text)
    assert back == program
    assert str(back) == text


@settings(max_examples=30, deadline=None)
@given(
    graphs(0) | st.none(),
    programs() | st.none(),
    microbatchings | st.none(),
    st.lists(st.tuples(texts, texts), max_size=2),
)
def test_a_bundle_prints_and_parses_back(graph, program, microbatching, notes):
    bundle = Bundle(graph=graph, program=program, microbatching=microbatching, notes=tuple(notes))
    assert parse_bundle(print_bundle(bundle)) == bundle


@SMALL
@given(graphs(0))
def test_shorter_forms_parse_to_the_graph_without_what_they_leave_out(graph):
    text = print_graph(graph, locations=False, blocks=False, regions=False, costs=False)
    back = parse_graph(text)
    assert back.avals == graph.avals
    assert [op.inputs for op in back.ops] == [op.inputs for op in graph.ops]
    assert not any(op.region or op.block or op.source or op.cost for op in back.ops)


EXAMPLE = """hetjax 1
graph train_step {
  in %0:f32[8,16] state "state.params/w"
  in %1:f32[64,8] batch(0) "batch/x"
  [forward in "MLP/Dense_0" stack transform("jvp") "MLP"]
  %2:f32[64,16] = dot_general %1 %0 {dimension_numbers=(((1,),(0,)),((),())), precision=None} from "mlp.py:12"
  %3:f32[64,16] = while %2 -inf:~f32 {body=graph body {
        in %0:f32[] input "0"
        out %0 "0"
      }, mode=GatherScatterMode.CLIP, numbers=GatherDimensionNumbers(offset_dims=(1,)), jvp=#relu.jvp}
  () = print %3 cost(1,2,3)
  out %3 "0" updates 0
  unused %4:key<fry>[]
}
microbatching 2 {
  types R*2 B(0)*3
  hoisted %1
  resliced %3
  positions %2
  chained (%0,%3) (%1,%2)
  same graph
}
program train_step {
  microbatches 2
  schedule "1f1b"
  mesh s0 of cpu at here (data=2,model=1) devices (0,1)
  values %4:key<fry>[]
  fragment s0/forward on 0 forward level 0 {
    in %0:f32[8,16@(data,model)] step donated
    in %1:f32[64|32@data,8] micro axis 0
    %2:f32[64|32,16] = dot_general %1 %0
    out %2:f32[64|32@data,16] sum scale 0.5
  }
  reshard x2:s0>s1 micro from 0 %2:f32[64|32@data,16] to 1 %2:f32[64|32,16@model] bytes 4096 {
    piece 0 to 1 (0,0) (32,16)
  }
  tasks 0 {
    F0 s0/forward
    send0 x2:s0>s1
  }
  feed 0 to 0 step spec(-,(data,model))
  return 0 from 0 %3 spec(data,-) concat axis 0
  result %3 "0" updates 0
  values %3:f32[1]
}
note "microbatches" "two, as asked"
"""


@pytest.mark.quick
def test_the_example_of_every_construct_round_trips():
    bundle = parse_bundle(EXAMPLE)
    assert (
        bundle.graph is not None and bundle.program is not None and bundle.microbatching is not None
    )
    assert bundle.microbatching.graph is bundle.graph
    assert bundle.graph.ops[0].block == "MLP/Dense_0"
    assert bundle.graph.ops[1].inputs[1] == Literal(-math.inf, Aval("f32", (), True))
    assert bundle.program.fragments[0].inputs[0].spec == ((), ("data", "model"))
    assert parse_bundle(print_bundle(bundle)) == bundle


# fmt: off
INSERTED = (
    "", "%", "}", "{", "(", ")", '"', "graph", "@", "|", "9" * 5000, "-", ":f32[", "#", "\\", "~", "[", "]", "=", ",",
    ".", "\n", "//", "in ", "out ", "\x00", "%5", "nan", "inf", "True:bool", "spec(", "^", "*", "symbol(", "complex(",
)
# fmt: on


def mutate(text, rng, edits):
    """Returns the text with some of it replaced, deleted or repeated."""
    for _ in range(edits):
        at = rng.randint(0, len(text))
        text = text[:at] + rng.choice(INSERTED) + text[at + rng.randint(0, 12) :]
        if rng.random() < 0.2:
            start = rng.randint(0, len(text))
            text = text[:at] + text[start : start + rng.randint(0, 200)] + text[at:]
    return text


def check_bundle_text(text):
    """Parses a text; what parses must verify or say what is wrong, print, and parse back equal."""
    try:
        bundle = parse_bundle(text)
    except (ParseError, ClusterError, PlanError) as error:
        assert str(error)
        return
    with contextlib.suppress(VerifyError):
        verify_bundle(bundle)
    assert parse_bundle(print_bundle(bundle)) == bundle


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 12))
def test_mutated_text_parses_or_raises_our_own_error(rng, edits):
    check_bundle_text(mutate(EXAMPLE, rng, edits))


@pytest.mark.nightly
def test_much_mutated_text_parses_or_raises_our_own_error():
    rng = random.Random(2026)
    golden = (GOLDEN / "lowering.hj").read_text()
    for _ in range(30_000):
        check_bundle_text(mutate(rng.choice([EXAMPLE, golden]), rng, rng.randint(1, 12)))


def test_texts_that_once_raised_something_else():
    with pytest.raises(ParseError, match="expected a value with its type"):
        parse_graph('graph g { in :f32[2] input "x" }')
    golden = (GOLDEN / "lowering.hj").read_text()
    for field, error in (('bandwidth_gbit_s = 400', ClusterError), ('"predicted_s": 0.001', PlanError)):
        assert field in golden
        with pytest.raises(error, match=r"number"):
            parse_bundle(golden.replace(field, field.rpartition(" ")[0] + " " + "9" * 400, 1))


@settings(max_examples=300, deadline=None)
@given(st.randoms(use_true_random=False), st.integers(1, 6))
def test_mutated_graphs_and_programs_parse_or_raise_our_own_error(rng, edits):
    graph = EXAMPLE[EXAMPLE.index("graph") : EXAMPLE.index("microbatching")]
    program = EXAMPLE[EXAMPLE.index("program") : EXAMPLE.index("note")]
    for parse, text in ((parse_graph, graph), (parse_program, program)):
        with contextlib.suppress(ParseError):
            parse(mutate(text, rng, edits))


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=60))
def test_any_text_parses_or_raises_our_own_error(text):
    for parse in (parse_bundle, parse_graph, parse_program):
        with contextlib.suppress(ParseError, ClusterError, PlanError):
            parse(text)


@SMALL
@given(graphs(), programs())
def test_the_verifier_raises_nothing_but_its_own_error(graph, program):
    for verify, what in ((verify_graph, graph), (verify_program, program)):
        try:
            verify(what)
        except VerifyError as error:
            assert error.problems


KNOWN_FIELDS = {
    Aval: 3,
    Literal: 2,
    Handle: 2,
    Symbol: 1,
    Record: 2,
    Cost: 3,
    Op: 10,
    Argument: 4,
    Result: 3,
    Graph: 6,
    BatchType: 3,
    Refusal: 5,
    Microbatching: 9,
    StageMesh: 5,
    Port: 5,
    Fragment: 8,
    Piece: 4,
    Reshard: 9,
    Task: 4,
    Feed: 5,
    Return: 3,
    Program: 12,
    Bundle: 6,
}


@pytest.mark.parametrize("kind", KNOWN_FIELDS, ids=lambda k: k.__name__)
def test_the_text_form_knows_every_field(kind):
    """A field added to a type of the IR must print and parse; then count it here."""
    assert len(dataclasses.fields(kind)) == KNOWN_FIELDS[kind]


def test_numbers_too_long_to_be_numbers_are_an_error():
    with pytest.raises(ParseError, match="this number is too long"):
        parse_graph("graph g { () = f {x=" + "9" * 5000 + "} }")


def test_text_behind_the_end_is_an_error():
    with pytest.raises(ParseError, match="expected the end of the text"):
        parse_graph("graph g { } graph h { }")


def test_deep_nesting_is_an_error_and_not_a_recursion():
    with pytest.raises(ParseError, match="nested more than 40 deep"):
        parse_graph("graph g { () = f {x=" + "(" * 5000 + ")" * 5000 + "} }")
    with pytest.raises(ParseError, match="nested more than 40 deep"):
        parse_graph("graph g { () = f {x=" * 5000)
