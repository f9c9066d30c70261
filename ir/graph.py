"""The graph: one SSA form of a whole step, around jaxpr equations.

A value is an integer, a *ref*; `Graph.avals[ref]` says its dtype and shape. Refs are numbered in
order of definition: inputs first, then the outputs of each op. The same step traced at another
batch size has the same ops and the same refs, with other avals; microbatching rests on that.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping
from typing import Any

from hetjax.ir.display import Shown
from hetjax.ir.dtypes import dtype_itemsize, is_inexact

Ref = int

# The regions of a step, in the order they run. "" means not labelled yet.
REGIONS = ("prologue", "forward", "backward", "update")


@dataclasses.dataclass(frozen=True, slots=True)
class Aval:
    """What is known of a value before it exists.

    Attributes:
      dtype: short name: "f32", "bf16", "i32", "bool", "key<fry>", "float0".
      shape: global shape.
      weak_type: JAX's weak type flag; it decides promotion, so it is kept.
    """

    dtype: str
    shape: tuple[int, ...]
    weak_type: bool = False

    @property
    def ndim(self) -> int:
        return len(self.shape)

    @property
    def size(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.size * dtype_itemsize(self.dtype)

    @property
    def is_inexact(self) -> bool:
        return is_inexact(self.dtype)

    def __str__(self) -> str:
        dims = ",".join(map(str, self.shape))
        return f"{'~' if self.weak_type else ''}{self.dtype}[{dims}]"


@dataclasses.dataclass(frozen=True, slots=True)
class Literal:
    """A scalar written into the program.

    Attributes:
      value: a Python bool, int, float or complex.
      aval: its type.
    """

    value: bool | int | float | complex
    aval: Aval

    def __eq__(self, other: object) -> bool:
        # NaN must equal itself and -0.0 must differ from 0.0, or a parsed graph would not equal its source.
        return (
            isinstance(other, Literal)
            and repr(self.value) == repr(other.value)
            and self.aval == other.aval
        )

    def __hash__(self) -> int:
        return hash((repr(self.value), self.aval))


Atom = Ref | Literal


@dataclasses.dataclass(frozen=True, slots=True)
class Handle:
    """A parameter that is not text: a callable, a sharding, a mesh; printed as `#name`.

    Attributes:
      name: a readable, deterministic name.
      value: the object, or None once the graph has been through text. Not compared.
    """

    name: str
    value: Any = dataclasses.field(default=None, compare=False, repr=False)


@dataclasses.dataclass(frozen=True, slots=True)
class Symbol:
    """A parameter that is one of a fixed set: a dtype ("f32"), an enum member, a PRNG ("PRNG.threefry2x32").

    Attributes:
      name: what is printed, without quotes.
    """

    name: str


@dataclasses.dataclass(frozen=True, slots=True)
class Record:
    """A parameter with named fields, such as the dimension numbers of a gather.

    Fields read as attributes (`record.offset_dims`), as they do on the object JAX uses.

    Attributes:
      kind: the JAX type's name: "GatherDimensionNumbers".
      fields: (name, value) pairs in the order that type declares; values as in `Op.params`.
    """

    kind: str
    fields: tuple[tuple[str, Any], ...] = ()

    def __getattr__(self, name: str) -> Any:
        for field, value in object.__getattribute__(self, "fields"):
            if field == name:
                return value
        raise AttributeError(f"{self.kind} has no field {name!r}")


@dataclasses.dataclass(frozen=True, slots=True)
class Cost:
    """What one op costs, counted from shapes (not measured).

    Attributes:
      flops: floating point operations.
      read_bytes: bytes of all inputs.
      written_bytes: bytes of all outputs.
    """

    flops: int
    read_bytes: int
    written_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One operation.

    Attributes:
      primitive: the JAX primitive's name.
      inputs: refs and literals read.
      outputs: refs defined, one per result, unused ones included.
      params: name and value of each parameter, sorted by name; values are Python literals, tuples,
        `Symbol`s, `Record`s, `Aval`s, `Handle`s, or `Graph`s (nested regions).
      region: one of `REGIONS`, or "".
      block: the module path, e.g. "Transformer/block_3/attn", or "".
      source: "file.py:41" of the user's line, or "".
      scopes: the name stack as (kind, name) pairs, kind "scope" or "transform", outermost first.
      cost: set by annotate-costs.
      eqn: the jaxpr equation, for exact lowering; None once the graph has been through text.
    """

    primitive: str
    inputs: tuple[Atom, ...]
    outputs: tuple[Ref, ...]
    params: tuple[tuple[str, Any], ...] = ()
    region: str = ""
    block: str = ""
    source: str = ""
    scopes: tuple[tuple[str, str], ...] = dataclasses.field(default=(), compare=False, repr=False)
    cost: Cost | None = None
    eqn: Any = dataclasses.field(default=None, compare=False, repr=False)

    @property
    def refs(self) -> tuple[Ref, ...]:
        """The inputs that are values, literals left out."""
        return tuple([a for a in self.inputs if not isinstance(a, Literal)])

    def param(self, name: str, default: Any = None) -> Any:
        """Returns the parameter `name`, or `default`."""
        return dict(self.params).get(name, default)


