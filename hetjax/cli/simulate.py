"""`hetjax simulate`: what a plan should take, before anything runs."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.programs import is_traced, load_bundle, read_text
from hetjax.ir.errors import HetjaxError, PlanError

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.cluster import Cluster
    from hetjax.ir.plan import Plan
    from hetjax.ir.program import Program

FORMATS = ("auto", "hetjax", "sailor")

# What is said, and what makes the trace.
Answer = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


@click.command()
@click.argument("program", metavar="PROGRAM")
@click.option("--cluster", metavar="FILE", help="The cluster file, where PROGRAM's own file has none [the local devices, for FILE.py:build].")
@click.option("--plan", "plan_file", metavar="FILE", help="A saved plan for FILE.py:build, in place of a new one.")
@click.option("--stages", type=click.IntRange(1), help="FILE.py:build: number of pipeline stages.")
@click.option("--microbatches", type=click.IntRange(1), help="FILE.py:build: number of microbatches.")
@click.option("--mesh", metavar="D,M", help='FILE.py:build: data and model axis, "2,1", or "2,1;3,2" per stage.')
@click.option("--schedule", help="FILE.py:build: the schedule's name.")
@click.option("--profiles", type=click.Path(exists=True, path_type=Path), help="A profile store of hetjax calibrate; for a published plan, the folder of published profiles [the one PROGRAM lies in].")
@click.option("--model", help="Which published model the plan is for [the one with as many layers].")
@click.option("--format", "form", type=click.Choice(FORMATS), default="auto", show_default=True, help="Whose plan it is.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for Perfetto.")
def simulate(
    program: str, cluster: str | None, plan_file: str | None, profiles: Path | None, model: str | None,
    form: str, as_json: bool, trace: Path | None, **request: Any,
) -> int:
    """Say what PROGRAM should take: FILE.py:build, step.hj, plan.json, or a published plan (--format sailor).

    FILE.py:build is traced, planned (or takes --plan) and priced op by op; so is a complete step.hj. A plan.json is
    simulated by the seconds and bytes that were written into it.
    """
    try:
        facts, events = _simulate(program, cluster, plan_file, profiles, model, form, request)
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "plan": program, "error": str(error)}))
        return 1
    if trace is not None:
        from hetjax.cli.programs import writing

        with writing(trace):
            trace.write_text(json.dumps(events()), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(facts))
        return 0
    _print(facts)
    return 0


def _simulate(
    program: str, cluster: str | None, plan_file: str | None, profiles: Path | None, model: str | None,
    form: str, request: dict[str, Any],
) -> Answer:
    text = "" if is_traced(program) else read_text(program)
    if form == "auto":
        form = "sailor" if '"pipeline_list"' in text and '"hetjax_plan"' not in text else "hetjax"
    if form == "sailor":
        asked = [f"--{k}" for k, v in {**request, "plan": plan_file}.items() if v is not None]
        if asked:
            raise click.UsageError(f"{' and '.join(asked)}: a published plan is made")
        return _published(Path(program), text, cluster, profiles, model)
    if model is not None:
        raise click.UsageError("--model: only published plans (--format sailor) need it")
    return _own(program, cluster, plan_file, profiles, request)


def _published(
    path: Path, text: str, cluster_file: str | None, profiles: Path | None, model: str | None
) -> Answer:
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
    program: str, cluster_file: str | None, plan_file: str | None, profiles: Path | None, request: dict[str, Any]
) -> Answer:
    from hetjax.ir.plan import verify_plan

    if is_traced(program):
        from hetjax.cli.explain import complete_bundle

        store = str(profiles or "")
        bundle = complete_bundle(program, cluster_file, plan_file, request, store)
    else:
        asked = [f"--{k}" for k, v in {**request, "plan": plan_file}.items() if v is not None]
        if asked:
            raise click.UsageError(f"{' and '.join(asked)}: a file's plan is made; give FILE.py:build to plan anew")
        bundle = load_bundle(program, cluster_file)
    plan, cluster = bundle.plan, bundle.cluster
    if plan is None:
        raise PlanError(f"{program} holds no plan; simulate FILE.py:build, or run hetjax opt -p default on it first")
    if cluster is None:
        raise PlanError(f"{program} names the cluster {plan.cluster!r} but does not describe it; give --cluster FILE")
    verify_plan(plan, cluster)
    if bundle.graph is not None and bundle.program is not None and _priced(bundle.program):
        return _estimated(program, bundle, plan, profiles)
    if profiles is not None:
        raise click.UsageError(f"--profiles: {program} has no ops to price; give FILE.py:build --plan {program}")
    return _planned(program, plan, cluster, bundle.program)


def _planned(name: str, plan: Plan, cluster: Cluster, program: Program | None) -> Answer:
    """Returns the answer for a plan by the numbers it bears."""
    from hetjax.emit.chrome import chrome_trace
    from hetjax.passes.bounds import lower_bound
    from hetjax.passes.simulator_program import simulate_plan

    timeline, costs, sources = simulate_plan(plan, cluster, program)
    bound = lower_bound(costs)
    peaks = [stage.peak_bytes for stage in plan.stages]
    known = dict(plan.sources).get("memory", "given") if all(n is not None for n in peaks) else "not in this plan"
    facts = {
        "ok": True, "plan": name, "format": "hetjax", "model": plan.name, "stages": plan.num_stages,
        "microbatches": plan.num_microbatches, "iteration_s": timeline.makespan_s,
        "lower_bound_s": bound.lower_s, "bound_by": bound.binding, "peak_bytes": peaks,
        "peak_in_flight": list(timeline.peak_in_flight), "bubble": timeline.bubble,
        "exposed_comm_s": max(timeline.exposed_comm_s), "predicted_s": plan.predicted_s,
        "sources": {**dict(sources), "memory": known},
    }
    return facts, lambda: chrome_trace(timeline, [f"stage {s}" for s in range(plan.num_stages)])


def _priced(program: Any) -> bool:
    """Returns whether a program is scheduled and its ops bear costs."""
    return any(program.tasks) and all(op.cost for f in program.fragments for op in f.ops)


def _estimated(program: str, bundle: Bundle, plan: Plan, profiles: Path | None) -> Answer:
    """Returns the answer for a complete bundle: every op priced, memory by liveness."""
    from hetjax.emit.chrome import chrome_trace
    from hetjax.passes.cost.estimate import estimate_program
    from hetjax.passes.cost.judge import Judge

    found = estimate_program(bundle, judge=Judge.at(str(profiles or "")))
    facts = {
        "ok": True, "plan": program, "format": "hetjax", "model": plan.name, "stages": plan.num_stages,
        "microbatches": plan.num_microbatches, "iteration_s": found.iteration_s,
        "lower_bound_s": found.lower_bound_s, "peak_bytes": list(found.peak_bytes),
        "peak_in_flight": list(found.timeline.peak_in_flight), "bubble": found.bubble,
        "exposed_comm_s": found.exposed_comm_s, "over_memory": list(found.over),
        "uncertainty": found.uncertainty, "host_bound_s": found.host_bound_s,
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
    if facts["peak_bytes"] and None not in facts["peak_bytes"]:
        click.echo(f"peak memory          {', '.join(f'{b / 1e9:.3g}' for b in facts['peak_bytes'])} GB per stage")
    if "peak_in_flight" in facts:
        click.echo(f"peak in flight       {', '.join(map(str, facts['peak_in_flight']))} microbatches per stage")
    for sentence in facts.get("over_memory", ()):
        click.echo(f"does not fit: {sentence}")
    for use in facts.get("emulated", ()):
        click.echo(f"emulated: {use['dtype']} on stage {use['stage']}")
    for what, source in facts["sources"].items():
        click.echo(f"  {what}: {source}")
