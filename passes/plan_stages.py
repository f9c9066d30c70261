"""plan-stages: one stage per group of like devices, cut where the slowest stage is fastest.

The first planner, and the baseline that searches are measured against: it divides devices by group,
keeps the cluster's order of sites, and finds the cuts by dynamic programming.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PassError, PlanError
from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.plan import Plan, StagePlan
from hetjax.ir.program import StageMesh
from hetjax.passes.cutting import best_cuts, cut_candidates
from hetjax.passes.parameter_specs import parameter_specs
from hetjax.passes.reshard_plan import crossing_speed

Mesh = tuple[int, int]  # sizes of the axes (data, model)


@dataclasses.dataclass(frozen=True)
class Request:
    """What the user fixed; None leaves a choice to the planner.

    Attributes:
      num_stages: stages.
      mesh: (data, model) sizes: one pair for all stages, or one per stage.
      schedule: a schedule's name.
    """

    num_stages: int | None = None
    mesh: tuple[Mesh, ...] | None = None
    schedule: str | None = None


@dataclasses.dataclass(frozen=True)
class PlanStages:
    """Makes the plan, unless the bundle has one.

    Attributes:
      stages: number of stages, 0 for one per group of like devices.
    """

    name: ClassVar[str] = "plan-stages"
    summary: ClassVar[str] = "give each group of like devices a stage and balance the cuts"
    requires: ClassVar[tuple[str, ...]] = ("graph", "microbatching")

    stages: int = 0

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.plan is not None:
            return bundle
        if bundle.graph is None or bundle.cluster is None or bundle.microbatching is None:
            raise PassError(self.name, "needs a graph, a cluster and a microbatching")
        request = Request(num_stages=self.stages or None)
        plan = plan_stages(bundle.graph, bundle.microbatching, bundle.cluster, request)
        return bundle.replace(plan=plan)


def batch_size_of(graph: Graph) -> int:
    """Returns the number of examples in a step, 0 when no input has a batch axis."""
    sizes = [
        graph.avals[a.ref].shape[a.batch_axis]
        for a in graph.inputs
        if a.role == "batch" and a.batch_axis is not None
    ]
    return max(sizes, default=0)


def stage_devices(cluster: Cluster, request: Request) -> list[tuple[int, ...]]:
    """Returns the devices of each stage, every stage within one group of like devices.

    Raises:
      PlanError: the devices cannot hold the stages or meshes asked for.
    """
    groups = cluster.groups()
    sizes = _mesh_sizes(request)
    wanted = request.num_stages or (len(sizes) if len(sizes) > 1 else len(groups))
    if len(sizes) == 1:
        sizes = sizes * wanted
    if sizes and len(sizes) != wanted:
        raise PlanError(
            f"{len(sizes)} meshes are given for {wanted} stages; give one for all or one per stage"
        )
    if wanted > cluster.num_devices:
        raise PlanError(
            f"{wanted} stages need at least {wanted} devices; cluster {cluster.name!r} has "
            f"{cluster.num_devices} ({_listed(cluster)})"
        )
    if sizes:
        return _fill(cluster, sizes)
    if wanted < len(groups):  # fewer stages than groups: the strongest groups, in the cluster's order
        strength = lambda g: cluster.kind(g.kind).peak("f32") * g.num_devices  # noqa: E731
        kept = sorted(groups, key=strength, reverse=True)[:wanted]
        return [g.devices for g in groups if g in kept]
    counts = [1] * len(groups)
    for _ in range(wanted - len(groups)):  # the next stage goes where a stage would stay the strongest
        k = max(
            (k for k, g in enumerate(groups) if counts[k] < g.num_devices),
            key=lambda k: cluster.kind(groups[k].kind).peak("f32") * groups[k].num_devices / counts[k],
        )
        counts[k] += 1
    out: list[tuple[int, ...]] = []
    for group, count in zip(groups, counts):
        base, extra = divmod(group.num_devices, count)
        start = 0
        for s in range(count):
            size = base + (s < extra)
            out.append(group.devices[start : start + size])
            start += size
    return out


def _mesh_sizes(request: Request) -> list[int]:
    return [data * model for data, model in request.mesh or ()]


def _listed(cluster: Cluster) -> str:
    return ", ".join(f"{g.num_devices} x {g.kind} in {g.site}" for g in cluster.groups())


def _fill(cluster: Cluster, sizes: Sequence[int]) -> list[tuple[int, ...]]:
    """Gives each stage the next devices of the first group that still has enough."""
    groups = cluster.groups()
    free = [list(g.devices) for g in groups]
    out: list[tuple[int, ...]] = []
    at = 0
    for s, size in enumerate(sizes):
        # Spread the stages evenly over the groups, in order, and never go back to an earlier one.
        at = max(at, s * len(groups) // len(sizes))
        k = next((k for k in range(at, len(groups)) if len(free[k]) >= size), None)
        if k is None:
            k = next((k for k in range(len(groups)) if len(free[k]) >= size), None)
        if k is None:
            left = ", ".join(f"{len(f)} x {g.kind} in {g.site}" for f, g in zip(free, groups))
            raise PlanError(
                f"stage {s} asks for {size} devices of one kind; left are {left}; the meshes ask for "
                f"{sum(sizes)} devices in all, cluster {cluster.name!r} has {cluster.num_devices}"
            )
        out.append(tuple(free[k][:size]))
        del free[k][:size]
        at = k
    return out


def plan_stages(
    graph: Graph, micro: Microbatching, cluster: Cluster, request: Request,
) -> Plan:
    """Returns a plan with balanced cuts.

    Args:
      graph: the full graph, labelled and with costs.
      micro: its microbatching.
      cluster: the devices.
      request: what the user fixed.

    Raises:
      PlanError: devices cannot hold the request, or the step has too few places to cut.
    """
    groups = stage_devices(cluster, request)
    batch = batch_size_of(graph)
    per_microbatch = batch // micro.num_microbatches if batch else 0
    speeds = [sum(cluster.kind_of(d).peak("f32") for d in devices) for devices in groups]
    meshes = [
        StageMesh(f"s{s}", cluster.kind_of(d[0]).name, cluster.devices[d[0]].site, _axes(request, s, len(d), per_microbatch), d)
        for s, d in enumerate(groups)
    ]
    links = [crossing_speed(cluster, a, b, per_microbatch) for a, b in itertools.pairwise(meshes)]
    candidates = cut_candidates(graph, micro)
    if candidates.places:
        if not request.num_stages and not request.mesh:  # more groups than places to cut: fewer stages
            most = len(candidates.places) + 1
            groups, speeds, links = groups[:most], speeds[:most], links[: most - 1]
        cuts = best_cuts(
            candidates, speeds, [bytes_s for bytes_s, _ in links], [latency_s for _, latency_s in links]
        )
    else:
        cuts = []  # nothing in this step can be cut (no forward at all): everything is on one stage
    stages = []
    for s, devices in enumerate(groups):
        device = cluster.devices[devices[0]]
        axes = _axes(request, s, len(devices), per_microbatch)
        first = cuts[s - 1].cut if 0 < s <= len(cuts) else None
        if s and first is None:
            break
        stages.append(
            StagePlan(
                devices=tuple(devices), site=device.site, kind=device.kind, axes=axes, first=first,
                blocks=stage_blocks(graph, [c.op for c in cuts], s),
            )
        )
    plan = Plan(
        name=graph.name, cluster=cluster.name, cluster_hash=cluster.hash,
        num_microbatches=micro.num_microbatches, batch_size=max(1, batch),
        schedule=request.schedule or ("1f1b" if micro.num_microbatches > 1 else "gpipe"),
        stages=tuple(stages), per_microbatch=micro.accepted, microbatch_reason=microbatch_reason(micro),
        sources=(("device speed", "given"), ("op cost", "analytic")),
    )
    return dataclasses.replace(plan, state_specs=parameter_specs(graph, micro, plan))


def _axes(request: Request, s: int, size: int, per_microbatch: int) -> tuple[tuple[str, int], ...]:
    if request.mesh:
        data, model = request.mesh[s if len(request.mesh) > 1 else 0]
    else:
        data = math.gcd(size, per_microbatch) if per_microbatch else 1
        model = size // data
    return (("data", data), ("model", model))


def microbatch_reason(micro: Microbatching) -> str:
    """Returns why there are so many microbatches, for the plan."""
    if micro.num_microbatches == 1:
        return micro.refusal.reason if micro.refusal else "one microbatch needs no proof"
    if micro.accepted:
        return "per_microbatch semantics chosen by the user"
    return f"{micro.num_microbatches} asked for or chosen, proved exact"


def stage_blocks(graph: Graph, cuts: Sequence[int], s: int) -> tuple[str, ...]:
    """Returns the module paths whose forward lies in stage s, in order, as deep as tells stages apart.

    Args:
      graph: labelled.
      cuts: position of the first op of each stage but the first.
      s: the stage.
    """
    start = cuts[s - 1] if s else 0
    stop = cuts[s] if s < len(cuts) else len(graph.ops)
    forward = [(i, op.block) for i, op in enumerate(graph.ops) if op.region == "forward" and op.block]
    depth = _split_depth([block for _, block in forward], len(cuts) + 1)
    short = [_shorten(b, depth) for i, b in forward if start <= i < stop]
    names = list(dict.fromkeys(short))
    return tuple(n for n in names if not any(other.startswith(n + "/") for other in names))


def _shorten(block: str, depth: int) -> str:
    """Returns the path down to a depth, and the number with it where that is a list: "blocks/3"."""
    parts = block.split("/")
    numbered = len(parts) > depth + 1 and parts[depth + 1].isdigit()
    return "/".join(parts[: depth + 1 + numbered])


def _split_depth(blocks: Sequence[str], num_stages: int) -> int:
    """Returns the least depth at which there are two module paths a stage, or the greatest there is."""
    depth = 0
    while True:
        names = {_shorten(b, depth) for b in blocks}
        deeper = any(len(b.split("/")) > depth + 1 for b in blocks)
        if len(names) >= 2 * num_stages or not deeper:
            return depth
        depth += 1
