"""What a verifier rule is, and the rules every graph obeys."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Generic, TypeVar

from hetjax.ir.dtypes import is_dtype_name, is_inexact, is_key
from hetjax.ir.graph import REGIONS, Argument, Aval, Graph, Literal, Op, Ref, Result
from hetjax.ir.params_text import dtype_name

ROLES = ("state", "batch", "const", "input")

T = TypeVar("T")


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """One violation.

    Attributes:
      message: what is wrong, with the numbers.
      ops: the ops around it, when it is an op's fault.
      position: the faulty op in `ops`.
      mark: the token of that op's line to point at; "" points at the primitive.
      avals: types for printing `ops`.
    """

    message: str
    ops: Sequence[Op] = ()
    position: int = 0
    mark: str = ""
    avals: Sequence[Aval] = ()


@dataclasses.dataclass(frozen=True, slots=True)
class Rule(Generic[T]):
    """One invariant.

    Attributes:
      name: in kebab-case; errors begin with it.
      summary: the invariant, as a sentence.
      check: yields what breaks it.
    """

    name: str
    summary: str
    check: Callable[[T], Iterator[Found]]


@dataclasses.dataclass(frozen=True)
class Code:
    """Straight-line code as rules see it: a graph, or the ops of a fragment.

    Attributes:
      ops: in order.
      avals: types by ref.
      given: refs that exist before the first op, with what gives them.
      arguments, results: of a graph; empty for a fragment.
    """

    ops: tuple[Op, ...]
    avals: Sequence[Aval]
    given: Mapping[Ref, str]
    arguments: tuple[Argument, ...] = ()
    results: tuple[Result, ...] = ()

    def at(self, position: int, message: str, mark: str = "") -> Found:
        """Returns a violation at an op."""
        return Found(message, self.ops, position, mark, self.avals)


def code_of(graph: Graph) -> Code:
    """Returns a graph as rules see it."""
    given = {a.ref: f'input "{a.path}"' for a in graph.inputs}
    return Code(graph.ops, graph.avals, given, graph.inputs, graph.outputs)


def refs_in_range(code: Code) -> Iterator[Found]:
    size = len(code.avals)
    for a in code.arguments:
        if not 0 <= a.ref < size:
            yield Found(f'input "{a.path}" is %{a.ref}, but values go up to %{size - 1}')
    for i, op in enumerate(code.ops):
        for r in op.inputs:
            if type(r) is int and not 0 <= r < size:
                yield code.at(
                    i, f"{op.primitive} reads %{r}, but values go up to %{size - 1}", f"%{r}"
                )
        for r in op.outputs:
            if not 0 <= r < size:
                yield code.at(
                    i, f"{op.primitive} gives %{r}, but values go up to %{size - 1}", f"%{r}"
                )
    for r in code.results:
        if isinstance(r.atom, int) and not 0 <= r.atom < size:
            yield Found(f'output "{r.path}" is %{r.atom}, but values go up to %{size - 1}')


def one_definition(code: Code) -> Iterator[Found]:
    by: dict[Ref, str] = {}
    for a in code.arguments:
        if a.ref in by:
            yield Found(f'input "{a.path}" is %{a.ref}, which is {by[a.ref]} already')
        by[a.ref] = f'input "{a.path}"'
    by.update(code.given)
    for i, op in enumerate(code.ops):
        for r in op.outputs:
            if r in by:
                yield code.at(i, f"{op.primitive} gives %{r}, which {by[r]} gives already", f"%{r}")
            by[r] = op.primitive


def dominance(code: Code) -> Iterator[Found]:
    seen = set(code.given)
    late: dict[Ref, int] | None = None
    for i, op in enumerate(code.ops):
        for r in op.inputs:
            if type(r) is int and r not in seen:
                if late is None:
                    late = {o: k for k, other in enumerate(code.ops) for o in other.outputs}
                where = (
                    f"only {code.ops[late[r]].primitive}, further down, gives"
                    if r in late
                    else "nothing gives"
                )
                yield code.at(i, f"{op.primitive} reads %{r}, which {where}", f"%{r}")
        seen.update(op.outputs)
    for r in code.results:
        if isinstance(r.atom, int) and r.atom not in seen:
            yield Found(f'output "{r.path}" is %{r.atom}, which nothing gives: the output is lost')


def known_types(code: Code) -> Iterator[Found]:
    wrong = {
        r
        for r, a in enumerate(code.avals)
        if not is_dtype_name(a.dtype) or any(n < 0 for n in a.shape)
    }
    if not wrong:
        return
    for r in sorted(wrong):
        what = (
            "an unknown dtype" if not is_dtype_name(code.avals[r].dtype) else "a negative dimension"
        )
        position = next((i for i, op in enumerate(code.ops) if r in op.outputs), None)
        message = f"%{r} has type {code.avals[r]}: {what}"
        yield Found(message) if position is None else code.at(position, message, f"%{r}")


def literal_types(code: Code) -> Iterator[Found]:
    for i, op in enumerate(code.ops):
        for a in op.inputs:
            if type(a) is Literal and (problem := _literal_problem(a)):
                yield code.at(
                    i, f"{op.primitive} reads the literal {a.value!r} {problem}", "literal"
                )
    for r in code.results:
        if isinstance(r.atom, Literal) and (problem := _literal_problem(r.atom)):
            yield Found(f'output "{r.path}" is the literal {r.atom.value!r} {problem}')


def _literal_problem(literal: Literal) -> str:
    aval, value = literal.aval, literal.value
    if aval.shape:
        return f"of type {aval}; a literal is a scalar"
    fits = (
        not is_key(aval.dtype)
        if not isinstance(value, (bool, complex, float))
        else aval.dtype == "bool"
        if isinstance(value, bool)
        else aval.dtype.startswith("c")
        if isinstance(value, complex)
        else is_inexact(aval.dtype)
    )
    return "" if fits else f"as {aval}, which cannot hold it"


def regions(code: Code) -> Iterator[Found]:
    for i, op in enumerate(code.ops):
        if op.region and op.region not in REGIONS:
            yield code.at(
                i, f"{op.primitive} is in region '{op.region}'; regions are {', '.join(REGIONS)}"
            )


def roles(code: Code) -> Iterator[Found]:
    for a in code.arguments:
        if a.role not in ROLES:
            yield Found(f"input \"{a.path}\" has role '{a.role}'; roles are {', '.join(ROLES)}")
        ndim = code.avals[a.ref].ndim if a.ref < len(code.avals) else 0
        if a.role == "batch" and a.batch_axis is None:
            yield Found(f'input "{a.path}" has role batch and no batch axis')
        if a.batch_axis is not None and not 0 <= a.batch_axis < ndim:
            yield Found(f'input "{a.path}" has batch axis {a.batch_axis} and {ndim} dimensions')


def updates(code: Code) -> Iterator[Found]:
    by: dict[int, Result] = {}
    for r in code.results:
        if r.updates is None:
            continue
        if not 0 <= r.updates < len(code.arguments):
            yield Found(
                f'output "{r.path}" updates input {r.updates}, but inputs go up to {len(code.arguments) - 1}'
            )
            continue
        target = code.arguments[r.updates]
        if target.role != "state":
            yield Found(
                f'output "{r.path}" updates input "{target.path}", whose role is {target.role}, not state'
            )
        if r.updates in by:
            yield Found(
                f'input "{target.path}" is updated twice: by outputs "{by[r.updates].path}" and "{r.path}"'
            )
        by[r.updates] = r
        new = r.atom.aval if isinstance(r.atom, Literal) else _lookup(code.avals, r.atom)
        old = _lookup(code.avals, target.ref)
        if new and old and (new.dtype, new.shape) != (old.dtype, old.shape):
            yield Found(f'state leaf "{target.path}" is {old} and comes back as {new}')
    for i, a in enumerate(code.arguments):
        if a.role == "state" and i not in by:
            yield Found(f'state leaf "{a.path}" is not among the outputs: its new value is lost')


def _lookup(avals: Sequence[Aval], ref: Ref) -> Aval | None:
    return avals[ref] if 0 <= ref < len(avals) else None


def equation_types(code: Code) -> Iterator[Found]:
    size = len(code.avals)
    names: dict[Any, str | None] = {}
    for i, op in enumerate(code.ops):
        if op.eqn is None:
            continue
        if len(op.eqn.invars) != len(op.inputs) or len(op.eqn.outvars) != len(op.outputs):
            yield code.at(
                i,
                f"{op.primitive} has {len(op.inputs)} operands and {len(op.outputs)} results, its equation "
                f"{len(op.eqn.invars)} and {len(op.eqn.outvars)}",
            )
            continue
        for refs, variables in ((op.inputs, op.eqn.invars), (op.outputs, op.eqn.outvars)):
            for r, var in zip(refs, variables):
                if type(r) is not int or not 0 <= r < size:
                    continue
                aval, expected = code.avals[r], var.aval
                shape = getattr(expected, "shape", ())
                if aval.shape != shape or not _same_dtype(
                    aval.dtype, getattr(expected, "dtype", None), names
                ):
                    yield code.at(
                        i,
                        f"%{r} is {aval}, but the equation of {op.primitive} has {expected} there",
                        f"%{r}",
                    )


def _same_dtype(name: str, dtype: Any, names: dict[Any, str | None]) -> bool:
    if dtype is None:
        return name == "token"
    if dtype not in names:
        names[dtype] = dtype_name(dtype)
    return names[dtype] == name


def _primitive_types(code: Code) -> Iterator[Found]:
    from hetjax.ir.type_rules import type_problem

    size = len(code.avals)
    for i, op in enumerate(code.ops):
        refs_fine = all(0 <= r < size for r in op.outputs) and all(
            type(a) is not int or 0 <= a < size for a in op.inputs
        )
        if refs_fine and (problem := type_problem(op, code.avals)):
            yield code.at(i, problem)


# Of straight-line code, in graphs and fragments alike.
CODE_RULES: tuple[Rule[Code], ...] = (
    Rule("refs-in-range", "every ref has a type", refs_in_range),
    Rule("one-definition", "every value is given once", one_definition),
    Rule("dominance", "every value is given before it is read, and no output is lost", dominance),
    Rule("known-types", "dtypes are known and dimensions not negative", known_types),
    Rule("literal-types", "a literal is a scalar its dtype can hold", literal_types),
    Rule("regions", "a region is one of the four, or none yet", regions),
    Rule("equation-types", "an op's types are those of the equation it lowers to", equation_types),
    Rule(
        "primitive-types",
        "operands and results of common primitives agree in shape and dtype",
        _primitive_types,
    ),
)
# Of a whole step.
GRAPH_RULES: tuple[Rule[Code], ...] = (
    *CODE_RULES,
    Rule("roles", "an input's role is known, and a batch has a batch axis", roles),
    Rule("updates", "every state leaf comes back exactly once, with its type", updates),
)
