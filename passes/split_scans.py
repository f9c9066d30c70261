"""split-scans: loops over layers become loops over some of them, one after another.

Rewritten before the batch is split and stages are cut: stages, residuals, gradients and optimizer
state then follow by the rules that hold for every other op.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, ClassVar

from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Argument, Atom, Aval, Graph, Literal, Op, Ref, Result
from hetjax.ir.importer import aval_of, encoded_params
from hetjax.ir.pieces import piece_path
from hetjax.passes.annotate_costs import annotate_costs
from hetjax.passes.label_blocks import label_blocks
from hetjax.passes.label_regions import label_regions
from hetjax.passes.layer_stacks import LayerStack, layer_stacks
from hetjax.passes.prover.elementwise import NONLINEAR

Edges = tuple[int, ...]

ELEMENTWISE = frozenset(NONLINEAR) | {
    "abs", "add", "add_any", "atan2", "cbrt", "clamp", "complex", "conj", "convert_element_type", "copy", "div",
    "eq", "ge", "gt", "imag", "integer_pow", "le", "lt", "max", "min", "mul", "ne", "neg", "pow", "real",
    "reduce_precision", "rsqrt", "select_n", "sign", "sqrt", "square", "stop_gradient", "sub",
}  # fmt: skip
# A reduction over the rows, and what puts two partial results together.
COMBINES = {
    "reduce_sum": "add", "reduce_max": "max", "reduce_min": "min", "reduce_prod": "mul",
    "reduce_and": "and", "reduce_or": "or",
}  # fmt: skip


@dataclasses.dataclass(frozen=True)
class SplitScans:
    """Splits every loop over layers in equal parts.

    Before: `%9 = scan %carry %params {length=12 …}`, its backward, and an optimizer on stacked state.
    After:  two scans of length 6 each way, over state leaves of six rows each; sums over all rows are
    put together from those of the parts. Loops over time are left alone.

    Attributes:
      parts: how many; at most as many as there are layers.
    """

    name: ClassVar[str] = "split-scans"
    summary: ClassVar[str] = "split loops over layers, their state and residuals, in parts"
    requires: ClassVar[tuple[str, ...]] = ("graph.regions",)

    parts: int = 2

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            return bundle
        edges = [even_edges(s.length, self.parts) for s in layer_stacks(bundle.graph)]
        graph = split_scans(bundle.graph, edges)
        if graph is bundle.graph:
            return bundle
        if bundle.microbatching is not None:
            raise PassError(self.name, "must run before the batch is split: a proof belongs to the graph it was made for")
        return bundle.replace(graph=graph)


def even_edges(length: int, parts: int) -> Edges:
    """Returns the first row of each of `parts` nearly equal parts, and the number of rows."""
    parts = max(1, min(parts, length))
    return tuple(length * k // parts for k in range(parts + 1))


def split_scans(graph: Graph, edges: Sequence[Edges]) -> Graph:
    """Returns the graph with loops over layers split; the same object when there are none to split.

    Args:
      graph: labelled, ops with equations.
      edges: per stack of layers, in order of `layer_stacks`: 0, the first layer of each later part, and
        the number of layers.
    """
    return split_and_found(graph, edges)[0]


def split_and_found(graph: Graph, edges: Sequence[Edges]) -> tuple[Graph, dict[int, list[int]]]:
    """Returns what `split_scans` does, and the positions of the parts of each loop by its old position."""
    stacks = layer_stacks(graph)
    if not any(len(e) > 2 for e in edges) or any(op.eqn is None for op in graph.ops):
        return graph, {}
    rewrite = _Rewrite(graph, stacks, edges)
    return annotate_costs(label_blocks(label_regions(rewrite.run()))), rewrite.parts


class _Rewrite:
    """Builds the split graph, op by op; a value is whole, in pieces, or both."""

    def __init__(self, graph: Graph, stacks: Sequence[LayerStack], edges: Sequence[Edges]):
        self.old = graph
        self.edges_of_scan = {i: e for s, e in zip(stacks, edges, strict=True) if len(e) > 2 for i in s.scans}
        self.edges_of_leaf = {r: e for s, e in zip(stacks, edges, strict=True) if len(e) > 2 for r in s.leaves}
        self.defined = {r: op for op in graph.ops for r in op.outputs}
        self.avals: list[Aval] = []
        self.inputs: list[Argument] = []
        self.ops: list[Op] = []
        self.vars: dict[Ref, Any] = {}
        self.consts: dict[Ref, Any] = {}
        self.env: dict[Ref, Atom] = {}
        self.pieces: dict[tuple[Ref, Edges], list[Ref]] = {}
        self.found: dict[Ref, Edges] = {}  # values that are in pieces by nature
        self.parts: dict[int, list[int]] = {}  # by position of a loop, those of its parts
        self.reader: Op | None = None  # whose place in the step new ops take

    def run(self) -> Graph:
        positions = self._arguments()
        for i, op in enumerate(self.old.ops):
            self.reader = op
            if i in self.edges_of_scan:
                self._scan(i, op, self.edges_of_scan[i])
            elif not self._in_pieces(op):
                outs = self._emit(op, [self._whole(a) for a in op.inputs], [v.aval for v in op.eqn.outvars])
                self.env.update(zip(op.outputs, outs, strict=True))
        return self._finished(self._results(positions))

    # -- inputs and results ------------------------------------------------------------------------

    def _arguments(self) -> dict[int, list[int]]:
        """Makes the new inputs; returns their positions by the old position."""
        known = {}
        for op in self.old.ops:
            known.update((a, v.aval) for a, v in zip(op.inputs, op.eqn.invars) if isinstance(a, int))
        positions: dict[int, list[int]] = {}
        for k, argument in enumerate(self.old.inputs):
            ref, aval = argument.ref, self.old.avals[argument.ref]
            edges = self.edges_of_leaf.get(ref)
            if edges is None or ref not in known:
                new = self._value(known.get(ref), aval)
                self.inputs.append(dataclasses.replace(argument, ref=new))
                self.env[ref] = new
                if ref in self.old.consts:
                    self.consts[new] = self.old.consts[ref]
                positions[k] = [len(self.inputs) - 1]
                continue
            refs = []
            for a, b in itertools.pairwise(edges):
                refs.append(self._value(_rows(known[ref], b - a)))
                path = piece_path(argument.path, a, b)
                self.inputs.append(dataclasses.replace(argument, ref=refs[-1], path=path))
            self.pieces[ref, edges] = refs
            self.found[ref] = edges
            positions[k] = list(range(len(self.inputs) - len(refs), len(self.inputs)))
        return positions

    def _results(self, positions: dict[int, list[int]]) -> list[Result]:
        out = []
        for result in self.old.outputs:
            at = [] if result.updates is None else positions[result.updates]
            if len(at) < 2 or isinstance(result.atom, Literal):
                updates = at[0] if at else None
                out.append(dataclasses.replace(result, atom=self._whole(result.atom), updates=updates))
                continue
            self.reader = self.defined.get(result.atom, self.reader)
            edges = self.edges_of_leaf[self.old.inputs[result.updates].ref]  # type: ignore[index]
            for atom, k in zip(self._parts(result.atom, edges), at, strict=True):
                out.append(Result(atom, self.inputs[k].path, k))
        return out

    def _finished(self, results: list[Result]) -> Graph:
        """Drops what nothing reads and numbers the rest in order of definition."""
        live = {r.atom for r in results if isinstance(r.atom, int)}
        where: list[int] = []
        for i in reversed(range(len(self.ops))):
            op = self.ops[i]
            if any(r in live for r in op.outputs) or (op.eqn is not None and op.eqn.effects):
                live.update(op.refs)
                where.append(i)
        where.reverse()
        kept = [self.ops[i] for i in where]
        now = {i: n for n, i in enumerate(where)}
        self.parts = {k: sorted(now[i] for i in made if i in now) for k, made in self.parts.items()}
        order = [a.ref for a in self.inputs] + [r for op in kept for r in op.outputs]
        number = {r: k for k, r in enumerate(order)}
        new = lambda a: a if isinstance(a, Literal) else number[a]  # noqa: E731
        ops = tuple(
            dataclasses.replace(op, inputs=tuple(map(new, op.inputs)), outputs=tuple(number[r] for r in op.outputs))
            for op in kept
        )
        return Graph(
            self.old.name, tuple(dataclasses.replace(a, ref=number[a.ref]) for a in self.inputs), ops,
            tuple(dataclasses.replace(r, atom=new(r.atom)) for r in results),
            tuple(self.avals[r] for r in order), {number[r]: c for r, c in self.consts.items()},
        )

    # -- values ------------------------------------------------------------------------------------

    def _value(self, jax_aval: Any, aval: Aval | None = None) -> Ref:
        ref = len(self.avals)
        self.avals.append(aval if aval is not None else aval_of(jax_aval))
        if jax_aval is not None:
            self.vars[ref] = _jax.new_var(jax_aval)
        return ref

    def _whole(self, atom: Atom) -> Atom:
        """Returns a value whole, put together from its pieces where it must be."""
        if isinstance(atom, Literal):
            return atom
        if atom not in self.env:
            parts = self.pieces[atom, self.found[atom]]
            aval = self.vars[parts[0]].aval
            whole = aval.update(shape=(self.found[atom][-1], *aval.shape[1:]))
            self.env[atom] = self._make("concatenate", parts, {"dimension": 0}, whole)
        return self.env[atom]

    def _parts(self, atom: Atom, edges: Edges) -> list[Ref]:
        """Returns a value in pieces."""
        assert isinstance(atom, int)
        if (atom, edges) not in self.pieces:
            op = self.defined.get(atom)
            if op is not None and self._spreads(op):
                self.pieces[atom, edges] = [self._shortened(op, a, b, edges) for a, b in itertools.pairwise(edges)]
            else:
                whole = self._whole(atom)
                assert isinstance(whole, int)
                self.pieces[atom, edges] = [self._slice(whole, a, b) for a, b in itertools.pairwise(edges)]
        return self.pieces[atom, edges]

    def _slice(self, ref: Ref, start: int, stop: int) -> Ref:
        aval = self.vars[ref].aval
        rest = aval.shape[1:]
        params = {"start_indices": (start, *(0 for _ in rest)), "limit_indices": (stop, *rest), "strides": None}
        return self._make("slice", [ref], params, _rows(aval, stop - start))

    def _spreads(self, op: Op) -> bool:
        """Whether rows of a value are all the same for being spread from scalars: made anew, not sliced."""
        if op.primitive == "broadcast_in_dim":
            return all(not self.old.aval(a).shape for a in op.inputs)
        return op.primitive in ELEMENTWISE and all(
            not self.old.aval(a).shape or (isinstance(a, int) and a in self.defined and self._spreads(self.defined[a]))
            for a in op.inputs
        )

    def _shortened(self, op: Op, start: int, stop: int, edges: Edges) -> Ref:
        k = edges.index(start)
        inputs = [self._parts(a, edges)[k] if self.old.aval(a).shape else self._whole(a) for a in op.inputs]
        return self._emit(op, inputs, [_rows(op.eqn.outvars[0].aval, stop - start)], rows=stop - start)[0]

    # -- ops ---------------------------------------------------------------------------------------

    def _emit(
        self, op: Op, inputs: Sequence[Atom], avals: Sequence[Any], params: dict[str, Any] | None = None,
        rows: int | None = None,
    ) -> list[Ref]:
        """Appends an old op on new inputs; `rows` sets the leading size its parameters name."""
        params = params or {}
        if rows is not None:
            for name in ("shape", "new_sizes"):
                if name in op.eqn.params:
                    params = {**params, name: (rows, *op.eqn.params[name][1:])}
        outs = [self._value(a) for a in avals]
        invars = [v if isinstance(a, Literal) else self._var(a, v.aval) for a, v in zip(inputs, op.eqn.invars, strict=True)]
        eqn = op.eqn.replace(invars=invars, outvars=[self.vars[r] for r in outs], params={**op.eqn.params, **params})
        shown = dict(op.params)
        shown.update(encoded_params(params))
        self.ops.append(
            dataclasses.replace(
                op, inputs=tuple(inputs), outputs=tuple(outs), params=tuple(sorted(shown.items())), eqn=eqn, cost=None
            )
        )
        return outs

    def _make(self, primitive: str, refs: Sequence[Ref], params: dict[str, Any], aval: Any) -> Ref:
        """Appends an op that the step did not have, where its reader stands."""
        assert self.reader is not None
        out = self._value(aval)
        eqn = self.reader.eqn.replace(
            primitive=_jax.primitive_named(primitive), params=params, invars=[self.vars[r] for r in refs],
            outvars=[self.vars[out]], effects=frozenset(),
        )
        self.ops.append(
            dataclasses.replace(
                self.reader, primitive=primitive, inputs=tuple(refs), outputs=(out,),
                params=tuple(sorted(encoded_params(params).items())), eqn=eqn, cost=None,
            )
        )
        return out

    def _var(self, ref: Ref, aval: Any) -> Any:
        return self.vars.setdefault(ref, _jax.new_var(aval))

    def _scan(self, position: int, op: Op, edges: Edges) -> None:
        params = op.eqn.params
        consts, carries = params["num_consts"], params["num_carry"]
        head = [self._whole(a) for a in op.inputs[: consts + carries]]
        xs = [self._parts(a, edges) for a in op.inputs[consts + carries :]]
        carry = head[consts:]
        parts = list(enumerate(itertools.pairwise(edges)))
        ys: dict[int, list[Ref]] = {}
        for k, (a, b) in reversed(parts) if params["reverse"] else parts:
            avals = [v.aval for v in op.eqn.outvars[:carries]]
            avals += [_rows(v.aval, b - a) for v in op.eqn.outvars[carries:]]
            outs = self._emit(op, [*head[:consts], *carry, *(x[k] for x in xs)], avals, {"length": b - a})
            self.parts.setdefault(position, []).append(len(self.ops) - 1)
            carry, ys[k] = list(outs[:carries]), outs[carries:]
        self.env.update(zip(op.outputs[:carries], carry))
        for j, ref in enumerate(op.outputs[carries:]):
            self.pieces[ref, edges] = [ys[k][j] for k, _ in parts]
            self.found[ref] = edges

    def _in_pieces(self, op: Op) -> bool:
        """Emits an op once per piece where it goes row by row; returns whether it did."""
        edges = next((self.found[a] for a in op.refs if a in self.found), None)
        if edges is None or len(op.outputs) != 1 or any(self.found.get(a, edges) != edges for a in op.refs):
            return False
        parts = list(enumerate(itertools.pairwise(edges)))
        if op.primitive in COMBINES and 0 in op.eqn.params["axes"]:
            partial = [
                self._emit(op, [self._parts(op.inputs[0], edges)[k]], [op.eqn.outvars[0].aval])[0] for k, _ in parts
            ]
            total = partial[0]
            for other in partial[1:]:
                total = self._make(COMBINES[op.primitive], [total, other], {}, op.eqn.outvars[0].aval)
            self.env[op.outputs[0]] = total
            return True
        if not self._keeps_rows(op, edges[-1]):
            return False
        out = []
        for k, (a, b) in parts:
            inputs = [
                self._parts(x, edges)[k] if self.old.aval(x).shape[:1] == (edges[-1],) else self._whole(x)
                for x in op.inputs
            ]
            out.append(self._emit(op, inputs, [_rows(op.eqn.outvars[0].aval, b - a)], rows=b - a)[0])
        self.pieces[op.outputs[0], edges] = out
        self.found[op.outputs[0]] = edges
        return True

    def _keeps_rows(self, op: Op, length: int) -> bool:
        """Whether row k of the result is made of row k of every array among the inputs."""
        params, shape = op.eqn.params, self.old.avals[op.outputs[0]].shape
        if shape[:1] != (length,):
            return False
        if op.primitive in ELEMENTWISE:
            return all(self.old.aval(a).shape in ((), shape) for a in op.inputs)
        if op.primitive in COMBINES:
            return 0 not in params["axes"]
        if op.primitive == "transpose":
            return params["permutation"][0] == 0
        if op.primitive == "squeeze":
            return 0 not in params["dimensions"]
        if op.primitive == "reshape":
            return params["dimensions"] is None and params.get("sharding") is None
        if op.primitive == "broadcast_in_dim":
            return params["broadcast_dimensions"][:1] == (0,) and params.get("sharding") is None
        return False


def _rows(aval: Any, count: int) -> Any:
    return aval.update(shape=(count, *aval.shape[1:]))
