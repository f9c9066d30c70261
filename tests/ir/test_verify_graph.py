"""Every rule over graphs fires on its violation, with its message, and on nothing else."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

from hetjax.ir.errors import VerifyError
from hetjax.ir.graph import Aval, Literal
from hetjax.ir.importer import import_jaxpr
from hetjax.ir.parser import parse_graph
from hetjax.ir.rules import GRAPH_RULES
from hetjax.ir.verify import verify_graph

GRAPH = """graph step {
  in %0:f32[8,4] state "state.w"
  in %1:f32[16,8] batch(0) "batch/x"
  in %2:f32[4] const "const0"
  [forward in "M/Dense_0"]
  %3:f32[16,4] = dot_general %1 %0 {dimension_numbers=(((1,),(0,)),((),()))} from "train.py:7"
  %4:f32[16,4] = add 1.0:f32 %3 from "train.py:8"
  [update]
  %5:f32[16] = reduce_sum %4 {axes=(1,)}
  %6:f32[8,4] = mul %0 0.5:f32
  out %6 "state.w" updates 0
  out %5 "out/loss"
}
"""


def problems(text):
    with pytest.raises(VerifyError) as caught:
        verify_graph(parse_graph(text))
    return caught.value.problems


@pytest.mark.quick
def test_a_valid_graph_passes():
    verify_graph(parse_graph(GRAPH))


FAULTS = [
    # rule, what to replace, with what, the message
    ("refs-in-range", 'out %5 "out/loss"', 'out %9 "out/loss"', 'output "out/loss" is %9, but values go up to %6'),
    ("refs-in-range", "mul %0 0.5:f32", "mul %7 0.5:f32", "mul reads %7, but values go up to %6"),
    ("one-definition", "%6:f32[8,4] = mul", "%0:f32[8,4] = mul", 'mul gives %0, which input "state.w" gives already'),
    ("one-definition", 'in %1:f32[16,8] batch(0) "batch/x"', 'in %1:f32[16,8] batch(0) "batch/x" in %1:f32[16,8] input "z"',
     'input "z" is %1, which is input "batch/x" already'),
    ("dominance", "dot_general %1 %0", "dot_general %1 %6", "dot_general reads %6, which only mul, further down, gives"),
    ("dominance", '%5:f32[16] = reduce_sum %4 {axes=(1,)}', "unused %5:f32[16] [update]",
     'output "out/loss" is %5, which nothing gives: the output is lost'),
    ("known-types", "f32[4] const", "f33[4] const", "%2 has type f33[4]: an unknown dtype"),
    ("literal-types", "add 1.0:f32", "add 1.0:i32", "add reads the literal 1.0 as i32[], which cannot hold it"),
    ("literal-types", "add 1.0:f32", "add 1.0:f32[2]", "add reads the literal 1.0 of type f32[2]; a literal is a scalar"),
    ("literal-types", 'out %5 "out/loss"', 'out True:f32 "out/loss"', 'output "out/loss" is the literal True as f32[], which cannot hold it'),
    ("regions", "[update]", "[sideways]", "reduce_sum is in region 'sideways'; regions are prologue, forward, backward, update"),
    ("roles", "const", "cosnt", "input \"const0\" has role 'cosnt'; roles are state, batch, const, input"),
    ("roles", "batch(0)", "batch", 'input "batch/x" has role batch and no batch axis'),
    ("roles", "batch(0)", "batch(2)", 'input "batch/x" has batch axis 2 and 2 dimensions'),
    ("updates", "updates 0", "updates 7", 'output "state.w" updates input 7, but inputs go up to 2'),
    ("updates", "updates 0", "updates 2", 'output "state.w" updates input "const0", whose role is const, not state'),
    ("updates", "updates 0", "", 'state leaf "state.w" is not among the outputs: its new value is lost'),
    ("updates", 'out %5 "out/loss"', 'out %6 "again" updates 0', 'input "state.w" is updated twice: by outputs "state.w" and "again"'),
    ("updates", 'out %6 "state.w"', 'out %5 "state.w"', 'state leaf "state.w" is f32[8,4] and comes back as f32[16]'),
    ("primitive-types", "{axes=(1,)}", "{axes=(0,)}", "reduce_sum gives shape (4), not f32[16]"),
]


@pytest.mark.parametrize(("rule", "old", "new", "message"), FAULTS, ids=[f"{f[0]}-{i}" for i, f in enumerate(FAULTS)])
def test_each_rule_says_what_is_wrong(rule, old, new, message):
    assert old in GRAPH
    found = problems(GRAPH.replace(old, new, 1))
    assert any(p.startswith(f"graph step: {rule}: {message}") for p in found), "\n".join(found)


def test_every_graph_rule_has_a_test():
    assert {r.name for r in GRAPH_RULES} == {f[0] for f in FAULTS} | {"equation-types"}


def test_a_negative_dimension_is_refused():
    graph = parse_graph(GRAPH)
    bad = graph.replace(avals=(*graph.avals[:2], Aval("f32", (-1,)), *graph.avals[3:]))
    with pytest.raises(VerifyError, match=r"known-types: %2 has type f32\[-1\]: a negative dimension"):
        verify_graph(bad)


@pytest.mark.parametrize(
    ("value", "dtype", "fits"),
    [
        (True, "bool", True), (True, "i32", False), (1, "i32", True), (1, "f32", True), (1, "bool", True),
        (1.0, "bf16", True), (1.0, "i32", False), (1j, "c64", True), (1j, "f32", False), (1, "key<fry>", False),
    ],
)
def test_literals_fit_their_dtype_or_not(value, dtype, fits):
    graph = parse_graph('graph g { out 0:i32 "o" }')
    result = dataclasses.replace(graph.outputs[0], atom=Literal(value, Aval(dtype, ())))
    changed = graph.replace(outputs=(result,))
    if fits:
        verify_graph(changed)
    else:
        with pytest.raises(VerifyError, match="cannot hold it"):
            verify_graph(changed)


def test_all_problems_are_listed_with_the_ops_around_each_and_a_caret():
    text = GRAPH.replace("add 1.0:f32 %3", "add %6 %3").replace("{axes=(1,)}", "{axes=(7,)}")
    first, *rest = problems(text)
    assert first == (
        "graph step: dominance: add reads %6, which only mul, further down, gives (train.py:8, module M/Dense_0)\n"
        "    %3:f32[16,4] = dot_general %1 %0 {dimension_numbers=(((1,),(0,)),((),()))}\n"
        "    %4:f32[16,4] = add %6 %3\n"
        "                       ^^\n"
        "    %5:f32[16] = reduce_sum %4 {axes=(7,)}"
    )
    assert [p.splitlines()[0] for p in rest] == [
        "graph step: primitive-types: add of f32[8,4], f32[16,4] cannot give f32[16,4] (train.py:8, module M/Dense_0)",
        "graph step: primitive-types: reduce_sum over axes (7,) of f32[16,4]",
    ]


def test_the_caret_points_at_a_result_and_not_at_a_longer_number():
    text = GRAPH.replace("%6:f32[8,4] = mul", "%4:f32[16,4] = mul").replace('out %6 "state.w"', 'out %4 "state.w"')
    found = problems(text.replace('out %5 "out/loss"\n', 'out %5 "out/loss"\n unused %6:f32[2]\n'))
    lines = found[0].splitlines()
    assert lines[2:4] == ["    %4:f32[16,4] = mul %0 0.5:f32", "    ^^"]


def test_nested_graphs_are_checked_and_named():
    text = """graph step {
      in %0:f32[] input "x"
      %1:f32[] = while %0 {body_jaxpr=graph body_jaxpr {
        in %0:f32[] input "0"
        %1:f32[] = add %0 %2
        %2:f32[] = neg %1
        out %2 "0"
      }}
      out %1 "0"
    }"""
    assert problems(text)[0].startswith(
        "graph step / %1:while.body_jaxpr: dominance: add reads %2, which only neg, further down, gives"
    )


def test_ten_problems_are_shown_in_full_and_the_rest_listed():
    ops = "\n".join(f"%{i}:f32[] = neg %90" for i in range(1, 31))
    found = problems(f'graph g {{ in %0:f32[] input "x"\n{ops}\n}}')
    full = [p for p in found if "\n" in p]
    assert len(full) == 10
    assert len([p for p in found if "refs-in-range" in p]) == 30


def test_types_must_be_those_of_the_equation():
    graph = import_jaxpr(jax.make_jaxpr(lambda x: jnp.sin(x) * 2)(jnp.ones(3)), name="f")
    verify_graph(graph)
    wrong = graph.replace(avals=(Aval("f32", (3,)), Aval("f32", (4,)), *graph.avals[2:]))
    with pytest.raises(VerifyError, match=r"equation-types: %1 is f32\[4\], but the equation of sin has"):
        verify_graph(wrong)
    op = dataclasses.replace(graph.ops[0], inputs=())
    with pytest.raises(VerifyError, match="sin has 0 operands and 1 results, its equation 1 and 1"):
        verify_graph(graph.replace(ops=(op, *graph.ops[1:])))


TYPES = [
    # op with its operands' types, message ("" when it is right)
    ("%2:f32[3] = add %0:f32[3] %1:f32[3]", ""),
    ("%2:f32[3,4] = add %0:f32[3,1] %1:f32[1,4]", ""),
    ("%2:f32[3] = add %0:f32[3] %1:f32[]", ""),
    ("%2:f32[3] = add %0:f32[3] %1:f32[4]", "add of f32[3], f32[4] cannot give f32[3]"),
    ("%2:f32[3] = add %0:f32[3] %1:i32[3]", "add of f32[3], i32[3] cannot give f32[3]"),
    ("%2:i32[3] = add %0:f32[3] %1:f32[3]", "add of f32[3], f32[3] gives f32, not i32"),
    ("%2:f32[3] = add %0:f32[3]", "add takes 2 operands and gives 1 result, not 1 and 1"),
    ("%2:bool[3] = lt %0:f32[3] %1:f32[3]", ""),
    ("%2:f32[3] = lt %0:f32[3] %1:f32[3]", "lt of f32[3], f32[3] gives bool, not f32"),
    ("%2:f32[3] = pow %0:f32[3] %1:i32[]", ""),
    ("%2:f32[3] = neg %0:f32[3]", ""),
    ("%2:f32[4] = neg %0:f32[3]", "neg of f32[3] cannot give f32[4]"),
    ("%2:f32[3] = abs %0:c64[3]", ""),
    ("%2:bool[3] = is_finite %0:f32[3]", ""),
    ("%2:i32[3] = convert_element_type %0:f32[3] {new_dtype=i32}", ""),
    ("%2:i32[4] = convert_element_type %0:f32[3] {new_dtype=i32}", "convert_element_type changes f32[3] to i32[4]; only the dtype may change"),
    ("%2:i32[3] = convert_element_type %0:f32[3] {new_dtype=f16}", "convert_element_type to f16 cannot give i32[3]"),
    ("%2:f32[3,2] = reshape %0:f32[6] {new_sizes=(3,2)}", ""),
    ("%2:f32[3,2] = reshape %0:f32[5] {new_sizes=(3,2)}", "reshape of f32[5] (5 elements) to 6 elements"),
    ("%2:f32[2,3] = reshape %0:f32[6] {new_sizes=(3,2)}", "reshape gives shape (3,2), not f32[2,3]"),
    ("%2:f32[4,3] = broadcast_in_dim %0:f32[3] {broadcast_dimensions=(1,), shape=(4,3)}", ""),
    ("%2:f32[4,3] = broadcast_in_dim %0:f32[2] {broadcast_dimensions=(1,), shape=(4,3)}", "broadcast_in_dim of f32[2] along (1,) cannot give shape (4, 3)"),
    ("%2:f32[3,4] = transpose %0:f32[4,3] {permutation=(1,0)}", ""),
    ("%2:f32[4,3] = transpose %0:f32[4,3] {permutation=(1,0)}", "transpose gives shape (3,4), not f32[4,3]"),
    ("%2:f32[4,3] = transpose %0:f32[4,3] {permutation=(1,1)}", "transpose of f32[4,3] by (1, 1), which is not an order of its dimensions"),
    ("%2:f32[3] = reduce_max %0:f32[4,3] {axes=(0,)}", ""),
    ("%2:f32[4] = reduce_max %0:f32[4,3] {axes=(0,)}", "reduce_max gives shape (3), not f32[4]"),
    ("%2:f32[3] = squeeze %0:f32[1,3] {dimensions=(0,)}", ""),
    ("%2:f32[3] = squeeze %0:f32[2,3] {dimensions=(0,)}", "squeeze of f32[2,3] drops a dimension that is not 1"),
    ("%2:f32[5] = concatenate %0:f32[2] %1:f32[3] {dimension=0}", ""),
    ("%2:f32[4] = concatenate %0:f32[2] %1:f32[3] {dimension=0}", "concatenate gives shape (5), not f32[4]"),
    ("%2:f32[2,5] = concatenate %0:f32[2,2] %1:f32[3,3] {dimension=1}", "concatenate of f32[2,2], f32[3,3] along dimension 1"),
    ("%3:f32[3] = select_n %0:bool[3] %1:f32[3] %2:f32[]", ""),
    ("%3:f32[3] = select_n %0:bool[3] %1:f32[4] %2:f32[3]", "select_n of f32[4], f32[3] cannot give f32[3]"),
    ("%3:f32[3] = select_n %0:f32[3] %1:f32[3] %2:f32[3]", "select_n chooses by f32[3] among f32[3]"),
    ("%2:f32[2,4,6] = dot_general %0:f32[2,4,5] %1:f32[2,5,6] {dimension_numbers=(((2,),(1,)),((0,),(0,)))}", ""),
    ("%2:f32[2,4,6] = dot_general %0:f32[2,4,5] %1:f32[2,7,6] {dimension_numbers=(((2,),(1,)),((0,),(0,)))}",
     "dot_general of f32[2,4,5], f32[2,7,6]: dimension 2 of the left has 5, dimension 1 of the right has 7"),
    ("%2:f32[4,2,6] = dot_general %0:f32[2,4,5] %1:f32[2,5,6] {dimension_numbers=(((2,),(1,)),((0,),(0,)))}",
     "dot_general gives shape (2,4,6), not f32[4,2,6]"),
    ("%2:f32[4] = dot_general %0:f32[4] %1:f32[4]", "dot_general has parameters or operands it cannot have"),
    ("%0:i32[4] = iota {dtype=i32, shape=(4,)}", ""),
    ("%0:f32[4] = iota {dtype=i32, shape=(4,)}", "iota of i32 cannot give f32[4]"),
    ("%2:f32[9] = a_primitive_without_a_rule %0:f32[3]", ""),
]


@pytest.mark.parametrize(("op", "message"), TYPES, ids=range(len(TYPES)))
def test_types_of_common_primitives(op, message):
    left, _, right = op.partition(" = ")
    words = right.split(" ")
    inputs = [w for w in words[1:] if w.startswith("%")]
    highest = int(left[1 : left.index(":")])
    unused = " ".join(f"%{r}:f32[]" for r in range(highest) if r >= len(inputs))
    body = " ".join(w.partition(":")[0] if w in inputs else w for w in words)
    declared = "\n".join(f'in {w} input "{i}"' for i, w in enumerate(inputs))
    graph = parse_graph(f"graph g {{ {declared}\n{left} = {body}\n {f'unused {unused}' if unused else ''} }}")
    if message:
        with pytest.raises(VerifyError) as caught:
            verify_graph(graph)
        assert [p.splitlines()[0] for p in caught.value.problems] == [f"graph g: primitive-types: {message}"]
    else:
        verify_graph(graph)
