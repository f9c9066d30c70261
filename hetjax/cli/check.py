"""`hetjax check`: plain jit and hetjax side by side, every leaf compared."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.devices import ensure_devices, force_cpu_devices, round_as_written
from hetjax.cli.main import EXIT_GOOD, EXIT_NEGATIVE, EXIT_REFUSED

if TYPE_CHECKING:
    from hetjax.frontend.parity import StepParity


@click.command("check")
@click.argument("target", metavar="FILE.py:build")
@click.option("--cluster", "cluster", metavar="FILE", help="Cluster as TOML; the local devices when left out.")
@click.option("--stages", type=click.IntRange(1), help="Number of pipeline stages.")
@click.option("--microbatches", type=click.IntRange(1), help="Number of microbatches.")
@click.option("--mesh", metavar="D,M", help='Data and model axis of each stage: "2,1", or "2,1;3,2" per stage.')
@click.option("--steps", type=click.IntRange(1), default=3, show_default=True, help="Steps to compare.")
@click.option("--rtol", type=float, help="Relative bound, in place of the one by dtype (f32: 1e-6).")
@click.option("--atol", type=float, help="Bound relative to the largest leaf of the tree (f32: 1e-7).")
@click.option("--per-microbatch", is_flag=True, help="Accept a step whose meaning is per microbatch.")
@click.option("--crossing-dtype", metavar="TYPE", help="Round what crosses between stages: bfloat16, float8_e4m3fn, float8_e5m2.")
@click.option("--sums", type=click.Choice(["whole"]), help="Make sums over examples whole, in plain jit's order.")
@click.option("--axis-name", metavar="NAME", help="Bind this axis, for a step written for pmap.")
@click.option("--replicas", type=click.IntRange(1), default=1, show_default=True, help="Devices that pmap ran on.")
@click.option("--double", is_flag=True, help="Both sides in double precision: finds what is no rounding.")
@click.option("--as-written", is_flag=True, help="Both sides with every op rounded as the step is written.")
@click.option("--plain-devices", type=click.IntRange(2), metavar="N", help="Plain jit on N devices in hetjax's place: what rounding alone does.")
@click.option("--rehearse", is_flag=True, help="Run the cluster's plan on CPU devices.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def check(
    target: str, cluster: str | None, stages: int | None, microbatches: int | None, mesh: str | None,
    steps: int, rtol: float | None, atol: float | None, per_microbatch: bool, crossing_dtype: str | None,
    sums: str | None, axis_name: str | None, replicas: int, double: bool, as_written: bool,
    plain_devices: int | None, rehearse: bool, as_json: bool,
) -> int:
    """Run plain jit and hetjax side by side and compare every leaf of outputs and state.

    build() returns (step, state, batches, meta). meta["framework"] is "linen" (the default) for
    step(state, batch) -> (state, out), or "nnx" for step(objects, batch) -> out that mutates its objects,
    or "nnx-jaxjit" for step(objects, batch) -> (state, out).

    Equal means, per leaf: max|difference| <= rtol * max|leaf| + atol * max|tree|. In f32 rtol is 1e-6 and
    atol 1e-7; what an optimizer keeps of the gradient has rtol 1e-5; a step that computes in bf16 has 1e-3,
    in fp16 1e-4. Integers, booleans, keys, shapes, dtypes and weak types are exact. Under Adam and its kin
    a parameter whose gradient is rounding noise is judged by its moments. max_rel is the largest difference
    in units of the bound, times rtol: at most rtol when equal.

    Left free, XLA keeps bf16 values in f32 between some ops, and fuses some multiplications with additions:
    which, depends on the program around them. --as-written forbids both, to plain jit and to hetjax.

    Exit codes: 0 equal; 1 unequal, or wrong input (JSON "ok" and "error" tell which); 3 refused.
    """
    notes = (round_as_written(),) if as_written else ()
    if plain_devices is not None:
        planned = {"--cluster": cluster, "--stages": stages, "--microbatches": microbatches, "--mesh": mesh,
                   "--per-microbatch": per_microbatch, "--crossing-dtype": crossing_dtype, "--sums": sums,
                   "--axis-name": axis_name, "--rehearse": rehearse}  # fmt: skip
        if any(planned.values()):
            given = ", ".join(k for k, v in planned.items() if v)
            raise click.UsageError(f"--plain-devices puts plain jit in hetjax's place, which takes no {given}")
    report, code = _check(
        target, steps, _tolerance(rtol, atol), double, notes, plain_devices,
        needed=plain_devices or _devices_needed(stages, mesh),
        options={
            "cluster": cluster, "num_stages": stages, "num_microbatches": microbatches, "mesh": mesh,
            "per_microbatch": per_microbatch, "crossing_dtype": crossing_dtype, "rehearse": rehearse,
            "axis_name": axis_name, "replicas": replicas, "sums": sums,
        },
        progress=None if as_json else lambda line: click.echo(line, err=True),
    )
    if as_json:
        click.echo(json.dumps(_finite(report)))
    else:
        _print(report)
    return code


def _check(
    target: str, num_steps: int, tolerance: Any, double: bool, notes: tuple[str, ...], plain_devices: int | None, *,
    needed: int, options: dict[str, Any], progress: Callable[[str], None] | None,
) -> tuple[dict[str, Any], int]:
    force_cpu_devices(max(8, needed))
    from hetjax.cli.target import load_case
    from hetjax.frontend.check_report import run_check

    notes += tuple(n for n in (ensure_devices(needed) if options["cluster"] is None else "",) if n)
    case = load_case(target)
    given = {k: v for k, v in options.items() if v not in (None, False)}
    if case.meta.get("donate"):
        given["donate"] = bool(case.meta["donate"])

    def tell(parity: StepParity) -> None:
        if progress:
            progress(f"step {parity.step}: {'equal' if parity.ok else 'UNEQUAL'}")

    name = case.meta.get("name", target)
    report = run_check(
        case, num_steps, name, tolerance, given, notes=notes, double=double, plain_devices=plain_devices, progress=tell
    )
    if report.refusal is not None:
        return report.as_dict(), EXIT_REFUSED
    return report.as_dict(), EXIT_GOOD if report.ok else EXIT_NEGATIVE


def _tolerance(rtol: float | None, atol: float | None) -> Any:
    """Returns the bounds given, or None for the defaults; one of the two keeps the other at its f32 default."""
    from hetjax.frontend.compare import F32, Tolerance

    if rtol is None and atol is None:
        return None
    for name, value in (("--rtol", rtol), ("--atol", atol)):
        if value is not None and not (math.isfinite(value) and value >= 0):
            raise click.BadParameter(f"must be a finite number that is not negative, not {value}", param_hint=name)
    return Tolerance(F32.rtol if rtol is None else rtol, F32.atol if atol is None else atol)


def _devices_needed(stages: int | None, mesh: str | None) -> int:
    """Returns how many devices a request takes at least; a mesh that cannot be read is left to its own error."""
    try:
        sizes = [math.prod(int(n) for n in part.split(",")) for part in (mesh or "1").split(";")]
    except ValueError:
        return stages or 1
    return sum(sizes) if len(sizes) > 1 else sizes[0] * (stages or 1)


def _finite(value: Any) -> Any:
    """Returns the value with infinities and NaN as strings: JSON has neither."""
    if isinstance(value, dict):
        return {k: _finite(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_finite(v) for v in value]
    return str(value) if isinstance(value, float) and not math.isfinite(value) else value


def _print(report: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.table import Column, Table

    console = Console(file=sys.stdout, soft_wrap=True)
    if report["refused"]:
        console.print(f"[bold yellow]refused[/]: {report['reason']}", highlight=False)
        for key in ("equation", "module", "source"):
            if report[key]:
                console.print(f"  {key:9} {report[key]}", highlight=False, markup=False)
        if report["error"] != report["reason"]:
            console.print(report["error"], highlight=False, markup=False)
        return
    table = Table(Column("tree", overflow="fold"), "leaves", "judged by", "max difference", "of its bound", "", title=f"{report['name']}: {report['steps']} steps")
    for group in report["groups"]:
        table.add_row(
            group["group"], str(group["leaves"]), ", ".join(group["rules"]), f"{group['max_abs']:.3g}",
            f"{group['of_bound']:.3g}", "equal" if group["ok"] else "[bold red]UNEQUAL[/]",
        )
    console.print(table)
    if not report["ok"]:
        leaves = Table("step", Column("leaf", overflow="fold"), "rule", "max difference", "allowed", "size", "", title="worst leaves")
        for leaf in report["worst"]:
            leaves.add_row(
                str(leaf["step"]), leaf["path"], leaf["rule"], f"{leaf['max_abs']:.3g}", f"{leaf['allowed']:.3g}",
                f"{leaf['size']:.3g}", leaf["note"],
            )
        console.print(leaves)
    for note in report["notes"]:
        console.print(f"note: {note}", highlight=False, markup=False)
    if report["stages"] is None:
        console.print("[bold green]equal[/]" if report["ok"] else "[bold red]unequal[/]", highlight=False)
        return
    ran = f"{report['stages']} stages, {report['microbatches']} microbatches, {report['bytes_between_stages']} bytes between stages a step"
    console.print(f"{'[bold green]equal[/]' if report['ok'] else '[bold red]unequal[/]'}: {ran}", highlight=False)
