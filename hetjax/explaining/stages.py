"""The stages of a planned step: devices, modules, memory, work, predicted time, bubble."""

from __future__ import annotations

import dataclasses
from typing import Any

from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Plan
from hetjax.passes.cost.estimate import ProgramEstimate
from hetjax.passes.schedules.check import peak_in_flight
from hetjax.render.units import human_bytes


@dataclasses.dataclass(frozen=True)
class StageFacts:
    """One stage. What a plan alone does not tell is None.

    Attributes:
      name: "s0".
      site, kind: where and on what.
      num_devices, axes: its mesh.
      modules: module paths of its forward, in order.
      parameter_bytes, optimizer_bytes: state on one device.
      activation_bytes: of the microbatches in flight, on one device.
      peak_bytes, memory_bytes: the most one device holds, and what it has.
      flops: of one step, all devices together.
      microbatch_s: forward and backward of one microbatch.
      bubble: share of the step in which the stage does nothing.
    """

    name: str
    site: str
    kind: str
    num_devices: int
    axes: tuple[tuple[str, int], ...]
    modules: tuple[str, ...]
    parameter_bytes: int | None = None
    optimizer_bytes: int | None = None
    activation_bytes: int | None = None
    peak_bytes: int | None = None
    memory_bytes: float | None = None
    flops: int | None = None
    microbatch_s: float | None = None
    bubble: float | None = None


def plan_stages(plan: Plan) -> list[StageFacts]:
    """Returns what a plan alone tells."""
    return [
        StageFacts(
            f"s{i}", s.site, s.kind, len(s.devices), s.axes, s.blocks, peak_bytes=s.peak_bytes,
            microbatch_s=s.predicted_s,
        )
        for i, s in enumerate(plan.stages)
    ]


def program_stages(bundle: Bundle, estimate: ProgramEstimate) -> list[StageFacts]:
    """Returns the stages of a complete program with its estimate.

    Raises:
      PlanError: the bundle is not complete.
    """
    program, cluster = bundle.program, bundle.cluster
    if program is None or cluster is None:
        raise PlanError("the stages of a program need a program and its cluster")
    in_flight = peak_in_flight(program.tasks)
    graph_ops = bundle.graph.ops if bundle.graph is not None else ()
    order = {op.block: -i for i, op in enumerate(reversed(graph_ops))}  # modules as the step runs
    out = []
    for s, mesh in enumerate(program.meshes):
        mine = [f for f in program.fragments if f.stage == s]
        modules = dict.fromkeys(
            op.block for f in mine for op in f.ops if op.region == "forward" and op.block
        )
        memory, total = estimate.memory[s], estimate.iteration_s
        flops = sum(
            op.cost.flops * (program.num_microbatches if f.per_microbatch else 1)
            for f in mine
            for op in f.ops
            if op.cost is not None
        )
        out.append(
            StageFacts(
                mesh.name,
                mesh.site,
                mesh.kind,
                len(mesh.devices),
                mesh.axes,
                tuple(sorted(modules, key=lambda m: order.get(m, 0))),
                memory.parameters,
                memory.optimizer,
                memory.activations * max(1, in_flight[s]),
                memory.peak_bytes,
                cluster.kind(mesh.kind).memory_bytes,
                flops,
                sum(estimate.fragments[f.name].seconds for f in mine if f.per_microbatch),
                1 - estimate.timeline.busy_s[s] / total if total else 0.0,
            )
        )
    return out


def outline(modules: tuple[str, ...], most: int = 3) -> str:
    """Returns module paths in a few words: the outermost ones, first and last."""
    # A module that only holds others of the stage says nothing.
    modules = tuple(m for m in modules if not any(o.startswith(m + "/") for o in modules))
    if not modules:
        return "-"
    short: list[str] = []
    # The shallowest level at which the stage's modules are told apart.
    for depth in range(1, 1 + max(m.count("/") + 1 for m in modules)):
        short = list(dict.fromkeys("/".join(m.split("/")[:depth]) for m in modules))
        if len(short) > 1:
            break
    if len(short) <= most:
        return ", ".join(short)
    return f"{short[0]} … {short[-1]} ({len(short)})"


def stage_table(stages: list[StageFacts]) -> str:
    """Returns the stages as a table for people; columns nobody knows are left out."""
    columns: list[tuple[str, Any]] = [
        ("stage", lambda s: s.name),
        ("site", lambda s: s.site),
        (
            "devices",
            lambda s: f"{s.num_devices} x {s.kind} ({' '.join(f'{a} {n}' for a, n in s.axes)})",
        ),
        ("modules", lambda s: outline(s.modules)),
        ("parameters", lambda s: _bytes(s.parameter_bytes)),
        ("optimizer", lambda s: _bytes(s.optimizer_bytes)),
        ("activations", lambda s: _bytes(s.activation_bytes)),
        (
            "peak",
            lambda s: (
                None
                if s.peak_bytes is None
                else _bytes(s.peak_bytes)
                if s.memory_bytes is None
                else f"{_bytes(s.peak_bytes)} of {_bytes(s.memory_bytes)}"
            ),
        ),
        ("GFLOP", lambda s: None if s.flops is None else f"{s.flops / 1e9:.4g}"),
        (
            "microbatch ms",
            lambda s: None if s.microbatch_s is None else f"{s.microbatch_s * 1e3:.4g}",
        ),
        ("idle", lambda s: None if s.bubble is None else f"{s.bubble:.1%}"),
    ]
    cells = [[head, *(get(s) for s in stages)] for head, get in columns]
    return table([c for c in cells if any(x is not None for x in c[1:])])


def table(columns: list[list[Any]]) -> str:
    """Returns columns (each with its head first) as aligned text."""
    texts = [["-" if x is None else str(x) for x in column] for column in columns]
    widths = [max(map(len, column)) for column in texts]
    rows = zip(*texts)
    return "\n".join("  ".join(x.ljust(w) for x, w in zip(row, widths)).rstrip() for row in rows)


def _bytes(n: float | None) -> str | None:
    return None if n is None else human_bytes(n)
