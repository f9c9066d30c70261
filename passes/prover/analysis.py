"""prove: walks a step once, types every value, hoists what must be whole, and says where it fails."""

from __future__ import annotations

import dataclasses

import hetjax.passes.prover.rules  # noqa: F401  (registers them)
from hetjax.ir.graph import Argument, Aval, Graph, Op, Ref, definitions
from hetjax.ir.microbatching import BatchType, Microbatching, Refusal
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.prover.batch_types import (
    REPLICATED,
    STEP_LEVEL,
    Index,
    NeedsWhole,
    Type,
    Untypable,
    batch_axis,
)
from hetjax.passes.prover.dispatch import Typer
from hetjax.passes.prover.pairs import Mismatch, Pair, PairLiteral, pair_graphs
from hetjax.passes.prover.reasons import refusal_at, sentence_for_sum

# A captured array up to this size is a table (positions, class weights), not a parameter: what depends
# on it may be computed on every stage. A megabyte is sent in a millisecond over ten gigabit.
TABLE_BYTES = 1 << 20

# Ops whose cost grows with a model's size: what leads to them is the model, what follows them is not.
_HEAVY = frozenset({
    "dot_general", "ragged_dot_general", "conv_general_dilated", "scan", "while", "remat2",
    "custom_vjp_call", "custom_jvp_call", "jit", "pjit", "closed_call",
})  # fmt: skip


def prove(
    full: Graph, micro: Graph, num_microbatches: int, *, strict: bool = False, accept: bool = False
) -> Microbatching:
    """Returns how each value of a step follows from its microbatches, or why one does not.

    Args:
      full: the step traced at the whole batch, calls inlined, regions labelled.
      micro: the same traced at 1/M of the batch.
      num_microbatches: M.
      strict: let a failing rule raise instead of counting it as "cannot be typed"; for tests.
      accept: type what cannot be proved by its meaning per microbatch: slices are concatenated, what
        has no batch axis is averaged. The refusal is kept; `accepted` says that it was overruled.

    Returns:
      A `Microbatching` of `micro`. Where `refusal` is None its types hold; else they are a
      best guess from the first refused op on.
    """
    if num_microbatches == 1:
        return one_microbatch(full)
    try:
        pair = pair_graphs(full, micro, num_microbatches)
        inputs = _input_types(full, micro, num_microbatches)
    except Mismatch as e:
        return _mismatch(full, micro, num_microbatches, e)
    whole: set[Ref] = set()
    while True:
        walk = _Walk(full, pair, num_microbatches, strict, frozenset(whole), accept)
        walk.run(inputs)
        if walk.wanted_whole <= whole:
            return walk.result(micro)
        whole |= walk.wanted_whole


def is_parameter(argument: Argument, aval: Aval) -> bool:
    """Returns whether an input leaf counts as trained (or frozen) parameters.

    Keys, counters, scalars and the batch do not; neither do captured arrays of at most
    `TABLE_BYTES`.
    """
    if argument.role == "batch" or not aval.is_inexact or aval.size <= 1:
        return False
    return argument.role != "const" or aval.nbytes > TABLE_BYTES


def _input_types(full: Graph, micro: Graph, num_microbatches: int) -> dict[Ref, Type]:
    types: dict[Ref, Type] = {}
    for a in full.inputs:
        try:
            axis = batch_axis(full.avals[a.ref].shape, micro.avals[a.ref].shape, num_microbatches)
        except Untypable as e:
            raise Mismatch(f"'{a.path}' cannot be split: {e.reason}") from e
        types[a.ref] = REPLICATED if axis is None else BatchType("B", 0, axis)
    return types


def _mismatch(full: Graph, micro: Graph, num_microbatches: int, e: Mismatch) -> Microbatching:
    reason = f"the program's structure depends on the batch size: {e.reason}"
    op = None if e.position is None else full.ops[e.position]
    refusal = Refusal(reason) if op is None else Refusal(reason, e.position, op.primitive, op.block, op.source)
    types = (STEP_LEVEL,) * len(full.avals)
    return Microbatching(num_microbatches, micro, types, refusal=refusal)


