"""How values show themselves in notebooks: the drawer that `hetjax.ir.display` asks."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from hetjax.frontend.check_report import CheckReport
from hetjax.frontend.dry_run import Rehearsal
from hetjax.frontend.parallel_function import ParallelFunction
from hetjax.frontend.whatif import Delta
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import HetjaxError
from hetjax.ir.graph import Graph
from hetjax.ir.plan import Plan, StagePlan
from hetjax.ir.program import Fragment, Program, StageMesh
from hetjax.notebook import views
from hetjax.notebook.subject import Subject, subject_of
from hetjax.passes.cost.estimate import ProgramEstimate
from hetjax.passes.search.result import SearchResult, SearchTree
from hetjax.passes.simulator import Timeline
from hetjax.render.cluster_map import cluster_picture
from hetjax.render.delta_view import delta_picture
from hetjax.render.folding import cut
from hetjax.render.graph_view import fragment_picture, graph_picture, mesh_picture, program_picture
from hetjax.render.line_charts import bars_picture
from hetjax.render.markup import fold, join, table, tag
from hetjax.render.picture import Picture, stack
from hetjax.render.search_view import search_picture, tree_picture
from hetjax.render.sharding_view import spec_words
from hetjax.render.units import human_bytes, human_seconds, plural

# Rows of one table of stages or notes; more are in the text.
MAX_ROWS = 100


def picture_of(value: Any) -> Picture:
    """Returns the picture of a value of one of our types.

    Raises:
      TypeError: it is of another type.
    """
    for kind, draw in _DRAW.items():
        if isinstance(value, kind):
            return draw(value)
    raise TypeError(f"nothing draws a {type(value).__name__}")


def _plan(plan: Plan) -> Picture:
    many = plural(plan.num_microbatches, "microbatch", "microbatches")
    took = f", predicted {human_seconds(plan.predicted_s)}" if plan.predicted_s is not None else ""
    title = f"plan {plan.name} on {plan.cluster}: {plural(plan.num_stages, 'stage')}, {plan.schedule}, batch {plan.batch_size} in {many}{took}"
    # What a planner noted of times is not what the step's own program is priced at, further down.
    head = ["stage", "devices", "mesh", "begins at", "modules", "a microbatch"][
        : 6 if plan.costing is None else 5
    ]
    rows = [[f"s{i}", *_stage_cells(s)][: len(head)] for i, s in enumerate(plan.stages[:MAX_ROWS])]
    if plan.num_stages > MAX_ROWS:
        rows.append([f"… and {plan.num_stages - MAX_ROWS} more"])
    parts = [
        tag("p", tag("b", title)),
        table(head, rows),
    ]
    if plan.microbatch_reason:
        parts.append(tag("p", f"microbatches: {plan.microbatch_reason}", class_="faint"))
    if plan.state_specs:
        specs = [[cut(path), spec_words(spec)] for path, spec in plan.state_specs]
        parts.append(
            fold(
                f"{plural(len(specs), 'leaf', 'leaves')} split over devices",
                table(["leaf", "split"], specs[:200]),
            )
        )
    if plan.sources:
        parts.append(
            tag("p", "from " + "; ".join(f"{a}: {b}" for a, b in plan.sources), class_="faint")
        )
    base = Picture(title, join(parts), str(plan))
    if plan.costing is None:
        return base
    s = subject_of(plan)
    below = [base, *([views.delta(plan)] if plan.delta is not None else []), *_costed(s)]
    return stack(title, *below)


def _costed(s: Subject) -> list[Picture]:
    """Returns stages, timeline and memory of a step; what cannot be priced says why."""
    try:
        return [views.stages(s), views.gantt(s), views.memory(s)]
    except HetjaxError as error:
        return [
            Picture(
                "not priced",
                tag("p", f"It cannot be priced: {error}"),
                f"it cannot be priced: {error}",
            )
        ]


def _stage_cells(s: StagePlan) -> list[str]:
    first = f"{s.first.block} + {s.first.offset}" if s.first else "the start"
    modules = " … ".join(dict.fromkeys(map(cut, (*s.blocks[:1], *s.blocks[-1:]))))
    took = human_seconds(s.predicted_s) if s.predicted_s is not None else ""
    axes = " x ".join(f"{a} {n}" for a, n in s.axes)
    return [f"{len(s.devices)} x {s.kind} at {s.site}", axes, first, modules, took]


def _stage(stage: StagePlan) -> Picture:
    cells = _stage_cells(stage)
    title = f"stage of {cells[0]}"
    devices = ", ".join(map(str, stage.devices[:64])) + (" …" if len(stage.devices) > 64 else "")
    body = join(
        [
            tag("p", tag("b", title)),
            table(["devices", "mesh", "begins at", "modules", "a microbatch"], [cells]),
            tag("p", f"devices {devices}", class_="faint"),
        ]
    )
    return Picture(title, body, f"{title} ({cells[1]}), begins at {cells[2]}: {cells[3]}")


def _bundle(bundle: Bundle) -> Picture:
    parts = [
        p for p in (bundle.program or bundle.graph, bundle.plan, bundle.cluster) if p is not None
    ]
    name = bundle.program.name if bundle.program else bundle.graph.name if bundle.graph else "empty"
    pictures = [picture_of(p) for p in parts]
    if bundle.program is not None and any(bundle.program.tasks) and bundle.cluster and bundle.graph:
        pictures = [*_costed(Subject(bundle)), *pictures]
    if bundle.notes:
        notes = table(["topic", ""], [[a, b] for a, b in bundle.notes[:MAX_ROWS]])
        pictures.append(Picture("notes", notes, "\n".join(f"{a}: {b}" for a, b in bundle.notes)))
    return stack(f"bundle {name}", *pictures)


def _estimate(e: ProgramEstimate) -> Picture:
    title = f"estimate: {human_seconds(e.iteration_s)} a step, at least {human_seconds(e.lower_bound_s)}, bubble {e.bubble:.1%}"
    rows = [
        [f"s{s}", human_bytes(m.parameters), human_bytes(m.optimizer), human_bytes(m.gradients), f"{m.in_flight} x {human_bytes(m.activations)}", human_bytes(m.transfers), human_bytes(m.temporaries), human_bytes(m.peak_bytes)]
        for s, m in enumerate(e.memory)
    ]  # fmt: skip
    head = [
        "stage",
        "parameters",
        "optimizer",
        "gradients",
        "activations",
        "transfers",
        "temporaries",
        "peak",
    ]
    over = [tag("p", f"Does not fit: {sentence}", class_="bad") for sentence in e.over]
    text = "\n".join([title, *("  " + "  ".join(r) for r in rows)])
    top = Picture(title, join([tag("p", tag("b", title)), table(head, rows), *over]), text)
    return stack(title, top, views.gantt(e.timeline, title="estimate"))


def _rehearsal(r: Rehearsal) -> Picture:
    lines = str(r).splitlines()
    rows = [
        ["a step", human_seconds(r.step_s)],
        ["at least, in any order", human_seconds(r.lower_bound_s)],
        ["gap to the bound", f"{r.gap:.1%}"],
        ["memory", "fits" if r.fits else "does not fit"],
        ["price", r.price_words],
    ]
    top = Picture(lines[0], join([tag("p", tag("b", lines[0])), table([], rows)]), str(r))
    s = subject_of(r)
    return stack(lines[0], top, cluster_picture(r.cluster, r.plan), *_costed(s))


def _function(function: ParallelFunction) -> Picture:
    name = function._name()
    if function.plan is None:
        title = f"{name}: made parallel, not planned yet"
        words = (
            "Call it, or plan_for(state, batch) with ShapeDtypeStructs, and it has a plan to show."
        )
        return Picture(
            title, join([tag("p", tag("b", title)), tag("p", words)]), f"{title}. {words}"
        )
    s = subject_of(function)
    if s.measured is None:
        return _plan(function.plan)
    return stack(
        name,
        _plan(function.plan),
        views.gantt(s, title=f"{name}, predicted and measured"),
        views.compare(s),
    )


def _delta(d: Delta) -> Picture:
    return delta_picture(d.name, d.decisions, d.costs, d.over)


def _check(r: CheckReport) -> Picture:
    facts, text = r.as_dict(), str(r)
    title = text.splitlines()[0]
    parts = [tag("p", tag("b", title, class_=None if r.ok else "bad"))]
    if r.refusal is not None:
        where = [[k, facts[k]] for k in ("equation", "module", "source") if facts[k]]
        return Picture(title, join([*parts, tag("p", facts["error"]), table([], where)]), text)
    groups = [
        [
            g["group"],
            str(g["leaves"]),
            ", ".join(g["rules"]),
            f"{g['max_abs']:.3g}",
            "equal" if g["ok"] else "UNEQUAL",
        ]
        for g in facts["groups"]
    ]
    parts.append(table(["tree", "leaves", "judged by", "max difference", ""], groups))
    bars = [
        (f"{g['group']}", min(g["of_bound"], 1e3))
        for g in facts["groups"]
        if math.isfinite(g["of_bound"])
    ]
    said = lambda v: f"{v:.3g} of its bound"  # noqa: E731
    parts.append(
        tag(
            "div",
            bars_picture(
                bars, "largest difference of each tree", said, lines=[("bound", 1.0)]
            ).body,
        )
    )
    leaves = [
        [
            str(d["step"]),
            d["path"],
            d["rule"],
            f"{d['max_abs']:.3g}",
            f"{d['allowed']:.3g}",
            d["note"],
        ]
        for d in facts["worst"]
    ]
    parts.append(
        fold(
            "the leaves nearest to their bound, or past it",
            table(["step", "leaf", "rule", "difference", "allowed", ""], leaves),
            open_=not r.ok,
        )
    )
    parts += [tag("p", note, class_="faint") for note in facts["notes"]]
    return Picture(title, join(parts), text)


_DRAW: dict[type, Callable[[Any], Picture]] = {
    Graph: graph_picture, Program: program_picture, StageMesh: mesh_picture, Fragment: fragment_picture,
    Plan: _plan, StagePlan: _stage, Cluster: cluster_picture, Bundle: _bundle, Timeline: views.gantt,
    ProgramEstimate: _estimate, Rehearsal: _rehearsal, ParallelFunction: _function, Delta: _delta,
    CheckReport: _check, SearchResult: search_picture, SearchTree: tree_picture,
}  # fmt: skip
