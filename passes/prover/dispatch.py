"""Types one op by its rule, and nested programs op by op; the conservative answer where no rule is."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np

from hetjax.ir.graph import Aval
from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import (
    REPLICATED,
    RULES,
    Index,
    NeedsWhole,
    Site,
    Type,
    Unscaled,
    Untypable,
    batch_axis,
)
from hetjax.passes.prover.pairs import Line, Pair, PairLiteral, pair_jaxprs


class Typer:
    """Applies the rules for one number of microbatches; remembers nested programs it has paired.

    Args:
      num_microbatches: M.
      strict: let a rule's own failure through instead of counting it as "cannot be typed".
    """

    def __init__(self, num_microbatches: int, strict: bool = False):
        self.num_microbatches, self.strict = num_microbatches, strict
        # The jaxprs are kept beside their pair: an id alone could be reused.
        self._pairs: dict[tuple[int, int], tuple[Any, Any, Pair]] = {}

    def line(self, line: Line, types: list[Type], avals: Sequence[Aval], micro: Sequence[Aval]) -> list[Type]:
        """Returns the types of an op's results.

        Args:
          line: the op.
          types: types of its inputs.
          avals: the program's avals at the whole batch, by ref.
          micro: the same at one microbatch.

        Raises:
          Untypable: no rule applies; `NeedsWhole` where only an index along the batch is in the way.
        """
        if not line.outputs:
            return []
        entry = RULES.get(line.primitive)
        for t in types:
            if isinstance(t, Unscaled):
                raise Untypable(t.reason)
        if line.params is not line.micro_params:
            _check_params(line, entry.varies if entry else ())
        if entry is None or not entry.index_aware:
            types = [_plain(t) for t in types]
        site = Site(
            line.primitive, self.num_microbatches, line.params, line.micro_params, types,
            [a.aval if isinstance(a, PairLiteral) else avals[a] for a in line.inputs],
            [a.aval if isinstance(a, PairLiteral) else micro[a] for a in line.inputs],
            [avals[r] for r in line.outputs], [micro[r] for r in line.outputs],
            [a.value if isinstance(a, PairLiteral) else None for a in line.inputs], self.body,
        )  # fmt: skip
        if entry is None:
            return _unknown(site, line)
        try:
            out = entry.rule(site)
        except (LookupError, TypeError, ValueError, AttributeError, AssertionError, ArithmeticError) as e:
            if self.strict:
                raise
            raise Untypable(f"its parameters have a form hetjax does not know ({type(e).__name__}: {e})") from e
        return [_checked(site, k, t) for k, t in enumerate(out)]

    def body(self, full: Any, micro: Any, types: list[Type], number: int = 0) -> list[Type]:
        """Returns the types of a nested program's results, given those of its inputs."""
        key = (id(full), id(micro))
        if key not in self._pairs:
            self._pairs[key] = (full, micro, pair_jaxprs(full, micro, self.num_microbatches))
        pair = self._pairs[key][2]
        if len(types) != len(pair.inputs):
            raise Untypable("its body takes another number of inputs")
        of: dict[int, Type] = dict(zip(pair.consts, pair.const_types))
        of.update(zip(pair.inputs, types))

        def read(a: Any) -> Type:
            return a.type if isinstance(a, PairLiteral) else of[a]

        for i, line in enumerate(pair.lines):
            try:
                outs = self.line(line, [read(a) for a in line.inputs], pair.avals, pair.micro_avals)
            except Untypable as e:
                # An index born inside cannot be taken from the whole batch: nothing inside is hoisted.
                raise Untypable(e.reason, ((number, i), *e.trail)) from e
            of.update(zip(line.outputs, outs))
        out = [read(a) for a in pair.outputs]
        if any(t.kind == "I" or isinstance(t, Unscaled) for t in out):
            raise Untypable("its body returns positions along the batch")
        return out


def _plain(t: Type) -> Type:
    """A type without `Index`, for the many rules that know none."""
    if not isinstance(t, Index):
        return t
    if t.role == "false":
        return BatchType("B", 0, t.axis)
    raise NeedsWhole("it reads positions along the batch as numbers")


def _checked(site: Site, k: int, t: Type) -> Type:
    """Every answer must fit the shapes, whatever the rule thought."""
    axis = batch_axis(site.outs[k].shape, site.micro_outs[k].shape, site.num_microbatches)
    if t.kind in "BI" and t.axis != axis:  # type: ignore[union-attr]
        raise Untypable("the batch axis is lost or moved in a way this op cannot be split")
    if t.kind in "RS" and axis is not None:
        raise Untypable("its shape depends on the batch size though its inputs' do not")
    if t.power and site.outs[k].dtype == "bool":
        raise Untypable("a truth value cannot be scaled by the batch size")
    return t


def _unknown(site: Site, line: Line) -> list[Type]:
    plain = all(t == REPLICATED or t.kind == "Z" for t in site.types)
    same = all(site.out_axis(k) is None for k in range(len(site.outs)))
    same = same and all(site.in_axis(k) is None for k in range(len(site.types)))
    if plain and same and not line.effects and _same_programs(line):
        return [REPLICATED] * len(site.outs)
    raise Untypable(f"hetjax has no rule for '{site.primitive}' on values that depend on the batch")


def _same_programs(line: Line) -> bool:
    """Whether nested programs, if any, are the same text; enough where a primitive is unknown."""
    return all(
        str(v) == str(line.micro_params[k]) for k, v in line.params.items() if _is_program(v)
    )


def _is_program(value: Any) -> bool:
    # What custom_jvp_call holds for its derivative is called through call_wrapped.
    return hasattr(value, "eqns") or hasattr(value, "jaxpr") or callable(value) or hasattr(value, "call_wrapped")


def _check_params(line: Line, varies: Collection[str]) -> None:
    for name, a in line.params.items():
        if name in varies:
            continue
        b = line.micro_params.get(name)
        if not _same(a, b):
            raise Untypable(f"its parameter '{name}' depends on the batch size ({_short(a)}, {_short(b)} at one microbatch)")


def _same(a: Any, b: Any) -> bool:
    if a is b or _is_program(a):
        return True
    if isinstance(a, (tuple, list)) and isinstance(b, (tuple, list)):
        return len(a) == len(b) and all(_same(x, y) for x, y in zip(a, b))
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(_same(v, b[k]) for k, v in a.items())
    if isinstance(a, float) and a != a:
        return b != b
    try:
        equal = a == b
        return equal if isinstance(equal, bool) else bool(np.all(equal))
    except Exception:  # an object of anybody's making; what cannot be compared is not the same
        return False


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else text[:37] + "..."
