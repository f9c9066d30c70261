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
from hetjax.passes.cost.host import host_step_s
from hetjax.passes.cost.judge import Judge
from hetjax.passes.cost.layers import layer_map, step_layers
from hetjax.passes.cost.memory import StageMemory, stage_memory
from hetjax.passes.cost.program_price import CALL, FragmentPrice, fragment_price
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
      host_bound_s: what the processors of the busiest host need for all that runs on its CPU
        devices, which share them; 0 where that is not known. The step takes no less.
      uncertainty: standard deviation of log(iteration_s) by the residual forest's spread.
    """

    iteration_s: float
    lower_bound_s: float
    timeline: Timeline
    fragments: Mapping[str, FragmentPrice]
    memory: tuple[StageMemory, ...]
    over: tuple[str, ...]
    emulated: tuple[tuple[int, str], ...]
    sources: tuple[tuple[str, str], ...]
    host_bound_s: float = 0.0
    uncertainty: float = 0.0

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
    bundle: Bundle,
    efficiency: Mapping[str, Efficiency] | None = None,
    judge: Judge | None = None,
) -> ProgramEstimate:
    """Returns what a bundle's program should take on its cluster.

    Args:
      bundle: with graph, cluster and a scheduled program.
      efficiency: curves by device kind; the platform's assumed one where absent.
      judge: what was measured; takes the place of `efficiency`.

    Raises:
      PlanError: a part is missing, or a kind cannot compute in a dtype of its stage.
      VerifyError: the task lists wait for each other.
    """
    graph, cluster, program = bundle.graph, bundle.cluster, bundle.program
    if graph is None or cluster is None or program is None or not program.tasks:
        raise PlanError("an estimate needs a graph, a cluster and a scheduled program")
    if judge is not None:
        cluster = judge.wired(cluster)
    prices = fragment_prices(bundle.replace(cluster=cluster), efficiency, judge)
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
    driven_s = _driven_s(program, cluster, prices, judge) if judge is not None else None
    least = _least_costs(program, cluster, work_s)
    if driven_s is not None:
        # Calls overlap with what runs, and copies are the processors' work.
        net_s = {n: s - dict(prices[n].sources).get(CALL, 0.0) for n, s in work_s.items()}
        least = _least_costs(program, cluster, net_s)
        zeros = (0.0,) * (least.num_stages - 1)
        least = least.replace(serialisation_s=zeros, latency_s=zeros)
    bound = lower_bound(least).lower_s
    emulated = [
        (f.stage, dtype) for f in program.fragments for dtype in prices[f.name].compute.emulated
    ]
    host_s = _host_bound_s(program, cluster, prices, judge) if judge is not None else 0.0
    runs = {f.name: program.num_microbatches if f.per_microbatch else 1 for f in program.fragments}
    total = sum(runs[n] * p.seconds for n, p in prices.items())
    unsure = sum(runs[n] * p.seconds * p.uncertainty for n, p in prices.items())
    return ProgramEstimate(
        max(timeline.makespan_s if driven_s is None else driven_s, host_s),
        max(bound, host_s),
        timeline,
        prices,
        memory,
        _over(program, cluster, memory),
        tuple(dict.fromkeys(emulated)),
        _sources(program, cluster, efficiency or {}, prices, judge),
        host_s,
        unsure / total if total else 0.0,
    )


def fragment_prices(
    bundle: Bundle,
    efficiency: Mapping[str, Efficiency] | None = None,
    judge: Judge | None = None,
) -> dict[str, FragmentPrice]:
    """Returns the price of every fragment of a bundle's program, by name; see `estimate_program`."""
    graph, cluster, program, micro = (
        bundle.graph, bundle.cluster, bundle.program, bundle.microbatching
    )  # fmt: skip
    if cluster is None or program is None:
        raise PlanError("prices need a cluster and a program")
    if judge is None:
        return {f.name: fragment_price(program, f, cluster, efficiency) for f in program.fragments}
    layers = None
    if graph is not None and micro is not None:
        layers = layer_map(graph, micro, step_layers(graph, micro))
    return {f.name: judge.price(program, f, cluster, layers) for f in program.fragments}


def _driven_s(
    program: Program, cluster: Cluster, prices: Mapping[str, FragmentPrice], judge: Judge
) -> float | None:
    """Returns the step's seconds where its devices are the processors of one host that also drives them.

    None where they are not, or where it was not measured what driving them costs.
    """
    devices = [cluster.devices[d] for mesh in program.meshes for d in mesh.devices]
    kinds = {mesh.kind for mesh in program.meshes}
    host = judge.store.hosts.get(next(iter(kinds))) if len(kinds) == 1 else None
    if host is None or not host.drives or not host.processors or len({d.node for d in devices}) > 1:
        return None
    return host_step_s(program, prices, host)


def _host_bound_s(
    program: Program, cluster: Cluster, prices: Mapping[str, FragmentPrice], judge: Judge
) -> float:
    """Returns the seconds that the busiest host's processors need for all its CPU devices do."""
    needed: dict[str, float] = {}
    for f in program.fragments:
        mesh = program.meshes[f.stage]
        host = judge.store.hosts.get(mesh.kind)
        processors = host.processors if host else 0
        nodes = {cluster.devices[d].node for d in mesh.devices}
        runs = program.num_microbatches if f.per_microbatch else 1
        if processors:
            for node in nodes:
                share = runs * prices[f.name].host_s / len(nodes) / processors
                needed[node] = needed.get(node, 0.0) + share
    return max(needed.values(), default=0.0)


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
    program: Program,
    cluster: Cluster,
    efficiency: Mapping[str, Efficiency],
    prices: Mapping[str, FragmentPrice],
    judge: Judge | None,
) -> tuple[tuple[str, str], ...]:
    kinds = sorted({m.kind for m in program.meshes})
    if judge is not None:
        efficiency = judge.store.efficiency
    curves = {k: efficiency.get(k, ASSUMED[cluster.kind(k).platform]).source for k in kinds}
    named = [(f"efficiency of {k}", "given" if s == "assumed" else s) for k, s in curves.items()]
    head: list[tuple[str, str]] = [("op costs", "analytic")]
    if judge is not None:
        head = [("op costs", _shares(program, prices))]
        head += [(f"kind {k}", judge.why_not(k)) for k in kinds if judge.why_not(k)]
    return (*head, *named, ("links", "given"), ("memory", "analytic"))


def _shares(program: Program, prices: Mapping[str, FragmentPrice]) -> str:
    """Returns how much of the work's seconds comes from where: "measured 93 %, analytic 7 %"."""
    shares: dict[str, float] = {}
    for f in program.fragments:
        runs = program.num_microbatches if f.per_microbatch else 1
        price = prices[f.name]
        for name, s in price.sources or (("analytic", price.seconds),):
            # What a call takes at least was measured, too.
            name = "measured" if name == "call" else name
            shares[name] = shares.get(name, 0.0) + runs * s
    total = sum(shares.values())
    if not total:
        return "analytic"
    ranked = sorted(shares.items(), key=lambda item: -item[1])
    if len(ranked) == 1:
        return ranked[0][0]
    return ", ".join(f"{name} {s / total:.1%}" for name, s in ranked)
