"""insert-reshards: makes every value that crosses from one stage to another a reshard."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.dtypes import dtype_itemsize
from hetjax.ir.errors import PassError
from hetjax.ir.graph import Ref
from hetjax.ir.program import Fragment, Port, Program, Reshard
from hetjax.passes.reshard_plan import plan_naive, plan_reshard

# Inside one node pieces must be this much quicker than a copy per device: every piece costs a dispatch.
WORTH = 0.9


@dataclasses.dataclass(frozen=True)
class InsertReshards:
    """Adds one reshard per value, form and pair of stages, and plans its pieces.

    Before: `s1/forward` reads %40, which only `s0/forward` gives.
    After:  a reshard `x40:s0>s1` carries it, once per microbatch, in pieces that cross once. Between
    devices of one node, where a copy per device costs no more, it has none. Without a cluster none has.
    """

    name: ClassVar[str] = "insert-reshards"
    summary: ClassVar[str] = "carry values between stages"
    requires: ClassVar[tuple[str, ...]] = ("program",)

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.program is None:
            raise PassError(self.name, "needs a program; run cut-stages first")
        reshards = tuple(find_reshards(bundle.program))
        if bundle.cluster is not None:
            reshards = tuple(with_pieces(bundle.program, bundle.cluster, r) for r in reshards)
        if reshards == bundle.program.reshards:
            return bundle
        return bundle.replace(program=bundle.program.replace(reshards=reshards))


def source_form(form: str) -> str:
    """Returns the form in which a fragment gives what another reads in `form`."""
    return "micro" if form in ("concat", "last") else form


def makers(program: Program) -> dict[tuple[Ref, str], list[tuple[Fragment, Port]]]:
    """Returns, by (ref, form given), the fragments that give it and their ports, in run order."""
    out: dict[tuple[Ref, str], list[tuple[Fragment, Port]]] = {}
    for fragment in program.fragments:
        for port in fragment.outputs:
            out.setdefault((port.ref, port.form), []).append((fragment, port))
    return out


def find_reshards(program: Program) -> Iterator[Reshard]:
    """Yields the reshards that the fragments' inputs ask for, in the order of their readers."""
    given = makers(program)
    seen: dict[str, str] = {}
    for fragment in program.fragments:
        for port in fragment.inputs:
            sources = given.get((port.ref, source_form(port.form)), [])
            if not sources or any(f.stage == fragment.stage for f, _ in sources):
                continue
            source, out = sources[0]
            form = "micro" if port.form == "concat" else port.form
            suffix = "" if form in ("micro", "step") else f".{form}"
            name = f"x{port.ref}{suffix}:s{source.stage}>s{fragment.stage}"
            if seen.get(name, form) != form:  # whole for one reader, in slices for another
                name = f"x{port.ref}.{form}:s{source.stage}>s{fragment.stage}"
            if name in seen:
                continue
            seen[name] = form
            avals = program.avals if form == "step" else program.micro_avals
            yield Reshard(
                name, port.ref, form, source.stage, fragment.stage, out.spec, port.spec,
                avals[port.ref].nbytes,
            )


def with_pieces(program: Program, cluster: Cluster, reshard: Reshard) -> Reshard:
    """Returns a reshard with the pieces the planner chose, () where whole copies are as good.

    Args:
      program: whose reshard it is.
      cluster: where its meshes' devices are.
      reshard: with specs at both ends.
    """
    aval = (program.avals if reshard.form == "step" else program.micro_avals)[reshard.ref]
    if len(reshard.source_spec) != aval.ndim or len(reshard.target_spec) != aval.ndim:
        return dataclasses.replace(reshard, pieces=())  # a spec that no pass has decided yet
    source, target = program.meshes[reshard.source], program.meshes[reshard.target]
    ends = (cluster, source, reshard.source_spec, target, reshard.target_spec, aval.shape, dtype_itemsize(aval.dtype))
    plan = plan_reshard(*ends)
    nodes = [{cluster.devices[d].node for d in mesh.devices} for mesh in (source, target)]
    near = len(nodes[0] | nodes[1]) == 1
    if near and plan.seconds > plan_naive(*ends).seconds * WORTH:
        return dataclasses.replace(reshard, pieces=())
    return dataclasses.replace(reshard, pieces=plan.pieces)
