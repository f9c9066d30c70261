"""`hetjax explain`: what a plan is, what it moves and holds, and why a value is where it is."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.main import EXIT_GOOD, EXIT_NEGATIVE
from hetjax.cli.programs import is_traced, load_bundle, trace_target
from hetjax.ir.errors import HetjaxError, PlanError

if TYPE_CHECKING:
    from hetjax.explaining.stages import StageFacts
    from hetjax.explaining.values import ValueFacts
    from hetjax.ir.bundle import Bundle
    from hetjax.passes.cost.estimate import ProgramEstimate

MOST_ROWS = 20
MOST_HOLDERS = 10


@click.command()
@click.argument("program", metavar="PROGRAM")
@click.argument("what", required=False, metavar="[VALUE|STAGE]")
@click.option(
    "--cluster",
    metavar="FILE",
    help="The cluster; the file's own, or the local devices, when left out.",
)
@click.option(
    "--plan",
    "plan_file",
    metavar="FILE",
    help="A saved plan for FILE.py:build, in place of a new one.",
)
@click.option("--stages", type=click.IntRange(1), help="Number of pipeline stages.")
@click.option("--microbatches", type=click.IntRange(1), help="Number of microbatches.")
@click.option(
    "--mesh",
    metavar="D,M",
    help='Data and model axis of each stage: "2,1", or "2,1;3,2" per stage.',
)
@click.option("--schedule", help="The schedule's name.")
@click.option(
    "--profiles",
    type=click.Path(exists=True, dir_okay=False),
    help="Price by this profile store of hetjax calibrate.",
)
@click.option("--reshards", is_flag=True, help="List what moves, largest first.")
@click.option(
    "--fail-over",
    metavar="SIZE",
    help="With --reshards: exit 1 if one value moves more than SIZE per step.",
)
@click.option("--memory", is_flag=True, help="List the largest holders at each device's peak.")
@click.option("--no-price", is_flag=True, help="For a VALUE: do not lower and price other splits.")
@click.option("--all", "everything", is_flag=True, help="Full lists.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def explain(
    program: str,
    what: str | None,
    cluster: str | None,
    plan_file: str | None,
    profiles: str | None,
    reshards: bool,
    fail_over: str | None,
    memory: bool,
    no_price: bool,
    everything: bool,
    as_json: bool,
    **request: Any,
) -> int:
    """Explain the plan of PROGRAM: FILE.py:build, step.hj or plan.json.

    Without more: the stages, by the modules' own names. VALUE is a path ("state/params/Dense_0/kernel", or an
    unambiguous end of one) or %NUMBER; STAGE is s0, s1, …. No device is needed. A plan.json alone tells the stages;
    FILE.py:build --plan plan.json tells everything.
    """
    if fail_over is not None and not reshards:
        raise click.UsageError("--fail-over needs --reshards")
    if sum(map(bool, (what, reshards, memory))) > 1:
        raise click.UsageError("give one of VALUE or STAGE, --reshards, --memory")
    try:
        bundle = complete_bundle(program, cluster, plan_file, request, profiles or "")
        if profiles and bundle.program is None:
            raise PlanError(
                f"--profiles: {program} has no ops to price; give FILE.py:build --plan {program}"
            )
        answer, text, code = _answer(
            bundle, what, reshards, fail_over, memory, not no_price, everything, profiles or ""
        )
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "error": str(error)}))
        return EXIT_NEGATIVE
    click.echo(json.dumps({"ok": code == EXIT_GOOD, **answer}, default=str) if as_json else text)
    return code


def complete_bundle(
    program: str,
    cluster: str | None,
    plan_file: str | None,
    request: dict[str, Any],
    profiles: str = "",
) -> Bundle:
    """Returns PROGRAM with plan and program, as far as it can be had.

    Args:
      program, cluster, plan_file, request: from the command line.
      profiles: the profile store that prices the plan; "" prices by data sheets.

    Raises:
      click.UsageError: options do not go with this PROGRAM.
      HetjaxError: it cannot be planned.
    """
    asked = {k: v for k, v in request.items() if v is not None}
    if is_traced(program):
        from hetjax.cli.devices import force_cpu_devices
        from hetjax.frontend.planning import Options, build_bundle, parse_mesh
        from hetjax.ir.cluster import Cluster
        from hetjax.ir.plan import Plan

        force_cpu_devices()
        described = Cluster.from_toml(cluster) if cluster else Cluster.local()
        options = Options(
            num_stages=asked.get("stages"),
            num_microbatches=asked.get("microbatches"),
            mesh=parse_mesh(asked.get("mesh")),
            schedule=asked.get("schedule"),
            plan=Plan.load(plan_file) if plan_file else None,
            profiles=profiles,
        )
        return build_bundle(trace_target(program), described, options)
    if asked or plan_file:
        given = ", ".join(f"--{k}" for k in [*asked, *(["plan"] if plan_file else [])])
        raise click.UsageError(f"{given}: a file's plan is made; give FILE.py:build to plan anew")
    bundle = load_bundle(program, cluster)
    if bundle.graph is not None and bundle.program is None and bundle.cluster is not None:
        from hetjax.passes.manager import run_pipeline

        bundle = run_pipeline(bundle, "default")
    return bundle


def _answer(
    bundle: Bundle,
    what: str | None,
    reshards: bool,
    fail_over: str | None,
    memory: bool,
    price: bool,
    everything: bool,
    profiles: str,
) -> tuple[dict[str, Any], str, int]:
    """Returns the answer as JSON holds it, as text, and the exit code."""
    if reshards:
        return _reshards(bundle, fail_over, everything)
    if memory:
        return _memory(bundle, everything)
    estimate = _estimate(bundle, profiles)
    stages = _stages(bundle, estimate)
    names = {s.name: s for s in stages}
    if what is None:
        return _overview(bundle, stages, estimate)
    if what in names or f"s{what}" in names:
        return _stage(bundle, names.get(what) or names[f"s{what}"], everything, estimate)
    from hetjax.explaining.values import as_dict, explain_value

    facts = explain_value(bundle, what, price=price)
    return {"value": as_dict(facts)}, _value_text(facts, bundle), EXIT_GOOD


def _estimate(bundle: Bundle, profiles: str) -> ProgramEstimate | None:
    """Returns what the program should take; None where there is no complete one."""
    if bundle.program is None or bundle.cluster is None or bundle.graph is None:
        return None
    from hetjax.passes.cost.estimate import estimate_program
    from hetjax.passes.cost.judge import Judge

    return estimate_program(bundle, judge=Judge.at(profiles))


def _stages(bundle: Bundle, estimate: ProgramEstimate | None) -> list[StageFacts]:
    from hetjax.explaining.stages import plan_stages, program_stages

    if estimate is not None:
        return program_stages(bundle, estimate)
    if bundle.plan is None:
        raise PlanError(
            "there is no plan to explain; give a cluster with --cluster FILE, or run hetjax opt -p default"
        )
    return plan_stages(bundle.plan)


def _overview(
    bundle: Bundle, stages: list[StageFacts], e: ProgramEstimate | None
) -> tuple[dict[str, Any], str, int]:
    from hetjax.explaining.stages import stage_table

    answer: dict[str, Any] = {"stages": [dataclasses.asdict(s) for s in stages]}
    lines = []
    if bundle.plan is not None:
        p = bundle.plan
        why = f" ({p.microbatch_reason})" if p.microbatch_reason else ""
        lines.append(
            f"{p.name}: {p.num_stages} stages, {p.num_microbatches} microbatches{why}, schedule {p.schedule}"
        )
        answer |= {
            "name": p.name,
            "microbatches": p.num_microbatches,
            "schedule": p.schedule,
            "sources": dict(p.sources),
        }
    if e is not None:
        answer |= {
            "step_s": e.iteration_s,
            "lower_bound_s": e.lower_bound_s,
            "bubble": e.bubble,
            "over": list(e.over),
            "emulated": [{"stage": s, "dtype": dtype} for s, dtype in e.emulated],
            "estimate_sources": dict(e.sources),
        }
        lines.append(
            f"predicted: {e.iteration_s * 1e3:.4g} ms a step, at least {e.lower_bound_s * 1e3:.4g} ms in any order; "
            f"bubble {e.bubble:.1%}"
        )
        lines += [f"too large: {sentence}" for sentence in e.over]
        lines += [f"  {what}: {source}" for what, source in e.sources]
    lines += ["", stage_table(stages)]
    answer["notes"] = [list(n) for n in bundle.notes]
    lines += [f"{topic}: {sentence}" for topic, sentence in bundle.notes]
    return answer, "\n".join(lines), EXIT_GOOD


def _stage(
    bundle: Bundle, facts: StageFacts, everything: bool, estimate: ProgramEstimate | None
) -> tuple[dict[str, Any], str, int]:
    from hetjax.explaining.stages import outline, stage_table, table

    lines = [stage_table([facts]), "", f"modules: {outline(facts.modules, 12)}"]
    answer: dict[str, Any] = {"stage": dataclasses.asdict(facts)}
    program = bundle.program
    if program is not None and bundle.graph is not None and estimate is not None:
        number = [m.name for m in program.meshes].index(facts.name)
        prices = estimate.fragments
        rows = [f for f in program.fragments if f.stage == number]
        answer["fragments"] = [
            {
                "name": f.name,
                "ops": len(f.ops),
                "seconds": prices[f.name].seconds,
                "inputs": len(f.inputs),
                "outputs": len(f.outputs),
                "runs": program.num_microbatches if f.per_microbatch else 1,
            }
            for f in rows
        ]
        lines += [
            "",
            table(
                [
                    ["fragment", *(f.name for f in rows)],
                    ["ops", *(len(f.ops) for f in rows)],
                    ["reads", *(len(f.inputs) for f in rows)],
                    ["gives", *(len(f.outputs) for f in rows)],
                    ["runs", *(program.num_microbatches if f.per_microbatch else 1 for f in rows)],
                    ["ms each", *(f"{prices[f.name].seconds * 1e3:.4g}" for f in rows)],
                ]
            ),
        ]
        inputs = bundle.graph.inputs
        feeds = [f for f in program.feeds if f.stage == number]
        feeds.sort(
            key=lambda f: -bundle.graph.avals[inputs[f.argument].ref].nbytes if bundle.graph else 0
        )
        shown = feeds if everything else feeds[:MOST_ROWS]
        answer["leaves"] = [
            {
                "path": inputs[f.argument].path,
                "type": str(bundle.graph.avals[inputs[f.argument].ref]),
                "spec": f.spec,
            }
            for f in feeds
        ]
        lines += [
            "",
            table(
                [
                    ["leaf", *(inputs[f.argument].path for f in shown)],
                    ["type", *(str(bundle.graph.avals[inputs[f.argument].ref]) for f in shown)],
                    ["split", *(_spec_words(f.spec) for f in shown)],
                ]
            ),
        ]
        if len(shown) < len(feeds):
            lines.append(f"and {len(feeds) - len(shown)} more; --all lists them")
    return answer, "\n".join(lines), EXIT_GOOD


def _reshards(
    bundle: Bundle, fail_over: str | None, everything: bool
) -> tuple[dict[str, Any], str, int]:
    from hetjax.explaining.link_bytes import link_bytes
    from hetjax.explaining.movements import movements, parse_size
    from hetjax.explaining.stages import table
    from hetjax.render.units import human_bytes

    found = movements(bundle)
    limit = parse_size(fail_over) if fail_over is not None else None
    over = [m for m in found if limit is not None and m.step_bytes > limit]
    shown = found if everything else found[:MOST_ROWS]
    lines = (
        [
            table(
                [
                    ["per step", *(human_bytes(m.step_bytes) for m in shown)],
                    ["times", *(m.times for m in shown)],
                    ["ms each", *(f"{m.seconds * 1e3:.4g}" for m in shown)],
                    ["how", *(m.kind for m in shown)],
                    ["where", *(m.where for m in shown)],
                    ["link", *(m.link for m in shown)],
                    ["value", *(m.what for m in shown)],
                    ["source", *(m.source for m in shown)],
                ]
            )
        ]
        if found
        else ["nothing moves"]
    )
    if len(shown) < len(found):
        lines.append(f"and {len(found) - len(shown)} more; --all lists them")
    total = sum(m.step_bytes for m in found if m.kind != "all-reduce")
    lines.append(f"between stages: {human_bytes(total)} per step")
    carried = (
        link_bytes(bundle.program, bundle.cluster) if bundle.program and bundle.cluster else []
    )
    if carried:
        part = carried if everything else carried[:MOST_ROWS]
        lines += ["", "each reshard once, beside the least that can cross and the time no way can beat:"]
        lines.append(
            table(
                [
                    ["reshard", *(c.reshard for c in part)],
                    ["pieces", *(c.pieces or "whole" for c in part)],
                    ["crosses", *(human_bytes(c.crossing) for c in part)],
                    ["least", *(human_bytes(c.unique) for c in part)],
                    ["ms", *(f"{c.seconds * 1e3:.4g}" for c in part)],
                    ["bound ms", *(f"{c.bound_s * 1e3:.4g}" for c in part)],
                    [
                        "on each link",
                        *(", ".join(f"{n} {human_bytes(b)}" for n, b in c.links) for c in part),
                    ],
                ]
            )
        )
    lines += [
        f"over {fail_over}: {m.what} ({human_bytes(m.step_bytes)} per step, {m.where})"
        for m in over
    ]
    answer = {
        "reshards": [{**dataclasses.asdict(m), "step_bytes": m.step_bytes} for m in found],
        "links": [dataclasses.asdict(c) for c in carried],
        "bytes_between_stages": total,
        "over": [m.what for m in over],
    }
    return answer, "\n".join(lines), EXIT_NEGATIVE if over else EXIT_GOOD


def _memory(bundle: Bundle, everything: bool) -> tuple[dict[str, Any], str, int]:
    from hetjax.explaining.memory import stage_peaks
    from hetjax.explaining.stages import table
    from hetjax.render.units import human_bytes

    peaks = stage_peaks(bundle)
    lines = []
    for p in peaks:
        shown = p.holders if everything else p.holders[:MOST_HOLDERS]
        lines += [
            f"{p.stage}: {human_bytes(p.memory.peak_bytes)} of {human_bytes(p.capacity)} on each device, in {p.moment}",
            table(
                [
                    ["  bytes", *(f"  {human_bytes(h.nbytes)}" for h in shown)],
                    [
                        "kind",
                        *(f"{h.kind}{f' x {h.copies}' if h.copies > 1 else ''}" for h in shown),
                    ],
                    ["what", *(h.what for h in shown)],
                    ["source", *(h.source for h in shown)],
                ]
            ),
        ]
        if len(shown) < len(p.holders):
            rest = sum(h.nbytes for h in p.holders[len(shown) :])
            lines.append(
                f"  and {len(p.holders) - len(shown)} more, {human_bytes(rest)}; --all lists them"
            )
        lines.append("")
    answer = {
        "stages": [
            {
                **dataclasses.asdict(p),
                "peak_bytes": p.memory.peak_bytes,
                "holders": [dataclasses.asdict(h) for h in p.holders],
            }
            for p in peaks
        ]
    }
    return answer, "\n".join(lines).rstrip(), EXIT_GOOD


def _spec_words(spec: Any) -> str:
    if not any(spec):
        return "replicated"
    return ", ".join(f"dimension {d} over {'*'.join(axes)}" for d, axes in enumerate(spec) if axes)


def _value_text(facts: ValueFacts, bundle: Bundle) -> str:
    from hetjax.explaining.naming import names_of
    from hetjax.render.units import human_bytes

    role = f", {facts.role}" if facts.role else ""
    lines = [f"{facts.name}: {facts.type}{role}"]
    made = [f"module {facts.module}" if facts.module else "", facts.source]
    if any(made):
        lines.append("made in " + ", ".join(filter(None, made)))
    for p in facts.places:
        where = f"{p.stage}{f', {p.fragment}' if p.fragment else ''}"
        lines.append(
            f"{where} ({p.how}): {_spec_words(p.spec)}, {human_bytes(p.device_bytes)} on each device"
        )
        lines.append(f"  chosen by {p.chosen_by}")
        if p.propagation is not None:
            for axis, edges in p.propagation.paths.items():
                origin = p.propagation.origins[axis]
                came = names_of(bundle).of(origin) if origin >= 0 else "the fragment's border"
                lines.append(f"  axis {axis} comes from {came}")
                lines += [f"    {edge}" for edge in edges]
    for i, a in enumerate(facts.alternatives):
        head = f"{'instead' if i else 'runner-up'}: {_spec_words(a.spec)}"
        if a.refused:
            lines.append(f"{head}: refused, {a.refused}")
            continue
        memory = f"{'-' if a.peak_bytes < 0 else '+'}{human_bytes(abs(a.peak_bytes))}"
        lines.append(f"{head}: {a.step_s * 1e3:+.4g} ms a step, {memory} at the peak")
    return "\n".join(lines)
