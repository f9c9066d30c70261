"""An outline of the search as a plan that can be lowered and run, on devices chosen one by one."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Argument, Graph
from hetjax.ir.microbatching import Microbatching
from hetjax.ir.plan import Plan, StagePlan
from hetjax.ir.program import Spec
from hetjax.passes.cost.layers import Layer
from hetjax.passes.plan_stages import batch_size_of, microbatch_reason, stage_blocks
from hetjax.passes.search.space import PLAIN, Outline, Problem


def place_outline(problem: Problem, outline: Outline) -> list[tuple[int, ...]]:
    """Returns the devices of each stage, as positions in the cluster, replica after replica.

    Large replicas are placed first, each inside a node or over whole nodes, so that whatever
    `placeable` allows is found.

    Raises:
      PlanError: the stages do not fit on the devices.
    """
    groups = {(g.site, g.kind): g for g in problem.cluster.groups()}
    free = [[list(node) for node in groups[p.site, p.kind].nodes] for p in problem.pools]
    taken: dict[tuple[int, int], list[int]] = {}
    wanted = [(-p.tensor, s, i, p) for s, g in enumerate(outline.groups) for i, p in enumerate(g.parts)]
    for _, s, i, part in sorted(wanted, key=lambda w: w[:3]):
        nodes, per_node = free[part.pool], problem.pools[part.pool].per_node
        mine = taken.setdefault((s, i), [])
        for _ in range(part.replicas):
            if part.tensor > per_node:
                whole = [n for n in nodes if len(n) == per_node][: -(-part.tensor // per_node)]
                found = [d for n in whole for d in n][: part.tensor]
                for n in whole:
                    n.clear()
            else:
                node = next((n for n in nodes if len(n) >= part.tensor), [])
                found = node[: part.tensor]
                del node[: part.tensor]
            if len(found) < part.tensor:
                raise PlanError(f"stage {s} finds no {part.tensor} devices near each other for a replica")
            mine += found
    return [
        tuple(d for i in range(len(g.parts)) for d in taken[s, i]) for s, g in enumerate(outline.groups)
    ]


def plan_of_outline(
    problem: Problem, outline: Outline, layers: Sequence[Layer], graph: Graph, micro: Microbatching, *,
    tensor_specs: Callable[[int], Mapping[str, tuple[int, Spec]]], homes: Mapping[str, int],
    schedule: str | None = None,
    seed: int | None = None, evaluations: int | None = None,
) -> Plan:
    """Returns the plan that an outline stands for; its numbers are written when it is lowered.

    Args:
      problem: of the search.
      outline: stages of one kind in one site each, with no options but recomputation, sharded state and
        sequences in parts: what the runtime can do.
      layers: of the table, one per layer of the problem.
      graph: the step, labelled and with costs.
      micro: proved for the outline's number of microbatches.
      tensor_specs: (layer, spec) by path of the leaves that a stage splits over so many devices.
      homes: the layer of each leaf of the state, by path.
      schedule: asked for; None takes the judge's.
      seed, evaluations: of the search.

    Raises:
      PlanError: the outline needs what plans do not have, or does not fit on the devices.
    """
    if micro.num_microbatches != outline.num_microbatches:
        raise PlanError(
            f"{micro.num_microbatches} microbatches are proved, the outline has {outline.num_microbatches}"
        )
    starts = [layers[edge] for edge in outline.edges[:-1]]
    cuts = [layer.op for layer in starts[1:]]
    stages = []
    for s, (group, devices) in enumerate(zip(outline.groups, place_outline(problem, outline))):
        kept = dataclasses.replace(group.options, recompute=False, sharding="none", sequence=False)
        if len(group.parts) != 1 or kept != PLAIN:
            raise PlanError(f"stage {s} of the outline has unlike replicas or options, which no plan has")
        part, pool = group.parts[0], problem.pools[group.parts[0].pool]
        axes = (("data", part.replicas), ("model", part.tensor))
        first = starts[s].first if s else None
        stages.append(
            StagePlan(
                devices, pool.site, pool.kind, axes, first, stage_blocks(graph, cuts, s),
                sequence=group.options.sequence and part.tensor > 1,
            )
        )
    if schedule is None:
        split = outline.num_microbatches > 1
        schedule = "virtual-1f1b" if split and len(stages) > 1 else "1f1b" if split else "gpipe"
    specs = {}
    for group, first, last in zip(outline.groups, outline.edges, outline.edges[1:]):
        tensor = group.parts[0].tensor
        if tensor > 1:
            specs |= {p: spec for p, (layer, spec) in tensor_specs(tensor).items() if first <= layer < last}
        if group.options.sharding != "none" and group.replicas > 1:
            mine = [a for a in graph.inputs if first <= homes.get(a.path, -1) < last]
            specs |= _over_replicas(graph, mine, group.replicas, specs, group.options.sharding)
    again = tuple(s for s, group in enumerate(outline.groups) if group.options.recompute)
    return Plan(
        name=graph.name, cluster=problem.cluster.name, cluster_hash=problem.cluster.hash,
        num_microbatches=micro.num_microbatches, batch_size=max(1, batch_size_of(graph)),
        schedule=schedule, stages=tuple(stages), per_microbatch=micro.accepted,
        microbatch_reason=microbatch_reason(micro), seed=seed, evaluations=evaluations,
        sources=(("device speed", "given"), ("op cost", "analytic")), state_specs=tuple(sorted(specs.items())),
        recompute="layer" if again else "", recompute_stages=() if len(again) == len(stages) else again,
    )  # fmt: skip


def _over_replicas(
    graph: Graph, leaves: Sequence[Argument], replicas: int, specs: Mapping[str, Spec], sharding: str
) -> dict[str, Spec]:
    """Returns specs by path that also split leaves over the replicas, each on its longest free dimension.

    Args:
      graph: the step.
      leaves: of the state of one stage.
      replicas: of the stage.
      specs: of leaves that tensor parallelism splits.
      sharding: "all", or "optimizer" for the optimizer's leaves alone; the parameters then have specs too,
        so that they do not follow their moments.
    """
    out: dict[str, Spec] = {}
    for leaf in leaves:
        shape = graph.avals[leaf.ref].shape
        spec = specs.get(leaf.path, ((),) * len(shape))
        free = [d for d, n in enumerate(shape) if not spec[d] and n >= replicas and n % replicas == 0]
        if not free:
            continue
        if sharding == "all" or "opt_state" in leaf.path:
            longest = max(free, key=lambda d: shape[d])
            spec = tuple(("data",) if d == longest else axes for d, axes in enumerate(spec))
        out[leaf.path] = spec
    return out
