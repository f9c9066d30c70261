"""PROGRAM on the command line: FILE.py:build, step.hj, plan.json, or - for a bundle on stdin."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hetjax.frontend.tracing import Traced
    from hetjax.ir.bundle import Bundle


def read_text(name: str) -> str:
    """Returns the text of a file, or of stdin for "-".

    Raises:
      click.UsageError: there is no such file, or it is not text.
    """
    if name == "-":
        return sys.stdin.read()
    try:
        return Path(name).read_text(encoding="utf-8")
    except FileNotFoundError:
        raise click.UsageError(f"there is no file {name!r}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise click.UsageError(f"{name!r} cannot be read: {error}") from None


def is_traced(program: str) -> bool:
    """Returns whether PROGRAM names Python code to be traced."""
    path, colon, _ = program.rpartition(":")
    return (path if colon else program).endswith(".py")


def load_bundle(program: str, cluster: str | None = None) -> Bundle:
    """Returns the bundle PROGRAM stands for.

    Args:
      program: FILE.py:build is traced; step.hj is parsed; plan.json gives a bundle with the plan alone.
      cluster: a cluster file that takes the place of the bundle's own.

    Raises:
      click.UsageError: PROGRAM is none of these, or cannot be read.
      ParseError, PlanError, ClusterError: what it holds is wrong.
    """
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.parser import parse_bundle

    if is_traced(program):
        bundle = Bundle(graph=trace_target(program).graph)
    else:
        text = read_text(program)
        if program.endswith(".json"):
            from hetjax.ir.plan import Plan

            bundle = Bundle(plan=Plan.from_json(text, program))
        else:
            bundle = parse_bundle(text, filename="<stdin>" if program == "-" else program)
    return with_cluster(bundle, cluster)


def with_cluster(bundle: Bundle, cluster: str | None) -> Bundle:
    """Returns the bundle with the cluster of a TOML file, if one is named."""
    if cluster is None:
        return bundle
    from hetjax.ir.cluster import Cluster

    return bundle.replace(cluster=Cluster.from_toml(cluster))


def trace_target(target: str) -> Traced:
    """Returns the traced step of FILE.py:build, on the types of its state and first batch.

    Raises:
      click.UsageError: the target is wrong.
      PlanError: the roles of its arguments cannot be told.
    """
    from hetjax.cli.target import load_case
    from hetjax.frontend.calls import flatten_call, is_in_place
    from hetjax.frontend.tracing import trace_call
    from hetjax.ir._jax import static_parameters

    case = load_case(target)
    batch = next(iter(case.batches), None)
    if batch is None:
        raise click.UsageError(f"{target}: batches is empty; one batch is needed for its types")
    step: Any = case.step
    leaves, structure = flatten_call((case.state, batch), {}, is_in_place(step), static_parameters(step))
    name = getattr(step, "__name__", None) or type(step).__name__
    return trace_call(step, structure, leaves, name=name)


@contextlib.contextmanager
def writing(path: Path | str) -> Iterator[None]:
    """Turns what the system says of a file that cannot be written into a usage error."""
    try:
        yield
    except OSError as error:
        raise click.UsageError(f"{str(path)!r} cannot be written: {error.strerror or error}") from None


def write_text(text: str, output: str | None) -> None:
    """Writes to a file, or to stdout for None and "-".

    Raises:
      click.UsageError: the file cannot be written.
    """
    if output in (None, "-"):
        click.echo(text, nl=not text.endswith("\n"))
        return
    with writing(output):
        Path(output).write_text(text if text.endswith("\n") else text + "\n", encoding="utf-8")
