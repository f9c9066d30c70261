"""`hetjax calibrate`: measure what prices rest on, fit, and show predicted against measured."""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetjax.ir.errors import HetjaxError

if TYPE_CHECKING:
    from hetjax.calibrate.session import Outcome

MOST_ROWS = 24


def default_store() -> Path:
    """Returns where profiles are kept unless the command says otherwise."""
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "hetjax" / "profiles.json"


def _counts(ctx: click.Context, param: click.Parameter, value: str | None) -> tuple[int, ...] | None:
    if value is None:
        return None
    try:
        found = tuple(int(part) for part in value.split(","))
    except ValueError:
        raise click.BadParameter(f"{value!r} is not a list of whole numbers such as 1,2,4") from None
    if not found or min(found) < 1:
        raise click.BadParameter(f"{value!r}: every number is at least 1")
    return found


@click.command()
@click.argument("program", metavar="[FILE.py:build]", required=False)
@click.option("--store", type=click.Path(dir_okay=False, path_type=Path), help="The profile store [~/.cache/hetjax/profiles.json].")
@click.option("--cluster", metavar="FILE", help="Describes the local devices, where their own description will not do.")
@click.option("--tp", "tensor", callback=_counts, metavar="N,…", help="Tensor-parallel degrees [1,2,4].")
@click.option("--dp", "data", callback=_counts, metavar="N,…", help="Data-parallel degrees [1,2,4].")
@click.option("--sizes", callback=_counts, metavar="N,…", help="Microbatch sizes [the batch in about 2, 4 and 8 parts].")
@click.option("--merge", "others", multiple=True, type=click.Path(exists=True, dir_okay=False, path_type=Path), help="Add another site's store; may be repeated.")
@click.option("--import", "folder", type=click.Path(exists=True, file_okay=False, path_type=Path), help="Add the profiles published with Sailor, from their folder.")
@click.option("--model", "models", multiple=True, help="With --import: which models [all].")
@click.option("--links", is_flag=True, help="Measure the way to another host instead: --serve there, --connect here.")
@click.option("--serve", is_flag=True, help="With --links: answer one measuring host, then end.")
@click.option("--keep", is_flag=True, help="With --serve: go on serving.")
@click.option("--bind", default="0.0.0.0", show_default=True, metavar="ADDRESS", help="With --serve: where to listen.")
@click.option("--port", type=click.IntRange(0, 65535), help="With --links [47115]; 0 with --serve takes a free one.")
@click.option("--connect", metavar="HOST", help="With --links: the host that serves.")
@click.option("--link", "link_name", metavar="NAME", help="With --cluster: the link to write the measurement into.")
@click.option("--budget", default=10.0, show_default=True, type=click.FloatRange(0.1), help="With --connect: seconds to measure for.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def calibrate(
    program: str | None, store: Path | None, cluster: str | None, tensor: tuple[int, ...] | None,
    data: tuple[int, ...] | None, sizes: tuple[int, ...] | None, others: tuple[Path, ...], folder: Path | None,
    models: tuple[str, ...], links: bool, serve: bool, keep: bool, bind: str, port: int | None,
    connect: str | None, link_name: str | None, budget: float, as_json: bool,
) -> int:
    """Profile the layers of a step on the local devices, and fit what plans are priced by.

    The step is cut into its layers; each is compiled and timed at every degree and microbatch size asked for, equal
    ones once. What the store knows already (same work, device kind and versions) is not measured again: a session that
    was interrupted goes on where it was. Then the kind's curves are fitted and the residual forest is trained, on all
    the store holds, and predictions are shown beside the measurements.

    With --links: bandwidth by message size, latency and duplex between two hosts, over TCP. One host runs
    `hetjax calibrate --links --serve`, the other `hetjax calibrate --links --connect HOST --cluster FILE --link NAME`,
    which writes them into the cluster file, and warns where the file said something else by more than 20 %.
    """
    if links:
        from hetjax.cli.calibrate_links import calibrate_links

        if program or store or tensor or data or others or folder:
            raise click.UsageError("--links measures a link and nothing else")
        return calibrate_links(serve, keep, bind, port, connect, cluster, link_name, sizes, budget, as_json)
    if serve or keep or connect or link_name or port is not None:
        raise click.UsageError("--serve, --keep, --port, --connect and --link need --links")
    path = store or default_store()
    if program is None and not others and folder is None:
        raise click.UsageError("give FILE.py:build to profile, --merge FILE, or --import DIR")
    if models and folder is None:
        raise click.UsageError("--model needs --import")
    try:
        answer = _calibrate(program, path, cluster, (tensor, data, sizes), others, folder, models)
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "error": str(error)}))
        return 1
    if as_json:
        click.echo(json.dumps(answer))
    else:
        _print(answer)
    return 0 if answer["ok"] else 1


