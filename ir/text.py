"""The text form: how graphs, programs and bundles print. `hetjax.ir.parser` reads it back.

    graph train_step {
      in %0:f32[8,16] state "state.params/w"
      in %1:f32[64,8] batch(0) "batch/x"
      [forward "MLP/Dense_0"]
      %2:f32[64,16] = dot_general %1 %0 {dimension_numbers=(((1,),(0,)),((),()))} from "mlp.py:12"
      %3:f32[64,16] = max %2 0.0:f32
      out %3 "0"
    }

One rule throughout: names a user chose (paths, module paths, source lines) stand in quotes, words
of the language do not. A `[region "module path"]` line holds for the ops below it. `~` before a
dtype is JAX's weak type. Whitespace means nothing; `//` starts a comment. In a program, `64|16`
is a dimension of 64 at full batch and 16 in one microbatch, and `16@model` one that is split over
mesh axis `model`.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from hetjax.ir.graph import Atom, Aval, Graph, Handle, Literal, Op, Record, Symbol

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.program import Program

# What may stand without quotes; the tokenizer of hetjax.ir.tokens agrees.
_NAME = re.compile(r"[A-Za-z_][\w./:<>-]*", re.ASCII)
_HANDLE = re.compile(r"[A-Za-z_][\w.]*", re.ASCII)
# Words that mean something where a parameter's value stands.
RESERVED = frozenset({"None", "True", "False", "nan", "inf", "complex", "graph", "symbol"})


def print_graph(
    graph: Graph,
    *,
    locations: bool = True,
    blocks: bool = True,
    regions: bool = True,
    costs: bool = True,
    scopes: bool = False,
) -> str:
    """Returns the text of a graph; with the defaults, `parse_graph` gives back an equal graph.

    Args:
      graph: what to print.
      locations: write the user's source line behind each op.
      blocks: write module paths.
      regions: write regions.
      costs: write what annotate-costs counted.
      scopes: write the name stacks too, which the labelling passes read; graphs do not compare them.
    """
    writer = Writer(locations=locations, blocks=blocks, regions=regions, costs=costs, scopes=scopes)
    writer.graph(graph, "")
    return writer.text()


def print_program(
    program: Program, *, locations: bool = True, blocks: bool = True, costs: bool = True
) -> str:
    """Returns the text of a program; with the defaults, `parse_program` gives back an equal one.

    Args:
      program: what to print.
      locations: write the user's source line behind each op.
      blocks: write module paths.
      costs: write what annotate-costs counted.
    """
    from hetjax.ir.program_text import write_program

    writer = Writer(locations=locations, blocks=blocks, costs=costs)
    write_program(writer, program)
    return writer.text()


def print_bundle(bundle: Bundle, *, scopes: bool = True, nones: bool = True) -> str:
    """Returns what a `.hj` file holds: every part that is present; `parse_bundle` reads it back.

    Args:
      bundle: what to print.
      scopes: write name stacks, so that the labelling passes can run on the file.
      nones: write parameters that are None; without them the text is for reading only.
    """
    from hetjax.ir.bundle_text import write_bundle

    writer = Writer(scopes=scopes, nones=nones)
    write_bundle(writer, bundle)
    return writer.text()


def print_op(op: Op, avals: Sequence[Aval]) -> str:
    """Returns one op on one line for people: no location, no parameter that is None, graphs by name."""
    writer = Writer(locations=False, costs=False, nones=False, fold=True)
    types = _Types((r, type_text(avals[r])) for r in op.outputs if r < len(avals))
    writer.op(op, types.__getitem__, "")
    return writer.lines[0]


class _Types(dict[int, str]):
    """Text of each ref's type; "?" for refs out of range, so that a broken graph prints too."""

    def __missing__(self, ref: int) -> str:
        return "?"


@functools.cache
def type_text(aval: Aval) -> str:
    """Returns "f32[4,16]"."""
    return str(aval)


@functools.lru_cache(maxsize=65536)
def quoted(text: str) -> str:
    """Returns the text as a JSON string; only what does not print is escaped."""
    return json.dumps(text, ensure_ascii=not text.isprintable())


def name_text(name: str) -> str:
    """Returns a name, in quotes when it is not one plain word."""
    return name if _NAME.fullmatch(name) else quoted(name)


def number_text(value: Any) -> str:
    """Returns the text of a Python bool, int, float or complex, exactly."""
    if isinstance(value, complex):
        return f"complex({float(value.real)!r},{float(value.imag)!r})"
    # JAX's typed scalars are subclasses of int and float with a longer repr.
    if isinstance(value, int) and not isinstance(value, bool):
        return int.__repr__(value)
    return float.__repr__(value) if isinstance(value, float) else repr(value)


def atom_text(atom: Atom) -> str:
    """Returns "%3" or "1.0:f32"."""
    if isinstance(atom, Literal):
        kind = type_text(atom.aval)
        return f"{number_text(atom.value)}:{kind[:-2] if kind.endswith('[]') else kind}"
    return f"%{atom}"


