"""compress-crossings: activations and their gradients cross between stages in fewer bits, by explicit choice."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.dtypes import dtype_itemsize, is_inexact, long_dtype, short_dtype
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Aval, Op, Ref
from hetjax.ir.importer import import_jaxpr, inline_calls
from hetjax.ir.plan import CROSSING_DTYPES
from hetjax.ir.program import Fragment, Port, Program, Reshard, Spec
from hetjax.passes.annotate_costs import annotate_costs
from hetjax.passes.insert_reshards import with_pieces

# A value of fewer bytes a microbatch costs the latency of its link, not its bandwidth.
LEAST_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class CompressCrossings:
    """Rounds the floating values that cross once per microbatch to a narrower type for the crossing.

    Before: x4:s0>s1 carries %4:f32, which `s0/forward` gives and `s1/forward` reads.
    After:  x90:s0>s1 carries %90:bf16; `s0/forward` narrows, `s1/forward` widens before it does anything.

    Types of 8 bits are scaled by a power of two, of the value's largest element, which crosses beside
    them: gradients are far smaller than those types can hold. Sums, such as gradients of shared
    parameters, cross as they are; so does what is read by others than the microbatch's own fragments, and
    what has less than 1,024 bytes.

    Attributes:
      dtype: one of `hetjax.ir.plan.CROSSING_DTYPES`; "" takes the plan's, and does nothing where it has none.
    """

    name: ClassVar[str] = "compress-crossings"
    summary: ClassVar[str] = "send activations between stages in fewer bits"
    requires: ClassVar[tuple[str, ...]] = ("program",)

    dtype: str = ""

    def apply(self, bundle: Bundle) -> Bundle:
        program = bundle.program
        if program is None:
            raise PassError(self.name, "needs a program; run cut-stages first")
        dtype = self.dtype or (bundle.plan.crossing_dtype if bundle.plan else "")
        if not dtype:
            return bundle
        if dtype not in CROSSING_DTYPES:
            raise PassError(self.name, f"dtype is {dtype!r}; it may be {', '.join(CROSSING_DTYPES)}")
        compressed = compress_crossings(program, short_dtype(dtype))
        if compressed is program:
            return bundle
        if bundle.cluster is not None:
            cluster = bundle.cluster
            compressed = compressed.replace(reshards=tuple(
                r if r in program.reshards else with_pieces(compressed, cluster, r) for r in compressed.reshards))
        return bundle.replace(program=compressed).note(*_note(program, compressed, dtype))


def compress_crossings(program: Program, dtype: str) -> Program:
    """Returns the program with its crossings narrowed; the same object where none can be.

    Args:
      program: with specs and reshards.
      dtype: short name of the type to cross in.
    """
    work = _Work(program, dtype)
    reshards: list[Reshard] = []
    for r in program.reshards:
        reshards += work.narrowed(r) or [r]
    if tuple(reshards) == program.reshards:
        return program
    return work.program().replace(reshards=tuple(reshards))


class _Work:
    """A program while its crossings are narrowed one by one."""

    def __init__(self, program: Program, dtype: str):
        self._before, self._dtype = program, dtype
        self._fragments = {f.name: f for f in program.fragments}
        self._avals, self._micro = list(program.avals), list(program.micro_avals)
        self._sent: dict[tuple[Ref, str], tuple[Ref, ...]] = {}  # (value, who gives it) -> what crosses for it

    def program(self) -> Program:
        return self._before.replace(
            fragments=tuple(self._fragments[f.name] for f in self._before.fragments),
            avals=tuple(self._avals), micro_avals=tuple(self._micro))

    def narrowed(self, reshard: Reshard) -> list[Reshard] | None:
        """Returns the reshards in a reshard's place, having changed the fragments at both ends; None if it stays."""
        ref, aval = reshard.ref, self._micro[reshard.ref]
        if reshard.form != "micro" or not _compressible(aval, self._dtype):
            return None
        fragments = list(self._fragments.values())
        # As it was before: what crosses to several stages is given up with the first of them.
        makers = [
            self._fragments[f.name] for f in self._before.fragments
            if f.stage == reshard.source and any((p.ref, p.form) == (ref, "micro") for p in f.outputs)
        ]
        readers = [f for f in fragments if f.stage == reshard.target and any(p.ref == ref for p in f.inputs)]
        if len(makers) != 1 or not makers[0].per_microbatch or not readers:
            return None
        if not all(f.per_microbatch and p.form == "micro" for f in readers for p in f.inputs if p.ref == ref):
            return None
        sent = self._send(makers[0], reshard)
        ports = tuple(Port(r, "micro", s) for r, s in zip(sent, _specs(sent, reshard.target_spec)))
        for reader in readers:
            self._receive(reader, ref, ports)
        return [
            dataclasses.replace(
                reshard, name=f"x{r}:s{reshard.source}>s{reshard.target}", ref=r, source_spec=source, target_spec=target,
                nbytes=self._micro[r].nbytes, pieces=())
            for r, source, target in zip(sent, _specs(sent, reshard.source_spec), _specs(sent, reshard.target_spec))
        ]

    def _send(self, maker: Fragment, reshard: Reshard) -> tuple[Ref, ...]:
        """Returns what crosses in a value's place; the maker gives it from now on."""
        ref = reshard.ref
        if (ref, maker.name) in self._sent:
            return self._sent[ref, maker.name]
        ops, sent = self._ops("narrow", _region(maker), (ref,), None)
        outputs = tuple(Port(r, "micro", s) for r, s in zip(sent, _specs(sent, reshard.source_spec)))
        given = maker.outputs if self._wanted_elsewhere(ref, maker) else tuple(
            p for p in maker.outputs if (p.ref, p.form) != (ref, "micro"))
        self._fragments[maker.name] = dataclasses.replace(maker, ops=(*maker.ops, *ops), outputs=(*given, *outputs))
        self._sent[ref, maker.name] = sent
        return sent

    def _wanted_elsewhere(self, ref: Ref, maker: Fragment) -> bool:
        """Returns whether anything that stays as it is reads a value: its own stage, or a form that is not narrowed."""
        return any(r.port is not None and r.port.ref == ref for r in self._before.returns) or any(
            p.ref == ref and (f.stage == maker.stage or p.form != "micro" or not f.per_microbatch)
            for f in self._fragments.values() for p in f.inputs)

    def _receive(self, reader: Fragment, ref: Ref, ports: tuple[Port, ...]) -> None:
        ops, _ = self._ops("widen", _region(reader), tuple(p.ref for p in ports), ref)
        inputs = (*(p for p in reader.inputs if p.ref != ref), *ports)
        self._fragments[reader.name] = dataclasses.replace(reader, ops=(*ops, *reader.ops), inputs=inputs)

    def _ops(self, what: str, region: str, inputs: Sequence[Ref], output: Ref | None) -> tuple[tuple[Op, ...], tuple[Ref, ...]]:
        """Returns the ops that narrow or widen, on values of this program, and what they give.

        Args:
          what: "narrow" or "widen".
          region: of the fragment they are for.
          inputs: what they read.
          output: the value they give, None for new ones.
        """
        wide = self._micro[inputs[0] if output is None else output]
        micro = _coder(what, wide, self._dtype)
        full = _coder(what, self._avals[inputs[0] if output is None else output], self._dtype)
        names = dict(zip((a.ref for a in micro.inputs), inputs))
        if output is not None:
            names[micro.outputs[0].atom] = output  # type: ignore[index]
        ops: list[Op] = []
        for op in micro.ops:
            for r in op.outputs:
                if r not in names:
                    names[r] = len(self._micro)
                    self._micro.append(micro.avals[r])
                    self._avals.append(full.avals[r])
            ops.append(dataclasses.replace(
                op, inputs=tuple(names[a] if isinstance(a, int) else a for a in op.inputs),
                outputs=tuple(names[r] for r in op.outputs), region=region, source=""))
        return tuple(ops), tuple(names[r.atom] for r in micro.outputs)  # type: ignore[index]


