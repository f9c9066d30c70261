"""The views of a planned step. Each takes a function made parallel, its plan, a rehearsal or a bundle."""

from __future__ import annotations

import json
import math
import numbers
import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetjax.explaining.naming import Names
from hetjax.explaining.stages import StageFacts, outline, program_stages
from hetjax.explaining.values import explain_value
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.plan import Plan
from hetjax.notebook.subject import Subject, subject_of
from hetjax.passes.cost.program_price import fragment_work
from hetjax.passes.cost.work import computed_dtype
from hetjax.passes.search.result import SearchResult, SearchTree
from hetjax.passes.simulator import Timeline
from hetjax.render.cluster_map import cluster_picture
from hetjax.render.delta_view import delta_picture
from hetjax.render.gantt import gantt as draw_gantt
from hetjax.render.gantt import predicted
from hetjax.render.markup import join, table, tag
from hetjax.render.memory_chart import memory_picture
from hetjax.render.picture import Picture
from hetjax.render.roofline_chart import Point, Roof, roofline_picture
from hetjax.render.scatter_chart import scatter_picture
from hetjax.render.search_view import search_picture, tree_picture
from hetjax.render.sharding_view import Arrow, Placed, sharding_picture, shardings_table
from hetjax.render.units import human_bytes, human_count, human_seconds

MAX_LEAVES = 24


def gantt(value: Any, *, title: str = "") -> Picture:
    """Returns when everything runs: predicted, and measured below it after `train_step.measure(…)`.

    Args:
      value: see the module; or a timeline of the simulator.
      title: in place of the step's name.
    """
    if isinstance(value, Timeline):
        names = [f"device {d}" for d in range(len(value.spans))]
        return draw_gantt([predicted(value)], names, title or "timeline")
    s = subject_of(value)
    said = (
        title
        or f"{s.program.name}, {s.program.schedule}, {s.program.num_microbatches} microbatches"
    )
    return draw_gantt(s.runs, s.names, said, nbytes=s.nbytes)


def memory(value: Any) -> Picture:
    """Returns what each device of each stage holds over time, by the model."""
    s = subject_of(value)
    estimate, cluster = s.estimate, _cluster(s)
    rows = []
    for k, (name, m) in enumerate(zip(s.names, estimate.memory)):
        kind = cluster.kind(s.program.meshes[k].kind)
        rows.append(
            (name, estimate.timeline.held_bytes[k], float(m.static_bytes), float(kind.memory_bytes))
        )
    return memory_picture(
        rows, estimate.iteration_s, f"{s.program.name}: bytes held on one device of each stage"
    )


def cluster_map(value: Cluster | Any, plan: Plan | None = None) -> Picture:
    """Returns the devices and links; with a plan, or of a planned step, its stages on them."""
    if isinstance(value, Cluster):
        return cluster_picture(value, plan)
    s = subject_of(value)
    return cluster_picture(_cluster(s), s.bundle.plan)


def sharding(value: Any, name: str) -> Picture:
    """Returns one value at every place it is in, as tiles of its devices, with what carries it between.

    Args:
      value: see the module.
      name: a path of the step ("state/params/head/kernel"), its unambiguous end, or "%12".

    Raises:
      PlanError: there is no such value.
    """
    s = subject_of(value)
    program = s.program
    facts = explain_value(s.bundle, name, price=False)
    mesh_of = {m.name: m for m in program.meshes}
    places = []
    for p in facts.places:
        mesh = mesh_of[p.stage]
        fragment = next((f for f in program.fragments if f.name == p.fragment), None)
        sliced = fragment is not None and fragment.per_microbatch
        if p.how == "fed":
            sliced = any(
                f.form == "micro"
                and f.stage == program.meshes.index(mesh)
                and s.graph.inputs[f.argument].ref == facts.ref
                for f in program.feeds
            )
        aval = (program.micro_avals if sliced else program.avals)[facts.ref]
        places.append(
            Placed(mesh, p.fragment, p.how, aval, p.spec or ((),) * aval.ndim, p.chosen_by)
        )
    arrows = [
        Arrow(
            r.name, program.meshes[r.source].name, program.meshes[r.target].name, r.nbytes,
            program.num_microbatches if r.form == "micro" else 1,
        )
        for r in program.reshards
        if r.ref == facts.ref
    ]  # fmt: skip
    if not places:
        raise PlanError(
            f"{facts.name} is at no fragment's border and in none: the program does not use it"
        )
    return sharding_picture(facts.name, places, arrows)