def _calibrate(
    program: str | None, path: Path, cluster: str | None, degrees: tuple[Any, Any, Any],
    others: tuple[Path, ...], folder: Path | None, models: tuple[str, ...],
) -> dict[str, Any]:
    notes: list[str] = []
    added = 0
    if others:
        notes += _merge(path, others)
    if folder is not None:
        added = _import(path, folder, models)
    if program is None:
        from hetjax.calibrate.session import trained
        from hetjax.passes.cost.store import ProfileStore

        return {**_facts(path, trained(path, ProfileStore.load(path)), []), "imported": added, "notes": notes}
    return _profile(program, path, cluster, degrees, notes) | {"imported": added}


def _merge(path: Path, others: tuple[Path, ...]) -> list[str]:
    """Merges stores into one; returns what they disagree on."""
    from hetjax.passes.cost.store import ProfileStore, update_store

    notes = []
    for other in others:
        theirs = ProfileStore.load(other)

        def merge(mine: ProfileStore, theirs: ProfileStore = theirs) -> ProfileStore:
            notes.extend(mine.disagreements(theirs))
            return mine.merged(theirs)

        update_store(path, merge)
    return notes


def _import(path: Path, folder: Path, models: tuple[str, ...]) -> int:
    """Adds published tables to the store; returns how many kinds of layer became samples."""
    from hetjax.ir import presets
    from hetjax.passes.cost.imported import published_samples
    from hetjax.passes.cost.sailor import model_names, read_model
    from hetjax.passes.cost.store import Measured, ProfileStore, update_store

    rows: list[Measured] = []
    found = ProfileStore()
    for name in models or model_names(folder):
        model = read_model(folder, name)
        found = dataclasses.replace(found, layers=found.layers.merged(model.profiles))
        rows += [
            Measured("", s.kind.name, s.work.phase, s.seconds, s.work, s.group.data, s.group.model, s.group.nodes,
                     s.group.link, step=name, cluster=s.cluster, source="imported")
            for s in published_samples(folder, model)
        ]
    kinds = {m.kind: presets.KINDS[m.kind] for m in rows}
    found = dataclasses.replace(found.adding(*rows), kinds=kinds)
    update_store(path, lambda mine: found.merged(mine))
    return len(rows)


def _profile(
    program: str, path: Path, cluster: str | None, degrees: tuple[Any, Any, Any], notes: list[str]
) -> dict[str, Any]:
    from hetjax.cli.devices import force_cpu_devices

    force_cpu_devices()
    from hetjax.calibrate.session import Request, agenda, run
    from hetjax.cli.programs import trace_target
    from hetjax.ir.cluster import Cluster

    described = Cluster.from_toml(cluster) if cluster else Cluster.local()
    tensor, data, sizes = degrees
    with _progress() as tell:
        tell("tracing", 0, 0)
        traced = trace_target(program)
        plan = agenda(traced, described, Request(tensor, data, sizes), lambda what: tell(what, 0, 0))
        done = [0]

        def told(what: str, at: int, total: int) -> None:
            done[0] = at
            tell(what, at, total)

        try:
            outcome = run(plan, path, told)
        except KeyboardInterrupt:
            return {
                "ok": False, "interrupted": True, "store": str(path), "done": done[0], "total": len(plan.items),
                "error": f"interrupted: {done[0]} of {len(plan.items)} measured and kept in {path}; "
                "the same command goes on from there",
            }
    from hetjax.calibrate.report import rows_of

    rows = rows_of(outcome.store, outcome.forest, plan.kind.name, step=traced.graph.name)
    facts = _facts(path, outcome, rows)
    return {**facts, "kind": plan.kind.name, "total": len(plan.items), "notes": [*notes, *plan.skipped]}


