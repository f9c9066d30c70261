"""Reads the text form back: `parse_graph(print_graph(g)) == g`, and so for programs and bundles.

Recursive descent over `hetjax.ir.tokens`. Every fault of a text is a `ParseError` with line and
column. What the text means is checked by `hetjax.ir.verify`, not here.
"""

from __future__ import annotations

import math
import re
from typing import TYPE_CHECKING, Any

from hetjax.ir.graph import (
    Argument,
    Atom,
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
from hetjax.ir.tokens import Cursor

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.program import Program

_TYPE = re.compile(r"(~?)(\w+(?:<\w+>)?)\[(.*)\]", re.ASCII)
_NUMBER = re.compile(r"-?(?:\d++(?:\.\d*+)?(?:[eE][+-]?\d++)?|inf|nan)", re.ASCII)
_CONSTANTS: dict[str, Any] = {
    "None": None,
    "True": True,
    "False": False,
    "nan": math.nan,
    "inf": math.inf,
}


def parse_graph(text: str, *, filename: str = "<text>") -> Graph:
    """Returns the graph that `print_graph` wrote.

    Args:
      text: one graph; a `.hj` file's header may precede it.
      filename: for messages.

    Raises:
      ParseError: the text is not a graph; with line, column and the line itself.
    """
    reader = GraphReader(text, filename)
    reader.header()
    reader.expect("graph")
    graph = reader.graph()
    reader.finish()
    return graph


def parse_program(text: str, *, filename: str = "<text>") -> Program:
    """Returns the program that `print_program` wrote.

    Raises:
      ParseError: the text is not a program; with line, column and the line itself.
    """
    from hetjax.ir.program_parser import ProgramReader

    reader = ProgramReader(text, filename)
    reader.header()
    reader.expect("program")
    program = reader.program()
    reader.finish()
    return program


def parse_bundle(text: str, *, filename: str = "<text>") -> Bundle:
    """Returns the bundle that a `.hj` file holds; the parts may come in any order.

    Raises:
      ParseError: the text is not a bundle; with line, column and the line itself.
      ClusterError, PlanError: the cluster or plan in it is wrong.
    """
    from hetjax.ir.bundle_parser import BundleReader

    return BundleReader(text, filename).bundle()


class GraphReader(Cursor):
    """Reads graphs, ops and parameter values."""

    def __init__(self, source: str, filename: str = "<text>"):
        super().__init__(source, filename)
        # A step has few distinct types, so their texts are read once.
        self.types: dict[str, Aval] = {}
        self.atoms: dict[str, Literal] = {}

    def header(self) -> None:
        """Steps over `hetjax 1`, if it stands there."""
        from hetjax.ir.bundle_text import VERSION

        if self.take("hetjax"):
            version = self.integer("the version of the text form")
            if version != VERSION:
                self.fail(
                    f"this hetjax reads version {VERSION} of the text form, not {version}",
                    self.at - 1,
                )

    # -- types and values

    def aval(self, text: str, inside: int = 0) -> Aval:
        """Reads a type that is (from `inside` on) the token just passed."""
        found = self.types.get(text)
        if found is None:
            match = _TYPE.fullmatch(text)
            if match is None:
                self.fail(f"'{text}' is not a type such as f32[4,16]", self.at - 1, inside)
            dims = match[3].split(",") if match[3].strip() else []
            for d in dims:
                if not d.strip().isdecimal():
                    self.fail(
                        f"'{d}' in {text} is not a dimension; a graph's types hold whole numbers",
                        self.at - 1,
                        inside + match.start(3),
                    )
            shape = tuple(self.to_int(d) for d in dims)
            found = self.types[text] = Aval(match[2], shape, bool(match[1]))
        return found

    def definition(self, types: dict[int, Aval]) -> int:
        """Steps over "%3:f32[4]" and notes the type."""
        token = self.tokens[self.at]
        head, colon, text = token.partition(":")
        if not colon or not head.startswith("%"):
            if token.startswith("%"):
                self.fail(f"{token} is defined here, so its type must follow: {token}:f32[4,16]")
            self.expected("a value with its type, such as %3:f32[4,16]")
        self.at += 1
        ref = self.to_int(head[1:])
        aval = self.aval(text, len(head) + 1)
        if types.setdefault(ref, aval) != aval:
            self.fail(f"%{ref} is {aval} here but {types[ref]} above", self.at - 1)
        return ref

    def literal(self) -> Literal:
        """Steps over "1.0:f32"."""
        token = self.tokens[self.at]
        self.at += 1
        found = self.atoms.get(token)
        if found is None:
            number, _, kind = token.rpartition(":")
            aval = self.aval(kind if kind.endswith("]") else kind + "[]", len(number) + 1)
            found = self.atoms[token] = Literal(self.number(number), aval)
        return found

    def at_literal(self) -> bool:
        token = self.tokens[self.at]
        return ":" in token and (token[0] in "-0123456789" or _is_literal(token))

    def number(self, text: str) -> Any:
        """Reads a number that is (part of) the token just passed."""
        if text in _CONSTANTS:
            return _CONSTANTS[text]
        if text.startswith("complex("):
            real, _, imag = text[8:-1].partition(",")
            return complex(float(real), float(imag))
        digits = text[1:] if text[0] == "-" else text
        if digits.isdecimal():
            return self.to_int(text)
        value = float(text)
        return math.nan if math.isnan(value) else value

    def plain_number(self, what: str) -> Any:
        """Steps over a number."""
        token = self.tokens[self.at]
        if not _NUMBER.fullmatch(token):
            self.expected(what)
        self.at += 1
        return self.number(token)

    def real(self, what: str) -> float:
        """Steps over a number, read as a float whatever its length."""
        token = self.tokens[self.at]
        if not _NUMBER.fullmatch(token):
            self.expected(what)
        self.at += 1
        value = float(token)
        return math.nan if math.isnan(value) else value

    def atom(self) -> Atom:
        """Steps over "%3" or a literal."""
        if self.at_literal():
            return self.literal()
        return self.ref("a value or a literal")

    # -- graphs

    def graph(self) -> Graph:
        """Reads a graph after the word `graph`."""
        self.enter()
        name = self.name("the graph's name")
        self.expect("{", "to open the graph")
        types: dict[int, Aval] = {}
        inputs: list[Argument] = []
        ops: list[Op] = []
        outputs: list[Result] = []
        while not self.take("}"):
            token = self.tokens[self.at]
            if token == "in":
                self.at += 1
                inputs.append(self.argument(types))
            elif token == "out":
                self.at += 1
                outputs.append(self.result())
            elif token == "unused":
                self.at += 1
                while self.peek().startswith("%"):
                    self.definition(types)
                    if self.peek() == "=":
                        self.fail(
                            "'unused' lists values that no op defines, behind the last op; an op stands here"
                        )
            elif token and token[0] in "%[(":
                self.ops(ops, lambda: self.definition(types))
            else:
                self.expected("'in', 'out', 'unused', an op, a '[region]' or '}'")
        self.leave()
        return Graph(name, tuple(inputs), tuple(ops), tuple(outputs), self.table(types))

    def table(self, types: dict[int, Any]) -> tuple[Any, ...]:
        """Returns the types by ref; the closing brace was just passed."""
        highest = max(types, default=-1)
        if highest + 1 != len(types):
            gap = next(r for r in range(highest) if r not in types)
            self.fail(
                f"%{gap} has no type: values are numbered without gaps up to %{highest}. "
                f"Where nothing defines it, say so: unused %{gap}:f32[4]",
                self.at - 1,
            )
        return tuple(types[r] for r in range(highest + 1))

    def argument(self, types: dict[int, Aval]) -> Argument:
        ref = self.definition(types)
        role = self.name("the input's role (state, batch, const or input)")
        axis = None
        if self.take("("):
            axis = self.integer("the batch axis")
            self.expect(")")
        return Argument(ref, self.string("the input's path"), role, axis)

    def result(self) -> Result:
        atom = self.atom()
        path = self.string("the output's path")
        updates = self.integer("the position of an input") if self.take("updates") else None
        return Result(atom, path, updates)

    # -- ops

    def ops(self, into: list[Op], define: Any) -> None:
        """Reads ops and section lines as long as they last; a section begins unlabelled."""
        tokens = self.tokens
        region, block, scopes = "", "", ()
        while True:
            token = tokens[self.at]
            if token == "[":
                region, block, scopes = self.section()
                continue
            if token == "(":
                self.at += 1
                self.expect(")", "(an op without results starts with '() =')")
                outputs: list[int] = []
            elif token.startswith("%"):
                outputs = [define()]
                while tokens[self.at].startswith("%"):
                    outputs.append(define())
            else:
                return
            self.expect("=", "after the op's results")
            primitive = self.name("the op's primitive")
            inputs: list[Atom] = []
            while True:
                token = tokens[self.at]
                if token.startswith("%"):
                    if ":" in token:
                        break
                    self.at += 1
                    inputs.append(
                        self.to_int(token[1:])
                        if len(token) > 1
                        else self.fail("'%' without a number", self.at - 1)
                    )
                elif self.at_literal():
                    inputs.append(self.literal())
                else:
                    break
            params = self.params() if tokens[self.at] == "{" else ()
            cost = None
            if self.take("cost"):
                position = self.at
                counts = self.integers("a count")
                if len(counts) != 3:
                    self.fail("cost holds (flops,bytes read,bytes written)", position)
                cost = Cost(*counts)
            source = self.string("the source line") if self.take("from") else ""
            into.append(
                Op(
                    primitive,
                    tuple(inputs),
                    tuple(outputs),
                    params,
                    region,
                    block,
                    source,
                    scopes,
                    cost,
                )
            )

    def section(self) -> tuple[str, str, tuple[tuple[str, str], ...]]:
        """Steps over `[forward in "block" stack "scope" transform("jvp")]`."""
        self.expect("[")
        region = block = ""
        scopes: list[tuple[str, str]] = []
        if self.at_name() and self.peek() not in ("in", "stack"):
            region = self.name("a region")
        if self.take("in"):
            block = self.string("a module path")
        if self.take("stack"):
            while self.peek() != "]":
                if self.peek().startswith('"'):
                    text = self.string("a scope")
                    if not self.take("("):
                        scopes.append(("scope", text))
                        continue
                    kind = text
                else:
                    kind = self.name("a scope, or a kind of scope with its name in brackets")
                    self.expect("(")
                scopes.append((kind, self.string("the scope's name")))
                self.expect(")")
        self.expect("]", "to close the section line")
        return region, block, tuple(scopes)

    def params(self) -> tuple[tuple[str, Any], ...]:
        self.expect("{")
        out: list[tuple[str, Any]] = []
        while not self.take("}"):
            out.append(self.field())
            if not self.take(",") and self.peek() != "}":
                self.expected("',' or '}' after a parameter")
        return tuple(out)

    def field(self) -> tuple[str, Any]:
        key = self.name("a parameter's name")
        self.expect("=", f"after parameter '{key}'")
        return key, self.value()

    def value(self) -> Any:
        """Reads one parameter value."""
        token = self.tokens[self.at]
        if token in _CONSTANTS:
            self.at += 1
            return _CONSTANTS[token]
        if token == "(":
            return self.tuple_of_values()
        if token.startswith("#"):
            self.at += 1
            if token == "#":
                self.fail("a handle's name must follow '#'", self.at - 1)
            return Handle(self.unquote(token[1:]) if token[1] == '"' else token[1:])
        if _NUMBER.fullmatch(token):
            return self.plain_number("a number")
        if token.endswith("]") and len(token) > 1 and (token[0].isalpha() or token[0] in "~_"):
            self.at += 1
            return self.aval(token)
        if token == "graph" and self.tokens[self.at + 1] not in ("(", ",", "}", ")"):
            self.at += 1
            return self.graph()
        if token in ("complex", "symbol") and self.tokens[self.at + 1] == "(":
            return self.call(token)
        if not self.at_name():
            self.expected("a parameter's value")
        quoted = token.startswith('"')
        text = self.name("a value")
        if self.peek() == "(":
            return self.record(text)
        return text if quoted else Symbol(text)

    def tuple_of_values(self) -> tuple[Any, ...]:
        self.enter()
        self.expect("(")
        items: list[Any] = []
        while not self.take(")"):
            items.append(self.value())
            if not self.take(",") and self.peek() != ")":
                self.expected("',' or ')' in a tuple")
        self.leave()
        return tuple(items)

    def call(self, word: str) -> Any:
        """Reads `complex(1.0,2.0)` and `symbol("odd name")`."""
        self.at += 1
        self.expect("(")
        if word == "symbol":
            value: Any = Symbol(self.string("the symbol"))
        else:
            parts = []
            for mark in (",", ")"):
                parts.append(self.real("a number"))
                if mark == ",":
                    self.expect(",")
            value = complex(*parts)
        self.expect(")")
        return value

    def record(self, kind: str) -> Record:
        self.enter()
        self.expect("(")
        fields: list[tuple[str, Any]] = []
        while not self.take(")"):
            fields.append(self.field())
            if not self.take(",") and self.peek() != ")":
                self.expected(f"',' or ')' in {kind}(…)")
        self.leave()
        return Record(kind, tuple(fields))


def _is_literal(token: str) -> bool:
    head = token.partition(":")[0]
    return head in ("True", "False", "nan", "inf") or head.startswith("complex(")
