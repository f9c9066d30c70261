"""Which received values a stage can take in any sharding, and the sharding that crosses cheapest."""

from __future__ import annotations

import dataclasses

from hetjax.ir.cluster import Cluster
from hetjax.ir.dtypes import dtype_itemsize
from hetjax.ir.graph import Ref
from hetjax.ir.program import Fragment, Port, Program, Reshard, Spec
from hetjax.passes.insert_reshards import with_pieces
from hetjax.passes.reshard_plan import cheapest_spec
from hetjax.passes.reshard_plan.planner import possible_specs

# Ops that work on each element alone, so that any sharding of what they read will do.
_ELEMENTWISE = frozenset({
    "abs", "add", "add_any", "and", "cbrt", "ceil", "clamp", "convert_element_type", "copy", "cos", "div", "eq",
    "erf", "exp", "exp2", "expm1", "floor", "ge", "gt", "integer_pow", "is_finite", "le", "log", "log1p",
    "logistic", "lt", "max", "min", "mul", "ne", "neg", "not", "or", "pow", "rem", "round", "rsqrt", "select_n",
    "sign", "sin", "sqrt", "square", "stop_gradient", "sub", "tan", "tanh", "xor",
})  # fmt: skip
_REDUCTIONS = frozenset({"reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or"})


def free_specs(program: Program, cluster: Cluster) -> Program:
    """Returns the program with every free receiver taking its value in shares, where that is quicker.

    A receiver is free when all that its stage does with a value is elementwise, ends in reductions to
    one number, or hands the value on: nothing has to be completed then. The same object where no
    reshard gains.
    """
    changed = program
    for r in program.reshards:
        now = next(x for x in changed.reshards if x.name == r.name)
        if now.form != "micro" or not is_free(changed, now.target, now.ref):
            continue
        spec = _cheapest(changed, cluster, now)
        if spec != now.target_spec:
            changed = _take(changed, cluster, now.target, now.ref, spec)
    return changed


def is_free(program: Program, stage: int, ref: Ref) -> bool:
    """Returns whether a stage can take a value that it receives every microbatch in any sharding."""
    for f in program.fragments:
        if f.stage != stage:
            continue
        forms = {p.form for p in f.inputs if p.ref == ref}
        if forms and (forms != {"micro"} or not f.per_microbatch or _needs_whole(program, f, ref)):
            return False
    return not any(r.port is not None and r.port.ref == ref for r in program.returns)


def _needs_whole(program: Program, fragment: Fragment, ref: Ref) -> bool:
    shape = program.micro_avals[ref].shape
    like = {ref}
    for op in fragment.ops:
        if not like & {*op.refs}:
            continue
        shapes = {program.micro_avals[r].shape for r in op.outputs}
        if op.primitive in _REDUCTIONS and shapes == {()}:
            continue
        if op.primitive not in _ELEMENTWISE or shapes != {shape}:
            return True
        like |= {*op.outputs}
    # What is given on is given whole; the received value itself may be handed on in its shares.
    return any(p.ref in like and p.ref != ref for p in fragment.outputs)


def _cheapest(program: Program, cluster: Cluster, r: Reshard) -> Spec:
    aval, mesh = program.micro_avals[r.ref], program.meshes[r.target]
    if len(r.target_spec) != aval.ndim or len(r.source_spec) != aval.ndim:
        return r.target_spec
    finer = [s for s in possible_specs(mesh, aval.shape) if _refines(s, r.target_spec)]
    spec, _ = cheapest_spec(
        cluster, program.meshes[r.source], r.source_spec, mesh, aval.shape, dtype_itemsize(aval.dtype),
        keep=r.target_spec, among=finer)  # fmt: skip
    return spec


def _refines(spec: Spec, coarse: Spec) -> bool:
    """Returns whether a spec splits at least as another does, on the same dimensions."""
    return all({*axes} >= {*kept} for axes, kept in zip(spec, coarse))


def _take(program: Program, cluster: Cluster, stage: int, ref: Ref, spec: Spec) -> Program:
    """Returns the program whose stage takes a value, and hands it on, with a spec."""

    def port(p: Port) -> Port:
        return dataclasses.replace(p, spec=spec) if p.ref == ref else p

    fragments = tuple(
        dataclasses.replace(f, inputs=tuple(map(port, f.inputs)), outputs=tuple(map(port, f.outputs)))
        if f.stage == stage else f
        for f in program.fragments
    )  # fmt: skip
    changed = program.replace(fragments=fragments)
    reshards = []
    for r in program.reshards:
        if r.ref == ref and r.target == stage:
            r = with_pieces(changed, cluster, dataclasses.replace(r, target_spec=spec))
        elif r.ref == ref and r.source == stage:
            r = with_pieces(changed, cluster, dataclasses.replace(r, source_spec=spec))
        reshards.append(r)
    return changed.replace(reshards=tuple(reshards))
