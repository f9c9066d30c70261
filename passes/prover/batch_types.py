"""The vocabulary of the prover: batch types, one op seen at two batch sizes, and how a rule says no.

For a value with whole-batch value V and microbatch values v_0 … v_{M-1} (see
`hetjax.ir.microbatching`): R,p means v_m = V * M^p; B,p,axis means v_m = slice_m(V) * M^p;
S,p means V = M^-p * sum_m v_m; Z means both are zero. From these follow the two coercions that
all rules share: Z is of every type, and R,q is also S,q+1 (a sum of M equal terms).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetjax.ir.graph import Aval
from hetjax.ir.microbatching import BatchType

ZERO = BatchType("Z")
REPLICATED = BatchType("R")
STEP_LEVEL = BatchType("U")


@dataclasses.dataclass(frozen=True, slots=True)
class Index:
    """An example's position in its own microbatch: what iota along the batch gives.

    It is not a slice of the whole batch's positions, and it must not be: it addresses the examples
    the microbatch holds. Only indexing may read it; anything else needs the whole batch's values.

    Attributes:
      axis: the batch axis.
      columns: positions on the last axis that hold the index, others being ordinary values; None
        when every element is the index.
      role: "index"; "junk" for an index plus an extent, which is only ever the branch not taken of
        a negative-index fix-up; "false" for the comparison `index < 0`.
    """

    axis: int
    columns: frozenset[int] | None = None
    role: str = "index"
    kind: str = "I"
    power: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Unscaled:
    """A literal whose values at the two batch sizes are no power of M apart."""

    reason: str
    kind: str = "X"
    power: int = 0
    axis: int | None = None


Type = BatchType | Index | Unscaled


SUM_WITH_EXAMPLES = (
    "a sum or mean over the batch and single examples of the same batch, as batch normalisation does"
)


class Untypable(Exception):
    """No rule shows how this op's value follows from the microbatches.

    Attributes:
      reason: why, in words a user of Flax understands.
      trail: where inside nested programs: (nested program's number, op's position) pairs.
    """

    def __init__(self, reason: str, trail: tuple[tuple[int, int], ...] = ()):
        super().__init__(reason)
        self.reason, self.trail = reason, trail


class NeedsWhole(Untypable):
    """Typable only if the indices along the batch it reads come from the whole batch."""


def batch_axis(full: Sequence[int], micro: Sequence[int], num_microbatches: int) -> int | None:
    """Returns the one axis on which two shapes differ, None when they are equal.

    Args:
      full: shape at the whole batch.
      micro: shape at one microbatch.
      num_microbatches: M.

    Raises:
      Untypable: more than one axis differs, or the sizes are not M to 1.
    """
    if full == micro:
        return None
    if len(full) != len(micro):
        raise Untypable("its rank depends on the batch size")
    axes = [i for i, (a, b) in enumerate(zip(full, micro)) if a != b]
    if len(axes) > 1:
        raise Untypable(
            f"it has two axes that grow with the batch (shape {list(full)} at the whole batch, "
            f"{list(micro)} at one microbatch): it pairs every example with every other, as a "
            "similarity matrix of the batch does"
        )
    if full[axes[0]] != num_microbatches * micro[axes[0]]:
        raise Untypable(
            f"its size along axis {axes[0]} is {full[axes[0]]} at the whole batch and "
            f"{micro[axes[0]]} at one microbatch, which is not {num_microbatches} to 1"
        )
    return axes[0]


@dataclasses.dataclass(slots=True)
class Site:
    """One op at both batch sizes, as a rule sees it.

    Attributes:
      primitive: the JAX primitive's name.
      num_microbatches: M.
      params: the equation's parameters at the whole batch.
      micro_params: the same at one microbatch.
      types: type of each input.
      ins: aval of each input at the whole batch.
      micro_ins: the same at one microbatch.
      outs: aval of each output at the whole batch.
      micro_outs: the same at one microbatch.
      values: the value of each input that is a literal, else None.
      body: types the results of a nested program, given its two jaxprs, the types of its inputs
        and its number among the op's nested programs.
    """

    primitive: str
    num_microbatches: int
    params: Mapping[str, Any]
    micro_params: Mapping[str, Any]
    types: list[Type]
    ins: Sequence[Aval]
    micro_ins: Sequence[Aval]
    outs: Sequence[Aval]
    micro_outs: Sequence[Aval]
    values: Sequence[Any]
    body: Callable[[Any, Any, list[Type], int], list[Type]]

    def out_axis(self, k: int = 0) -> int | None:
        """Returns the batch axis of output `k`, None when its shape does not depend on the batch."""
        return batch_axis(self.outs[k].shape, self.micro_outs[k].shape, self.num_microbatches)

    def in_axis(self, k: int) -> int | None:
        """Returns the batch axis of input `k`, None when its shape does not depend on the batch."""
        return batch_axis(self.ins[k].shape, self.micro_ins[k].shape, self.num_microbatches)

    def sliced(self, power: int, axis: int, k: int = 0) -> BatchType:
        """Returns type B for output `k`, after checking that its batch axis is `axis`."""
        if self.out_axis(k) != axis:
            raise Untypable("the batch axis is lost or moved in a way this op cannot be split")
        return BatchType("B", power, axis)

    def like(self, t: Type, axis: int | None = None, k: int = 0) -> Type:
        """Returns `t` for output `k`, moved to batch axis `axis` if it is of type B."""
        if t.kind == "B":
            if axis is None:
                raise Untypable("the batch axis is lost")
            return self.sliced(t.power, axis, k)
        if t.kind != "Z" and self.out_axis(k) is not None:
            raise Untypable("its shape depends on the batch size though its inputs' do not")
        return t

    def resolved(self, k: int) -> Type:
        """Returns the type of input `k`, a zero taken as the plain value it is."""
        t = self.types[k]
        if t.kind != "Z":
            return t
        axis = self.in_axis(k)
        return REPLICATED if axis is None else BatchType("B", 0, axis)


Rule = Callable[[Site], list[Type]]


@dataclasses.dataclass(frozen=True, slots=True)
class Entry:
    """A rule and what the dispatcher must know of it.

    Attributes:
      rule: the function.
      varies: parameters that may differ between the two batch sizes; the rule looks at both.
      index_aware: whether the rule understands type `Index`.
    """

    rule: Rule
    varies: frozenset[str] = frozenset()
    index_aware: bool = False


RULES: dict[str, Entry] = {}


def rule(*primitives: str, varies: Sequence[str] = (), index_aware: bool = False):
    """Registers a rule for `primitives`."""

    def register(f: Rule) -> Rule:
        for p in primitives:
            if p in RULES:
                raise ValueError(f"primitive '{p}' has two rules")
            RULES[p] = Entry(f, frozenset(varies), index_aware)
        return f

    return register


def live(types: Sequence[Type]) -> list[Type]:
    """Returns the types that are not Z."""
    return [t for t in types if t.kind != "Z"]


def join(types: Sequence[Type], what: str) -> Type:
    """Returns the one type all `types` have, for an op that is linear in all of them together.

    Args:
      types: the types; B's axes are not looked at.
      what: the verb phrase of the refusal, e.g. "adds".

    Raises:
      Untypable: there is none.
    """
    some = live(types)
    if not some:
        return ZERO
    first = some[0]
    if all(t == first for t in some):
        return first
    if any(t.kind == "S" for t in some):
        if any(t.kind not in "RS" for t in some):
            raise Untypable(f"it {what} {SUM_WITH_EXAMPLES}")
        powers = {t.power if t.kind == "S" else t.power + 1 for t in some}
        if len(powers) > 1:
            raise Untypable(
                f"it {what} a sum over the batch and a term that is not scaled the same way "
                "(one grows with the number of examples, the other does not)"
            )
        return BatchType("S", powers.pop())
    if len({t.power for t in some}) > 1:
        raise Untypable(f"it {what} terms that scale differently with the batch size")
    return next((t for t in some if t.kind == "B"), first)


def no_sums(types: Sequence[Type], what: str) -> None:
    """Raises Untypable if one of `types` is a batch sum; `what` says how the op treats it."""
    if any(t.kind == "S" for t in types):
        raise Untypable(
            f"{what} a sum or mean over the batch is not linear in it, so the microbatches' results "
            "do not add up to the whole batch's"
        )


def no_powers(types: Sequence[Type], what: str) -> None:
    """Raises Untypable if one of `types` is scaled by a power of M."""
    if any(t.power for t in types):
        raise Untypable(f"{what} a value that is scaled by the batch size is not linear in it")


def is_integer(aval: Aval) -> bool:
    return not aval.is_inexact and aval.dtype != "bool"
