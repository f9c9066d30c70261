"""Programs on the simulator: what their reshards cost on a cluster's wires, and when each task runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from hetjax.ir.cluster import Cluster
from hetjax.ir.dtypes import dtype_itemsize
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Plan
from hetjax.ir.program import Program, Reshard, StageMesh
from hetjax.passes.reshard_plan import activation_crossing, plan_naive, price_pieces
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
    crossings = [_crossing(cluster, plan, s) for s in range(plan.num_stages - 1)]
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


def _crossing(cluster: Cluster, plan: Plan, s: int) -> tuple[float, float]:
    """Returns the latency and the seconds on the wire of what a stage sends to the next one."""
    a, b = plan.stages[s], plan.stages[s + 1]
    source, target = (StageMesh(f"s{k}", x.kind, x.site, x.axes, x.devices) for k, x in ((s, a), (s + 1, b)))
    if not a.sent_bytes:
        return cluster.link(a.devices[-1], b.devices[0]).latency_s, 0.0
    batch = plan.batch_size // plan.num_microbatches
    found = activation_crossing(cluster, source, target, a.sent_bytes, batch)
    return found.delay_s, found.serialisation_s


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

    Each wire carries what its pieces add up to, and is held for so long; the transfer ends when the
    slowest is done. What relays add (a latency each, and the time until the first chunk is there)
    counts as latency. Without pieces every target device gets its whole block from a source device.
    """
    return {r.name: _transfer(program, cluster, r) for r in program.reshards}


def _transfer(program: Program, cluster: Cluster, reshard: Reshard) -> Transfer:
    source, target = program.meshes[reshard.source], program.meshes[reshard.target]
    aval = (program.avals if reshard.form == "step" else program.micro_avals)[reshard.ref]
    size = dtype_itemsize(aval.dtype)
    pieces = reshard.pieces
    if not pieces:
        ends = (source, reshard.source_spec, target, reshard.target_spec)
        pieces = plan_naive(cluster, *ends, aval.shape, size).pieces
    own = source.blocks(reshard.source_spec, aval.shape)
    return transfer_of(f"{source.name}>{target.name}", *price_pieces(cluster, pieces, own, size))


def transfer_of(name: str, held_s: Mapping[str, float], delay_s: float) -> Transfer:
    """Returns pieces priced by wire as one transfer; `name` stands for its line where they need none."""
    if not held_s:
        return Transfer((name,), 0.0, delay_s)
    lines = tuple(sorted(held_s))
    return Transfer(lines, max(held_s.values()), delay_s, tuple(held_s[x] for x in lines))


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
                tuple(sorted({*lines, *price.slowest})))
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
