"""How a value inside a fragment comes by its sharding: Shardy's own propagation, with the edges it took."""

from __future__ import annotations

import dataclasses
import json
import re
from typing import Any

from hetjax.emit.stablehlo import struct_of
from hetjax.ir import _jax
from hetjax.ir.errors import LoweringError
from hetjax.ir.exporter import export_jaxpr
from hetjax.ir.graph import Graph, Ref
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.ir.rebuild import rebuild_equations

_EDGE = re.compile(r'\{?"(\w+)" = (operand|result)-(\d+) -> \[([^\]]*)\]')


@dataclasses.dataclass(frozen=True)
class Edge:
    """One step by which an axis reached a value.

    Attributes:
      op: the StableHLO op it passed.
      type: of that op's result.
      step: Shardy's own name of the step.
      source, target: "operand 0", "result 0".
    """

    op: str
    type: str
    step: str
    source: str
    target: str

    def __str__(self) -> str:
        return f"{self.op} ({self.type}): {self.source} to {self.target}, {self.step}"


@dataclasses.dataclass(frozen=True)
class Propagation:
    """What Shardy finds for one value.

    Attributes:
      fragment: where.
      spec: mesh axes per dimension.
      origins: per axis, the ref of the fragment's input or output that brought it; -1 when Shardy does
        not say.
      paths: per axis, the edges from that origin to the value.
    """

    fragment: str
    spec: Spec
    origins: dict[str, Ref]
    paths: dict[str, tuple[Edge, ...]]


def spec_text(spec: Spec, rank: int) -> str:
    """Returns a spec as Shardy writes it, "" when it says nothing of this rank."""
    if len(spec) != rank:
        return ""
    return (
        "[" + ", ".join("{" + ", ".join(json.dumps(a) for a in axes) + "}" for axes in spec) + "]"
    )


def propagate(program: Program, fragment: Fragment, ref: Ref) -> Propagation:
    """Returns how a value inside a fragment is sharded, given what is fixed at the fragment's border.

    XLA runs the same propagation when it compiles the fragment; later stages of it may differ.

    Raises:
      LoweringError: the fragment cannot be lowered, or Shardy refuses its shardings.
    """
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    ops = rebuild_equations(Graph(fragment.name, (), fragment.ops, (), avals)).ops
    inputs = {p.ref: p.spec for p in fragment.inputs}
    outputs = {p.ref: p.spec for p in fragment.outputs}
    wanted = [*outputs, ref]
    closed = export_jaxpr(fragment.name.replace("/", "_"), ops, list(inputs), wanted, avals)
    module = _jax.lower_to_module(
        _jax.jaxpr_function(closed), [struct_of(avals[r]) for r in inputs]
    )
    mesh = program.meshes[fragment.stage]
    axes = "[" + ", ".join(f"{json.dumps(a)}={n}" for a, n in mesh.axes) + "]"
    fixed = lambda items: [spec_text(spec, avals[r].ndim) for r, spec in items]  # noqa: E731
    try:
        module = _jax.propagate_shardings(
            module, axes, fixed(inputs.items()), [*fixed(outputs.items()), ""]
        )
    except ValueError as error:
        raise LoweringError(f"Shardy refuses the shardings of {fragment.name}: {error}") from error
    entry = _jax.entry_function(module)
    block = entry.body.blocks[0]
    *_, last = block.operations
    value = last.operation.operands[len(wanted) - 1]
    names = list(inputs)
    return _Reader(entry, names, list(outputs)).propagation(fragment.name, value)


class _Reader:
    """Reads the attributes that propagation left."""

    def __init__(self, entry: Any, inputs: list[Ref], outputs: list[Ref]):
        self.entry, self.inputs, self.outputs = entry, inputs, outputs

    def propagation(self, fragment: str, value: Any) -> Propagation:
        spec, origins = self.sharding(value), self.origins(value)
        axes = [a for dim in spec for a in dim]
        return Propagation(
            fragment,
            spec,
            {a: origins.get(a, -1) for a in axes},
            {a: tuple(self.path(value, a)) for a in axes},
        )

    def attribute(self, value: Any, name: str) -> str:
        """Returns one of Shardy's attributes for a value, "" when it has none."""
        number, owner = _position(value)
        if owner is None:
            listed = self.entry.operation.attributes["arg_attrs"]
            found = {k: str(v) for k, v in _items(listed[number])}
            return found.get(name, "")
        if name not in owner.attributes:
            return ""
        text = str(owner.attributes[name])
        if name == "sdy.sharding":
            inner = re.findall(r"<@mesh, (\[.*?\])>", text)
            return inner[number] if number < len(inner) else ""
        if name == "sdy.sharding_origins":
            inner = re.findall(r"\{[^{}]*\}", text)
            return inner[number] if number < len(inner) else ""
        return text

    def sharding(self, value: Any) -> Spec:
        text = self.attribute(value, "sdy.sharding")
        found = re.search(r"\[(\{.*\})\]", text)
        if not found:
            return ()
        return tuple(
            tuple(re.findall(r'"(\w+)"', dim)) for dim in re.findall(r"\{([^{}]*)\}", found[1])
        )

    def origins(self, value: Any) -> dict[str, Ref]:
        """Returns, per axis, the value of the border that brought it."""
        out: dict[str, Ref] = {}
        for axis, kind, number in re.findall(
            r'(\w+) = "(input|output): (\d+)"', self.attribute(value, "sdy.sharding_origins")
        ):
            table = self.inputs if kind == "input" else self.outputs
            if int(number) < len(table):
                out[axis] = table[int(number)]
        return out

    def path(self, value: Any, axis: str) -> list[Edge]:
        """Returns the edges from where an axis entered to the value, followed against their direction."""
        edges: list[Edge] = []
        seen: set[str] = set()
        while True:
            found = self.edge_into(value, axis)
            if found is None or str(found[1]) in seen:
                return edges[::-1]
            edge, value = found
            seen.add(str(edge))
            edges.append(edge)

    def edge_into(self, value: Any, axis: str) -> tuple[Edge, Any] | None:
        """Returns the edge that brought an axis to a value, and the value it came from."""
        number, owner = _position(value)
        places = [(owner, f"result-{number}")] if owner is not None else []
        places += [(use.owner.operation, f"operand-{use.operand_number}") for use in value.uses]
        for op, place in places:
            if "sdy.propagation_edges" not in op.attributes:
                continue
            text = str(op.attributes["sdy.propagation_edges"])
            for step, body in re.findall(r"(step-\d+) = \[(.*?\])\}\]", text) or _steps(text):
                for name, side, index, targets in _EDGE.findall(body):
                    if name == axis and place in re.split(r",\s*", targets):
                        source = (
                            op.operands[int(index)] if side == "operand" else op.results[int(index)]
                        )
                        kind = str(op.results[0].type) if len(op.results) else ""
                        edge = Edge(op.name, kind, step, f"{side} {index}", place.replace("-", " "))
                        return edge, source
        return None


def _steps(text: str) -> list[tuple[str, str]]:
    """Splits "[{step-0 = [...], step-3 = [...]}]" into (step, edges)."""
    parts = re.split(r"(step-\d+) = ", text)
    return list(zip(parts[1::2], parts[2::2]))


def _position(value: Any) -> tuple[int, Any]:
    """Returns (number, the op that makes it); None for an argument of the entry."""
    owner = value.owner
    if hasattr(value, "result_number"):
        return value.result_number, owner.operation if hasattr(owner, "operation") else owner
    return value.arg_number, None


def _items(attribute: Any) -> list[tuple[str, Any]]:
    return [(named.name, named.attr) for named in attribute]
