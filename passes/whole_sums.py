"""whole-sums: what an op adds up is whole on every device that adds it, in plain jit's order."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Op, Ref
from hetjax.ir.importer import encoded_params
from hetjax.ir.program import Fragment, Program, StageMesh
from hetjax.passes.constraint_ops import Entry, constraint_equation, constraint_op
from hetjax.passes.partition import exchanged_bytes

# Reductions whose result depends on the order, and the parameter that holds what they reduce.
_REDUCTIONS = {"reduce_sum": "axes", "reduce_prod": "axes", "reduce": "dimensions"}
_RUNNING = frozenset({"cumsum", "cumprod", "cumlogsumexp"})


@dataclasses.dataclass(frozen=True)
class WholeSums:
    """Constrains every dimension that an op sums over to be on each device of its stage.

    Before: each device of a stage adds the examples it has, and the parts are added: `all_reduce` of a gradient.
    After:  the examples are gathered (`all_gather` of activations) and added in one order, that of one device.
    Examples stay split wherever nothing is summed over them. That sums over the batch wait for all microbatches
    is the work of cut-stages, where the plan asks for whole sums.
    """

    name: ClassVar[str] = "whole-sums"
    summary: ClassVar[str] = "let no device add a part of a sum: gather what is added, in plain jit's order"
    requires: ClassVar[tuple[str, ...]] = ("program",)

    def apply(self, bundle: Bundle) -> Bundle:
        program = bundle.program
        if program is None:
            raise PassError(self.name, "needs a program; run cut-stages and shard-stages first")
        changed = whole_sums(program)
        bundle = bundle if changed is program else bundle.replace(program=changed)
        for sentence in _told(program, changed):
            bundle = bundle.note("sums", sentence)
        return bundle


def whole_sums(program: Program) -> Program:
    """Returns the program with what its ops sum over constrained; the same object where no stage has two devices."""
    work = _Work(program)
    fragments = tuple(work.fragment(f) for f in program.fragments)
    if all(a is b for a, b in zip(fragments, program.fragments)):
        return program
    return program.replace(fragments=fragments, avals=tuple(work.avals), micro_avals=tuple(work.micro))


def summed_dims(eqn: Any) -> list[tuple[int, tuple[int, ...]]]:
    """Returns (position of the operand, dimensions that are summed over) of an equation; [] where none is."""
    name, params = eqn.primitive.name, eqn.params
    ndim = lambda k: len(eqn.invars[k].aval.shape)  # noqa: E731
    if name in _REDUCTIONS:
        return [(k, tuple(params[_REDUCTIONS[name]])) for k in range(len(eqn.invars)) if ndim(k)]
    if name in _RUNNING:
        return [(0, (params["axis"],))]
    if name == "dot_general":
        left, right = params["dimension_numbers"][0]
        return [(0, tuple(left)), (1, tuple(right))]
    if name == "conv_general_dilated":
        numbers = params["dimension_numbers"]
        return [(0, tuple(numbers.lhs_spec[1:])), (1, tuple(numbers.rhs_spec[1:]))]
    if name == "scatter-add":
        window = params["dimension_numbers"].update_window_dims
        return [(1, tuple(range(ndim(1)))), (2, tuple(d for d in range(ndim(2)) if d not in window))]
    return []


class _Work:
    """A program while its fragments are changed one by one."""

    def __init__(self, program: Program):
        self.program = program
        self.avals, self.micro = list(program.avals), list(program.micro_avals)

    def fragment(self, fragment: Fragment) -> Fragment:
        mesh = self.program.meshes[fragment.stage]
        if len(mesh.devices) == 1:
            return fragment
        ops: list[Op] = []
        for op in fragment.ops:
            ops += self.constrained(_nested(op, mesh), mesh, fragment.per_microbatch)
        same = len(ops) == len(fragment.ops) and all(a is b for a, b in zip(ops, fragment.ops))
        return fragment if same else dataclasses.replace(fragment, ops=tuple(ops))

    def constrained(self, op: Op, mesh: StageMesh, per_microbatch: bool) -> list[Op]:
        """Returns the op, after a constraint on each operand that it sums over."""
        before, read = [], list(op.inputs)
        for k, dims in summed_dims(op.eqn) if op.eqn is not None else ():
            ref = read[k]
            if not dims or not isinstance(ref, int):
                continue
            aval = (self.micro if per_microbatch else self.avals)[ref]
            read[k] = whole = self.value(ref)
            before.append(constraint_op(aval, ref, whole, _entries(aval.ndim, dims), mesh.axes, op))
        return [*before, dataclasses.replace(op, inputs=tuple(read))] if before else [op]

    def value(self, like: Ref) -> Ref:
        self.avals.append(self.avals[like])
        self.micro.append(self.micro[like])
        return len(self.avals) - 1


def _entries(ndim: int, dims: Sequence[int]) -> tuple[Entry, ...]:
    return tuple(() if d in dims else None for d in range(ndim))


# -- loops, checkpointed blocks, branches, calls: what they sum inside ---------------------------------------------


def _nested(op: Op, mesh: StageMesh) -> Op:
    if op.eqn is None:
        return op
    eqn = _nested_equation(op.eqn, mesh)
    if eqn is op.eqn:
        return op
    return dataclasses.replace(op, eqn=eqn, params=tuple(sorted(encoded_params(eqn.params).items())))


def _nested_equation(eqn: Any, mesh: StageMesh) -> Any:
    return _jax.with_inner_jaxprs(eqn, lambda inner: _inner(inner, mesh))


def _inner(jaxpr: Any, mesh: StageMesh) -> Any:
    eqns: list[Any] = []
    for eqn in jaxpr.eqns:
        before, read = [], list(eqn.invars)
        for k, dims in summed_dims(eqn):
            if dims and not _jax.is_literal(read[k]):
                whole = _jax.new_var(read[k].aval)
                entries = _entries(len(whole.aval.shape), dims)
                before.append(constraint_equation(read[k], whole, entries, mesh.axes, eqn))
                read[k] = whole
        inner = _nested_equation(eqn, mesh)
        eqns += [*before, inner.replace(invars=read)] if before else [inner]
    same = len(eqns) == len(jaxpr.eqns) and all(a is b for a, b in zip(eqns, jaxpr.eqns))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _told(before: Program, after: Program) -> list[str]:
    """Returns what whole sums cost, in sentences."""
    out = []
    if after is not before:
        moved = [exchanged_bytes(p) for p in (before, after)]
        told = "" if None in moved else (
            f": {moved[1]:.0f} bytes a step are exchanged inside stages, {moved[0]:.0f} where each device adds a part"
        )
        out.append(f"no sum is split over the devices of a stage{told}")
    num = after.num_microbatches
    if num > 1:
        late = {(f.stage, p.ref) for f in after.fragments for p in f.inputs if p.form == "concat"}
        kept = num * sum(after.micro_avals[r].nbytes for _, r in late)
        out.append(f"sums over the batch wait for all {num} microbatches: {kept} bytes are kept for them until the update")
        parts = {p.ref for f in after.fragments for p in f.outputs if p.form == "sum"}
        if parts:
            out.append(f"{len(parts)} sums made inside loops over layers, beside other values, are added by microbatch")
    return out
