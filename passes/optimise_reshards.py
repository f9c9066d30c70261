"""optimise-reshards: small ops move to where fewer bytes cross; a site gets a value once; free receivers take shares."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Op, Ref
from hetjax.ir.program import Fragment, Port, Program, Reshard, Spec
from hetjax.passes.free_specs import free_specs
from hetjax.passes.insert_reshards import find_reshards, with_pieces

# Ops on one value that cost next to nothing: what they make is larger, or smaller, than what they read.
_GROWING = frozenset({"convert_element_type", "broadcast_in_dim"})
_SHRINKING = frozenset({
    "convert_element_type", "slice", "squeeze", "reduce_sum", "reduce_max", "reduce_min", "reduce_and", "reduce_or",
    "argmax", "argmin",
})  # fmt: skip


@dataclasses.dataclass(frozen=True)
class OptimiseReshards:
    """Makes fewer bytes cross between stages, and each value cross once between two sites.

    Before: `s0/forward` widens %4:bf16 to %5:f32, and x5:s0>s1 carries it.
    After:  x4:s0>s1 carries half the bytes, and `s1/forward` widens; so with broadcasts. Where the
    receiver first narrows, slices or reduces a value, the sender does so instead.

    Before: x2:s0>s1 and x2:s0>s2, with s1 and s2 in another site than s0.
    After:  x2:s0>s1 and x2:s1>s2.

    Before: x2:s0>s1 brings four devices a whole value, of which they only take the mean of squares.
    After:  it brings each a quarter; the stage's ports say so.
    """

    name: ClassVar[str] = "optimise-reshards"
    summary: ClassVar[str] = "move casts, slices and reductions to where fewer bytes cross, cross between sites once"
    requires: ClassVar[tuple[str, ...]] = ("program",)

    def apply(self, bundle: Bundle) -> Bundle:
        program = bundle.program
        if program is None:
            raise PassError(self.name, "needs a program; run cut-stages first")
        if not program.reshards:
            return bundle
        moved = move_casts(program)
        if moved is not program:
            found = find_reshards(moved)
            moved = moved.replace(reshards=tuple(
                found if bundle.cluster is None else (with_pieces(moved, bundle.cluster, r) for r in found)))
        if bundle.cluster is not None:
            moved = free_specs(cross_once(moved, bundle.cluster), bundle.cluster)
        return bundle if moved is program else bundle.replace(program=moved)


def move_casts(program: Program) -> Program:
    """Returns the program with casts, broadcasts, slices and reductions where fewer bytes cross.

    Reshards are those of before; find them anew. The same object where nothing moves.
    """
    for reshard in program.reshards:
        if reshard.form != "micro":
            continue
        changed = _widen_late(program, reshard) or _narrow_early(program, reshard)
        if changed is not None:
            again = changed.replace(reshards=tuple(find_reshards(changed)))
            return move_casts(again)
    return program


def _one_to_one(op: Op, names: frozenset[str]) -> bool:
    return op.primitive in names and len(op.refs) == 1 and len(op.inputs) == 1 and len(op.outputs) == 1


def _spec_before(op: Op, shape: tuple[int, ...], after: tuple[int, ...], spec: Spec) -> Spec:
    """Returns how a value of `shape` is split so that a growing op gives `spec` without a collective."""
    if op.primitive == "convert_element_type":
        return spec
    places = op.param("broadcast_dimensions")
    return tuple(spec[d] if n == after[d] else () for n, d in zip(shape, places))


def _spec_after(op: Op, shape: tuple[int, ...], after: tuple[int, ...], spec: Spec) -> Spec | None:
    """Returns how the result of a shrinking op on a value of `shape` is split; None if that takes a collective."""
    if op.primitive == "convert_element_type":
        return spec
    if op.primitive == "slice":
        whole = all(not axes or n == m for axes, n, m in zip(spec, shape, after))
        return spec if whole else None
    gone = {*op.param("dimensions" if op.primitive == "squeeze" else "axes")}
    if any(spec[d] for d in gone):
        return None
    return tuple(axes for d, axes in enumerate(spec) if d not in gone)


def _maker(program: Program, reshard: Reshard) -> tuple[Fragment, Port] | None:
    for f in program.fragments:
        for p in f.outputs:
            if f.stage == reshard.source and p.ref == reshard.ref and p.form == "micro":
                return f, p
    return None


def _readers(program: Program, stage: int, ref: Ref) -> list[tuple[Fragment, Port]]:
    return [(f, p) for f in program.fragments if f.stage == stage for p in f.inputs if p.ref == ref]


def _swap(program: Program, changes: dict[str, Fragment]) -> Program:
    return program.replace(fragments=tuple(changes.get(f.name, f) for f in program.fragments))


def _needed(program: Program, ref: Ref, besides: int) -> bool:
    """Returns whether anything but the fragments of one stage needs a value given by a fragment."""
    return any(p.ref == ref for f in program.fragments if f.stage != besides for p in f.inputs) or any(
        r.port is not None and r.port.ref == ref for r in program.returns)


def _given(fragment: Fragment, ref: Ref, spec: Spec) -> tuple[Port, ...]:
    """Returns a fragment's outputs with one more value."""
    if any(p.ref == ref and p.form == "micro" for p in fragment.outputs):
        return fragment.outputs
    return (*fragment.outputs, Port(ref, "micro", spec))


