"""One judgement of a program: how long a step takes, how near that is to the limit, what it holds."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.program import Program
from hetjax.passes.bounds import lower_bound
from hetjax.passes.cost.memory import StageMemory, stage_memory
from hetjax.passes.cost.program_price import FragmentPrice, fragment_price, transfer_price
from hetjax.passes.cost.roofline import ASSUMED, Efficiency
from hetjax.passes.schedules.check import peak_in_flight
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.simulator import Timeline, Transfer, simulate


@dataclasses.dataclass(frozen=True)
class ProgramEstimate:
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
    costs, prologue_s = _costs(program, prices)
    transfers = {r.name: transfer_price(program, r, cluster) for r in program.reshards}
    in_flight = peak_in_flight(program.tasks)
    memory = tuple(
        stage_memory(graph, program, s, max(1, in_flight[s])) for s in range(len(program.meshes))
    )
    timeline = simulate(
        program.tasks, costs, transfers=transfers, prologue_s=prologue_s,
        activation_bytes=[m.activations for m in memory],
        static_bytes=[m.static_bytes for m in memory],
    )  # fmt: skip
    emulated = [
        (f.stage, dtype) for f in program.fragments for dtype in prices[f.name].compute.emulated
    ]
    return ProgramEstimate(
        timeline.makespan_s,
        lower_bound(_bound_costs(program, costs, transfers)).lower_s,
        timeline,
        prices,
        memory,
        _over(program, cluster, memory),
        tuple(dict.fromkeys(emulated)),
        _sources(program, cluster, efficiency or {}),
    )


def _costs(
    program: Program, prices: Mapping[str, FragmentPrice]
) -> tuple[PipelineCosts, list[float]]:
    """Returns seconds per stage and kind of task, and of the prologues."""
    stages = range(len(program.meshes))

    def total(stage: int, phase: str) -> float:
        mine = [f.name for f in program.fragments if f.stage == stage and f.phase == phase]
        return sum(prices[name].seconds for name in mine)

    def mean(stage: int, phase: str, kind: str) -> float:
        # Lists may hold several tasks of a kind; the simulator prices each the same.
        count = sum(t.kind == kind and t.microbatch is None for t in program.tasks[stage])
        return total(stage, phase) / max(1, count)

    whole = program.num_microbatches == 1
    costs = PipelineCosts(
        tuple(mean(s, "forward", "F") if whole else total(s, "forward") for s in stages),
        tuple(mean(s, "backward", "B") if whole else total(s, "backward") for s in stages),
        program.num_microbatches,
        update_s=tuple(mean(s, "update", "update") for s in stages),
    )
    return costs, [mean(s, "prologue", "prologue") for s in stages]


def _bound_costs(
    program: Program, costs: PipelineCosts, transfers: Mapping[str, Transfer]
) -> PipelineCosts:
    """Returns the pipeline with each boundary's transfers, for the bound."""
    boundaries = range(max(0, len(program.meshes) - 1))
    serialisation, latency = [0.0 for _ in boundaries], [0.0 for _ in boundaries]
    for reshard in program.reshards:
        if reshard.form == "micro" and reshard.target == reshard.source + 1:
            price = transfers[reshard.name]
            serialisation[reshard.source] += price.serialisation_s
            latency[reshard.source] = max(latency[reshard.source], price.latency_s)
    return costs.replace(serialisation_s=tuple(serialisation), latency_s=tuple(latency))


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
