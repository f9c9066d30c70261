"""`hetjax demo`: the screen around hetjax/demo/session.py."""

from __future__ import annotations

import gc
import json
import os
import pathlib
import sys
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.devices import force_cpu_devices
from hetjax.cli.main import EXIT_GOOD, EXIT_NEGATIVE

if TYPE_CHECKING:
    from rich.console import Console
    from rich.progress import Progress

    from hetjax.demo.session import ParityRow, Session, Tick

NUM_DEVICES = 8


@click.command("demo")
@click.option("--framework", type=click.Choice(["linen", "nnx"]), default="linen", show_default=True)
@click.option("--steps", type=click.IntRange(1), default=300, show_default=True, help="Training steps.")
@click.option("--layers", type=click.IntRange(1), default=4, show_default=True, help="Layers of the model.")
@click.option("--plain", is_flag=True, help="Train under plain jit on one device instead; nothing is compared.")
@click.option("--parity/--no-parity", "with_parity", default=True, help="Compare the first steps with plain jit.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object at the end, and nothing else.")
def demo(
    framework: str, steps: int, layers: int, plain: bool, with_parity: bool, as_json: bool
) -> int:
    """Train a small GPT across two unlike sites, and prove it equal to plain jit.

    Eight CPU devices are forced and described as two sites: two fast ones and six slow ones, joined by a slow
    link. The text is Python's own help. Compiled programs are kept in $XDG_CACHE_HOME/hetjax (or
    $JAX_COMPILATION_CACHE_DIR), so that a second start is quick.

    Exit codes: 0 when the loss fell and every number compared is equal; 1 otherwise.
    """
    begin = time.perf_counter()
    if force_cpu_devices(NUM_DEVICES, only_cpu=True) < NUM_DEVICES:
        raise click.UsageError(
            f"XLA_FLAGS forces fewer than the {NUM_DEVICES} devices the demo describes: {os.environ['XLA_FLAGS']!r}; "
            "unset it, or ask for 8"
        )
    from rich.console import Console

    console = Console(file=sys.stdout, quiet=as_json, soft_wrap=not sys.stdout.isatty())
    report = _run(framework, steps, layers, plain, with_parity and not plain, console, begin)
    if as_json:
        click.echo(json.dumps(report))
    return EXIT_GOOD if report["ok"] else EXIT_NEGATIVE


def cache_folder() -> pathlib.Path:
    """Returns where compiled programs are kept between starts."""
    given = os.environ.get("JAX_COMPILATION_CACHE_DIR")
    home = pathlib.Path(os.environ.get("XDG_CACHE_HOME") or pathlib.Path.home() / ".cache")
    return pathlib.Path(given) if given else home / "hetjax" / "compiled"


def _run(
    framework: str, num_steps: int, num_layers: int, plain: bool, with_parity: bool, console: Console,
    begin: float,
) -> dict[str, Any]:
    from hetjax.demo import session as demo_session

    # Tracing makes objects that stay: looking through them for garbage costs a tenth of a start.
    gc.disable()
    folder = cache_folder()
    cached = demo_session.use_compilation_cache(folder)
    show: dict[str, Callable[[str, int, int], None]] = {}
    with _progress(console) as bar:
        row = bar.add_task("compile", total=None, detail="tracing and planning")
        show["compiled"] = lambda name, done, total: bar.update(row, completed=done, total=total, detail=name)
        session = demo_session.open_session(
            framework, num_steps, num_layers=num_layers, plain=plain, progress=lambda *news: show["compiled"](*news)
        )
        num_params = session.num_params
        bar.console.print(
            f"{framework} GPT of {num_params:,} parameters on {len(session.corpus.train):,} characters of Python's help text, "
            + ("plain jit on one device" if plain else _sites(session)), highlight=False,
        )
        ticks, first_step_s = _train(session, bar, row, begin)
    losses = [t.loss for t in ticks]
    steady = ticks[-1].elapsed_s - ticks[0].elapsed_s
    tokens_per_s = session.tokens_per_step * (len(ticks) - 1) / steady if len(ticks) > 1 else None
    held_out = demo_session.held_out_loss(session)
    fell = len(losses) == 1 or sum(losses[-10:]) / len(losses[-10:]) < losses[0]
    console.print(
        f"loss {losses[0]:.3f} to {losses[-1]:.3f}, held-out text {held_out:.3f} (computed where the state lives)"
        + (f", {tokens_per_s:,.0f} characters/s" if tokens_per_s else ""), highlight=False,
    )
    report: dict[str, Any] = {
        "framework": framework, "plain": plain, "steps": num_steps, "params": num_params,
        "first_step_s": first_step_s, "cached_programs": cached, "cache": str(folder), "losses": losses,
        "held_out_loss": held_out, "loss_fell": fell, "tokens_per_s": tokens_per_s, "parity": [], "ok": fell,
    }
    if not plain:
        report |= _plan_facts(session)
    rows: list[ParityRow] = []
    if with_parity:
        with _progress(console) as bar:
            again = bar.add_task("parity", total=3, detail="the first steps again: hetjax, plain jit, plain jit in float64")
            show["compiled"] = lambda name, done, total: None
            for result in demo_session.parity(session):
                rows.append(result)
                bar.update(again, advance=1)
        console.print(_parity_table(rows))
        report["parity"] = [
            {"what": r.what, "max_abs": r.max_abs, "of_bound": r.of_bound, "worst": r.worst, "error": r.error,
             "plain_error": r.plain_error, "ratio": r.ratio, "ok": r.ok} for r in rows
        ]
        report["ok"] = fell and all(r.ok for r in rows)
    report["total_s"] = time.perf_counter() - begin
    console.print(_verdict(report), highlight=False)
    return report


