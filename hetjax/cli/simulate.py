"""`hetjax simulate`: what a plan should take, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import click

from hetjax.ir.errors import HetjaxError, PlanError

FORMATS = ("auto", "hetjax", "sailor")


@click.command()
@click.argument("plan", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--cluster", type=click.Path(exists=True, dir_okay=False, path_type=Path), help="The cluster file, where the plan's file has none.")
@click.option("--profiles", type=click.Path(exists=True, path_type=Path), help="The folder of published profiles [the one PLAN lies in].")
@click.option("--model", help="Which published model the plan is for [the one with as many layers].")
@click.option("--format", "form", type=click.Choice(FORMATS), default="auto", show_default=True, help="Whose plan it is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for Perfetto.")
def simulate(
    plan: Path, cluster: Path | None, profiles: Path | None, model: str | None, form: str, as_json: bool,
    trace: Path | None,
) -> int:
    """Say what PLAN should take: a plan.json, a step.hj, or a published plan (--format sailor)."""
    try:
        facts, events = _simulate(plan, cluster, profiles, model, form)
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "plan": str(plan), "error": str(error)}))
        return 1
    if trace is not None:
        trace.write_text(json.dumps(events()), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(facts))
        return 0
    _print(facts)
    return 0


def _simulate(
    path: Path, cluster: Path | None, profiles: Path | None, model: str | None, form: str
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Returns the answer and what makes the trace."""
    text = path.read_text(encoding="utf-8")
    if form == "auto":
        form = "sailor" if '"pipeline_list"' in text and '"hetjax_plan"' not in text else "hetjax"
    if form == "sailor":
        return _published(path, text, cluster, profiles, model)
    unused = [name for name, value in (("--profiles", profiles), ("--model", model)) if value is not None]
    if unused:
        raise click.UsageError(f"{' and '.join(unused)}: only published plans (--format sailor) need it")
    return _own(path, text, cluster)


