"""The verifier: every rule over every part, all violations in one error, with the text around each."""

from __future__ import annotations

from collections.abc import Iterator

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import VerifyError
from hetjax.ir.graph import Graph, subgraphs
from hetjax.ir.program import Program
from hetjax.ir.program_rules import PROGRAM_RULES, Context
from hetjax.ir.rules import CODE_RULES, GRAPH_RULES, Code, Found, Rule, code_of
from hetjax.ir.schedule_rules import SCHEDULE_RULES
from hetjax.ir.text import print_op

# Beyond so many violations the text around each would bury the first; their messages are still listed.
SHOWN_IN_FULL = 10
MAX_LINE = 160


def verify_graph(graph: Graph) -> None:
    """Checks a graph and the graphs nested in it.

    Raises:
      VerifyError: it breaks `GRAPH_RULES`; every violation, with the ops around it.
    """
    _raise(graph_problems(graph))


def verify_program(program: Program) -> None:
    """Checks a program; its task lists only once there are any.

    Raises:
      VerifyError: it breaks `PROGRAM_RULES`, `SCHEDULE_RULES` or, in a fragment, `CODE_RULES`.
    """
    _raise(program_problems(program))


def verify_bundle(bundle: Bundle) -> None:
    """Checks every part that is present, and that the parts belong together.

    Raises:
      VerifyError: something is wrong; every violation.
    """
    _raise(bundle_problems(bundle))


def _raise(problems: Iterator[tuple[str, Found]]) -> None:
    texts = []
    for where, found in problems:
        texts.append(render(where, found, context=len(texts) < SHOWN_IN_FULL))
    if texts:
        raise VerifyError(texts)


def graph_problems(graph: Graph, where: str = "") -> Iterator[tuple[str, Found]]:
    """Yields (where and rule, violation) of a graph, nested graphs included."""
    where = where or f"graph {graph.name}"
    code = code_of(graph)
    yield from _apply(GRAPH_RULES, code, where)
    yield from _nested(code, where)


def _nested(code: Code, where: str) -> Iterator[tuple[str, Found]]:
    for op in code.ops:
        for inner in subgraphs(op):
            result = f"%{op.outputs[0]}:" if op.outputs else ""
            yield from graph_problems(inner, f"{where} / {result}{op.primitive}.{inner.name}")


def _apply(rules: tuple[Rule, ...], what: object, where: str) -> Iterator[tuple[str, Found]]:
    for rule in rules:
        for found in rule.check(what):
            yield f"{where}: {rule.name}", found


def program_problems(program: Program) -> Iterator[tuple[str, Found]]:
    """Yields (where and rule, violation) of a program."""
    where = f"program {program.name}"
    yield from _apply(PROGRAM_RULES, Context(program), where)
    for f in program.fragments:
        given = {p.ref: f"input port {p.form}" for p in f.inputs}
        avals = program.micro_avals if f.per_microbatch else program.avals
        code = Code(f.ops, avals, given)
        yield from _apply(CODE_RULES, code, f"{where}, fragment {f.name}")
        yield from _nested(code, f"{where}, fragment {f.name}")
    yield from _apply(SCHEDULE_RULES, Context(program), where)


def bundle_problems(bundle: Bundle) -> Iterator[tuple[str, Found]]:
    """Yields (where and rule, violation) of a bundle."""
    if bundle.graph is not None:
        yield from graph_problems(bundle.graph)
    if bundle.microbatching is not None:
        yield from _microbatching_problems(bundle)
    if bundle.program is not None:
        yield from program_problems(bundle.program)
        yield from _belonging_problems(bundle)
    if bundle.plan is not None and bundle.cluster is not None:
        from hetjax.ir.plan import verify_plan

        try:
            verify_plan(bundle.plan, bundle.cluster)
        except VerifyError as error:
            for problem in error.problems:
                yield "plan-fits", Found(problem)


def _microbatching_problems(bundle: Bundle) -> Iterator[tuple[str, Found]]:
    micro, graph = bundle.microbatching, bundle.graph
    assert micro is not None
    where = "microbatching: same-step"
    if micro.num_microbatches < 1:
        yield where, Found(f"there are {micro.num_microbatches} microbatches; at least 1")
    if graph is not None and micro.graph is not graph and micro.refusal is None:
        if [op.primitive for op in micro.graph.ops] != [op.primitive for op in graph.ops]:
            yield (
                where,
                Found("the step at one microbatch has other ops than the step at full batch"),
            )
        elif len(micro.graph.avals) != len(graph.avals):
            yield (
                where,
                Found(
                    f"{len(micro.graph.avals)} values at one microbatch, {len(graph.avals)} at full batch"
                ),
            )
        yield from graph_problems(micro.graph, f"graph {micro.graph.name} at one microbatch")
    if micro.types and len(micro.types) != len(micro.graph.avals):  # none: not proved yet
        yield (
            where,
            Found(f"{len(micro.types)} values have a batch type, {len(micro.graph.avals)} exist"),
        )


def _belonging_problems(bundle: Bundle) -> Iterator[tuple[str, Found]]:
    program, graph, where = bundle.program, bundle.graph, "program: same-step"
    assert program is not None
    if graph is not None:
        # A program may go on counting: what a pass has made for it alone is in no graph.
        if program.avals[: len(graph.avals)] != graph.avals:
            yield where, Found("its values are not those of the graph")
        if program.results != graph.outputs:
            yield where, Found("its outputs are not those of the graph")
        for feed in program.feeds:
            if not 0 <= feed.argument < len(graph.inputs):
                yield (
                    where,
                    Found(
                        f"input {feed.argument} is fed, but inputs go up to {len(graph.inputs) - 1}"
                    ),
                )
    if (
        bundle.microbatching is not None
        and program.num_microbatches != bundle.microbatching.num_microbatches
    ):
        yield (
            where,
            Found(
                f"it has {program.num_microbatches} microbatches, {bundle.microbatching.num_microbatches} are proved"
            ),
        )


def render(where: str, found: Found, *, context: bool = True) -> str:
    """Returns a violation as text: message, user's line and module, the ops around it, a caret."""
    at = ""
    if found.ops:
        op = found.ops[found.position]
        places = [op.source, f"module {op.block}" if op.block else ""]
        at = ", ".join(filter(None, places))
    lines = [f"{where}: {found.message}{f' ({at})' if at else ''}"]
    if context and found.ops:
        first = max(0, found.position - 1)
        for i, op in enumerate(found.ops[first : found.position + 2], first):
            text = print_op(op, found.avals)
            if len(text) > MAX_LINE:
                text = text[: MAX_LINE - 1] + "…"
            lines.append(f"    {text}")
            if i == found.position:
                column, width = _marked(text, found.mark, op.primitive)
                lines.append(f"    {' ' * column}{'^' * width}")
    return "\n".join(lines)


def _marked(text: str, mark: str, primitive: str) -> tuple[int, int]:
    """Returns column and width of what to point at."""
    operands = text.find(" = ") + 3
    if mark.startswith("%"):
        # As an operand it stands alone; as a result its type follows.
        for start, token in ((operands, mark), (0, mark + ":")):
            at = text.find(token, start)
            while at >= 0 and text[at + len(token) : at + len(token) + 1].isdigit():
                at = text.find(token, at + 1)
            if at >= 0:
                return at, len(mark)
    return text.find(primitive, operands - 1), len(primitive)
