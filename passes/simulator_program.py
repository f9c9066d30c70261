"""Programs on the simulator: what their reshards cost on a cluster's wires, and when each task runs."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from hetjax.ir.cluster import Cluster
from hetjax.ir.dtypes import dtype_itemsize
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Plan, StagePlan
from hetjax.ir.program import Program, Reshard
from hetjax.passes.reshard_plan import price_pieces
from hetjax.passes.schedules import schedule
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.flush import warmup_lists
from hetjax.passes.simulator import Timeline, Transfer, simulate


def simulate_program(
    program: Program,
    cluster: Cluster,
    work_s: Mapping[str, float],
    *,
    sync_s: Sequence[float] = (),
    activation_bytes: Sequence[float] = (),
    static_bytes: Sequence[float] = (),
) -> Timeline:
    """Returns when each task of a complete program runs; a mesh is one device of the timeline.

    Args:
      program: with task lists.
      cluster: where its meshes' devices are.
      work_s: seconds of one run of each fragment, by name.
      sync_s, activation_bytes, static_bytes: per stage, see `simulate`.

    Raises:
      PlanError: a fragment has no time.
      VerifyError: the lists deadlock.
    """
    missing = [f.name for f in program.fragments if f.name not in work_s]
    if missing:
        raise PlanError(f"no time is given for fragment(s) {', '.join(missing)}")
    costs = pipeline_costs(program, cluster, work_s).replace(sync_s=tuple(sync_s))
    return simulate(
        program.tasks, costs, transfers=program_transfers(program, cluster), work_s=work_s,
        activation_bytes=activation_bytes, static_bytes=static_bytes)


def simulate_plan(
    plan: Plan, cluster: Cluster, program: Program | None = None
) -> tuple[Timeline, PipelineCosts, tuple[tuple[str, str], ...]]:
    """Returns the timeline of a plan by its own predicted stage times, its costs, and their sources.

    With a program, what crosses is priced by its bytes and the step's own task lists are run; without
    one, the plan says how many bytes its stages send, and its schedule makes the lists.

    Args:
      plan: every stage with a predicted time.
      cluster: the plan's.
      program: the plan's program, lowered as far as its task lists, or None.

    Raises:
      PlanError: a stage has no predicted time, or the schedule cannot be made.
    """
    missing = [s for s, stage in enumerate(plan.stages) if stage.predicted_s is None]
    if missing:
        raise PlanError(
            f"stage(s) {', '.join(map(str, missing))} of plan {plan.name!r} have no predicted_s, so there is"
            " nothing to simulate; plan with hetjax plan, or run hetjax calibrate and plan again")
    seconds = [stage.predicted_s or 0.0 for stage in plan.stages]
    made = dict(plan.sources)
    sources = [("stage times", made.get("stage times", made.get("predicted_s", "given")))]
    if program is not None and any(program.tasks):
        work_s = _share_out(program, seconds)
        costs = pipeline_costs(program, cluster, work_s)
        sources += [("links", "given"), ("bytes between stages", "analytic"), ("task lists", "the program's own")]
        return simulate_program(program, cluster, work_s), costs, tuple(sources)
    crossings = [_crossing(cluster, a, b) for a, b in itertools.pairwise(plan.stages)]
    costs = PipelineCosts(
        tuple(t / 3 for t in seconds), tuple(2 * t / 3 for t in seconds), plan.num_microbatches,
        tuple(latency_s for latency_s, _ in crossings),
        tuple(serialisation_s for _, serialisation_s in crossings))
    lists = (
        warmup_lists(costs, plan.warmups) if plan.warmups else schedule(plan.schedule, costs))
    sent = all(stage.sent_bytes is not None for stage in plan.stages[:-1])
    sources += [
        ("forward and backward", "a third and two thirds of the stage's time"), ("links", "given"),
        ("bytes between stages", "analytic" if sent else "not in this plan: latency only; a step.hj has them"),
        ("prologue and update", "not in a plan; a step.hj has them")]
    return simulate(lists, costs), costs, tuple(sources)


def _crossing(cluster: Cluster, a: StagePlan, b: StagePlan) -> tuple[float, float]:
    """Returns the latency and the seconds on the wire of what a stage sends to the next one."""
    sender, receiver = a.devices[-1], b.devices[0]
    link, nbytes = cluster.link(sender, receiver), float(a.sent_bytes or 0)
    # Inside a node each device has a port of its own; a node's or a site's link is one for all.
    if cluster.devices[sender].node == cluster.devices[receiver].node:
        nbytes /= min(len(a.devices), len(b.devices))
    return link.latency_s, link.serialise_s(nbytes) if nbytes else 0.0


def _share_out(program: Program, seconds: Sequence[float]) -> dict[str, float]:
    """Returns each fragment's share of its stage's time, by FLOPs; prologue and update take nothing.

    Where the ops bear no costs, the backward counts twice the forward.
    """
    weight: dict[str, float] = {}
    for f in program.fragments:
        flops = sum(op.cost.flops for op in f.ops if op.cost is not None)
        weight[f.name] = flops if f.per_microbatch else 0.0
    for s in range(len(program.meshes)):
        mine = [f for f in program.fragments if f.stage == s and f.per_microbatch]
        if mine and not sum(weight[f.name] for f in mine):
            weight.update((f.name, 2.0 if f.phase == "backward" else 1.0) for f in mine)
    total = [0.0] * len(program.meshes)
    for f in program.fragments:
        total[f.stage] += weight[f.name]
    return {
        f.name: seconds[f.stage] * weight[f.name] / total[f.stage] if total[f.stage] else 0.0
        for f in program.fragments}


def program_transfers(program: Program, cluster: Cluster) -> dict[str, Transfer]:
    """Returns what one send of each reshard costs, by its name.

    Each wire carries what its pieces add up to; the transfer occupies all its wires until the slowest
    is done. What relays add (a latency each, and the time until the first chunk is there) counts as
    latency. A reshard without pieces is priced as one whole value from the first device to the first.
    """
    return {r.name: _transfer(program, cluster, r) for r in program.reshards}


def _transfer(program: Program, cluster: Cluster, reshard: Reshard) -> Transfer:
    source, target = program.meshes[reshard.source], program.meshes[reshard.target]
    if reshard.pieces:
        avals = program.avals if reshard.form == "step" else program.micro_avals
        aval = avals[reshard.ref]
        own = source.blocks(reshard.source_spec, aval.shape)
        occupied, delay_s = price_pieces(cluster, reshard.pieces, own, dtype_itemsize(aval.dtype))
    else:
        a, b = source.devices[0], target.devices[0]
        link = cluster.link(a, b)
        there = bool(reshard.nbytes) and a != b
        occupied = {w: link.serialise_s(reshard.nbytes) for w in cluster.wires(a, b)} if there else {}
        delay_s = link.latency_s
    if not occupied:
        return Transfer((f"{source.name}>{target.name}",), 0.0, 0.0)
    return Transfer(tuple(sorted(occupied)), max(occupied.values()), delay_s)


def pipeline_costs(
    program: Program, cluster: Cluster, work_s: Mapping[str, float],
    *, max_in_flight: Sequence[int] | None = None,
) -> PipelineCosts:
    """Returns a program as plain numbers, for choosing its schedule and for its lower bound.

    What crosses a boundary per microbatch is added up, each way; values that skip stages count on
    every boundary they pass. The slower of the two ways stands for both.

    Args:
      program: with reshards; task lists are not needed.
      cluster: where its meshes' devices are.
      work_s: seconds of fragments by name; those it does not name count nothing.
      max_in_flight: per stage, see `PipelineCosts`.
    """
    stages = len(program.meshes)
    seconds = {phase: [0.0] * stages for phase in ("prologue", "forward", "backward", "weight", "update")}
    for f in program.fragments:
        seconds[f.phase][f.stage] += work_s.get(f.name, 0.0)
    prices = program_transfers(program, cluster)
    # (serialisation, latency, lines) by boundary and way.
    crossing: dict[tuple[int, int], tuple[float, float, tuple[str, ...]]] = {}
    for r in program.reshards:
        if r.form not in ("micro", "concat") or r.source == r.target:
            continue
        price = prices[r.name]
        way = 0 if r.source < r.target else 1
        for b in range(min(r.source, r.target), max(r.source, r.target)):
            serialisation, latency, lines = crossing.get((b, way), (0.0, 0.0, ()))
            crossing[b, way] = (
                serialisation + price.serialisation_s, max(latency, price.latency_s),
                tuple(sorted({*lines, *price.lines})))
    boundaries = range(stages - 1)
    for b in boundaries:
        for way in (0, 1):
            crossing.setdefault((b, way), (0.0, 0.0, (f"{b + way}>{b + 1 - way}",)))
    return PipelineCosts(
        tuple(seconds["forward"]),
        tuple(i + w for i, w in zip(seconds["backward"], seconds["weight"])), program.num_microbatches,
        tuple(max(crossing[b, 0][1], crossing[b, 1][1]) for b in boundaries),
        tuple(max(crossing[b, 0][0], crossing[b, 1][0]) for b in boundaries),
        None if max_in_flight is None else tuple(max_in_flight),
        lines=tuple((crossing[b, 0][2], crossing[b, 1][2]) for b in boundaries),
        update_s=tuple(seconds["update"]))