class Writer:
    """Collects lines; every `print_…` function is one writer with its switches."""

    def __init__(
        self,
        *,
        locations: bool = True,
        blocks: bool = True,
        regions: bool = True,
        costs: bool = True,
        scopes: bool = False,
        nones: bool = True,
        fold: bool = False,
    ):
        self.locations, self.blocks, self.regions = locations, blocks, regions
        self.costs, self.scopes, self.nones, self.fold = costs, scopes, nones, fold
        self.lines: list[str] = []

    def text(self) -> str:
        return "\n".join(self.lines) + "\n"

    def graph(self, graph: Graph, indent: str, head: str = "graph") -> None:
        """Writes a graph; the first line continues with `head`."""
        self.lines.append(f"{indent}{head} {name_text(graph.name)} {{")
        inner = indent + "  "
        types = _Types(enumerate(map(type_text, graph.avals)))
        for a in graph.inputs:
            axis = "" if a.batch_axis is None else f"({a.batch_axis})"
            self.lines.append(
                f"{inner}in %{a.ref}:{types[a.ref]} {name_text(a.role)}{axis} {quoted(a.path)}"
            )
        self.ops(graph.ops, types.__getitem__, inner)
        for r in graph.outputs:
            updates = "" if r.updates is None else f" updates {r.updates}"
            self.lines.append(f"{inner}out {atom_text(r.atom)} {quoted(r.path)}{updates}")
        defined = {a.ref for a in graph.inputs}.union(*(op.outputs for op in graph.ops))
        self.wrapped("unused", [f"%{r}:{t}" for r, t in types.items() if r not in defined], inner)
        self.lines.append(f"{indent}}}")

    def wrapped(self, word: str, items: list[str], indent: str) -> None:
        """Writes `word` and the items, over as many lines as they need; nothing when there are none."""
        if not items:
            return
        line = f"{indent}{word}"
        for item in items:
            if len(line) + 1 + len(item) > 100 and not line.endswith(word):
                self.lines.append(line)
                line = f"{indent}{' ' * len(word)}"
            line += " " + item
        self.lines.append(line)

    def ops(self, ops: Sequence[Op], type_of: Callable[[int], str], indent: str) -> None:
        """Writes ops, with a section line wherever region, module path or name stack change."""
        section: tuple[Any, ...] = ("", "", ())
        for op in ops:
            here = (
                op.region if self.regions else "",
                op.block if self.blocks else "",
                op.scopes if self.scopes else (),
            )
            if here != section:
                self.lines.append(f"{indent}[{_section_text(*here)}]")
                section = here
            self.op(op, type_of, indent)

    def op(self, op: Op, type_of: Callable[[int], str], indent: str) -> None:
        """Writes one op."""
        outputs = op.outputs
        if len(outputs) == 1:
            left = f"%{outputs[0]}:{type_of(outputs[0])}"
        else:
            left = " ".join([f"%{r}:{type_of(r)}" for r in outputs]) or "()"
        parts = [indent, left, " = ", name_text(op.primitive)]
        parts += [f" %{a}" if type(a) is int else " " + atom_text(a) for a in op.inputs]
        if op.params:
            params = [
                f"{name_text(k)}={self.value(v, indent)}"
                for k, v in op.params
                if v is not None or self.nones
            ]
            if params:
                parts.append(f" {{{', '.join(params)}}}")
        if self.costs and op.cost is not None:
            parts.append(f" cost({op.cost.flops},{op.cost.read_bytes},{op.cost.written_bytes})")
        if self.locations and op.source:
            parts.append(" from " + quoted(op.source))
        self.lines.append("".join(parts))

    def value(self, value: Any, indent: str) -> str:
        """Returns the text of one parameter value; nested graphs span lines."""
        kind = type(value)
        if kind is str:
            return quoted(value)
        if value is None or kind in (bool, int, float, complex):
            return number_text(value)
        if kind is tuple:
            items = [self.value(v, indent) for v in value]
            return f"({','.join(items)}{',' if len(items) == 1 else ''})"
        if kind is Symbol:
            plain = _NAME.fullmatch(value.name) and value.name not in RESERVED
            return value.name if plain else f"symbol({quoted(value.name)})"
        if kind is Handle:
            return "#" + (value.name if _HANDLE.fullmatch(value.name) else quoted(value.name))
        if kind is Aval:
            return type_text(value)
        if kind is Record:
            head = (
                value.kind
                if value.kind not in RESERVED and _NAME.fullmatch(value.kind)
                else quoted(value.kind)
            )
            fields = [f"{name_text(k)}={self.value(v, indent)}" for k, v in value.fields]
            return f"{head}({','.join(fields)})"
        if kind is Graph:
            return self._nested(value, indent)
        raise TypeError(f"a parameter of type {kind.__name__} has no text; encode_param makes one")

    def _nested(self, graph: Graph, indent: str) -> str:
        if self.fold:
            return f"graph {name_text(graph.name)} {{…}}"
        inner = Writer(
            locations=self.locations,
            blocks=self.blocks,
            regions=self.regions,
            costs=self.costs,
            scopes=self.scopes,
            nones=self.nones,
        )
        inner.graph(graph, indent + "    ")
        return "\n".join(inner.lines).lstrip()


@functools.lru_cache(maxsize=65536)
def _section_text(region: str, block: str, scopes: tuple[tuple[str, str], ...]) -> str:
    parts = [quoted(region) if region in ("in", "stack") else name_text(region)] if region else []
    if block:
        parts.append("in " + quoted(block))
    if scopes:
        parts.append("stack " + " ".join(_scope_text(*s) for s in scopes))
    return " ".join(parts)


def _scope_text(kind: str, name: str) -> str:
    return quoted(name) if kind == "scope" else f"{name_text(kind)}({quoted(name)})"