@dataclasses.dataclass
class _Walk:
    """One pass over the ops.

    Attributes:
      whole: refs of indices along the batch that an earlier pass found must come from the whole batch.
      accept: whether ops that cannot be typed run per microbatch all the same.
      types: of each ref so far.
      parametric: refs that depend on parameters.
      hoisted: refs computed once at full batch.
      wanted_whole: `whole`, and what this pass found.
      cause: for each ref of type U or S, the op and the reason it became so.
      refusal: the first op that stops the proof.
      defined: position of the op that defines each ref.
    """

    full: Graph
    pair: Pair
    num_microbatches: int
    strict: bool
    whole: frozenset[Ref]
    accept: bool
    types: dict[Ref, Type] = dataclasses.field(default_factory=dict)
    parametric: set[Ref] = dataclasses.field(default_factory=set)
    hoisted: set[Ref] = dataclasses.field(default_factory=set)
    wanted_whole: set[Ref] = dataclasses.field(default_factory=set)
    cause: dict[Ref, tuple[int, Untypable]] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None
    defined: dict[Ref, int] = dataclasses.field(default_factory=dict)

    def run(self, inputs: dict[Ref, Type]) -> None:
        full, pair = self.full, self.pair
        self.types.update(inputs)
        self.defined = definitions(full)
        self.parametric.update(a.ref for a in full.inputs if is_parameter(a, full.avals[a.ref]))
        guarded, has_gradient = _guarded(full, self.parametric)
        typer = Typer(self.num_microbatches, self.strict)
        types = self.types
        for i, (op, line) in enumerate(zip(full.ops, pair.lines)):
            ins = [a.type if isinstance(a, PairLiteral) else types[a] for a in line.inputs]
            refs = op.refs
            parametric = any(r in self.parametric for r in refs)
            if parametric:
                self.parametric.update(op.outputs)
            kinds = {t.kind for t in ins}
            after = op.region == "update" if has_gradient else "B" not in kinds and "I" not in kinds
            if any(r in self.whole for r in op.outputs):
                self._hoist(i, op)
            elif "U" in kinds:
                if not parametric:
                    self._hoist(i, op)
                else:
                    self._step_level(i, op, kinds, guarded[i], self._cause_of(refs, "U"))
            elif "S" in kinds and after and op.outputs:
                # Sums are complete only after the last microbatch; computing on them then is exact and done once.
                self._step_level(i, op, kinds, guarded[i], self._cause_of(refs, "S"))
            else:
                try:
                    outs = self._type(typer, line, ins)
                except Untypable as e:
                    if parametric and self.accept and guarded[i]:
                        self._per_microbatch(i, op, self._explained(refs, i, e, kinds))
                    elif parametric:
                        self._step_level(i, op, kinds, guarded[i], self._explained(refs, i, e, kinds))
                    else:
                        self._hoist(i, op)
                    continue
                if not parametric and any(t.kind == "S" for t in outs):
                    self._hoist(i, op)
                    continue
                types.update(zip(op.outputs, outs))
                for r, t in zip(op.outputs, outs):
                    if t.kind == "S":
                        self.cause[r] = self._sum_origin(i, op, refs)
        for result in full.outputs:
            if isinstance(result.atom, int):
                self._join(result.atom)

    def _type(self, typer: Typer, line, ins: list[Type]) -> list[Type]:
        avals, micro = self.pair.avals, self.pair.micro_avals
        try:
            return typer.line(line, ins, avals, micro)
        except NeedsWhole:
            if not any(r in self.parametric for r in line.outputs):
                raise
            for k, (a, t) in enumerate(zip(line.inputs, ins)):
                if isinstance(t, Index):
                    assert isinstance(a, int)
                    self.wanted_whole.add(a)
                    ins[k] = BatchType("B", 0, t.axis)
            return typer.line(line, ins, avals, micro)

    def _hoist(self, i: int, op: Op) -> None:
        """Computes an op free of parameters once, at full batch."""
        for r in op.outputs:
            try:
                axis = batch_axis(self.pair.avals[r].shape, self.pair.micro_avals[r].shape, self.num_microbatches)
            except Untypable as e:
                # It has no slice to hand to a microbatch; what is computed from it may have.
                self.types[r] = STEP_LEVEL
                self.cause[r] = (i, e)
                continue
            self.types[r] = REPLICATED if axis is None else BatchType("B", 0, axis)
            self.hoisted.add(r)

    def _step_level(self, i: int, op: Op, kinds: set[str], guarded: bool, why: tuple[int, Untypable]) -> None:
        """Computes an op after the microbatches, at full batch, unless the microbatches wait for it."""
        if guarded and ("B" in kinds or "I" in kinds) and self.refusal is None:
            at, error = why
            self.refusal = refusal_at(self.full, at, error, reader=None if at == i else i)
        for r in op.refs:
            self._join(r)
        for r in op.outputs:
            self.types[r] = STEP_LEVEL
            self.cause[r] = why

    def _per_microbatch(self, i: int, op: Op, why: tuple[int, Untypable]) -> None:
        """Types an op by what it means to each microbatch on its own."""
        if self.refusal is None:
            at, error = why
            self.refusal = refusal_at(self.full, at, error, reader=None if at == i else i)
        # An average over microbatches is S, 1; what it lacks or exceeds of that power, its slices have.
        known = [self.types[r] for r in op.refs]
        power = max(
            (t.power - (t.kind == "S") for t in known if isinstance(t, BatchType) and t.kind in "RBS"), default=0
        )
        for r in op.outputs:
            axis = batch_axis(self.pair.avals[r].shape, self.pair.micro_avals[r].shape, self.num_microbatches)
            self.types[r] = BatchType("S", 1 + power) if axis is None else BatchType("B", power, axis)
            self.cause[r] = why

    def _join(self, ref: Ref) -> None:
        """Notes that a value is needed whole: positions that depend on parameters cannot be."""
        stack = [ref]
        while stack:
            r = stack.pop()
            if not isinstance(self.types[r], Index):
                continue
            if r in self.parametric:
                stack.extend(self.full.ops[self.defined[r]].refs)
            elif r != ref:
                self.wanted_whole.add(r)

    def _cause_of(self, refs: tuple[Ref, ...], kind: str) -> tuple[int, Untypable]:
        return next(self.cause[r] for r in refs if self.types[r].kind == kind and r in self.cause)

    def _explained(self, refs: tuple[Ref, ...], i: int, e: Untypable, kinds: set[str]) -> tuple[int, Untypable]:
        """Adds, to an op that fails on a batch sum, where that sum was taken."""
        if "S" not in kinds:
            return i, e
        at, _ = self._cause_of(refs, "S")
        return i, Untypable(f"{e.reason}; {sentence_for_sum(self.full, at)}", e.trail)

    def _sum_origin(self, i: int, op: Op, refs: tuple[Ref, ...]) -> tuple[int, Untypable]:
        for r in refs:
            if self.types[r].kind == "S" and r in self.cause:
                return self.cause[r]
        return i, Untypable("a sum or mean over the batch is used with single examples of the same batch")

    def result(self, micro: Graph) -> Microbatching:
        final, positions = [], set()
        for r, (aval, small) in enumerate(zip(self.pair.avals, self.pair.micro_avals)):
            t = self.types[r]
            if isinstance(t, Index):
                t = BatchType("B", 0, t.axis)
                positions.add(r)
            elif t.kind == "Z" and aval.shape != small.shape:
                t = BatchType("B", 0, batch_axis(aval.shape, small.shape, self.num_microbatches))
            assert isinstance(t, BatchType)
            final.append(t)
        return Microbatching(
            self.num_microbatches, micro, tuple(final), frozenset(self.hoisted),
            frozenset(positions), self.refusal,
            accepted=self.accept and self.refusal is not None,
        )


