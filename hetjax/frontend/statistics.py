"""What running a plan shows: a flat dict of counts, rates, and times where they were measured."""

from __future__ import annotations

import itertools
import statistics
import warnings
from collections.abc import Sequence
from typing import Any

from hetjax.frontend.entry import Entry
from hetjax.frontend.realtime import timeline
from hetjax.ir.cluster import Cluster
from hetjax.passes.residuals import residual_bytes
from hetjax.runtime.dispatch import TaskTime

# A stage that takes this much more or less than predicted is reported.
DRIFT = 0.15


def statistics_of(entry: Entry, cluster: Cluster, num_plans: int) -> dict[str, Any]:
    """Returns what is known of a plan's execution, without waiting for anything.

    Args:
      entry: that has run.
      cluster: it runs on.
      num_plans: of the function.

    Returns:
      always: stages, microbatches, schedule, plan_from ("request", "search" or "cache"), steps, launches, transfers, bytes_between_stages (a
      step), residual_bytes (kept from forward to backward, a microbatch, all stages), compiled, plans, "bytes/s0>s1" per pair of stages; from the second call on: step_s (the
      median time between calls), examples_per_s, tokens_per_s (of the largest integer batch leaf),
      "mfu/KIND" (model FLOPs over what the devices of a kind could do); after a measured or emulated
      step: measured_step_s, bubble, and per stage "stage_s/s0" (forward and backward of one
      microbatch), "exposed_comm_s/s0", "predicted_over_measured/s0".
    """
    counters = entry.executor.counters  # type: ignore[union-attr]
    steps = max(1, counters.steps)
    out: dict[str, Any] = {
        "stages": entry.plan.num_stages,
        "microbatches": entry.plan.num_microbatches,
        "schedule": entry.plan.schedule,
        "plan_from": entry.plan_from,
        "steps": counters.steps,
        "launches": counters.launches // steps,
        "transfers": counters.transfers // steps,
        "bytes_between_stages": counters.bytes_between_stages // steps,
        "residual_bytes": sum(residual_bytes(entry.program).values()),
        "compiled": len(entry.program.fragments),
        "plans": num_plans,
    }
    out.update(_bytes_of_links(entry))
    out.update(_rates(entry, cluster, list(counters.starts_s)))
    times = entry.executor.times  # type: ignore[union-attr]
    if times:
        out.update(_measured(entry, times))
    return out


def _bytes_of_links(entry: Entry) -> dict[str, int]:
    out: dict[str, int] = {}
    sent = entry.executor.bytes_of_reshards()  # type: ignore[union-attr]
    for r in entry.program.reshards:
        times = entry.program.num_microbatches if r.form == "micro" else 1
        name = f"bytes/s{r.source}>s{r.target}"
        out[name] = out.get(name, 0) + times * sent[r.name]
    homes = entry.homes()
    for feed in entry.program.feeds:  # a state leaf that another stage reads too
        home = homes.get(feed.argument, (feed.stage, ()))[0]
        if home != feed.stage and entry.graph.inputs[feed.argument].role == "state":
            name = f"bytes/s{home}>s{feed.stage}"
            out[name] = out.get(name, 0) + entry.graph.avals[entry.graph.inputs[feed.argument].ref].nbytes
    return out


def _rates(entry: Entry, cluster: Cluster, starts_s: Sequence[float]) -> dict[str, float]:
    if len(starts_s) < 2:
        return {}
    step_s = statistics.median(b - a for a, b in itertools.pairwise(starts_s))
    if step_s <= 0:
        return {}
    out = {"step_s": step_s, "examples_per_s": entry.plan.batch_size / step_s}
    batch = [entry.graph.avals[a.ref] for a in entry.graph.inputs if a.role == "batch"]
    tokens = max((a.size for a in batch if a.ndim > 1 and a.dtype[0] in "iu"), default=0)
    if tokens:
        out["tokens_per_s"] = tokens / step_s
    done: dict[str, float] = {}
    could: dict[str, float] = {}
    for s, mesh in enumerate(entry.program.meshes):
        flops = sum(
            op.cost.flops * (entry.program.num_microbatches if f.per_microbatch else 1)
            for f in entry.program.fragments if f.stage == s for op in f.ops if op.cost is not None
        )
        done[mesh.kind] = done.get(mesh.kind, 0.0) + flops
        peak = cluster.kind(mesh.kind).peak("f32") * len(mesh.devices)
        could[mesh.kind] = could.get(mesh.kind, 0.0) + peak
    out.update((f"mfu/{kind}", done[kind] / step_s / could[kind]) for kind in done)
    return out


def _measured(entry: Entry, times: Sequence[TaskTime]) -> dict[str, float]:
    seen = timeline(times, len(entry.program.tasks))
    out = {"measured_step_s": seen.makespan_s, "bubble": seen.bubble}
    target = {r.name: r.target for r in entry.program.reshards}
    for lane, spans in enumerate(seen.spans):
        coming = [t for t in seen.transfers if target.get(t.task.work) == lane]
        exposed = 0.0
        for before, after in itertools.pairwise(spans):
            travelling = [t for t in coming if t.posted_s < after.start_s and t.end_s > before.end_s]
            if travelling:
                start = max(before.end_s, min(t.posted_s for t in travelling))
                exposed += max(0.0, min(after.start_s, max(t.end_s for t in travelling)) - start)
        out[f"exposed_comm_s/s{lane}"] = exposed
    for stage, (took_s, predicted_s) in stage_seconds(entry, times).items():
        out[f"stage_s/s{stage}"] = took_s
        if predicted_s and took_s:
            out[f"predicted_over_measured/s{stage}"] = predicted_s / took_s
    return out


def stage_seconds(entry: Entry, times: Sequence[TaskTime]) -> dict[int, tuple[float, float | None]]:
    """Returns, per stage, measured and predicted seconds of one microbatch's forward and backward."""
    by_stage: dict[int, dict[str, list[float]]] = {}
    for t in times:
        if t.task.kind in ("F", "B", "I", "W"):
            by_stage.setdefault(t.task.stage, {}).setdefault(t.task.kind, []).append(t.end_s - t.start_s)
    emulation = entry.executor.emulation if entry.executor else None
    out = {}
    for stage, kinds in sorted(by_stage.items()):
        predicted_s = entry.plan.stages[stage].predicted_s
        if emulation is not None:
            mine = [f for f in entry.program.fragments if f.stage == stage and f.per_microbatch]
            predicted_s = sum(emulation.work_s[f.name] for f in mine)
        out[stage] = (sum(map(statistics.median, kinds.values())), predicted_s)
    return out


def warn_of_drift(entry: Entry) -> None:
    """Warns of stages that took other times than what was measured or imported for them promised."""
    executor = entry.executor
    if executor is None or not executor.times:
        return
    known = dict(entry.plan.sources).get("stage times") in ("measured", "imported")
    if executor.emulation is None and not known:
        return
    for stage, (took_s, predicted_s) in stage_seconds(entry, executor.times).items():
        if predicted_s and abs(took_s / predicted_s - 1) > DRIFT:
            mesh = entry.program.meshes[stage]
            warnings.warn(
                f"stage {stage} on {len(mesh.devices)} x {mesh.kind} in {mesh.site} took {took_s:.3g} s a "
                f"microbatch, predicted were {predicted_s:.3g} s ({took_s / predicted_s - 1:+.0%}); plan "
                "again with measured times, or look for what slows it",
                UserWarning, stacklevel=3,
            )
