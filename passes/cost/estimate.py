"""One judgement of a program: seconds of a step, how near the limit that is, bytes it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.display import Shown
from hetjax.ir.errors import PlanError
from hetjax.ir.program import Program
from hetjax.passes.bounds import lower_bound
from hetjax.passes.cost.memory import StageMemory, stage_memory
from hetjax.passes.cost.program_price import FragmentPrice, fragment_price
from hetjax.passes.cost.roofline import ASSUMED, Efficiency
from hetjax.passes.schedules.check import peak_in_flight
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.simulator import Timeline
from hetjax.passes.simulator_program import (
    pipeline_costs,
    program_transfers,
    simulate_program,
)


@dataclasses.dataclass(frozen=True)
class ProgramEstimate(Shown):
    """What a program should take.

    Attributes:
      iteration_s: one step.
      lower_bound_s: what no order of the same fragments could beat.
      timeline: every task on the clock.
      fragments: price of each fragment's call, by name.
      memory: per stage, on one device.
      over: sentences about stages that hold more than their devices have.
      emulated: (stage, dtype) pairs computed by means of another dtype.
      sources: (what, where its numbers come from) pairs.
    """

    iteration_s: float
    lower_bound_s: float
    timeline: Timeline
    fragments: Mapping[str, FragmentPrice]
    memory: tuple[StageMemory, ...]
    over: tuple[str, ...]
    emulated: tuple[tuple[int, str], ...]
    sources: tuple[tuple[str, str], ...]

    @property
    def bubble(self) -> float:
        """Returns the share of device time without work, from 0 to 1."""
        return self.timeline.bubble

    @property
    def exposed_comm_s(self) -> float:
        """Returns the most that a stage stands still while what it waits for travels."""
        return max(self.timeline.exposed_comm_s, default=0.0)

    @property
    def peak_bytes(self) -> tuple[int, ...]:
        """Returns the most bytes one device of each stage holds."""
        return tuple(m.peak_bytes for m in self.memory)


def estimate_program(
    bundle: Bundle, efficiency: Mapping[str, Efficiency] | None = None
) -> ProgramEstimate:
    """Returns what a bundle's program should take on its cluster.

    Args:
      bundle: with graph, cluster and a scheduled program.
      efficiency: curves by device kind; the platform's assumed one where absent.

    Raises:
      PlanError: a part is missing, or a kind cannot compute in a dtype of its stage.
      VerifyError: the task lists wait for each other.
    """
    graph, cluster, program = bundle.graph, bundle.cluster, bundle.program
    if graph is None or cluster is None or program is None or not program.tasks:
        raise PlanError("an estimate needs a graph, a cluster and a scheduled program")
    prices = {f.name: fragment_price(program, f, cluster, efficiency) for f in program.fragments}
    work_s = {name: price.seconds for name, price in prices.items()}
    in_flight = peak_in_flight(program.tasks)
    memory = tuple(
        stage_memory(graph, program, s, max(1, in_flight[s])) for s in range(len(program.meshes))
    )
    timeline = simulate_program(
        program,
        cluster,
        work_s,
        activation_bytes=[m.activations for m in memory],
        static_bytes=[m.static_bytes for m in memory],
    )
    bound = lower_bound(_least_costs(program, cluster, work_s)).lower_s
    emulated = [
        (f.stage, dtype) for f in program.fragments for dtype in prices[f.name].compute.emulated
    ]
    return ProgramEstimate(
        timeline.makespan_s,
        bound,
        timeline,
        prices,
        memory,
        _over(program, cluster, memory),
        tuple(dict.fromkeys(emulated)),
        _sources(program, cluster, efficiency or {}),
    )


def _least_costs(program: Program, cluster: Cluster, work_s: Mapping[str, float]) -> PipelineCosts:
    """Returns the pipeline with no more per boundary than any order must spend there.

    Of the values that cross together only the longest is sure to be waited for, and of the two ways
    the quicker one stands for both.
    """
    costs = pipeline_costs(program, cluster, work_s)
    prices = program_transfers(program, cluster)
    least: dict[int, list[tuple[float, float]]] = {}
    for source, target in (
        (b + way, b + 1 - way) for b in range(costs.num_stages - 1) for way in (0, 1)
    ):
        crossing = [
            (prices[r.name].serialisation_s, prices[r.name].latency_s)
            for r in program.reshards
            if (r.source, r.target, r.form) == (source, target, "micro")
        ]
        least.setdefault(min(source, target), []).append(max(crossing, default=(0.0, 0.0)))
    both = [(min(a[0], b[0]), min(a[1], b[1])) for a, b in least.values()]
    return costs.replace(
        serialisation_s=tuple(s for s, _ in both), latency_s=tuple(x for _, x in both), lines=()
    )


def _over(program: Program, cluster: Cluster, memory: tuple[StageMemory, ...]) -> tuple[str, ...]:
    out = []
    for s, (mesh, m) in enumerate(zip(program.meshes, memory)):
        has = cluster.kind(mesh.kind).memory_bytes
        if m.peak_bytes > has:
            out.append(
                f"stage {s} needs {m.peak_bytes / 1e9:.3g} GB on each {mesh.kind}, which has "
                f"{has / 1e9:.3g} GB: {m.in_flight} x {m.activations / 1e9:.3g} GB of activations, "
                f"{(m.parameters + m.optimizer + m.gradients) / 1e9:.3g} GB of state and gradients"
            )
    return tuple(out)


def _sources(
    program: Program, cluster: Cluster, efficiency: Mapping[str, Efficiency]
) -> tuple[tuple[str, str], ...]:
    kinds = sorted({m.kind for m in program.meshes})
    curves = {k: efficiency.get(k, ASSUMED[cluster.kind(k).platform]).source for k in kinds}
    named = [(f"efficiency of {k}", "given" if s == "assumed" else s) for k, s in curves.items()]
    return (("op costs", "analytic"), *named, ("links", "given"), ("memory", "analytic"))
