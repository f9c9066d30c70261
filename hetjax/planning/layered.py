"""A step cut into its layers, each on the same few devices: what tables and calibrations are made of."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence

from hetjax.ir import presets
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster, DeviceKind, Link, Node, Site
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Graph, Ref
from hetjax.ir.plan import Plan, StagePlan
from hetjax.ir.program import Program, Spec
from hetjax.passes.cost.layers import Layer, LayerMap, layer_map, step_layers
from hetjax.passes.cut_stages import meshes_of
from hetjax.passes.follow_updates import follow_updates
from hetjax.passes.fragments import build_program
from hetjax.passes.manager import run_pipeline
from hetjax.passes.parameter_specs import parameter_specs
from hetjax.passes.partition import Partition
from hetjax.passes.placement import place
from hetjax.passes.plan_stages import batch_size_of
from hetjax.planning.tensor_specs import choose_specs


@dataclasses.dataclass(frozen=True)
class Layered:
    """A step's layers at one microbatch size on one mesh.

    Attributes:
      bundle: cut at every layer; all meshes have the shape `data` x `model`.
      layers: which op belongs where.
      data, model: the mesh.
      microbatch: examples.
    """

    bundle: Bundle
    layers: LayerMap
    data: int
    model: int
    microbatch: int


def layered(step: Bundle, kind: DeviceKind, data: int, model: int, link: Link | None) -> Layered:
    """Returns the step's layers on meshes of data x model devices.

    Args:
      step: graph and microbatching.
      kind: of the devices.
      data, model: the mesh; the microbatch need not divide: what does not is replicated.
      link: between the devices; the kind's usual one when None.
    """
    graph, micro = step.graph, step.microbatching
    if graph is None or micro is None:
        raise PlanError("layers are cut from a step with its microbatching")
    layers = step_layers(graph, micro)
    cluster = rows_of(kind, len(layers), data * model, link)
    plan = _plan(graph.name, cluster, layers, data, model, micro.num_microbatches)
    batch = max(1, batch_size_of(graph))
    plan = plan.with_(batch_size=batch, per_microbatch=micro.accepted)
    plan = plan.with_(state_specs=parameter_specs(graph, micro, plan))
    cut = run_pipeline(step.replace(cluster=cluster, plan=plan), "cut-stages,shard-stages")
    return Layered(
        cut, layer_map(graph, micro, layers), data, model, batch // micro.num_microbatches
    )


@dataclasses.dataclass(frozen=True)
class LayerCut:
    """A step cut at every layer, to be split over any number of devices a layer.

    Attributes:
      step: graph and microbatching.
      kind: of the devices.
      layers: where they start.
      homes: the layer of each state leaf.
      program: fragments on one device a layer, without shardings.
    """

    step: Bundle
    kind: DeviceKind
    layers: tuple[Layer, ...]
    homes: Mapping[Ref, int]
    program: Program


def cut_layers(step: Bundle, kind: DeviceKind) -> LayerCut:
    """Returns a step cut at every layer.

    Args:
      step: graph and microbatching.
      kind: of the devices.
    """
    graph, micro = step.graph, step.microbatching
    if graph is None or micro is None:
        raise PlanError("layers are cut from a step with its microbatching")
    layers = step_layers(graph, micro)
    placement = place(graph, micro, len(layers), [layer.op for layer in layers[1:]])
    plan = _plan(graph.name, rows_of(kind, len(layers), 1, None), layers, 1, 1, micro.num_microbatches)
    program = build_program(graph, micro, placement, meshes_of(plan))
    return LayerCut(step, kind, layers, placement.homes, program)


def choose_layer_specs(
    cut: LayerCut, model: int, seconds: Callable[[Partition], float]
) -> tuple[tuple[str, Spec], ...]:
    """Returns (path, spec) of the state leaves that the layers split over so many devices; see `choose_specs`.

    Args:
      cut: the layers.
      model: devices a layer.
      seconds: what a partitioned forward takes, for ranking.
    """
    graph = cut.step.graph
    if model < 2 or graph is None:
        return ()
    return with_followers(graph, choose_specs(graph, cut.program, cut.homes, model, seconds))


def split_layers(
    cut: LayerCut, model: int, specs: tuple[tuple[str, Spec], ...], *, sequence: bool = False
) -> Bundle:
    """Returns the layers, each split over so many devices.

    Args:
      cut: the layers.
      model: devices a layer.
      specs: of the state, by path.
      sequence: whether they split what that leaves whole, too.
    """
    graph, micro = cut.step.graph, cut.step.microbatching
    assert graph is not None and micro is not None
    cluster = rows_of(cut.kind, len(cut.layers), model, None)
    plan = _plan(graph.name, cluster, cut.layers, 1, model, micro.num_microbatches)
    if sequence:
        plan = dataclasses.replace(plan, stages=tuple(dataclasses.replace(s, sequence=True) for s in plan.stages))
    batch = max(1, batch_size_of(graph))
    plan = dataclasses.replace(plan, batch_size=batch, per_microbatch=micro.accepted, state_specs=specs)
    program = cut.program.replace(meshes=meshes_of(plan))
    return run_pipeline(cut.step.replace(cluster=cluster, plan=plan, program=program), "shard-stages")


def with_followers(graph: Graph, chosen: Mapping[Ref, Spec]) -> tuple[tuple[str, Spec], ...]:
    """Returns (path, spec) of leaves, and of the moments and averages updated with them, sorted by path."""
    carried = follow_updates(graph, chosen)
    return tuple(sorted((a.path, carried[a.ref]) for a in graph.inputs if a.role == "state" and a.ref in carried))


def rows_of(kind: DeviceKind, rows: int, size: int, link: Link | None) -> Cluster:
    """Returns a cluster of several nodes of `size` devices each."""
    usual = presets.LINKS[presets.KIND_LINK.get(kind.name, "pcie3-x16")]
    inner = dataclasses.replace(link or usual, name="inside")
    nodes = tuple(Node(f"row{i}", kind.name, size, "here", "inside") for i in range(rows))
    return Cluster("calibrate", (kind,), (Site("here", "inside"),), nodes, (inner,))


def _plan(
    name: str, cluster: Cluster, layers: Sequence[Layer], data: int, model: int, num: int
) -> Plan:
    size = data * model
    stages = tuple(
        StagePlan(
            tuple(range(s * size, (s + 1) * size)), "here", cluster.kinds[0].name,
            (("data", data), ("model", model)), layer.first,
        )
        for s, layer in enumerate(layers)
    )  # fmt: skip
    return Plan(name, cluster.name, cluster.hash, num, 1, "gpipe", stages)