def _guarded(full: Graph, parameters: set[Ref]) -> tuple[list[bool], bool]:
    """Returns, per op, whether the microbatches wait for its result; and whether there is a gradient.

    With a gradient these are the ops of the backward and the forward ops it needs. Without, they are
    the ops that a heavy op needs: what follows the model (a metric of all scores) may wait for the
    whole batch, the model may not.
    """
    has_gradient = any(op.region in ("forward", "backward") for op in full.ops)
    has_backward = any(op.region == "backward" for op in full.ops)
    wanted: set[Ref] = set()
    guarded = [False] * len(full.ops)
    if not has_gradient:
        reached = set(parameters)
        heavy = [False] * len(full.ops)
        for i, op in enumerate(full.ops):
            if any(r in reached for r in op.refs):
                reached.update(op.outputs)
                heavy[i] = op.primitive in _HEAVY
    for i in reversed(range(len(full.ops))):
        op = full.ops[i]
        if not has_gradient:
            ends = heavy[i]
        elif has_backward:
            ends = op.region == "backward"
        else:
            ends = op.region == "forward"
        early = op.region != "update" or not has_gradient
        guarded[i] = ends or (early and any(r in wanted for r in op.outputs))
        if guarded[i]:
            wanted.update(op.refs)
    return guarded, has_gradient