def shardings(value: Any, stage: int | None = None) -> Picture:
    """Returns the leaves of the step, largest first, with how each is split.

    Args:
      value: see the module.
      stage: of one stage; None for all.
    """
    s = subject_of(value)
    program, graph = s.program, s.graph
    rows = []
    for feed in program.feeds:
        if stage is not None and feed.stage != stage:
            continue
        argument, mesh = graph.inputs[feed.argument], program.meshes[feed.stage]
        aval = (program.micro_avals if feed.form == "micro" else program.avals)[argument.ref]
        spec = feed.spec or ((),) * aval.ndim
        rows.append(
            (
                argument.path,
                aval,
                mesh,
                spec,
                math.ceil(aval.nbytes / math.prod(mesh.parts(spec) or (1,))),
            )
        )
    rows.sort(key=lambda r: (-r[4], r[0], r[2].name))
    where = f" on s{stage}" if stage is not None else ""
    left = len(rows) - MAX_LEAVES
    title = f"{program.name}: {len(rows)} leaves{where}" + (
        f", the largest {MAX_LEAVES}" if left > 0 else ""
    )
    return shardings_table(rows[:MAX_LEAVES], title)


def roofline(value: Any) -> Picture:
    """Returns what every fragment reaches under the roof of its devices, predicted; the costliest are named."""
    s = subject_of(value)
    program, cluster, estimate = s.program, _cluster(s), s.estimate
    roofs: dict[str, Roof] = {}
    points = []
    for f in sorted(program.fragments, key=lambda f: -estimate.fragments[f.name].compute.seconds):
        kind = cluster.kind(program.meshes[f.stage].kind)
        work = fragment_work(program, f, cluster)
        flops = sum(k.count * k.flops for k in work.kernels)
        nbytes = sum(k.count * k.nbytes for k in work.kernels)
        if kind.name not in roofs:
            # Of what the largest product computes in; the f32 peak where there is no product.
            largest = max(work.kernels, key=lambda k: (k.product, k.count * k.flops), default=None)
            dtype = "f32"
            if largest is not None and largest.product:
                dtype = computed_dtype(largest.dtype, largest.precise, kind)
            used = dtype if dtype in dict(kind.peak_flops) else "f32"
            roofs[kind.name] = Roof(kind.name, kind.peak(used), kind.memory_bandwidth_bytes_s, used)
        seconds = estimate.fragments[f.name].compute.seconds
        runs = program.num_microbatches if f.per_microbatch else 1
        points.append(Point(f.name, kind.name, flops, nbytes, seconds, seconds * runs))
    if not roofs:
        raise PlanError("the program has no fragment to show")
    return roofline_picture(
        list(roofs.values()), points, f"{program.name}: fragments under the roof of their devices"
    )


def compare(value: Any, *, title: str = "") -> Picture:
    """Returns predicted against measured seconds with the outliers named.

    Args:
      value: a function after `train_step.measure(…)`, whose fragments and transfers are compared; or
        (name, predicted, measured) triples in seconds.
      title: of the picture.

    Raises:
      PlanError: nothing was measured.
    """
    if isinstance(value, Sequence) and not isinstance(value, str):
        wrong = [p for p in value if not _triple(p)]
        if wrong:
            raise PlanError(
                f"compare takes (name, predicted, measured) with finite seconds; not {wrong[0]!r}"
            )
        return scatter_picture(list(value), title or "predicted against measured")
    s = subject_of(value)
    if s.measured is None:
        raise PlanError(
            f"nothing was measured of {s.program.name}; call train_step.measure(state, batch) first"
        )
    pairs = predicted_and_measured(s)
    return scatter_picture(pairs, title or f"{s.program.name}, predicted against measured")


def _triple(value: Any) -> bool:
    """Returns whether a value is a name with two times whose ratio is a number."""
    if not (isinstance(value, Sequence) and len(value) == 3 and isinstance(value[0], str)):
        return False
    return all(isinstance(v, numbers.Real) and (float(v) <= 0 or 1e-100 < float(v) < 1e100) for v in value[1:])


def predicted_and_measured(s: Subject) -> list[tuple[str, float, float]]:
    """Returns (fragment or reshard, predicted, median measured) seconds of everything that ran."""
    took: dict[str, list[float]] = {}
    for span in (
        *(x for row in (s.measured.spans if s.measured else ()) for x in row),
        *(s.measured.transfers if s.measured else ()),
    ):
        took.setdefault(span.task.work, []).append(span.end_s - span.start_s)
    should = {name: price.seconds for name, price in s.estimate.fragments.items()}
    travel: dict[str, list[float]] = {}
    for span in s.estimate.timeline.transfers:
        travel.setdefault(span.task.work, []).append(span.end_s - span.start_s)
    should |= {name: statistics.median(times) for name, times in travel.items()}
    return [
        (name, should[name], statistics.median(times))
        for name, times in took.items()
        if name in should
    ]


