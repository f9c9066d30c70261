"""Checks a proof by numbers: runs a step whole and in microbatches, and compares every value.

The proof stands on the rules; this stands on arithmetic alone. It follows the types literally, so a
wrong rule shows as a value that is not what its type says.
"""

from __future__ import annotations

import dataclasses
import functools
import operator
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from hetjax.ir import _jax
from hetjax.ir.dtypes import is_key
from hetjax.ir.exporter import export_jaxpr
from hetjax.ir.graph import Graph, Op, Ref, definitions
from hetjax.ir.microbatching import BatchType, Microbatching
from hetjax.passes.prover.needs import is_parameter


@dataclasses.dataclass(frozen=True)
class Disagreement:
    """A value that its type does not describe.

    Attributes:
      ref: the value.
      type: its type.
      primitive: the op that makes it.
      position: that op's position.
      error: largest difference, relative to the value's largest element.
    """

    ref: Ref
    type: BatchType
    primitive: str
    position: int
    error: float


def replay(
    full: Graph, proof: Microbatching, values: Sequence[Any], tolerance: float = 1e-9
) -> list[Disagreement]:
    """Returns the values for which whole and microbatched runs differ.

    Args:
      full: the step at the whole batch; every op carries its equation.
      proof: what `prove` returned, without refusal.
      values: one array per input of `full`; captured arrays may be left out.
      tolerance: allowed difference, relative to a value's largest element, or to a thousandth of
        the largest value anywhere where that is more: what should be zero is rounding noise.
    """
    inputs = dict(zip((a.ref for a in full.inputs), values)) | dict(full.consts)
    whole = _run(full.ops, full, inputs)
    early, parts = _microbatches(full, proof, {**inputs, **{r: whole[r] for r in proof.resliced}})
    found = _Comparison(full, proof, whole, tolerance)
    for i, op in enumerate(full.ops):
        for r in op.outputs:
            if r in early:
                found.compare(i, r, early[r])
            elif r in proof.resliced:
                continue  # made at full batch: compared with the step level, below
            elif proof.types[r].kind != "U":
                found.compare_parts(i, r, [part[r] for part in parts])
    # A value that agrees with its type is the whole value: the step level starts from those.
    late = _step_level(full, proof, {**inputs, **whole})
    for i, op in enumerate(full.ops):
        for r in op.outputs:
            if r in late:
                found.compare(i, r, late[r])
    return found.disagreements


def execute(full: Graph, proof: Microbatching, values: Sequence[Any]) -> list[Any]:
    """Returns the results of a step run in microbatches, put together by their types alone.

    Args:
      full: the step at the whole batch.
      proof: what `prove` returned, without refusal or accepted. State that is chained is averaged.
      values: one array per input of `full`; captured arrays may be left out.
    """
    inputs = dict(zip((a.ref for a in full.inputs), values)) | dict(full.consts)
    if proof.resliced:
        # All forwards, then what the head makes of them; the backwards follow with slices of that.
        inputs |= {r: v for r, v in _put_together(full, proof, inputs).items() if r in proof.resliced}
    joined = _put_together(full, proof, inputs)
    return [
        joined[r.atom] if isinstance(r.atom, int) else np.asarray(r.atom.value) for r in full.outputs
    ]


def _put_together(full: Graph, proof: Microbatching, inputs: Mapping[Ref, Any]) -> dict[Ref, Any]:
    """Returns every value at full batch, by the types; where `inputs` lack resliced values, what is had without them."""
    early, parts = _microbatches(full, proof, inputs)
    joined = {**inputs, **early}
    for op in full.ops:
        for r in op.outputs:
            if r not in joined and r in parts[0] and not _at_full_batch(proof, r):
                joined[r] = _joined([part[r] for part in parts], proof.types[r])
    joined.update(_step_level(full, proof, joined))
    return joined


def _at_full_batch(proof: Microbatching, ref: Ref) -> bool:
    return proof.types[ref].kind == "U" or ref in proof.resliced


def _without(ops: Sequence[Op], missing: set[Ref]) -> list[Op]:
    """Returns the ops that do not wait, through any number of others, for refs that are missing."""
    lost, out = set(missing), []
    for op in ops:
        if lost & set(op.refs):
            lost.update(op.outputs)
        else:
            out.append(op)
    return out


def _microbatches(
    full: Graph, proof: Microbatching, inputs: Mapping[Ref, Any]
) -> tuple[dict[Ref, Any], list[dict[Ref, Any]]]:
    """Returns the hoisted values, and every microbatch's values."""
    early = _hoisted_values(full, proof, inputs)
    late = {r for r, t in enumerate(proof.types) if t.kind == "U"} | proof.hoisted | proof.resliced
    ops = [op for op in proof.graph.ops if not late & set(op.outputs)]
    given = {**inputs, **early}
    ops = _without(ops, set(proof.resliced) - set(given))
    return early, [
        _run(ops, proof.graph, _slices(proof, given, m)) for m in range(proof.num_microbatches)
    ]


def _step_level(full: Graph, proof: Microbatching, env: Mapping[Ref, Any]) -> dict[Ref, Any]:
    """Returns the values of kind U, computed at full batch from the others."""
    ops = [op for op in full.ops if any(_at_full_batch(proof, r) for r in op.outputs)]
    known, made = set(env), {r for op in ops for r in op.outputs}
    ops = _without(ops, {r for op in ops for r in op.refs} - known - made)
    made = {r for op in ops for r in op.outputs}
    out = _run(ops, full, {r: v for r, v in env.items() if r not in made})
    return {r: out[r] for r in made}


