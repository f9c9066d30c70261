"""A traced step cut into its layers, each on the same few devices, ready to be compiled and timed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from hetjax.frontend.planning import Options, choose_microbatching
from hetjax.frontend.tracing import Traced
from hetjax.ir import presets
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster, DeviceKind, Link, Node, Site
from hetjax.ir.errors import MicrobatchError, PlanError
from hetjax.ir.plan import Plan, StagePlan
from hetjax.ir.program import Fragment, Program
from hetjax.passes.cost.layers import Layer, LayerMap, layer_map, segments, step_layers
from hetjax.passes.cost.program_price import fragment_ops, work_of
from hetjax.passes.cost.work import Work
from hetjax.passes.manager import run_pipeline
from hetjax.passes.parameter_specs import parameter_specs
from hetjax.passes.pipeline import analyse
from hetjax.passes.plan_stages import Request, batch_size_of


@dataclasses.dataclass(frozen=True)
class Unit:
    """One call to measure.

    Attributes:
      layer, phase: what it is.
      signature: of its work.
      work: what one device does.
      program, fragment: what is compiled.
      microbatch: examples.
    """

    layer: str
    phase: str
    signature: str
    work: Work
    program: Program
    fragment: Fragment
    microbatch: int


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


def step_at(traced: Traced, analysed: Bundle, num_microbatches: int) -> Bundle:
    """Returns the step with so many microbatches, proved.

    Raises:
      MicrobatchError: the number does not divide the batch, or is not proved.
    """
    graph, cluster = analysed.graph, analysed.cluster
    if graph is None or cluster is None:
        raise PlanError("nothing was traced")
    options = Options(num_microbatches=num_microbatches)
    graph, micro = choose_microbatching(graph, traced.retrace, cluster, options, Request())
    return analysed.replace(graph=graph, microbatching=micro)


def analysed_step(traced: Traced, kind: DeviceKind) -> Bundle:
    """Returns the traced step, labelled and with costs, on one device of a kind."""
    return analyse(Bundle(graph=traced.graph, cluster=_rows(kind, 1, 1, None)))


def layered(step: Bundle, kind: DeviceKind, data: int, model: int, link: Link | None) -> Layered:
    """Returns the step's layers on meshes of data x model devices.

    Args:
      step: from `step_at`.
      kind: of the devices.
      data, model: the mesh; the microbatch need not divide: what does not is replicated.
      link: between the devices; the kind's usual one when None.
    """
    graph, micro = step.graph, step.microbatching
    if graph is None or micro is None:
        raise PlanError("layers are cut from a step with its microbatching")
    layers = step_layers(graph, micro)
    cluster = _rows(kind, len(layers), data * model, link)
    plan = _plan(graph.name, cluster, layers, data, model, micro.num_microbatches)
    batch = max(1, batch_size_of(graph))
    plan = plan.with_(batch_size=batch, per_microbatch=micro.accepted)
    plan = plan.with_(state_specs=parameter_specs(graph, micro, plan))
    cut = run_pipeline(step.replace(cluster=cluster, plan=plan), "cut-stages,shard-stages")
    return Layered(
        cut, layer_map(graph, micro, layers), data, model, batch // micro.num_microbatches
    )


def units(step: Layered) -> Iterator[Unit]:
    """Yields every call worth measuring: fragments of one layer and phase; equal ones again and again."""
    program, cluster = step.bundle.program, step.bundle.cluster
    if program is None or cluster is None:
        raise PlanError("the step is not cut")
    for fragment in program.fragments:
        ops = fragment_ops(program, fragment, cluster)
        parts = segments(program, fragment, ops, step.layers)
        if fragment.phase == "prologue" or not fragment.outputs or not parts:
            continue
        # What a fragment holds of other layers (a scalar that several update) counts with its own.
        main = max(parts, key=lambda s: len(s.ops))
        yield Unit(
            main.layer, main.phase, main.signature, work_of(main.phase, ops), program, fragment,
            step.microbatch,
        )  # fmt: skip


def legal_counts(batch: int, sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of microbatches that give these sizes.

    Raises:
      MicrobatchError: a size does not divide the batch; names the nearest that do.
    """
    problems = []
    for size in sizes:
        if size < 1 or batch % size:
            legal = [n for n in range(1, batch + 1) if batch % n == 0]
            near = sorted(sorted(legal, key=lambda n: abs(n - size))[:3])
            problems.append(
                f"microbatches of {size} do not divide a batch of {batch}; nearest: "
                f"{', '.join(map(str, near))}"
            )
    if problems:
        raise MicrobatchError("\n".join(problems), reason="the batch does not divide")
    return [batch // size for size in sizes]


def usual_sizes(batch: int) -> list[int]:
    """Returns three microbatch sizes to measure: the batch in about 2, 4 and 8 parts."""
    legal = [m for m in range(1, batch + 1) if batch % m == 0]
    near = {min(legal, key=lambda m: abs(math.log(m / wanted))) for wanted in (2, 4, 8)}
    return sorted(batch // m for m in near)


def _rows(kind: DeviceKind, rows: int, size: int, link: Link | None) -> Cluster:
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