def _train(session: Session, bar: Progress, row: Any, begin: float) -> tuple[list[Tick], float]:
    """Returns every step's loss, and the seconds from the start of the command to the end of the first step."""
    from hetjax.demo.session import train

    ticks: list[Tick] = []
    first_step_s = 0.0
    for tick in train(session):
        ticks.append(tick)
        if tick.step == 1:
            first_step_s = time.perf_counter() - begin
            gc.freeze()
            gc.enable()
            bar.remove_task(row)
            bar.console.print(f"first step done {first_step_s:.1f} s after the start", highlight=False)
            if hasattr(session.step, "plan"):
                bar.console.print(_stage_table(session))
            row = bar.add_task("train", total=session.num_steps, detail="")
        rate = session.tokens_per_step * (tick.step - 1) / max(tick.elapsed_s - ticks[0].elapsed_s, 1e-9)
        detail = f"loss {tick.loss:.3f}" + (f"  {rate:,.0f} characters/s" if tick.step > 1 else "")
        bar.update(row, completed=tick.step, detail=detail)
    return ticks, first_step_s


def _progress(console: Console) -> Progress:
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    return Progress(
        TextColumn("{task.description:8}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(),
        TextColumn("{task.fields[detail]}"), console=console,
    )


def _sites(session: Session) -> str:
    cluster = session.step.cluster
    groups = ", ".join(f"{g.num_devices} {g.kind} devices in {g.site!r}" for g in cluster.groups())
    links = "; ".join(
        f"{' - '.join(k.between)}: {k.bandwidth_bytes_s * 8 / 1e9:g} Gbit/s, {k.latency_s * 1e3:g} ms"
        for k in cluster.links if k.between
    )
    return f"across {groups} ({links})"


def _stage_table(session: Session) -> Any:
    from rich.table import Table

    plan = session.step.plan
    table = Table(
        "stage", "site", "devices", "mesh", "modules",
        title=f"{plan.num_stages} stages, {plan.num_microbatches} microbatches of {plan.batch_size // plan.num_microbatches}, {plan.schedule}",
    )
    for number, stage in enumerate(plan.stages):
        mesh = " x ".join(f"{name} {size}" for name, size in stage.axes)
        table.add_row(
            str(number), stage.site, f"{len(stage.devices)} {stage.kind}", mesh, _modules(stage.blocks)
        )
    return table


def _modules(blocks: tuple[str, ...]) -> str:
    """Returns the modules a stage holds below the root, in order: "embed, block_0, block_1"."""
    names = []
    for block in blocks:
        parts = block.split("/")[1:] or [block]
        # A list of modules says nothing by its own name: "blocks/3".
        names.append("/".join(parts[: 2 if len(parts) > 1 and parts[1].isdigit() else 1]))
    return ", ".join(dict.fromkeys(names))


def _plan_facts(session: Session) -> dict[str, Any]:
    plan, stats = session.step.plan, session.step.stats()
    return {
        "stages": stats["stages"], "microbatches": stats["microbatches"], "schedule": plan.schedule,
        "bytes_between_stages": stats["bytes_between_stages"], "minimum_bytes": session.minimum_bytes,
        "plan": [
            {"site": s.site, "kind": s.kind, "devices": len(s.devices), "mesh": dict(s.axes), "modules": _modules(s.blocks)}
            for s in plan.stages
        ],
    }


def _parity_table(rows: list[ParityRow]) -> Any:
    from rich.table import Column, Table

    from hetjax.demo.session import MAX_ERROR_RATIO, PARITY_STEPS

    table = Table(
        Column(f"first {PARITY_STEPS} steps", no_wrap=True), "largest difference", "of tolerance", "error to f64",
        "plain's error", f"ratio (<= {MAX_ERROR_RATIO:g})", "", title="parity with plain jax.jit",
    )
    for r in rows:
        table.add_row(
            r.what, f"{r.max_abs:.2e}", f"{r.of_bound:.1%}", f"{r.error:.2e}", f"{r.plain_error:.2e}", f"{r.ratio:.2f}",
            "equal" if r.ok else "[bold red]UNEQUAL[/]",
        )
    return table


def _verdict(report: dict[str, Any]) -> str:
    parts = [f"{report['total_s']:.0f} s in all"]
    if not report["plain"]:
        over = report["bytes_between_stages"] - report["minimum_bytes"]
        parts.append(
            f"{report['bytes_between_stages']:,} bytes between stages a step: activations and cotangents at the cut, "
            f"and {over:,} bytes of scalars"
        )
    parts.append(f"compiled programs are in {report['cache']}")
    word = "[bold green]good[/]" if report["ok"] else "[bold red]not good[/]"
    return f"{word}: " + "; ".join(parts)
