"""prove: walks a step once, types every value, hoists what must be whole, and says where it fails."""

from __future__ import annotations

import dataclasses

import hetjax.passes.prover.rules  # noqa: F401  (registers them)
from hetjax.ir.graph import Graph, Op, Ref, definitions
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
from hetjax.passes.prover.hoisting import with_followers
from hetjax.passes.prover.local import local_types, pairs_examples, whole_to_local
from hetjax.passes.prover.needs import guarded_ops, is_parameter, running_statistics
from hetjax.passes.prover.pairs import Line, Mismatch, Pair, PairLiteral, pair_graphs
from hetjax.passes.prover.reasons import refusal_at, sentence_for_sum


def prove(
    full: Graph, micro: Graph, num_microbatches: int, *, accept: bool = False, head: bool = True, strict: bool = False
) -> Microbatching:
    """Returns how each value of a step follows from its microbatches, or why one does not.

    Args:
      full: the step traced at the whole batch, calls inlined, regions labelled.
      micro: the same traced at 1/M of the batch.
      num_microbatches: M.
      accept: where the step cannot be proved, type it as it runs when each microbatch goes by its own
        statistics (the user's `per_microbatch`); the refusal is kept and `accepted` is set.
      head: where the step cannot be proved otherwise, and not by `accept`, let a loss head that couples examples
        run once at full batch.
      strict: let a failing rule raise instead of counting it as "cannot be typed"; for tests.

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
    typer = Typer(num_microbatches, strict)
    exact = _settled(full, pair, typer, inputs, accept=False)
    if exact.refusal is not None and head and not accept:
        whole = _settled(full, pair, typer, inputs, accept=False, head=True)
        if whole.refusal is None and whole.resliced and whole.head_share() <= HEAD_SHARE:
            return whole.result(micro)
    if exact.refusal is None or not accept:
        return exact.result(micro)
    own = _settled(full, pair, typer, inputs, accept=True)
    chained = tuple(sorted((old, new) for new, old in own.chained.items()))
    return dataclasses.replace(own.result(micro), refusal=exact.refusal, accepted=True, chained=chained)


def _settled(
    full: Graph, pair: Pair, typer: Typer, inputs: dict[Ref, Type], accept: bool, head: bool = False
) -> _Walk:
    """Walks until no more indices along the batch turn out to be wanted whole."""
    whole: set[Ref] = set()
    while True:
        walk = _Walk(full, pair, typer, accept, frozenset(whole), head)
        walk.run(inputs)
        if walk.wanted_whole <= whole:
            return walk
        whole |= walk.wanted_whole


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


# The most of the forward's operations that may run once at full batch, while the stages wait: beyond, it is
# no head, and a pipeline gains nothing.
HEAD_SHARE = 0.25


@dataclasses.dataclass
class _Walk:
    """One pass over the ops.

    Attributes:
      typer: applies the rules.
      accept: whether to go on with each microbatch's own statistics where the proof fails.
      whole: refs of indices along the batch that an earlier pass found must come from the whole batch.
      head: whether forward ops that couple examples may run once on the whole batch, between all forwards and
        all backwards.
      types: of each ref so far.
      parametric: refs that depend on parameters.
      hoisted: refs computed once at full batch.
      wanted_whole: `whole`, and what this pass found.
      cause: for each ref of type U or S, the op and the reason it became so.
      refusal: the first op that stops the proof.
      defined: position of the op that defines each ref.
      chained: where accepted, the old value of each running statistic by the new one.
      resliced: with `head`, refs at full batch of which the backwards read slices.
      read_by_head: with `head`, what its forward reads of the microbatches.
      head_ops: with `head`, the forward ops in it.
      following: refs of the microbatches that depend on `resliced`, and refs at full batch that depend on those.
    """

    full: Graph
    pair: Pair
    typer: Typer
    accept: bool
    whole: frozenset[Ref]
    head: bool = False
    types: dict[Ref, Type] = dataclasses.field(default_factory=dict)
    parametric: set[Ref] = dataclasses.field(default_factory=set)
    hoisted: set[Ref] = dataclasses.field(default_factory=set)
    wanted_whole: set[Ref] = dataclasses.field(default_factory=set)
    cause: dict[Ref, tuple[int, Untypable]] = dataclasses.field(default_factory=dict)
    refusal: Refusal | None = None
    defined: dict[Ref, int] = dataclasses.field(default_factory=dict)
    chained: dict[Ref, Ref] = dataclasses.field(default_factory=dict)
    resliced: set[Ref] = dataclasses.field(default_factory=set)
    read_by_head: set[Ref] = dataclasses.field(default_factory=set)
    head_ops: set[int] = dataclasses.field(default_factory=set)
    following: set[Ref] = dataclasses.field(default_factory=set)

    def run(self, inputs: dict[Ref, Type]) -> None:
        full, types = self.full, self.types
        types.update(inputs)
        self.defined = definitions(full)
        self.parametric.update(a.ref for a in full.inputs if is_parameter(a, full.avals[a.ref]))
        guarded, has_gradient = guarded_ops(full, self.parametric)
        between: set[int] = set()
        if self.accept:
            self.chained, between = running_statistics(full, {r for r, t in inputs.items() if t.kind == "B"})
        for i, (op, line) in enumerate(zip(full.ops, self.pair.lines)):
            ins = [a.type if isinstance(a, PairLiteral) else types[a] for a in line.inputs]
            if any(r in self.parametric for r in op.refs):
                self.parametric.update(op.outputs)
                kinds = {t.kind for t in ins}
                # A loop that holds forward and backward of its own reads sums and examples alike.
                after = (op.region == "update" if has_gradient else not guarded[i]) and not kinds & {"B", "I"}
                if self.accept and (i in between or op.region == "forward"):
                    after, guarded[i] = False, True
                self._parametric(i, op, line, ins, after, guarded[i])
            else:
                self._free(i, op, line, ins)
        for result in full.outputs:
            if isinstance(result.atom, int):
                self._join(result.atom)

    def _free(self, i: int, op: Op, line: Line, ins: list[Type]) -> None:
        """Types an op that does not depend on parameters: what has no type is hoisted."""
        if any(r in self.whole for r in op.outputs) or any(t.kind == "U" for t in ins):
            return self._hoist(i, op)
        try:
            outs = self.typer.line(line, ins, self.pair.avals, self.pair.micro_avals)
        except Untypable:
            return self._hoist(i, op)
        if any(t.kind == "S" for t in outs):
            return self._hoist(i, op)
        self.types.update(zip(op.outputs, outs))

    def _parametric(self, i: int, op: Op, line: Line, ins: list[Type], after: bool, guarded: bool) -> None:
        """Types an op that depends on parameters: what has no type waits for the whole batch.

        Args:
          after: the op comes after forward and backward.
          guarded: the microbatches wait for its result.
        """
        kinds = {t.kind for t in ins}
        if self.accept and pairs_examples(line, self.pair.avals, self.pair.micro_avals):
            return self._set(i, op, self._local(line, ins))
        if any(r in self.resliced or r in self.following for r in op.refs):
            self.following.update(op.outputs)
        if "U" in kinds and self.head and guarded and self._reslice(i, op, line):
            return None
        if "U" in kinds:
            return self._step_level(i, op, line, ins, guarded, self._lateness(i, op))
        if "S" in kinds and after and op.outputs:
            # Sums are complete only after the last microbatch; computing on them then is exact and done once.
            return self._step_level(i, op, line, ins, guarded, self._cause_of(op.refs, "S"))
        try:
            outs = self._type(line, ins)
        except Untypable as e:
            return self._step_level(i, op, line, ins, guarded, self._explained(op.refs, i, e, kinds))
        self._set(i, op, outs)

    def _set(self, i: int, op: Op, outs: list[Type]) -> None:
        self.types.update(zip(op.outputs, outs))
        for r, t in zip(op.outputs, outs):
            if t.kind == "S":
                self.cause[r] = self._sum_origin(i, op)

    def _type(self, line: Line, ins: list[Type]) -> list[Type]:
        avals, micro = self.pair.avals, self.pair.micro_avals
        try:
            return self.typer.line(line, ins, avals, micro)
        except NeedsWhole:
            wanted = {a for a, t in zip(line.inputs, ins) if isinstance(t, Index) and isinstance(a, int)}
            plain: list[Type] = [BatchType("B", 0, t.axis) if isinstance(t, Index) else t for t in ins]
            outs = self.typer.line(line, plain, avals, micro)
            self.wanted_whole |= wanted
            return outs

    def _hoist(self, i: int, op: Op) -> None:
        """Computes an op free of parameters once, at full batch."""
        for r in op.outputs:
            try:
                axis = self._axis(r)
            except Untypable as e:
                if self.accept:
                    self.types[r] = whole_to_local(self.pair.avals[r], self.pair.micro_avals[r])
                    continue
                # It has no slice to hand to a microbatch; what is computed from it may have.
                self.types[r] = STEP_LEVEL
                self.cause[r] = (i, e)
                continue
            self.types[r] = REPLICATED if axis is None else BatchType("B", 0, axis)
            self.hoisted.add(r)

    def _axis(self, ref: Ref) -> int | None:
        full, micro = self.pair.avals[ref].shape, self.pair.micro_avals[ref].shape
        return batch_axis(full, micro, self.typer.num_microbatches)

    def _step_level(
        self, i: int, op: Op, line: Line, ins: list[Type], guarded: bool, why: tuple[int, Untypable]
    ) -> None:
        """Computes an op after the microbatches, at full batch, unless the microbatches wait for it."""
        if guarded and self.head and self._may_wait(op):
            if op.region == "forward":
                self.head_ops.add(i)
                self.read_by_head.update(r for r in op.refs if self.types[r].kind in "BI")
        elif guarded and any(t.kind in "BI" for t in ins) and self.refusal is None:
            at, error = why
            self.refusal = refusal_at(self.full, at, error, reader=None if at == i else i)
        if guarded and self.accept:
            return self._set(i, op, self._local(line, ins))
        for r in op.refs:
            self._join(r)
        for r in op.outputs:
            self.types[r] = STEP_LEVEL
            self.cause[r] = why

    def _may_wait(self, op: Op) -> bool:
        """Returns whether an op may run at full batch between forwards and backwards."""
        updated = any(r in self.defined and self.full.ops[self.defined[r]].region == "update" for r in op.refs)
        return not updated and not any(r in self.following for r in op.refs)

    def _reslice(self, i: int, op: Op, line: Line) -> bool:
        """Types a backward op that reads both what the head made and what the microbatches kept: by slices.

        A slice of a value that is whole is what type B says, whatever the value is, so this needs no rule.
        """
        kept = [
            r for r in op.refs
            if self.types[r].kind in "BI" and r in self.parametric and r not in self.read_by_head
        ]
        late = [r for r in op.refs if self.types[r].kind == "U"]
        updated = any(r in self.defined and self.full.ops[self.defined[r]].region == "update" for r in late)
        if op.region != "backward" or not kept or updated or any(r in self.following for r in late):
            return False
        before = {r: self.types[r] for r in late}
        try:
            for r in late:
                axis = self._axis(r)
                self.types[r] = REPLICATED if axis is None else BatchType("B", 0, axis)
            outs = self._type(line, [a.type if isinstance(a, PairLiteral) else self.types[a] for a in line.inputs])
        except Untypable:
            self.types.update(before)
            return False
        self.resliced.update(late)
        self.following.update(op.outputs)
        self._set(i, op, outs)
        return True

    def head_share(self) -> float:
        """Returns the share of the forward's operations that run in the head; 1.0 where costs are not known."""
        flops = lambda ops: sum(op.cost.flops for op in ops if op.cost is not None)  # noqa: E731
        forward = flops(op for op in self.full.ops if op.region == "forward")
        return flops(self.full.ops[i] for i in self.head_ops) / forward if forward else 1.0

    def _local(self, line: Line, ins: list[Type]) -> list[Type]:
        return local_types(self.typer, line, ins, self.pair.avals, self.pair.micro_avals)

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

    def _lateness(self, i: int, op: Op) -> tuple[int, Untypable]:
        """Returns why a value that the op reads exists only after the microbatches."""
        late = [r for r in op.refs if self.types[r].kind == "U" and r in self.defined]
        updated = [r for r in late if self.full.ops[self.defined[r]].region == "update"]
        if updated and op.region in ("forward", "backward"):
            return i, Untypable(
                "it is part of a second forward, which starts from values that this step has updated "
                "already; the update needs all microbatches of the first"
            )
        return self._cause_of(op.refs, "U")

    def _cause_of(self, refs: tuple[Ref, ...], kind: str) -> tuple[int, Untypable]:
        return next(self.cause[r] for r in refs if self.types[r].kind == kind and r in self.cause)

    def _explained(self, refs: tuple[Ref, ...], i: int, e: Untypable, kinds: set[str]) -> tuple[int, Untypable]:
        """Adds, to an op that fails on a batch sum, where that sum was taken."""
        if "S" not in kinds:
            return i, e
        at, _ = self._cause_of(refs, "S")
        return i, Untypable(f"{e.reason}; {sentence_for_sum(self.full, at)}", e.trail)

    def _sum_origin(self, i: int, op: Op) -> tuple[int, Untypable]:
        for r in op.refs:
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
                t = BatchType("B", 0, self._axis(r))
            assert isinstance(t, BatchType)
            final.append(t)
        return Microbatching(
            self.typer.num_microbatches, micro, tuple(final),
            with_followers(self.full, self.types, self.parametric, self.hoisted),
            frozenset(positions), self.refusal, resliced=frozenset(self.resliced),
        )
