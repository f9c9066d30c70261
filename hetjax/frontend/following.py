"""Functions that follow the plan of another: evaluation, averages, norms, generation."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from hetjax.frontend.tracing import Traced
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Aval
from hetjax.ir.plan import Plan
from hetjax.ir.program import Program
from hetjax.passes.cut_stages import meshes_of
from hetjax.passes.fragments import build_program
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.partition import exchanged_bytes
from hetjax.passes.pipeline import analyse, lower
from hetjax.passes.placement import place
from hetjax.passes.plan_stages import batch_size_of

if TYPE_CHECKING:
    from hetjax.frontend.entry import Entry
    from hetjax.frontend.parallel_function import ParallelFunction


def follow_bundle(traced: Traced, leader: ParallelFunction) -> Bundle:
    """Returns the lowered bundle of a function whose leaves stay where the leader keeps them.

    Leaves correspond by the end of their path and their type ("params/block_0/attn/kernel" of any
    argument is that of the leader's state); the rest follows the data. One microbatch.

    Raises:
      PlanError: the leader has no plan yet.
    """
    entry = leader._latest
    if entry is None:
        raise PlanError(
            f"{leader._name()} has no plan to follow yet; call it, or plan_for(state, batch) with "
            "ShapeDtypeStructs, first"
        )
    bundle = analyse(Bundle(graph=traced.graph, cluster=leader.cluster))
    graph = bundle.graph
    if graph is None:
        raise PlanError("nothing was traced")
    paths, avals = [a.path for a in graph.inputs], [graph.avals[a.ref] for a in graph.inputs]
    found = known_homes(entry, paths, avals)
    homes = {graph.inputs[k].ref: home for k, (home, _) in found.items()}
    specs = {graph.inputs[k].ref: spec for k, (_, spec) in found.items() if any(spec)}
    micro = one_microbatch(graph)
    plan: Plan = dataclasses.replace(
        entry.plan,
        name=graph.name, num_microbatches=1, batch_size=max(1, batch_size_of(graph)), schedule="gpipe",
        state_specs=tuple(sorted((a.path, specs[a.ref]) for a in graph.inputs if a.ref in specs)),
        microbatch_reason=f"follows the plan of {entry.plan.name}",
    )
    placement = place(
        graph, micro, plan.num_stages, homes=homes, block_stages=block_stages(entry.program)
    )
    program = build_program(graph, micro, placement, meshes_of(plan))
    lowered = lower(bundle.replace(graph=graph, microbatching=micro, plan=plan, program=program))
    moved = exchanged_bytes(lowered.program) if specs and lowered.program is not None else 0
    if not specs or moved == 0:
        return lowered
    told = "bytes are" if moved is None else f"{moved:.0f} bytes a call are"
    return lowered.note(
        "following", f"{len(specs)} leaves of the state are kept split over the devices of a stage: {told} exchanged there "
        "to use them, which is in no price"
    )


def block_stages(program: Program) -> dict[str, int]:
    """Returns the stage of every module whose forward lies in one stage."""
    found: dict[str, set[int]] = {}
    for fragment in program.fragments:
        for op in fragment.ops:
            if op.region == "forward" and op.block:
                found.setdefault(op.block, set()).add(fragment.stage)
    return {block: min(stages) for block, stages in found.items() if len(stages) == 1}


def state_leaves(leader: ParallelFunction, paths: Sequence[str], avals: Sequence[Aval]) -> set[int]:
    """Returns which leaves are leaves of the leader's state."""
    return set(known_homes(leader._in_use(), paths, avals))


def known_homes(
    entry: Entry, paths: Sequence[str], avals: Sequence[Aval]
) -> dict[int, tuple[int, Any]]:
    """Returns (home, spec) of the leaves that are leaves of the leader's state, by position."""
    by_path: dict[tuple[str, Any], tuple[int, Any]] = {}
    by_tail: dict[tuple[str, Any], tuple[int, Any] | None] = {}
    homes = entry.homes()
    for leaf, (argument, aval) in zip(entry.leaves, entry.arguments()):
        home = homes.get(leaf.positions[0])
        if argument.role != "state" or home is None:
            continue
        kind = (aval.dtype, aval.shape)
        by_path[argument.path, kind] = home
        for tail in _tails(argument.path):
            known = by_tail.get((tail, kind), home)
            by_tail[tail, kind] = home if known == home else None
    out = {}
    for k, (path, aval) in enumerate(zip(paths, avals)):
        kind = (aval.dtype, aval.shape)
        found = by_path.get((path, kind)) or next(
            (by_tail[t, kind] for t in _tails(path) if by_tail.get((t, kind))), None
        )
        if found is not None:
            out[k] = found
    return out


def _tails(path: str) -> list[str]:
    """Returns the ends of a path, longest first, without its first part (the argument's name)."""
    parts = path.split("/")
    return ["/".join(parts[i:]) for i in range(1, len(parts))]
