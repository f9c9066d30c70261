"""`hetjax bisect`: the first bad pass of a pipeline, then its first bad rewrite."""

from __future__ import annotations

import json
import shlex
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.completion import complete_pipeline
from hetjax.cli.main import EXIT_GOOD, EXIT_NEGATIVE
from hetjax.cli.opt import use_colour
from hetjax.cli.programs import load_bundle, writing
from hetjax.ir.errors import HetjaxError

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle
    from hetjax.passes.bisection import Blame

# As git bisect has it: the check cannot tell.
CANNOT_TELL = 125


@click.command()
@click.argument("program", metavar="PROGRAM")
@click.option(
    "-p",
    "--pipeline",
    required=True,
    metavar="PASSES",
    shell_complete=complete_pipeline,
    help="The passes to search.",
)
@click.option(
    "--check",
    "command",
    default="verify",
    metavar="CMD",
    show_default=True,
    help="'verify', 'numbers', or a shell command that gets a .hj file ({} or its last word): exit 0 is good.",
)
@click.option("--cluster", metavar="FILE", help="The cluster, in place of the file's own.")
@click.option(
    "-o",
    "--output",
    metavar="DIR",
    help="Write good.hj and bad.hj, just before and just after the fault.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bisect(
    program: str,
    pipeline: str,
    command: str,
    cluster: str | None,
    output: str | None,
    as_json: bool,
) -> int:
    """Find the first pass, then the first rewrite, that makes PROGRAM fail a check.

    'verify' asks the verifier; 'numbers' runs the graph on random inputs and compares its outputs with those of
    the graph before any pass. A pass that raises is bad. Exit codes: 0 nothing bad, or the culprit was found; 1 the
    input is bad already, or the check cannot tell.
    """
    from hetjax.passes.bisection import bisect as search
    from hetjax.passes.pipeline_text import parse_pipeline

    try:
        bundle = load_bundle(program, cluster)
        with tempfile.TemporaryDirectory() as folder:
            blame = search(
                bundle, parse_pipeline(pipeline), make_check(command, bundle, Path(folder))
            )
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "error": str(error)}))
        return EXIT_NEGATIVE
    files = _write(blame, output) if blame is not None and output is not None else {}
    if as_json:
        click.echo(
            json.dumps(
                {
                    "ok": True,
                    "found": blame is not None,
                    **(_facts(blame) if blame else {}),
                    **files,
                }
            )
        )
    elif blame is None:
        click.echo("every pass passes the check")
    else:
        _print(blame, files)
    return EXIT_GOOD


def make_check(command: str, bundle: Bundle, folder: Path) -> Callable[[Bundle], bool]:
    """Returns the check a command line names.

    Args:
      command: "verify", "numbers" or a shell command.
      bundle: the input, which "numbers" compares with.
      folder: for the files a shell command gets.
    """
    if command == "verify":
        return _verifies
    if command == "numbers":
        from hetjax.cli.numbers import same_numbers

        return same_numbers(bundle)
    return lambda candidate: _shell_says(command, candidate, folder)


def _verifies(bundle: Bundle) -> bool:
    from hetjax.ir.errors import VerifyError
    from hetjax.ir.verify import verify_bundle

    try:
        verify_bundle(bundle)
    except VerifyError:
        return False
    return True


def _shell_says(command: str, bundle: Bundle, folder: Path) -> bool:
    from hetjax.ir.text import print_bundle

    path = folder / "candidate.hj"
    path.write_text(print_bundle(bundle), encoding="utf-8")
    name = shlex.quote(str(path))
    full = command.replace("{}", name) if "{}" in command else f"{command} {name}"
    done = subprocess.run(full, shell=True, stdout=subprocess.DEVNULL, check=False)
    if done.returncode == CANNOT_TELL or done.returncode == 127:
        raise click.ClickException(f"the check exited {done.returncode}: {full}")
    return done.returncode == 0


def _facts(blame: Blame) -> dict[str, Any]:
    from hetjax.passes.pipeline_text import pass_text

    rewrite = None
    if blame.rewrite is not None:
        position, name, where = blame.rewrite
        rewrite = {"number": position, "of": blame.num_rewrites, "name": name, "where": where}
    return {
        "pass": {
            "number": blame.number,
            "text": pass_text(blame.one),
            "raised": blame.crashed or None,
        },
        "rewrite": rewrite,
        "checks": blame.checks,
    }


def _write(blame: Blame, output: str) -> dict[str, str]:
    from hetjax.ir.text import print_bundle

    folder = Path(output)
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    files = {}
    for name, bundle in (("good", blame.good), ("bad", blame.bad)):
        if bundle is not None:
            path = folder / f"{name}.hj"
            path.write_text(print_bundle(bundle), encoding="utf-8")
            files[name] = str(path)
    return files


def _print(blame: Blame, files: dict[str, str]) -> None:
    from hetjax.ir.text import print_bundle
    from hetjax.passes.diffing import diff, render
    from hetjax.passes.instruments import changed_parts, only
    from hetjax.passes.pipeline_text import pass_text

    click.echo(f"first bad pass: {pass_text(blame.one)} (number {blame.number})")
    if blame.crashed:
        click.echo(f"it raised {blame.crashed}")
    if blame.rewrite is not None:
        position, name, where = blame.rewrite
        click.echo(
            f"first bad rewrite: {name}{f' at {where}' if where else ''} ({position} of {blame.num_rewrites})"
        )
    elif blame.num_rewrites:
        click.echo(f"it is bad before the first of its {blame.num_rewrites} rewrites")
    if blame.bad is not None:
        parts = changed_parts(blame.good, blame.bad)
        texts = [
            print_bundle(only(b, parts), scopes=False, nones=False) for b in (blame.good, blame.bad)
        ]
        click.echo(render(diff(*texts), colour=use_colour()), err=True)
    for name, path in files.items():
        click.echo(f"{name}: {path}")
