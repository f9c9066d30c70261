"""What a pass may require of its input: parts of the bundle and facts about them."""

from __future__ import annotations

from collections.abc import Callable

from hetjax.ir.bundle import Bundle

# name -> (whether it holds, what brings it about).
FACTS: dict[str, tuple[Callable[[Bundle], bool], str]] = {
    "graph": (lambda b: b.graph is not None, "trace a step with `hetjax trace`"),
    "cluster": (lambda b: b.cluster is not None, "give a cluster with `--cluster FILE`"),
    "plan": (lambda b: b.plan is not None, "run a planning pass or give a plan"),
    "microbatching": (
        lambda b: b.microbatching is not None,
        "run 'one-microbatch', or trace with --microbatches",
    ),
    "program": (lambda b: b.program is not None, "run 'cut-stages'"),
    "graph.regions": (
        lambda b: b.graph is not None and all(op.region for op in b.graph.ops),
        "run 'label-regions'",
    ),
    "graph.costs": (
        lambda b: b.graph is not None and all(op.cost is not None for op in b.graph.ops),
        "run 'annotate-costs'",
    ),
    "program.tasks": (
        lambda b: b.program is not None and (any(b.program.tasks) or not b.program.fragments),
        "run 'schedule'",
    ),
}


def missing(requires: tuple[str, ...], bundle: Bundle) -> list[str]:
    """Returns one sentence per required fact that does not hold."""
    return [
        f"it needs {name}: {remedy}"
        for name in requires
        for holds, remedy in (FACTS[name],)
        if not holds(bundle)
    ]