def _joined(parts: list[Any], t: BatchType) -> Any:
    import jax.numpy as jnp

    if len(parts) == 1:
        return parts[0]
    scale = float(len(parts)) ** -t.power
    if t.kind == "B":
        whole = jnp.concatenate(parts, t.axis)
    elif t.kind == "S":
        whole = functools.reduce(operator.add, parts)
    else:
        whole = parts[-1]
    return whole if scale == 1 else (whole * scale).astype(whole.dtype)


def _run(ops: Sequence[Op], graph: Graph, env: Mapping[Ref, Any]) -> dict[Ref, Any]:
    """Returns every value the ops define, and those of `env`."""
    read = dict.fromkeys(r for op in ops for r in op.refs)
    made = [r for op in ops for r in op.outputs]
    defined = set(made)
    inputs = [r for r in read if r not in defined]
    closed = export_jaxpr("replay", ops, inputs, made, graph.avals)
    # Not compiled as a whole: with every value a result, that takes longer than running it.
    results = _jax.jaxpr_function(closed)(*(env[r] for r in inputs))
    return {**env, **dict(zip(made, results))}


def _hoisted_values(full: Graph, proof: Microbatching, inputs: Mapping[Ref, Any]) -> dict[Ref, Any]:
    """Computes hoisted values from what may be had before the first microbatch: no parameters."""
    defined, needed, stack = definitions(full), set(), list(proof.hoisted)
    arguments = {a.ref: a for a in full.inputs}
    while stack:
        r = stack.pop()
        if r in arguments:
            if is_parameter(arguments[r], full.avals[r]):
                raise ValueError(f"a hoisted value reads the parameter '{arguments[r].path}'")
        elif defined[r] not in needed:
            needed.add(defined[r])
            stack.extend(full.ops[defined[r]].refs)
    env = _run([full.ops[i] for i in sorted(needed)], full, inputs)
    return {r: env[r] for r in proof.hoisted}


def _slices(proof: Microbatching, env: Mapping[Ref, Any], m: int) -> dict[Ref, Any]:
    return {r: _part(v, proof.types[r], m, proof.num_microbatches) for r, v in env.items()}


def _part(value: Any, t: BatchType, m: int, num_microbatches: int) -> Any:
    if t.kind != "B":
        return value
    size = value.shape[t.axis] // num_microbatches
    at = [slice(None)] * len(value.shape)
    at[t.axis or 0] = slice(m * size, (m + 1) * size)
    return value[tuple(at)]


def _plain(value: Any) -> np.ndarray:
    import jax

    if hasattr(value, "dtype") and is_key(str(value.dtype)):
        return np.asarray(jax.random.key_data(value))
    array = np.asarray(value)
    return array if array.dtype.kind in "biufc" else array.astype(np.float64)


# Values above this are masks, not data.
_MASK = 1e6


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; places where both are the same infinity or both NaN do not count."""
    with np.errstate(invalid="ignore"):
        same = (a == b) | ((a != a) & (b != b))
        gap = np.abs(np.where(same, 0, a) - np.where(same, 0, b))
    gap = np.where(np.isnan(gap), np.inf, gap)
    return float(np.max(gap, initial=0.0))


def _largest(array: np.ndarray) -> float:
    return float(np.max(np.abs(array), initial=0.0, where=np.isfinite(array)))


@dataclasses.dataclass
class _Comparison:
    full: Graph
    proof: Microbatching
    whole: Mapping[Ref, Any]
    tolerance: float
    disagreements: list[Disagreement] = dataclasses.field(default_factory=list)

    @functools.cached_property
    def floor(self) -> float:
        """The size below which a value is taken for noise; masks of -1e9 and the like do not count."""
        sizes = [_largest(_plain(v)) for r, v in self.whole.items() if self.full.avals[r].is_inexact]
        return 1e-3 * max((s for s in sizes if s < _MASK), default=1e-27)

    def compare_parts(self, position: int, ref: Ref, parts: list[Any]) -> None:
        """Compares a value's parts with what its type says of the whole value."""
        t, count, whole = self.proof.types[ref], self.proof.num_microbatches, self.whole[ref]
        if t.kind == "S":
            total = np.sum([_plain(p) for p in parts], axis=0)
            self._check(position, ref, total, whole, t.power, whole)
        elif t.kind == "B" and ref not in self.proof.positions:
            for m, part in enumerate(parts):
                self._check(position, ref, part, _part(whole, t, m, count), t.power, whole)
        elif t.kind in "RZ":
            for part in parts:
                self._check(position, ref, part, whole, t.power, whole)

    def compare(self, position: int, ref: Ref, value: Any) -> None:
        self._check(position, ref, value, self.whole[ref], 0, self.whole[ref])

    def _check(self, position: int, ref: Ref, got: Any, whole: Any, power: int, scale_of: Any) -> None:
        a, b = _plain(got), _plain(whole)
        factor = float(self.proof.num_microbatches) ** power
        if a.shape != b.shape:
            error = float("inf")
        elif a.dtype.kind in "fc" or power:
            scale = max(_largest(_plain(scale_of)), self.floor)
            error = _distance(a / factor, b) / scale
        else:
            error = 0.0 if np.array_equal(a, b) else float("inf")
        if error > self.tolerance:
            op = self.full.ops[position]
            self.disagreements.append(
                Disagreement(ref, self.proof.types[ref], op.primitive, position, error)
            )
