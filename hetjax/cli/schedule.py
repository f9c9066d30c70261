"""`hetjax schedule`: a pipeline schedule on plain numbers, drawn and measured against the bound."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import click

from hetjax.ir.errors import HetjaxError


class _Numbers(click.ParamType):
    """Comma-separated numbers, e.g. 1,1,.5,.5."""

    name = "numbers"

    def __init__(self, kind: type) -> None:
        self.kind = kind

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if not isinstance(value, str):
            return value
        words = [w.strip() for w in value.split(",")] if value.strip() else []
        out = []
        for i, word in enumerate(words):
            try:
                out.append(self.kind(word))
            except ValueError:
                what = "a whole number" if self.kind is int else "a number"
                self.fail(f"entry {i} is {word!r}, not {what}; give them like 1,1,2", param, ctx)
        return tuple(out)


_SECONDS, _COUNTS = _Numbers(float), _Numbers(int)


@click.command()
@click.argument("name", required=False)
@click.option("--list", "list_all", is_flag=True, help="Name the schedules and stop.")
@click.option("--forward", type=_SECONDS, help="Seconds of one microbatch's forward, per stage.")
@click.option("--backward", type=_SECONDS, help="Seconds of its backward, per stage [twice forward].")
@click.option("--latency", type=_SECONDS, default="", help="Seconds of latency, per boundary [0].")
@click.option("--serialisation", type=_SECONDS, default="", help="Seconds a transfer holds the link, per boundary [0].")
@click.option("--microbatches", type=int, help="How many microbatches.")
@click.option("--max-in-flight", type=_COUNTS, help="The most activations held, per stage [no limit].")
@click.option("--weight-share", type=float, default=0.5, show_default=True, help="W's share of a split backward.")
@click.option("--chunks", type=int, help="Stages per device [2 for interleaved-1f1b and zb-v, else 1].")
@click.option("--sync", type=_SECONDS, default="", help="Seconds of gradient synchronisation, per stage [0].")
@click.option("--update", type=_SECONDS, default="", help="Seconds of the optimizer, per stage [0].")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("--svg", type=click.Path(dir_okay=False, path_type=Path), help="Write the chart as SVG.")
@click.option("--trace", type=click.Path(dir_okay=False, path_type=Path), help="Write a trace for Perfetto.")
@click.option("--width", type=int, help="Columns of the chart [the terminal's].")
def schedule(
    name: str | None, list_all: bool, forward: tuple[float, ...] | None, backward: tuple[float, ...] | None,
    latency: tuple[float, ...], serialisation: tuple[float, ...], microbatches: int | None,
    max_in_flight: tuple[int, ...] | None, weight_share: float, chunks: int | None,
    sync: tuple[float, ...], update: tuple[float, ...], as_json: bool, svg: Path | None,
    trace: Path | None, width: int | None,
) -> int:
    """Make schedule NAME from times, prove it, simulate it and draw it.

    The times are seconds, or any other unit: the makespan comes in the same. A boundary lies between
    two neighbouring stages. With --chunks every stage is cut into that many on its device.

    \b
    hetjax schedule virtual-1f1b --forward 1,1,.5,.5 --backward 2,2,1,1 --latency 0,2,0 --microbatches 32
    """
    from hetjax.passes.schedules import SCHEDULES, PipelineCosts

    if list_all:
        return _list(as_json)
    missing = [
        text for text, value in (("NAME", name), ("--forward", forward), ("--microbatches", microbatches))
        if value is None]
    if missing:
        raise click.UsageError(f"{', '.join(missing)} missing; the schedules are: {', '.join(SCHEDULES)}")
    assert name is not None and forward is not None and microbatches is not None
    try:
        costs = PipelineCosts(
            forward, tuple(2 * f for f in forward) if backward is None else backward, microbatches, latency,
            serialisation, max_in_flight, weight_share, sync_s=sync, update_s=update)
        facts, timeline = _make(name, costs, chunks)
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "schedule": name, "error": str(error)}))
        return 1
    from hetjax.cli.programs import writing
    from hetjax.emit.chrome import chrome_trace
    from hetjax.render.gantt import gantt, predicted
    from hetjax.render.text_chart import LEGEND, text_chart

    names = [f"device {d}" for d in range(len(timeline.spans))]
    if svg is not None:
        title = f"{facts['schedule']}, lower bound {facts['lower_bound']:.6g}"
        with writing(svg):
            gantt([predicted(timeline)], names, title, seconds=False).save(svg)
    if trace is not None:
        with writing(trace):
            trace.write_text(json.dumps(chrome_trace(timeline, names)), encoding="utf-8")
    if as_json:
        click.echo(json.dumps(facts))
        return 0
    click.echo(_headline(facts))
    columns = width or shutil.get_terminal_size((100, 24)).columns
    click.echo(text_chart(timeline, names, columns, colour=sys.stdout.isatty()))
    click.echo(LEGEND)
    click.echo(f"peak in flight per device: {', '.join(map(str, facts['peak_in_flight_per_device']))}")
    if any(facts["exposed_comm"]):
        click.echo(f"exposed communication per device: {', '.join(f'{x:.6g}' for x in facts['exposed_comm'])}")
    return 0


def _headline(facts: dict[str, Any]) -> str:
    chosen = f" ({facts['chosen']})" if facts["chosen"] != facts["schedule"] else ""
    return (
        f"{facts['schedule']}{chosen}: makespan {facts['makespan']:.6g}, lower bound"
        f" {facts['lower_bound']:.6g} by {facts['bounds']['binding']} (efficiency"
        f" {facts['efficiency']:.3f}), bubble {facts['bubble']:.3f}")


def _make(name: str, costs: Any, chunks: int | None) -> tuple[dict[str, Any], Any]:
    """Returns what is known about the schedule, and its timeline."""
    from hetjax.passes.bounds import lower_bound
    from hetjax.passes.schedules import check_schedule, schedule_info, split_stages
    from hetjax.passes.schedules import schedule as make
    from hetjax.passes.schedules.auto import choose
    from hetjax.passes.simulator import simulate, with_step_tasks

    info = schedule_info(name)
    if chunks is None:
        chunks = 2 if name in ("interleaved-1f1b", "zb-v") else 1
    if chunks != 1:
        costs = split_stages(costs, chunks, "vee" if info.placements == ("vee",) else "loop")
    chosen, lists = choose(costs) if name == "auto" else (name, make(name, costs))
    check_schedule(lists, costs.num_microbatches, max_in_flight=costs.max_in_flight)
    timeline = simulate(with_step_tasks(lists, costs), costs)
    split = schedule_info(chosen).split
    bounds = lower_bound(costs, split=split)
    lower = bounds.lower_s
    if lower <= timeline.makespan_s * (1 + 1e-9):
        lower = min(lower, timeline.makespan_s)  # sums in another order may differ in the last digit
    stages: list[list[list[Any]]] = [[] for _ in range(costs.num_stages)]
    held, peak = [0] * costs.num_stages, [0] * costs.num_stages
    for span in (span for spans in timeline.spans for span in spans):
        task = span.task
        if task.kind in ("F", "B", "I", "W"):
            stages[task.stage].append([task.kind, task.microbatch, span.start_s, span.end_s])
            held[task.stage] += {"F": 1, "I": 0}.get(task.kind, -1)
            peak[task.stage] = max(peak[task.stage], held[task.stage])
    facts = {
        "ok": True, "schedule": name, "chosen": chosen, "makespan": timeline.makespan_s,
        "lower_bound": lower,
        "bounds": {
            "chain": bounds.chain_s, "stage": bounds.stage_s, "link": bounds.link_s, "window": bounds.window_s,
            "memory": bounds.memory_s, "sync": bounds.sync_s, "per_device": list(bounds.devices_s),
            "per_line": dict(bounds.lines_s), "binding": bounds.binding},
        "efficiency": lower / timeline.makespan_s if timeline.makespan_s else 1.0,
        "bubble": timeline.bubble, "bubble_within": timeline.bubble_within,
        "exposed_comm": list(timeline.exposed_comm_s), "peak_in_flight": peak,
        "peak_in_flight_per_device": list(timeline.peak_in_flight), "device_of": list(costs.device_of),
        "tasks": stages,
    }
    return facts, timeline


def _list(as_json: bool) -> int:
    from hetjax.passes.schedules import SCHEDULES

    if as_json:
        click.echo(json.dumps({"schedules": [
            {"name": n, "summary": i.summary, "placements": list(i.placements), "split_backward": i.split,
             "peak_in_flight": i.declared_peak} for n, i in SCHEDULES.items()]}))
        return 0
    for n, i in SCHEDULES.items():
        click.echo(f"{n:17} {i.summary}; holds at most: {i.declared_peak}")
    return 0
