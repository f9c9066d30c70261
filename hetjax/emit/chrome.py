"""Timelines as Chrome traces, which Perfetto and chrome://tracing open beside jax.profiler's own.

A process is a run on a host or site, a thread a device or a line; times are microseconds.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import LoweringError, ParseError
from hetjax.ir.program import Task
from hetjax.passes.simulator import Span, Timeline
from hetjax.passes.simulator_program import simulate_plan


def timeline_of(bundle: Bundle) -> Timeline:
    """Returns when each task of the bundle's plan runs, by its predicted times.

    Raises:
      LoweringError: it has no plan or no cluster.
      PlanError: the plan predicts no times.
    """
    if bundle.plan is None or bundle.cluster is None:
        raise LoweringError(
            "a timeline needs a plan and its cluster; run -p default with --cluster FILE"
        )
    timeline, _, _ = simulate_plan(bundle.plan, bundle.cluster, bundle.program)
    return timeline


def emit_chrome_trace(bundle: Bundle) -> str:
    """Returns the trace as JSON; see `timeline_of` for what it raises."""
    timeline = timeline_of(bundle)
    names = [f"s{i}" for i in range(len(timeline.spans))]
    return json.dumps(chrome_trace(timeline, names)) + "\n"


def chrome_trace(
    timeline: Timeline,
    names: Sequence[str],
    *,
    run: str = "predicted",
    hosts: Sequence[str] = (),
    first_pid: int = 0,
    nbytes: Mapping[str, int] | None = None,
) -> dict[str, Any]:
    """Returns a Chrome trace: a thread per device, one per line or network; microseconds.

    Args:
      timeline: what ran.
      names: of its devices.
      run: what the processes are called.
      hosts: the host or site of each device, a process each; () for one process.
      first_pid: number of the first process, so that several runs stand in one file.
      nbytes: bytes of transfers by the `work` of their task.
    """
    places = list(dict.fromkeys(hosts)) or [""]
    pids = {place: first_pid + k for k, place in enumerate(places)}
    events: list[dict[str, Any]] = []
    for place, pid in pids.items():
        name = f"{run}: {place}" if place else run
        events.append(
            {"name": "process_name", "ph": "M", "pid": pid, "tid": 0, "args": {"name": name}}
        )
    lines = sorted({t.place for t in timeline.transfers})
    where = [pids[h] for h in hosts] if hosts else [first_pid] * len(names)
    threads = [*zip(where, range(len(names)), names)]
    threads += [(first_pid, len(names) + k, line) for k, line in enumerate(lines)]
    for pid, tid, name in threads:
        events.append(
            {"name": "thread_name", "ph": "M", "pid": pid, "tid": tid, "args": {"name": name}}
        )
        events.append(
            {
                "name": "thread_sort_index",
                "ph": "M",
                "pid": pid,
                "tid": tid,
                "args": {"sort_index": tid},
            }
        )

    def add(span: Span, pid: int, thread: int) -> None:
        facts: dict[str, Any] = {"stage": span.task.stage, "microbatch": span.task.microbatch}
        if span.task.work:
            facts["work"] = span.task.work
        if nbytes and span.task.kind in ("send", "sync") and span.task.work in nbytes:
            facts["bytes"] = nbytes[span.task.work]
        events.append({
            "name": f"s{span.task.stage}/{span.task}", "cat": span.task.kind, "ph": "X", "pid": pid,
            "tid": thread, "ts": span.start_s * 1e6, "dur": (span.end_s - span.start_s) * 1e6, "args": facts,
        })  # fmt: skip

    for d, spans in enumerate(timeline.spans):
        for span in spans:
            add(span, where[d], d)
    for span in timeline.transfers:
        add(span, first_pid, len(names) + lines.index(span.place))
    return {"traceEvents": events, "displayTimeUnit": "ms"}


def merge_traces(traces: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Returns one trace of several; their processes must not share numbers."""
    return {"traceEvents": [e for t in traces for e in t["traceEvents"]], "displayTimeUnit": "ms"}


def read_trace(path: str | Path, run: str) -> Timeline:
    """Returns one run of a trace file that `chrome_trace` wrote, as a timeline.

    Args:
      path: the file.
      run: "measured" or "predicted".

    Raises:
      ParseError: the file cannot be read, is no trace, or holds no such run.
    """
    try:
        events = json.loads(Path(path).read_text(encoding="utf-8"))["traceEvents"]
        named = [e for e in events if e["ph"] == "M" and e["name"] == "process_name"]
        pids = {e["pid"] for e in named if e["args"]["name"].partition(":")[0] == run}
        threads = {
            e["tid"]: e["args"]["name"]
            for e in events if e["ph"] == "M" and e["name"] == "thread_name" and e["pid"] in pids
        }  # fmt: skip
        spans = [(e["tid"], e) for e in events if e["ph"] == "X" and e["pid"] in pids]
        lines = {
            t
            for t, e in spans
            if e["cat"] in ("send", "sync") or threads[t].startswith(("line ", "network "))
        }
        devices = sorted(set(threads) - lines)
        rows: list[list[Span]] = [[] for _ in devices]
        travel: list[Span] = []
        for tid, e in spans:
            facts = e["args"]
            task = Task(e["cat"], facts["stage"], facts["microbatch"], facts.get("work", ""))
            start, end = e["ts"] / 1e6, (e["ts"] + e["dur"]) / 1e6
            if tid in lines:
                travel.append(Span(task, threads[tid], task.stage, start, end, start))
            else:
                d = devices.index(tid)
                rows[d].append(Span(task, f"device {d}", d, start, end, start))
    except (OSError, ValueError, KeyError, TypeError, IndexError) as error:
        raise ParseError(f"{path} is no trace of hetjax: {error!r}") from None
    if not spans:
        raise ParseError(f"{path} holds no {run} run")
    rows = [sorted(r, key=lambda s: s.start_s) for r in rows]
    nothing = tuple(() for _ in rows)
    return Timeline(
        max(s.end_s for r in (*rows, travel) for s in r), tuple(map(tuple, rows)), tuple(travel),
        tuple(sum(s.end_s - s.start_s for s in r) for r in rows), (0.0,) * len(rows), nothing, nothing,
    )  # fmt: skip
