"""Train steps of other people through `hetjax check`, as a table.

    python -m hetjax.cli.case_table FOLDER --write docs/cases.md

FOLDER holds `NAME/run.py` with a `build()` (see `hetjax check --help`), and files with a dict `CASES` of
functions that give (fn, args, meta). Each case runs in a process of its own with 2 stages, 2
microbatches and 2 shards; one that is refused runs once more with one microbatch. One that is past its
bound runs once more with whole sums (`parallelize(sums="whole")`), then with every op rounded as it is
written besides (`hetjax check --as-written`), then in double precision; and plain jit on 2 devices runs
in hetjax's place, to show what rounding alone does.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import hashlib
import importlib.util
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from typing import Any

import click

from hetjax.cli.case_sources import CACHE, flax_examples
from hetjax.ir.errors import HetjaxError

STAGES, MICROBATCHES, SHARDS = 2, 2, 2
LIMIT_S = 900

# Case files of small functions: the last argument that can be halved carries the batch, another is the state.
ADAPTER = """
import importlib.util, itertools, jax
spec = importlib.util.spec_from_file_location("cases", {file!r})
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)

def build():
    fn, args, meta = module.CASES[{name!r}]()
    half = lambda k: [jax.tree.map(lambda x: x[: x.shape[0] // 2], a) if i == k else a for i, a in enumerate(args)]
    out = jax.eval_shape(fn, *args)
    if isinstance(out, tuple) and jax.tree.structure(out[0]) == jax.tree.structure(args[0]):
        step, state, batch = fn, args[0], args[1]
    else:
        k = next((k for k in reversed(range(2)) if traces(fn, half, k)), None)
        if k is None:
            raise ValueError({name!r} + " traces with neither argument halved: it has no batch that could be split")
        place = lambda s, b: (s, b) if k else (b, s)
        step, state, batch = lambda s, b: (s, fn(*place(s, b))), args[1 - k], args[k]
    return step, state, itertools.repeat(batch), {{"name": {name!r}}}

def traces(fn, half, k):
    # What JAX raises where shapes do not fit; the same call with whole arguments has gone well.
    try:
        jax.eval_shape(fn, *half(k))
    except (TypeError, ValueError, IndexError, ZeroDivisionError):
        return False
    return True
"""


@dataclasses.dataclass(frozen=True)
class Row:
    """One run of one case.

    Attributes:
      case: its name.
      microbatches: asked for.
      verdict: "right", "refused", "past its bound", "wrong" (in double precision, too) or "failed".
      max_rel: the largest difference in units of its bound, times the relative bound; None if none ran.
      rtol: the relative bound.
      residual_bytes: kept from forward to backward, per microbatch.
      reason: of a refusal or failure, or of fewer stages; the worst leaves where it is wrong.
      seconds: the run took.
      double: whether it ran in double precision.
      sums: "whole" where it ran with `parallelize(sums="whole")`.
      as_written: whether every op rounded as it is written, on both sides.
      plain: whether plain jit, its batch over `SHARDS` devices, ran in hetjax's place.
      stages: that ran; fewer than asked for where a function has no gradient whose forward could be cut.
    """

    case: str
    microbatches: int
    verdict: str
    max_rel: float | None = None
    rtol: float | None = None
    residual_bytes: int | None = None
    reason: str = ""
    seconds: float = 0.0
    stages: int | None = None
    double: bool = False
    sums: str = ""
    as_written: bool = False
    plain: bool = False


def cases_in(folder: pathlib.Path, scratch: pathlib.Path) -> dict[str, str]:
    """Returns a `hetjax check` target by case name.

    Args:
      folder: of cases.
      scratch: where adapters for files with `CASES` are written.
    """
    found = {}
    for file in sorted(folder.glob("*.py")):
        text = file.read_text()
        if not re.search(r"^CASES\s*=\s*\{", text, re.M):
            continue
        for name in _names(file):
            adapter = scratch / f"{file.stem}_{name}.py"
            adapter.write_text(ADAPTER.format(file=str(file.absolute()), name=name))
            found[name] = f"{adapter}:build"
    found.update((f.parent.name, f"{f}:build") for f in sorted(folder.glob("*/run.py")))
    return found


def _names(file: pathlib.Path) -> list[str]:
    spec = importlib.util.spec_from_file_location(f"_cases_{file.stem}", file.absolute())
    if spec is None or spec.loader is None:
        raise HetjaxError(f"{file} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return list(module.CASES)


def run_case(name: str, target: str, steps: int, environment: dict[str, str]) -> list[Row]:
    """Returns the rows of one case: one, or more where splitting the batch is refused or rounding decides.

    The last tells whether the case is right.
    """
    check = functools.partial(_check, name, target, steps=steps, environment=environment)
    rows = [check(MICROBATCHES)]
    if rows[0].verdict == "refused":
        rows.append(check(1))
    microbatches = rows[-1].microbatches
    if rows[-1].verdict == "past its bound":
        rows += [check(1, plain=True), check(microbatches, sums="whole")]
    if rows[-1].verdict == "past its bound":
        rows.append(check(microbatches, sums="whole", as_written=True))
    if rows[-1].verdict == "past its bound":
        rows.append(check(microbatches, double=True))
    return rows


def is_right(rows: Sequence[Row]) -> bool:
    """Returns whether a case is right, by the last of its runs."""
    return rows[-1].verdict == "right"


def kept_rows(file: pathlib.Path | None, steps: int) -> dict[str, list[Row]]:
    """Returns the rows by case that a file keeps of a run of the same code and number of steps."""
    if file is None or not file.is_file():
        return {}
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    return {
        line["rows"][0]["case"]: [Row(**r) for r in line["rows"]]
        for line in lines if line["of"] == [_code_digest(), steps]
    }


def keep_rows(file: pathlib.Path | None, steps: int, rows: Sequence[Row]) -> None:
    """Adds a case's rows to the file, if there is one."""
    if file is not None:
        with file.open("a") as out:
            out.write(json.dumps({"of": [_code_digest(), steps], "rows": [dataclasses.asdict(r) for r in rows]}) + "\n")


@functools.cache
def _code_digest() -> str:
    home = pathlib.Path(__file__).absolute().parents[1]
    parts = ("ir", "passes", "runtime", "frontend", "planning", "cli")
    files = sorted(path for part in parts for path in (home / part).rglob("*.py"))
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()


def _check(
    name: str, target: str, microbatches: int, *, steps: int, environment: dict[str, str], double: bool = False,
    sums: str = "", as_written: bool = False, plain: bool = False,
) -> Row:
    how = ["--plain-devices", str(SHARDS)] if plain else [
        "--stages", str(STAGES), "--microbatches", str(microbatches), "--mesh", f"{SHARDS},1"
    ]  # fmt: skip
    command = [
        sys.executable, "-c", "from hetjax.cli.main import main; main()", "check", target, *how, "--steps", str(steps), "--json",
        *(["--double"] if double else []), *(["--sums", sums] if sums else []), *(["--as-written"] if as_written else []),
    ]  # fmt: skip
    start = time.monotonic()
    try:
        done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=LIMIT_S)
    except subprocess.TimeoutExpired:
        return Row(name, microbatches, "failed", reason=f"took longer than {LIMIT_S} s", seconds=LIMIT_S)
    seconds = time.monotonic() - start
    try:
        report = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError):
        return Row(name, microbatches, "failed", reason=done.stderr.strip()[-400:], seconds=seconds)
    row = row_of(name, microbatches, report, seconds, double)
    return dataclasses.replace(row, sums=sums, as_written=as_written, plain=plain, stages=1 if plain else row.stages)


def row_of(name: str, microbatches: int, report: dict[str, Any], seconds: float, double: bool = False) -> Row:
    """Returns the row of what `hetjax check --json` printed."""
    if report.get("refused"):
        return Row(name, microbatches, "refused", reason=report["reason"], seconds=seconds, double=double)
    if report.get("max_rel") is None:
        return Row(name, microbatches, "failed", reason=report.get("error", ""), seconds=seconds, double=double)
    verdict = "right" if report["ok"] else "wrong" if double else "past its bound"
    reason = "; ".join(w["path"] for w in report["worst"][:3])
    if report["ok"]:  # why there are fewer stages, where there are
        reason = next((n.removeprefix("stages: ") for n in report.get("notes", ()) if n.startswith("stages: ")), "")
    return Row(
        name, microbatches, verdict, float(report["max_rel"]), report["rtol"], report["residual_bytes"], reason, seconds,
        report.get("stages"), double,
    )


def markdown(rows: Sequence[Row]) -> str:
    """Returns the table as a page of the documents."""
    lines = [
        "# Train steps of other projects", "",
        "Made by `python -m hetjax.cli.case_table`. Every case ran through `hetjax check`: plain jit and hetjax side by",
        "side, every leaf of state and outputs compared after each step. Where whole-batch meaning forbids splitting the",
        "batch, the refusal is the right answer, and the case runs once more with one microbatch.", "",
        "Max relative difference is the largest difference of any leaf in units of its bound, times the relative bound",
        "(1e-6 in f32, 1e-5 for moments, 1e-3 where the step computes in bf16). Residual bytes are what the forwards keep",
        "for the backwards, per microbatch.", "",
        "A case past its bound runs again with whole sums (`parallelize(sums=\"whole\")`, see docs/steps.md): no sum over",
        "examples is split over devices or microbatches then, and plain jit's order of adding is kept. One still past its",
        "bound runs so once more with every op, of plain jit and of hetjax, rounded as the step is written (`hetjax check",
        "--as-written`). Should that not do, double precision would: bounds 1e-9 and 1e-10 on both sides, where a mistake",
        f"shows and rounding does not. A row \"plain jit on {SHARDS} devices\" is plain jit with its batch split over {SHARDS} devices, held",
        "to the same bound: what the user's own data parallelism changes.", "",
        "| case | stages | microbatches | shards | verdict | max relative difference | residual bytes |",
        "|---|---|---|---|---|---|---|",
    ]  # fmt: skip
    for r in rows:
        rel = "" if r.max_rel is None else f"{r.max_rel:.1e}"
        kept = "" if r.residual_bytes is None else f"{r.residual_bytes:,}"
        verdict = r.verdict + (f": {_plain(r.reason)}" if r.reason else "")
        name = r.case + (" in double precision" if r.double else "") + (" with whole sums" if r.sums else "")
        name += (", as written" if r.as_written else "") + (f": plain jit on {SHARDS} devices" if r.plain else "")
        lines.append(f"| {name} | {r.stages or STAGES} | {r.microbatches} | {SHARDS} | {verdict} | {rel} | {kept} |")
    return "\n".join(lines) + "\n"


def _plain(reason: str) -> str:
    """Returns a reason on one line, absolute paths shortened to their last part."""
    text = " ".join(reason.split()).replace("|", "\\|")
    return re.sub(r"(?<![\w.])/(?:[\w.+-]+/)+([\w.-]+\.py)", r"\1", text)


@click.command("case_table")
@click.argument("folder", type=click.Path(exists=True, file_okay=False, path_type=pathlib.Path))
@click.option("--only", multiple=True, metavar="NAME", help="Only cases whose name contains this.")
@click.option("--steps", type=click.IntRange(1), default=2, show_default=True, help="Steps to compare.")
@click.option("--jobs", type=click.IntRange(1), default=1, show_default=True, help="Cases at a time.")
@click.option("--cache", type=click.Path(path_type=pathlib.Path), default=CACHE, help="Where source distributions are kept.")
@click.option("--offline", is_flag=True, help="Never download; cases whose source is not cached are left out.")
@click.option("--write", type=click.Path(path_type=pathlib.Path), help="Write the table here, as Markdown.")
@click.option("--resume", type=click.Path(path_type=pathlib.Path), help="Keep each case's rows here, and take those of a run of the same code.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def case_table(
    folder: pathlib.Path, only: tuple[str, ...], steps: int, jobs: int, cache: pathlib.Path, offline: bool,
    write: pathlib.Path | None, resume: pathlib.Path | None, as_json: bool,
) -> None:
    """Run the cases of FOLDER with 2 stages, 2 microbatches and 2 shards.

    Exits with 1 when one is neither right, nor refused and right with one microbatch.
    """
    environment = dict(os.environ)
    try:
        environment["HETJAX_CASE_PEERS"] = str(flax_examples(cache, offline=offline))
        without = False
    except HetjaxError as error:
        if not offline:
            raise click.ClickException(str(error)) from error
        click.echo(f"left out, as --offline asks: {error}", err=True)
        without = True
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    with tempfile.TemporaryDirectory() as scratch:
        cases = cases_in(folder, pathlib.Path(scratch))
        cases = {
            n: t for n, t in cases.items()
            if (not only or any(part in n for part in only)) and not (without and n.startswith("flax_"))
        }
        if not cases:
            raise click.ClickException(f"{folder} holds no cases{f' named {only}' if only else ''}")
        kept = kept_rows(resume, steps)
        with concurrent.futures.ThreadPoolExecutor(jobs) as pool:
            running = {
                n: None if n in kept else pool.submit(run_case, n, t, steps, environment) for n, t in cases.items()
            }
            found = []
            for name, job in running.items():
                if job is None:
                    found.append(kept[name])
                    continue
                found.append(job.result())
                keep_rows(resume, steps, found[-1])
                for r in found[-1]:
                    click.echo(f"{r.case}: {r.verdict} with {r.microbatches} microbatches, {r.seconds:.0f} s {r.reason}", err=True)
    rows = [r for group in found for r in group]
    bad = [group[0].case for group in found if not is_right(group)]
    if write is not None:
        write.write_text(markdown(rows))
    if as_json:
        click.echo(json.dumps({"ok": not bad, "rows": [dataclasses.asdict(r) for r in rows]}))
    elif write is None:
        click.echo(markdown(rows))
    if bad:
        raise click.ClickException(f"not right: {', '.join(bad)}")


if __name__ == "__main__":
    case_table()