def _facts(path: Path, outcome: Outcome, rows: list[Any]) -> dict[str, Any]:
    from hetjax.calibrate.report import summary
    from hetjax.passes.cost.judge import forest_path

    store, forest = outcome.store, outcome.forest
    return {
        "ok": True, "store": str(path), "measured": outcome.measured, "known": outcome.known,
        "efficiency": {k: dataclasses.asdict(e) for k, e in store.efficiency.items()},
        "links": {k: {"bandwidth_bytes_s": x.bandwidth_bytes_s, "latency_s": x.latency_s} for k, x in store.links.items()},
        "forest": None if forest is None else {
            "file": str(forest_path(path)), "kinds": dict(forest.kinds), "made_with": forest.made_with},
        "held_out": {name: {k: _finite(v) for k, v in dataclasses.asdict(score).items()} for name, score in outcome.scores},
        **summary(rows),
        "rows": [{k: _finite(v) for k, v in dataclasses.asdict(r).items()} for r in rows],
    }


def _finite(value: Any) -> Any:
    """Returns None for a number that JSON has no name for."""
    return None if isinstance(value, float) and value - value != 0 else value


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Gives what draws a bar on stderr, told (what comes next, done, total)."""
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("", total=None)

        def tell(what: str, done: int, total: int) -> None:
            bar.update(task, description=what[:60], completed=done, total=total or None)

        yield tell


def _print(answer: dict[str, Any]) -> None:
    if not answer["ok"]:
        click.echo(answer["error"], err=True)
        return
    rows = answer["rows"]
    shown = sorted(rows, key=lambda r: -r["measured_s"])[:MOST_ROWS]
    if shown:
        click.echo(f"{'layer':28} {'phase':9} {'dp x tp':>7} {'size':>5} {'measured':>10} {'fitted':>9} {'forest':>9} {'sure':>6}  (ms)")
    for r in shown:
        forest = "-" if r["forest_s"] is None else f"{r['forest_s'] * 1e3:.3g}"
        sure = "-" if r["uncertainty"] is None else f"±{r['uncertainty']:.0%}"
        click.echo(
            f"{r['layer'][-28:]:28} {r['phase']:9} {r['data']} x {r['model']:<3} {r['microbatch']:5} "
            f"{r['measured_s'] * 1e3:10.4g} {r['fitted_s'] * 1e3:9.3g} {forest:>9} {sure:>6}"
        )
    if len(shown) < len(rows):
        click.echo(f"and {len(rows) - len(shown)} quicker ones; --json lists all")
    click.echo(f"measured {answer['measured']} now, {answer['known']} were known; kept in {answer['store']}")
    if answer.get("imported"):
        click.echo(f"imported {answer['imported']} kinds of layer")
    if "fitted_error" in answer:
        click.echo(
            f"analytic: mean error {answer['assumed_error']:.1%} by the data sheet, {answer['fitted_error']:.1%} fitted; "
            f"rank {answer['assumed_rank']:.3f}, {answer['fitted_rank']:.3f}"
        )
    for name, score in answer["held_out"].items():
        click.echo(
            f"forest, held out {name}: mean error {score['forest_error']:.1%} (analytic {score['analytic_error']:.1%}), "
            f"rank {score['forest_rank']:.3f} ({score['analytic_rank']:.3f}), {score['num_samples']} samples"
        )
    if answer["forest"] is None:
        click.echo("too few layers are measured for a residual forest: prices stay analytic where nothing was measured")
    for note in answer.get("notes", ()):
        click.echo(f"note: {note}")
