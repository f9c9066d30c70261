"""What is run and why, in words and a table."""

from __future__ import annotations

from hetjax.frontend.entry import Entry
from hetjax.ir.cluster import Cluster
from hetjax.passes.residuals import residual_bytes


def explain(entry: Entry, cluster: Cluster) -> str:
    """Returns the plan, its stages, what crosses between them, and every note of the passes."""
    plan, program = entry.plan, entry.program
    lines = [str(plan), f"  microbatches: {plan.microbatch_reason}"]
    flops = {
        s: sum(op.cost.flops for f in program.fragments if f.stage == s for op in f.ops if op.cost)
        for s in range(plan.num_stages)
    }
    state = {s: 0 for s in range(plan.num_stages)}
    for argument, (stage, _) in entry.homes().items():
        if argument < len(entry.graph.inputs) and entry.graph.inputs[argument].role in ("state", "input"):
            state[stage] += entry.graph.avals[argument].nbytes
    lines.append("  stage  site            devices          state_bytes  flops_per_step  modules")
    for s, stage in enumerate(plan.stages):
        axes = "x".join(str(n) for _, n in stage.axes)
        blocks = stage.blocks[0] + (f" … {stage.blocks[-1]}" if len(stage.blocks) > 1 else "") if stage.blocks else "-"
        devices = f"{len(stage.devices)} {stage.kind} ({axes})"
        lines.append(
            f"  s{s:<5} {stage.site:<15} {devices:<16} {state[s]:>11}  {flops[s]:>14}  {blocks}"
        )
    per_step: dict[tuple[int, int], int] = {}
    for reshard in program.reshards:
        times = program.num_microbatches if reshard.form == "micro" else 1
        key = (reshard.source, reshard.target)
        per_step[key] = per_step.get(key, 0) + times * reshard.nbytes
    for (a, b), nbytes in sorted(per_step.items()):
        link = cluster.link(plan.stages[a].devices[-1], plan.stages[b].devices[0])
        lines.append(f"  s{a} > s{b}: {nbytes} bytes per step over {link.name}")
    kept = residual_bytes(program)
    if any(kept.values()):
        listed = ", ".join(f"s{s} {n}" for s, n in sorted(kept.items()))
        lines.append(f"  residuals: {listed} bytes kept from forward to backward per microbatch")
    for topic, sentence in entry.bundle.notes:
        lines.append(f"  {topic}: {sentence}")
    return "\n".join(lines)
