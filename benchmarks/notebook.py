"""What a notebook waits for: reprs of a 7,000-op graph and of its program, charts of many tasks.

    python benchmarks/notebook.py            a table
    python benchmarks/notebook.py --quick    fewer rounds, within 50 s
    python benchmarks/notebook.py --json     one object

The step is a 13-block transformer with adamw. Times are the best of some rounds of CPU time; each round
draws from scratch, and the first, with its imports, is reported by itself.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("JAX_PLATFORMS", "cpu")
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks._report import Figure, Report, at_most, main

MOST_S, MOST_BYTES = 0.5, 300e3


def drawn(name: str, value: Any, rounds: int) -> list[Figure]:
    """Returns seconds and bytes of a value's HTML."""
    times, text = [], ""
    for _ in range(rounds):
        start = time.process_time()
        text = value._repr_html_()
        times.append(time.process_time() - start)
    size = len(text.encode())
    return [
        at_most(f"{name}, first", times[0], "s", MOST_S),
        at_most(name, min(times), "s", MOST_S),
        at_most(f"{name}, size", size / 1e3, "kB", MOST_BYTES / 1e3),
    ]


def large_step() -> tuple[Callable[..., Any], tuple[Any, ...]]:
    from benchmarks.ir import train_step

    step, (params, state, tokens) = train_step(num_blocks=13)

    def whole(state: Any, tokens: Any) -> Any:
        params, opt_state, loss = step(*state, tokens)
        return (params, opt_state), loss

    return whole, ((params, state), tokens)


def run(report: Report) -> None:
    import hetjax
    from hetjax.demo.session import CLUSTER
    from hetjax.passes.schedules import PipelineCosts, schedule
    from hetjax.passes.search.own_judge import OwnJudge
    from hetjax.passes.search.result import search
    from hetjax.passes.search.samples import random_problem
    from hetjax.passes.simulator import simulate

    rounds = 3 if report.quick else 7
    step, args = large_step()
    begin = time.process_time()
    rehearsal = hetjax.rehearse(
        step, str(CLUSTER), *args, options={"num_microbatches": 2, "mesh": "2,1;2,1"}
    )
    report.figures.append(
        Figure("rehearsal: trace, prove, plan, lower, price", time.process_time() - begin, "s")
    )
    graph = rehearsal.bundle.graph
    if graph is None:
        raise RuntimeError("nothing was traced")
    report.figures.append(Figure("ops of the graph", len(graph.ops), "ops"))
    raw = graph.replace(
        ops=tuple(op.__class__(op.primitive, op.inputs, op.outputs, op.params) for op in graph.ops)
    )
    report.measure("graph", 2, lambda: drawn("graph", graph, rounds))
    report.measure("graph without labels", 2, lambda: drawn("graph without labels", raw, rounds))
    report.measure("program", 2, lambda: drawn("program", rehearsal.bundle.program, rounds))
    report.measure("plan with costs", 2, lambda: drawn("plan with costs", rehearsal.plan, rounds))
    report.measure("bundle", 3, lambda: drawn("bundle", rehearsal.bundle, rounds))
    begin = time.process_time()
    changed = rehearsal.plan.with_(schedule="gpipe")
    report.figures.append(
        Figure("plan.with_(schedule=…), lowered and priced", time.process_time() - begin, "s")
    )
    report.measure("changed plan", 2, lambda: drawn("changed plan with its delta", changed, rounds))
    found = search(OwnJudge(random_problem(3)), max_evaluations=1500)
    name = f"search with a tree of {len(found.tree):,} nodes"
    report.measure(name, 2, lambda: drawn(name, found, rounds))
    for stages, microbatches in ((8, 32), (32, 256)):
        costs = PipelineCosts((1.0,) * stages, (2.0,) * stages, microbatches, (0.1,) * (stages - 1))
        timeline = simulate(schedule("1f1b", costs), costs)
        name = f"Gantt of {stages} stages, {microbatches} microbatches"
        report.measure(name, 3, lambda t=timeline, n=name: drawn(n, t, rounds))


if __name__ == "__main__":
    main(__doc__ or "", run)