@dataclasses.dataclass(frozen=True, slots=True)
class Argument:
    """One input leaf.

    Attributes:
      ref: the value it defines.
      path: the user's own path: "state.params/block_0/attn/kernel", "batch/tokens".
      role: "state" (comes back updated), "batch" (has a batch dimension), "const" (a captured
        array), "input" (anything else: keys, scalars, frozen arrays).
      batch_axis: the axis that counts examples, for role "batch".
    """

    ref: Ref
    path: str
    role: str = "input"
    batch_axis: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Result:
    """One output leaf.

    Attributes:
      atom: the value returned.
      path: the user's own path in the returned tree.
      updates: position in `Graph.inputs` of the state leaf this one replaces, or None.
    """

    atom: Atom
    path: str
    updates: int | None = None


@dataclasses.dataclass(frozen=True)
class Graph(Shown):
    """A step as straight-line code.

    Attributes:
      name: the function's name.
      inputs: one `Argument` per input leaf; captured arrays ("const") come last.
      ops: in an order in which every value is defined before it is used.
      outputs: one `Result` per output leaf.
      avals: type of each ref.
      consts: the captured arrays, by ref; not part of the text.
    """

    name: str
    inputs: tuple[Argument, ...]
    ops: tuple[Op, ...]
    outputs: tuple[Result, ...]
    avals: tuple[Aval, ...]
    consts: Mapping[Ref, Any] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def aval(self, atom: Atom) -> Aval:
        """Returns the type of a ref or a literal."""
        return atom.aval if isinstance(atom, Literal) else self.avals[atom]

    def replace(self, **changes: Any) -> Graph:
        return dataclasses.replace(self, **changes)

    def __str__(self) -> str:
        from hetjax.ir.text import print_graph

        return print_graph(self)


def definitions(graph: Graph) -> dict[Ref, int]:
    """Returns, for each ref an op defines, that op's position in `graph.ops`."""
    return {r: i for i, op in enumerate(graph.ops) for r in op.outputs}


def users(graph: Graph) -> dict[Ref, list[int]]:
    """Returns, for each ref, the positions of the ops that read it, ascending."""
    out: dict[Ref, list[int]] = {}
    for i, op in enumerate(graph.ops):
        for r in dict.fromkeys(op.refs):
            out.setdefault(r, []).append(i)
    return out


def subgraphs(op: Op) -> Iterator[Graph]:
    """Yields the graphs nested in an op's parameters, in order of the parameters."""

    def walk(value: Any) -> Iterator[Graph]:
        if isinstance(value, Graph):
            yield value
        elif isinstance(value, tuple):
            for v in value:
                yield from walk(v)
        elif isinstance(value, Record):
            for _, v in value.fields:
                yield from walk(v)

    for _, value in op.params:
        yield from walk(value)
