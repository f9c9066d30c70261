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


def trace_target(target: str, batch_size: int | None = None) -> Traced:
    """Returns the traced step of FILE.py:build, on the types of its state and first batch.

    Args:
      target: FILE.py:build.
      batch_size: examples of a step, in place of what the first batch has.

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
    traced = trace_call(step, structure, leaves, name=name)
    return traced if batch_size is None else _resized(traced, target, step, structure, leaves, batch_size)


def _resized(
    traced: Traced, target: str, step: Any, structure: Any, leaves: list[Any], batch_size: int
) -> Traced:
    """Returns the step traced again with batch leaves of another number of examples."""
    import jax

    from hetjax.frontend.tracing import abstract_leaf, trace_call
    from hetjax.passes.plan_stages import batch_size_of

    have = batch_size_of(traced.graph)
    if not have:
        raise click.UsageError(f"{target}: no argument carries a batch, so its size cannot be chosen")
    if have == batch_size:
        return traced
    resized = list(leaves)
    for k, argument in enumerate(traced.graph.inputs[: len(leaves)]):
        if argument.role == "batch" and argument.batch_axis is not None:
            struct = abstract_leaf(leaves[k])
            shape = list(struct.shape)
            size, rest = divmod(shape[argument.batch_axis] * batch_size, have)
            if rest or size < 1:
                raise click.UsageError(
                    f"{target}: {argument.path} has {shape[argument.batch_axis]} rows for {have} examples; "
                    f"{batch_size} examples would not have a whole number of them"
                )
            shape[argument.batch_axis] = size
            resized[k] = jax.ShapeDtypeStruct(tuple(shape), struct.dtype, weak_type=struct.weak_type)
    return trace_call(step, structure, resized, name=traced.graph.name)


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