def _note(before: Program, after: Program, dtype: str) -> tuple[str, str]:
    """Returns what a reader of `explain` should know of the rounding."""
    import ml_dtypes

    changed = [r for r in before.reshards if r not in after.reshards]
    narrow = [r for r in after.reshards if r not in before.reshards]
    bits = ml_dtypes.finfo(dtype).nmant
    of = "itself" if dtype == "bfloat16" else "itself, or of its tensor's largest element where it is far smaller"
    return "crossings", (
        f"{len(changed)} values cross in {dtype} by choice, {sum(r.nbytes for r in narrow)} bytes a microbatch in place of "
        f"{sum(r.nbytes for r in changed)}; each element is rounded by up to 2^-{bits + 1} of {of}, so the numbers are no "
        "longer plain jit's: hetjax check --crossing-dtype shows by how much"
    )


def _compressible(aval: Aval, dtype: str) -> bool:
    return (
        is_inexact(aval.dtype) and not aval.dtype.startswith("c") and not aval.weak_type and aval.ndim > 0
        and dtype_itemsize(aval.dtype) > dtype_itemsize(dtype) and aval.nbytes >= LEAST_BYTES)


def _region(fragment: Fragment) -> str:
    return "forward" if fragment.phase == "forward" else "backward"


def _specs(sent: Sequence[Ref], spec: Spec) -> list[Spec]:
    """Returns the sharding of what crosses: the value's own, and none for its scale."""
    return [spec, *((),) * (len(sent) - 1)]


@functools.lru_cache(maxsize=256)
def _coder(what: str, wide: Aval, dtype: str):
    """Returns the graph that narrows a value, or widens what crossed for it."""
    import jax
    import jax.numpy as jnp

    long, narrow = jnp.dtype(long_dtype(wide.dtype)), jnp.dtype(long_dtype(dtype))
    scaled = dtype_itemsize(dtype) == 1

    def narrow_one(x):
        if not scaled:
            return x.astype(narrow)
        most = jnp.max(jnp.abs(x)).astype(jnp.float32)
        # Of the powers of two that keep the largest element finite, the largest; infinities and NaN cross as NaN.
        usable = (most > 0) & jnp.isfinite(most)
        room = jnp.floor(jnp.log2(float(jnp.finfo(narrow).max) / jnp.where(usable, most, 1.0)))
        power = jnp.where(usable, jnp.clip(room, -120, 120), 0.0)
        scale = jnp.exp2(power)
        largest = float(jnp.finfo(narrow).max)
        scaled_x = x.astype(jnp.float32) * scale
        # A power of two that is off by its last bit must not take the largest element out of range.
        return jnp.where(usable, jnp.clip(scaled_x, -largest, largest), scaled_x).astype(narrow), scale

    def widen_one(*crossed):
        if not scaled:
            return crossed[0].astype(long)
        return (crossed[0].astype(jnp.float32) / crossed[1]).astype(long)

    value = jax.ShapeDtypeStruct(wide.shape, long)
    inline = jax.make_jaxpr(narrow_one)(value) if what == "narrow" else jax.make_jaxpr(widen_one)(
        *jax.tree.leaves(jax.eval_shape(narrow_one, value)))
    return annotate_costs(inline_calls(import_jaxpr(inline, name=what)))
