"""How tensor parallelism splits the weights of a step: candidates ranked by what Shardy makes of them.

No layer is known by name. Weights that enter equal products with one activation (query, key and value) are split
alike; each such role may be split on any dimension that divides. Shardy propagates a layer's candidates and
puts in the collectives they take; the layer takes those with the least

  3 * (FLOPs of the products on one device) / speed + 2 * (seconds of the forward's collectives)

for a backward multiplies twice and exchanges about what the forward does. Equal layers are looked at once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence

from hetjax.ir.errors import LoweringError
from hetjax.ir.graph import Aval, Graph, Op, Ref
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.passes.partition import Partition, fragment_signature, partition

# Up to so many candidates of a layer are all looked at; of more, those that a descent meets.
_ALL = 40
# A weight with less than this share of its layer's bytes may stay whole.
_SMALL = 1 / 16
_CARRIES = ("convert_element_type", "copy", "transpose", "reshape")

Dims = tuple[int | None, ...]


def choose_specs(
    graph: Graph, program: Program, homes: Mapping[Ref, int], model: int, seconds: Callable[[Partition], float]
) -> dict[Ref, Spec]:
    """Returns the specs of the weights that are split, by ref.

    Args:
      graph: the step.
      program: cut at every layer, without shardings.
      homes: the layer of each state leaf.
      model: devices a layer is split over.
      seconds: what a partitioned forward takes, for ranking.
    """
    state = {a.ref for a in graph.inputs if a.role == "state"}
    known: dict[tuple[str, tuple[int, ...]], Dims] = {}
    out: dict[Ref, Spec] = {}
    for fragment in program.fragments:
        if fragment.phase != "forward":
            continue
        avals = program.micro_avals if fragment.per_microbatch else program.avals
        refs = [p.ref for p in fragment.inputs]
        weights = [
            r for r in refs
            if r in state and homes.get(r) == fragment.stage and avals[r].ndim >= 2 and r not in out
        ]
        if not weights:
            continue
        layer = _Layer(program, fragment, avals, weights, model, seconds)
        key = (fragment_signature(fragment.ops, avals, refs), tuple(refs.index(r) for r in weights))
        if key not in known:
            known[key] = layer.best()
        out |= {r: layer.spec(r, d) for r, d in zip(weights, known[key]) if d is not None}
    return out


class _Layer:
    """One layer's weights and what splitting them takes."""

    def __init__(
        self, program: Program, fragment: Fragment, avals: Sequence[Aval], weights: Sequence[Ref], model: int,
        seconds: Callable[[Partition], float],
    ):
        self.fragment, self.avals, self.weights, self.model, self.seconds = fragment, avals, weights, model, seconds
        abroad = {p.ref for f in program.fragments if f.stage != fragment.stage for p in f.inputs}
        whole = lambda r: ((),) * avals[r].ndim  # noqa: E731
        self.inputs: dict[Ref, Spec] = {p.ref: whole(p.ref) for p in fragment.inputs}
        self.outputs: dict[Ref, Spec | None] = {
            p.ref: None if p.form in ("micro", "step") and p.ref not in abroad and avals[p.ref].ndim else whole(p.ref)
            for p in fragment.outputs
        }
        self.roles = _roles(fragment.ops, avals, weights)
        self._scores: dict[Dims, float] = {}

    def best(self) -> Dims:
        """Returns the dimension each weight is split on, None for one that stays whole."""
        options = [self.options(role) for role in self.roles]
        if math.prod(map(len, options)) <= _ALL:
            return min(map(self.spread, itertools.product(*options)), key=self.score)
        found = [self.descend([o[k] for o in options], options) for k in (0, -1)]
        return min(found, key=self.score)

    def options(self, role: Sequence[Ref]) -> list[int | None]:
        """Returns the dimensions a role may be split on."""
        shape = self.avals[role[0]].shape
        dims: list[int | None] = [d for d, n in enumerate(shape) if n % self.model == 0]
        nbytes = [self.avals[r].nbytes for r in self.weights]
        small = sum(self.avals[r].nbytes for r in role) < _SMALL * sum(nbytes)
        return [*dims, None] if small or not dims else dims

    def descend(self, choice: list[int | None], options: Sequence[Sequence[int | None]]) -> Dims:
        """Returns the choice that no change of one role makes better."""
        improved = True
        while improved:
            improved = False
            for k, mine in enumerate(options):
                tried = [[*choice[:k], d, *choice[k + 1 :]] for d in mine]
                better = min(tried, key=lambda c: self.score(self.spread(c)))
                if self.score(self.spread(better)) < self.score(self.spread(choice)):
                    choice, improved = better, True
        return self.spread(choice)

    def spread(self, choice: Sequence[int | None]) -> Dims:
        """Returns the dimension of each weight, from that of each role."""
        of = {r: d for role, d in zip(self.roles, choice) for r in role}
        return tuple(of[r] for r in self.weights)

    def spec(self, ref: Ref, dim: int) -> Spec:
        return tuple(("model",) if d == dim else () for d in range(self.avals[ref].ndim))

    def score(self, dims: Dims) -> float:
        if dims not in self._scores:
            split = {r: self.spec(r, d) for r, d in zip(self.weights, dims) if d is not None}
            axes = (("data", 1), ("model", self.model))
            try:
                found = partition(self.fragment.ops, self.avals, self.inputs | split, self.outputs, axes)
                self._scores[dims] = self.seconds(found)
            except LoweringError:
                self._scores[dims] = math.inf
        return self._scores[dims]


def _roles(ops: Sequence[Op], avals: Sequence[Aval], weights: Sequence[Ref]) -> list[list[Ref]]:
    """Returns the weights in groups that enter equal products with one activation."""
    carried = {r: r for r in weights}
    partner: dict[Ref, tuple] = {}
    for op in ops:
        mine = [r for r in op.refs if r in carried]
        if not mine:
            continue
        if op.primitive in _CARRIES and op.outputs:
            carried[op.outputs[0]] = carried[mine[0]]
            continue
        weight = carried[mine[0]]
        others = tuple(r for r in op.refs if r not in carried)
        partner.setdefault(weight, (op.primitive, others[:1]))
    groups: dict[tuple, list[Ref]] = {}
    for r in weights:
        groups.setdefault((avals[r].shape, avals[r].dtype, partner.get(r, (r,))), []).append(r)
    return list(groups.values())