def _published(
    path: Path, text: str, cluster_file: Path | None, profiles: Path | None, model: str | None
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    from hetjax.ir.cluster import Cluster
    from hetjax.passes.cost.published import estimate
    from hetjax.passes.cost.sailor import find_folder, model_of, plan_cluster, read_model, read_plan

    plan = read_plan(text, str(path))
    folder = profiles or find_folder(path)
    if folder is None:
        raise PlanError(f"{path} lies in no folder of published profiles; name one with --profiles")
    name = model or model_of(folder, plan)
    cluster = plan_cluster(folder, plan) if cluster_file is None else Cluster.from_toml(cluster_file)
    found = estimate(plan, read_model(folder, name), cluster)
    facts: dict[str, Any] = {
        "ok": True, "plan": str(path), "format": "sailor", "model": name, "stages": plan.num_stages,
        "microbatches": plan.num_microbatches, "iteration_s": found.iteration_s,
        "lower_bound_s": found.lower_bound_s, "peak_bytes": list(found.peak_bytes), "bubble": found.bubble,
        "exposed_comm_s": found.exposed_comm_s, "sources": dict(found.sources),
    }
    if plan.measured_s is not None:
        facts["measured_s"] = plan.measured_s
        facts["error"] = found.iteration_s / plan.measured_s - 1
    if plan.measured_bytes is not None:
        facts["measured_bytes"] = plan.measured_bytes

    def events() -> dict[str, Any]:
        return {"displayTimeUnit": "ms", "traceEvents": [
            *({"name": "thread_name", "ph": "M", "pid": 0, "tid": s, "args": {"name": f"stage {s}"}}
              for s in range(plan.num_stages)),
            *({"name": span.name, "ph": "X", "pid": 0, "tid": span.stage, "ts": span.start_s * 1e6,
               "dur": (span.end_s - span.start_s) * 1e6, "args": {}} for span in found.spans)]}

    return facts, events


def _own(
    path: Path, text: str, cluster_file: Path | None
) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    from hetjax.emit.gantt import chrome_trace
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.cluster import Cluster
    from hetjax.ir.plan import Plan, verify_plan
    from hetjax.passes.bounds import lower_bound
    from hetjax.passes.simulator_program import simulate_plan

    if text.lstrip().startswith("{"):
        bundle = Bundle(plan=Plan.from_json(text, str(path)))
    else:
        from hetjax.ir.parser import parse_bundle

        bundle = parse_bundle(text, filename=str(path))
    plan = bundle.plan
    if plan is None:
        raise PlanError(f"{path} holds no plan; hetjax plan makes one")
    cluster = Cluster.from_toml(cluster_file) if cluster_file is not None else bundle.cluster
    if cluster is None:
        raise PlanError(f"{path} names the cluster {plan.cluster!r} but does not describe it; give --cluster FILE")
    verify_plan(plan, cluster)
    program = bundle.program
    if bundle.graph is not None and program is not None and _priced(program):
        return _estimated(path, bundle.replace(cluster=cluster), plan)
    timeline, costs, sources = simulate_plan(plan, cluster, program)
    bound = lower_bound(costs)
    facts = {
        "ok": True, "plan": str(path), "format": "hetjax", "model": plan.name, "stages": plan.num_stages,
        "microbatches": plan.num_microbatches, "iteration_s": timeline.makespan_s,
        "lower_bound_s": bound.lower_s, "bound_by": bound.binding, "peak_in_flight": list(timeline.peak_in_flight),
        "bubble": timeline.bubble, "exposed_comm_s": max(timeline.exposed_comm_s), "sources": dict(sources),
    }
    return facts, lambda: chrome_trace(timeline, [f"stage {s}" for s in range(plan.num_stages)])


def _priced(program: Any) -> bool:
    """Returns whether a program is scheduled and its ops bear costs."""
    return any(program.tasks) and all(op.cost for f in program.fragments for op in f.ops)


def _estimated(path: Path, bundle: Any, plan: Any) -> tuple[dict[str, Any], Callable[[], dict[str, Any]]]:
    """Returns the answer for a complete bundle: every op priced, memory by liveness."""
    from hetjax.emit.gantt import chrome_trace
    from hetjax.passes.cost.estimate import estimate_program

    found = estimate_program(bundle)
    facts = {
        "ok": True, "plan": str(path), "format": "hetjax", "model": plan.name, "stages": plan.num_stages,
        "microbatches": plan.num_microbatches, "iteration_s": found.iteration_s,
        "lower_bound_s": found.lower_bound_s, "peak_bytes": list(found.peak_bytes),
        "peak_in_flight": list(found.timeline.peak_in_flight), "bubble": found.bubble,
        "exposed_comm_s": found.exposed_comm_s, "over_memory": list(found.over),
        "emulated": [{"stage": s, "dtype": dtype} for s, dtype in found.emulated],
        "sources": dict(found.sources),
    }
    return facts, lambda: chrome_trace(found.timeline, [f"stage {s}" for s in range(plan.num_stages)])


def _print(facts: dict[str, Any]) -> None:
    bound = f", bound by {facts['bound_by']}" if "bound_by" in facts else ""
    click.echo(f"{facts['model']}: {facts['stages']} stages, {facts['microbatches']} microbatches")
    click.echo(f"iteration            {facts['iteration_s']:.6g} s")
    click.echo(f"lower bound          {facts['lower_bound_s']:.6g} s{bound}")
    if "measured_s" in facts:
        click.echo(f"measured             {facts['measured_s']:.6g} s (prediction {facts['error']:+.1%})")
    click.echo(f"bubble               {facts['bubble']:.3f}")
    click.echo(f"exposed transfers    {facts['exposed_comm_s']:.6g} s")
    if "peak_bytes" in facts:
        click.echo(f"peak memory          {', '.join(f'{b / 1e9:.2f}' for b in facts['peak_bytes'])} GB per stage")
    if "peak_in_flight" in facts:
        click.echo(f"peak in flight       {', '.join(map(str, facts['peak_in_flight']))} microbatches per stage")
    for sentence in facts.get("over_memory", ()):
        click.echo(f"does not fit: {sentence}")
    for use in facts.get("emulated", ()):
        click.echo(f"emulated: {use['dtype']} on stage {use['stage']}")
    for what, source in facts["sources"].items():
        click.echo(f"  {what}: {source}")
