"""`hetjax trace`: a train step as IR text."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING

import click

from hetjax.cli.programs import trace_target, with_cluster, write_text

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle


@click.command()
@click.argument("target", metavar="FILE.py:build")
@click.option("-o", "--output", metavar="FILE", help="Where to write; stdout when left out.")
@click.option("--cluster", metavar="FILE", help="Put this cluster into the file too.")
@click.option(
    "--microbatches",
    type=click.IntRange(1),
    metavar="M",
    help="Trace at a batch M times smaller too, and put the proof that M of them equal the whole into the "
    "file. It can only be made here: a file holds the step at one batch size.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object; the text needs -o.")
def trace(
    target: str, output: str | None, cluster: str | None, microbatches: int | None, as_json: bool
) -> int:
    """Trace the step of FILE.py:build, on the types of its state and first batch.

    build() returns (step, state, batches, meta), as for `hetjax check`. The file holds the step as traced,
    calls not yet inlined; with --microbatches it is inlined and labelled, which the proof needs.
    """
    from hetjax.ir.text import print_bundle

    if as_json and output in (None, "-"):
        raise click.UsageError("--json prints to stdout; name a file for the text with -o")
    bundle = with_cluster(_traced(target, microbatches), cluster)
    write_text(print_bundle(bundle), output)
    graph = bundle.graph
    if as_json and graph is not None:
        click.echo(
            json.dumps(
                {
                    "ok": True,
                    "file": output,
                    "name": graph.name,
                    "ops": len(graph.ops),
                    "inputs": len(graph.inputs),
                    "outputs": len(graph.outputs),
                    "microbatches": microbatches or 1,
                }
            )
        )
    return 0


def _traced(target: str, microbatches: int | None) -> Bundle:
    from hetjax.ir.bundle import Bundle

    traced = trace_target(target)
    bundle = Bundle(graph=traced.graph)
    if microbatches is None:
        return bundle
    from hetjax.frontend.planning import Options, choose_microbatching
    from hetjax.ir.cluster import Cluster
    from hetjax.passes.pipeline import analyse
    from hetjax.passes.plan_stages import Request

    bundle = analyse(bundle)
    if bundle.graph is None:
        return bundle
    options = Options(num_microbatches=microbatches)
    # The number is given, so nothing is asked of the cluster.
    graph, micro = choose_microbatching(bundle.graph, traced.retrace, Cluster.local(), options, Request())
    return bundle.replace(graph=graph, microbatching=micro)