def stages(value: Any) -> Picture:
    """Returns the stages as a table: devices, modules, memory, work, predicted time, idle share."""
    s = subject_of(value)
    facts = program_stages(s.bundle, s.estimate)
    e = s.estimate
    title = (
        f"{s.program.name}: {human_seconds(e.iteration_s)} a step, at least {human_seconds(e.lower_bound_s)} "
        f"in any order, bubble {e.bubble:.1%}"
    )
    head = [
        "stage",
        "devices",
        "mesh",
        "modules",
        "state",
        "activations",
        "peak",
        "FLOP",
        "a microbatch",
        "idle",
    ]
    rows = [_stage_row(f) for f in facts]
    over = [tag("p", f"Does not fit: {sentence}", class_="bad") for sentence in e.over]
    known = tag("p", "from " + "; ".join(f"{a}: {b}" for a, b in e.sources), class_="faint")
    body = join([tag("p", tag("b", title)), table(head, rows), *over, known])
    text = [title, *("  " + "  ".join(r) for r in rows), *(f"  does not fit: {x}" for x in e.over)]
    return Picture(title, body, "\n".join(text))


def _stage_row(f: StageFacts) -> list[str]:
    said = lambda n: "" if n is None else human_bytes(n)  # noqa: E731
    state = (
        (f.parameter_bytes or 0) + (f.optimizer_bytes or 0)
        if f.parameter_bytes is not None
        else None
    )
    return [
        f.name, f"{f.num_devices} x {f.kind} at {f.site}", " x ".join(f"{a} {n}" for a, n in f.axes),
        outline(f.modules), said(state), said(f.activation_bytes),
        "" if f.peak_bytes is None else f"{said(f.peak_bytes)} of {said(f.memory_bytes)}",
        "" if f.flops is None else human_count(f.flops),
        "" if f.microbatch_s is None else human_seconds(f.microbatch_s),
        "" if f.bubble is None else f"{f.bubble:.1%}",
    ]  # fmt: skip


def delta(plan: Plan) -> Picture:
    """Returns what `plan.with_(…)` changed and what that costs.

    Raises:
      PlanError: the plan was not made by `with_` from one that came with its step.
    """
    d = plan.delta
    if d is None:
        raise PlanError(f"plan {plan.name!r} was not made of another by with_")
    return delta_picture(d.name, d.decisions, d.costs, d.over)


def search(found: SearchResult | SearchTree) -> Picture:
    """Returns what a search found, how it came there, and its tree to open: visits, value, prior, cost, why pruned."""
    _search_tree(found)
    return search_picture(found) if isinstance(found, SearchResult) else tree_picture(found)


def _search_tree(found: Any) -> SearchTree:
    tree = found.tree if isinstance(found, SearchResult) else found
    if not isinstance(tree, SearchTree):
        raise PlanError(f"a {type(found).__name__} is no search; give what search(judge) returns, or its tree")
    return tree


def save_dot(found: SearchResult | SearchTree, path: str | Path) -> None:
    """Writes the most visited part of a search's tree for Graphviz."""
    from hetjax.emit.dot import search_dot

    tree = _search_tree(found)
    Path(path).write_text(search_dot(tree), encoding="utf-8")


def save_trace(value: Any, path: str | Path) -> None:
    """Writes the predicted run, and the measured one where there is one, as a trace for Perfetto.

    It opens beside what `jax.profiler` writes: each run is a process a site, each stage a thread.
    """
    from hetjax.emit.chrome import chrome_trace, merge_traces

    s = subject_of(value)
    hosts = [m.site for m in s.program.meshes]
    traces = []
    for k, run in enumerate(s.runs):
        first = 100 * (k + 1)
        traces.append(
            chrome_trace(
                run.timeline, s.names, run=run.label, hosts=hosts, first_pid=first, nbytes=s.nbytes
            )
        )
    Path(path).write_text(json.dumps(merge_traces(traces)) + "\n", encoding="utf-8")


def stepper(folder: str | Path) -> Picture:
    """Returns a dumped run of passes, one pass at a time with the difference it made beside it.

    Args:
      folder: what `hetjax opt --dump` or `HETJAX_DUMP` wrote.

    Raises:
      ParseError: it is no dump.
    """
    from hetjax.notebook.dumps import read_dump
    from hetjax.render.stepper import stepper_picture

    if not isinstance(folder, (str, Path)):
        raise PlanError(f"a {type(folder).__name__} is no folder of a dump; give its path")
    dump = read_dump(folder)
    return stepper_picture(dump.name, dump.steps)


def names_of(value: Any) -> Names:
    """Returns the step's values by the user's names."""
    return Names(subject_of(value).graph)


def _cluster(s: Subject) -> Cluster:
    if s.bundle.cluster is None:
        raise PlanError("the cluster is not known; give one with the step")
    return s.bundle.cluster