def _widen_late(program: Program, reshard: Reshard) -> Program | None:
    """Returns the program with a cast or broadcast that grows a value done by the receiver, None where none is."""
    made, readers = _maker(program, reshard), _readers(program, reshard.target, reshard.ref)
    if made is None or any(p.form != "micro" or not f.per_microbatch for f, p in (made, *readers)):
        return None  # what is made at full batch and sliced is another op's result there
    fragment, out = made
    cast = next((op for op in fragment.ops if reshard.ref in op.outputs), None)
    if cast is None or not _one_to_one(cast, _GROWING):
        return None
    narrow = cast.refs[0]
    avals = program.micro_avals
    shapes = avals[narrow].shape, avals[reshard.ref].shape
    known = {r for op in fragment.ops for r in op.outputs} | {p.ref for p in fragment.inputs}
    if avals[narrow].nbytes >= avals[reshard.ref].nbytes or narrow not in known:
        return None
    if any(len(p.spec) != len(shapes[1]) for p in (out, *(p for _, p in readers))):
        return None  # a spec that no pass has decided yet
    given = _given(fragment, narrow, _spec_before(cast, *shapes, out.spec))
    others = any(
        p.ref == reshard.ref for f in program.fragments for p in f.inputs
        if f.name not in {r.name for r, _ in readers}
    ) or any(r.port is not None and r.port.ref == reshard.ref for r in program.returns)
    if not others:
        given = tuple(p for p in given if not (p.ref == reshard.ref and p.form == "micro"))
    changes = {fragment.name: dataclasses.replace(fragment, outputs=given)}
    for reader, port in readers:
        inputs = tuple(p for p in reader.inputs if p is not port and not (p.ref == narrow and p.form == "micro"))
        inputs = (*inputs, Port(narrow, "micro", _spec_before(cast, *shapes, port.spec)))
        changes[reader.name] = dataclasses.replace(reader, inputs=inputs, ops=(cast, *reader.ops))
    return _swap(program, changes)


def _narrow_early(program: Program, reshard: Reshard) -> Program | None:
    """Returns the program with a receiver's op that shrinks a value done by the sender, None where none is."""
    made, readers = _maker(program, reshard), _readers(program, reshard.target, reshard.ref)
    if made is None or not made[0].per_microbatch or len(readers) != 1 or readers[0][1].form != "micro" or not readers[0][0].per_microbatch:
        return None
    (reader, port), (fragment, out) = readers[0], made
    uses = [op for op in reader.ops if reshard.ref in op.refs]
    passed_on = any(p.ref == reshard.ref for p in reader.outputs)
    if len(uses) != 1 or passed_on or not _one_to_one(uses[0], _SHRINKING):
        return None
    cast = uses[0]
    narrow, avals = cast.outputs[0], program.micro_avals
    shapes = avals[reshard.ref].shape, avals[narrow].shape
    if avals[narrow].nbytes >= avals[reshard.ref].nbytes or _needed(program, narrow, reader.stage):
        return None
    if any(len(p.spec) != len(shapes[0]) for p in (out, port)):
        return None  # a spec that no pass has decided yet
    sent, taken = (_spec_after(cast, *shapes, p.spec) for p in (out, port))
    if sent is None or taken is None:
        return None
    outputs = (*fragment.outputs, Port(narrow, "micro", sent))
    still = any(
        p.ref == reshard.ref for f in program.fragments if f.name != reader.name for p in f.inputs
    ) or any(r.port is not None and r.port.ref == reshard.ref for r in program.returns)
    if not still:
        outputs = tuple(p for p in outputs if not (p.ref == reshard.ref and p.form == "micro"))
    inputs = tuple(Port(narrow, "micro", taken) if p is port else p for p in reader.inputs)
    return _swap(program, {
        fragment.name: dataclasses.replace(fragment, ops=(*fragment.ops, cast), outputs=outputs),
        reader.name: dataclasses.replace(reader, inputs=inputs, ops=tuple(op for op in reader.ops if op is not cast)),
    })


def cross_once(program: Program, cluster: Cluster) -> Program:
    """Returns the program in which a value goes to each far site once, and on from the stage there.

    The stage that got it hands it on after the fragment that reads it. The same object where each
    value crosses once already.
    """
    site = [cluster.devices[m.devices[0]].site for m in program.meshes]
    groups: dict[tuple[Ref, int, str], list[Reshard]] = {}
    for r in program.reshards:
        if r.form == "micro" and site[r.source] != site[r.target]:
            groups.setdefault((r.ref, r.source, site[r.target]), []).append(r)
    fragments = {f.name: f for f in program.fragments}
    instead: dict[str, Reshard] = {}
    for (ref, _, _), several in groups.items():
        readers = {r.target: [f for f in program.fragments if f.stage == r.target and any(p.ref == ref for p in f.inputs)] for r in several}
        first = [fs[0] for fs in readers.values()]
        if len(several) < 2 or len({f.phase for f in first}) > 1 or not first[0].per_microbatch:
            continue
        # Forwards run up the stages, backwards down: the first to read it can hand it on in time.
        several.sort(key=lambda r: r.target, reverse=first[0].phase == "backward")
        head = several[0]
        reader = fragments[readers[head.target][0].name]
        fragments[reader.name] = dataclasses.replace(
            reader, outputs=(*reader.outputs, Port(ref, "micro", head.target_spec)))
        for r in several[1:]:
            instead[r.name] = dataclasses.replace(
                r, name=f"x{ref}:s{head.target}>s{r.target}", source=head.target, source_spec=head.target_spec, pieces=())
    if not instead:
        return program
    changed = program.replace(fragments=tuple(fragments[f.name] for f in program.fragments))
    return changed.replace(reshards=tuple(
        with_pieces(changed, cluster, instead[r.name]) if r.name in instead else r for r in program.reshards))
