"""`hetjax plan STEP`: the search for a traced step's plan, watched as it goes, and what it leaves behind."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetjax.ir.errors import PlanError

if TYPE_CHECKING:
    from hetjax.frontend.step_search import StepSearch
    from hetjax.frontend.tracing import Traced
    from hetjax.ir.cluster import Cluster
    from hetjax.ir.plan import Plan
    from hetjax.passes.search.evaluator import Evaluator, Improvement
    from hetjax.passes.search.result import SearchResult


@dataclasses.dataclass(frozen=True)
class Asked:
    """What the command line asks of a search for a step's plan.

    Attributes:
      target: FILE.py:build.
      cluster: a TOML file; None for the local devices.
      batch: examples of a step; None for what `build` gives.
      microbatches, schedule: fixed; None leaves them to the search.
      evaluations, budget_s, seed, without, forest: of the search.
      objective: "time" or "cost".
      prices: per device-hour by kind, in place of the cluster's.
      max_devices: 0 for all.
      pins: decisions fixed by hand.
      profiles: a profile store that prices, "" for data sheets.
      output, log: files of the plan and of the search; None writes none.
      as_json: whether only one JSON object is printed.
    """

    target: str
    cluster: str | None
    batch: int | None
    microbatches: int | None
    schedule: str | None
    evaluations: int
    budget_s: float
    seed: int
    without: tuple[str, ...]
    forest: tuple[str, ...]
    objective: str
    prices: Mapping[str, float]
    max_devices: int
    pins: tuple[str, ...]
    output: str | None
    log: str | None
    profiles: str
    as_json: bool


def plan_step(asked: Asked) -> tuple[dict[str, Any], SearchResult]:
    """Returns what `--json` prints, and the search, having written the plan and the log.

    Raises:
      HetjaxError: no plan fits, or what is asked cannot be had.
    """
    from hetjax.cli.devices import force_cpu_devices

    force_cpu_devices()
    from hetjax.frontend.planning import Options
    from hetjax.frontend.step_search import Effort, Wishes, search_step
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.cluster import Cluster
    from hetjax.passes.cost.store import store_digest
    from hetjax.passes.pipeline import analyse
    from hetjax.planning.pins import read_pins

    cluster = Cluster.from_toml(asked.cluster) if asked.cluster else Cluster.local()
    traced = traced_step(asked.target, asked.batch)
    graph = analyse(Bundle(graph=traced.graph, cluster=cluster)).graph
    if graph is None:
        raise PlanError("nothing was traced")
    effort = Effort(asked.evaluations, asked.budget_s, asked.seed, asked.without, asked.forest, finalists=4)
    prices = prices_of(cluster, asked.prices) if asked.objective == "cost" else {}
    wishes = Wishes(asked.objective, prices, asked.max_devices, pins=read_pins(asked.pins))
    options = Options(
        num_microbatches=asked.microbatches, schedule=asked.schedule, profiles=asked.profiles,
        profiles_digest=store_digest(asked.profiles) if asked.profiles else "",
    )
    with _watched(asked, cluster) as watch:
        found = search_step(
            traced, graph, cluster, options, effort=effort, wishes=wishes, on_start=watch.start,
            on_improvement=watch.improved,
        )  # fmt: skip
        facts = facts_of(found, cluster, asked)
        watch.end(facts)
    if asked.output is not None:
        save_plan(found.best.plan, asked.output)
    return facts, found.result


def load_plan(asked: Asked, file: str) -> dict[str, Any]:
    """Returns what `--json` prints of a plan read from a file and fitted to the step; nothing is searched.

    Raises:
      HetjaxError: it does not fit, line by line, or holds more than the devices have.
    """
    from hetjax.cli.devices import force_cpu_devices

    force_cpu_devices()
    from hetjax.cli.programs import read_text
    from hetjax.frontend.planning import Options, planned_bundle, with_plan
    from hetjax.frontend.step_search import price_per_s
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.cluster import Cluster
    from hetjax.ir.plan import Plan
    from hetjax.passes.cost.estimate import estimate_program
    from hetjax.passes.cost.judge import Judge
    from hetjax.passes.pipeline import analyse
    from hetjax.planning.fitting import fit_plan
    from hetjax.planning.pins import pin_specs, read_pins

    text = read_text(file)
    plan = Plan.from_json(text, file)
    cluster = Cluster.from_toml(asked.cluster) if asked.cluster else Cluster.local()
    traced = traced_step(asked.target, asked.batch)
    analysed = analyse(Bundle(graph=traced.graph, cluster=cluster))
    if analysed.graph is None:
        raise PlanError("nothing was traced")
    fitted = fit_plan(plan, analysed.graph, cluster, filename=file, text=text)
    fitted = pin_specs(fitted, read_pins(asked.pins), analysed.graph)
    bundle = planned_bundle(traced, analysed, with_plan(Options(profiles=asked.profiles), fitted, cluster))
    estimate = estimate_program(bundle, judge=Judge.at(asked.profiles))
    if bundle.plan is None or estimate.over:
        raise PlanError(f"the plan {file} does not fit:\n  " + "\n  ".join(estimate.over))
    value = estimate.iteration_s
    if asked.objective == "cost":
        value *= price_per_s(bundle.plan, prices_of(cluster, asked.prices))
    if asked.output is not None:
        save_plan(bundle.plan, asked.output)
    return {
        "ok": True, "step": bundle.plan.name, "cluster": cluster.name, "objective": asked.objective,
        "loaded": file, "changed": fitted != plan, "iteration_s": estimate.iteration_s, "value": value,
        "lower_bound_s": estimate.lower_bound_s, "search_s": 0.0, "evaluations": 0,
        "devices_used": sum(len(s.devices) for s in bundle.plan.stages), "devices": cluster.num_devices,
        "global_batch": bundle.plan.batch_size, "peak_bytes": list(estimate.peak_bytes),
        "file": asked.output, "log": None, "plan": json.loads(bundle.plan.to_json()),
    }  # fmt: skip


def diff_plans(first: str, second: str) -> dict[str, Any]:
    """Returns in what two plan files differ: decisions, and the numbers they bear."""
    from hetjax.frontend.whatif import decisions_between
    from hetjax.ir.plan import Plan

    old, new = Plan.load(first), Plan.load(second)
    rows = [{"what": r.what, "before": r.before, "after": r.after} for r in decisions_between(old, new)]
    for what in ("cluster", "cluster_hash", "per_microbatch"):
        a, b = getattr(old, what), getattr(new, what)
        if a != b:
            rows.append({"what": what, "before": str(a), "after": str(b)})
    numbers = [{"what": "step_s", "before": old.predicted_s, "after": new.predicted_s}]
    for k in range(max(old.num_stages, new.num_stages)):
        for name in ("predicted_s", "peak_bytes", "sent_bytes"):
            a, b = (getattr(p.stages[k], name) if k < p.num_stages else None for p in (old, new))
            if a != b:
                numbers.append({"what": f"s{k} {name}", "before": a, "after": b})
    return {"ok": True, "same": not rows, "decisions": rows, "numbers": numbers}


def print_diff(facts: Mapping[str, Any]) -> None:
    """Prints what `diff_plans` found."""
    if facts["same"]:
        click.echo("the plans decide the same")
    rows = [*facts["decisions"], *(n for n in facts["numbers"] if n["before"] != n["after"])]
    width = max((len(r["what"]) for r in rows), default=0)
    for row in rows:
        before, after = ("-" if row[k] in (None, "") else row[k] for k in ("before", "after"))
        click.echo(f"  {row['what']:{width}}  {before}  ->  {after}")


def traced_step(target: str, batch: int | None) -> Traced:
    """Returns the traced step of FILE.py:build, at another batch size where one is asked for."""
    from hetjax.cli.programs import trace_target

    return trace_target(target, batch)


def prices_of(cluster: Cluster, given: Mapping[str, float]) -> dict[str, float]:
    """Returns a price per device-hour for every kind of a cluster.

    Raises:
      PlanError: a kind has none, or one is given for a kind that is not there; all of them.
    """
    known = {k.name: k.price_per_hour for k in cluster.kinds if k.price_per_hour}
    names = [k.name for k in cluster.kinds]
    strange = sorted(set(given) - set(names))
    if strange:
        raise PlanError(f"prices are given for {', '.join(strange)}; {cluster.name!r} has {', '.join(names)}")
    prices = known | dict(given)
    missing = sorted(set(names) - set(prices))
    if missing:
        raise PlanError(
            f"the objective cost needs a price per device-hour of {', '.join(missing)}: give --price "
            f"{missing[0]}=1.5, or price_per_hour in the cluster file's [kinds.{missing[0]}]"
        )
    return prices


def save_plan(plan: Plan, output: str) -> None:
    """Writes a plan's JSON.

    Raises:
      click.UsageError: the file cannot be written.
    """
    try:
        plan.save(output)
    except OSError as error:
        raise click.UsageError(f"{output!r} cannot be written: {error}") from None


def facts_of(found: StepSearch, cluster: Cluster, asked: Asked) -> dict[str, Any]:
    """Returns what `--json` prints of a search."""
    best, result = found.best, found.result
    plan, used = best.plan, sum(len(s.devices) for s in best.plan.stages)
    facts: dict[str, Any] = {
        "ok": True, "step": plan.name, "cluster": cluster.name, "objective": asked.objective,
        "search_s": found.search_s, "evaluations": result.evaluations, "simulations": result.simulations,
        "seed": result.seed, "stopped": result.stopped, "iteration_s": best.estimate.iteration_s,
        "iterations_per_s": 1 / best.estimate.iteration_s, "value": best.value,
        "search_value": result.value, "lower_bound": result.lower_bound, "gap": result.gap,
        "proved": result.proved, "devices_used": used, "devices": cluster.num_devices,
        "global_batch": plan.batch_size, "found_by": best.source,
        "peak_bytes": list(best.estimate.peak_bytes),
        "judged_in_full": [
            {"by": f.source, "stages": f.plan.num_stages, "microbatches": f.plan.num_microbatches,
             "value": f.value, "over_memory": list(f.estimate.over)} for f in found.finalists
        ],
        "unused": [{"devices": n, "kind": k, "site": s, "why": w} for n, k, s, w in _unused(found, cluster)],
        "file": asked.output, "log": asked.log, "plan": json.loads(plan.to_json()),
    }  # fmt: skip
    if asked.objective == "time":
        facts["lower_bound_s"] = result.lower_bound
    return facts


def _unused(found: StepSearch, cluster: Cluster) -> Sequence[tuple[int, str, str, str]]:
    """Returns the devices the plan leaves out, with the search's reasons where it is the search's plan."""
    if found.best.source == "search" and found.best.plan.num_microbatches == found.result.outline.num_microbatches:
        return found.result.unused
    used = {d for s in found.best.plan.stages for d in s.devices}
    left: dict[tuple[str, str], int] = {}
    for device in cluster.devices:
        if device.index not in used:
            left[device.kind, device.site] = left.get((device.kind, device.site), 0) + 1
    return [(n, k, s, "no plan judged in full that uses it is better") for (k, s), n in left.items()]


class _Watch:
    """Keeps the log of a search and shows how it goes: one line that changes on a terminal, else a line each."""

    def __init__(self, asked: Asked, cluster: Cluster):
        self.asked = asked
        self.evaluator: Evaluator | None = None
        self._log = None
        if asked.log is not None:
            try:
                self._log = Path(asked.log).open("w", encoding="utf-8")  # noqa: SIM115
            except OSError as error:
                raise click.UsageError(f"{asked.log!r} cannot be written: {error}") from None
        self.plain = not asked.as_json and not sys.stderr.isatty()
        self._write(
            event="start", step=asked.target, cluster=cluster.name, cluster_hash=cluster.hash,
            seed=asked.seed, evaluations=asked.evaluations, objective=asked.objective,
            without=list(asked.without), forest=list(asked.forest), pins=list(asked.pins),
        )

    def start(self, evaluator: Evaluator) -> None:
        self.evaluator = evaluator
        self._write(event="search", lower_bound=evaluator.lower_bound)

    def improved(self, found: Improvement) -> None:
        from hetjax.passes.search.result import describe

        assert self.evaluator is not None
        self._write(
            event="better", evaluations=found.evaluations, elapsed_s=found.elapsed_s, value=found.value,
            lower_bound=self.evaluator.lower_bound, found_by=found.found_by,
            microbatches=found.outline.num_microbatches,
            stages=describe(self.evaluator.problem, found.outline),
        )
        if self.plain:
            click.echo(self.line(), err=True)

    def end(self, facts: Mapping[str, Any]) -> None:
        kept = ("stopped", "evaluations", "search_s", "iteration_s", "value", "lower_bound", "gap", "proved")
        self._write(event="end", **{k: facts[k] for k in kept}, plan_hash=_hash_of(facts))

    def close(self) -> None:
        if self._log is not None:
            self._log.close()

    def line(self) -> str:
        """Returns how the search stands."""
        e = self.evaluator
        if e is None:
            return "tracing and pricing layers"
        head = f"{e.elapsed_s:7.2f} s  {e.evaluations:6} plans"
        if e.outline is None:
            return f"{head}  nothing fits yet"
        gap = 1 - e.lower_bound / e.best
        unit = "s a step" if self.asked.objective == "time" else "a step"
        return (
            f"{head}  best {e.best:.6g} {unit}  bound {e.lower_bound:.6g}  gap {gap:.1%}  "
            f"{_sizes(e.outline.num_stages, e.outline.num_microbatches)}"
        )

    def _write(self, **facts: Any) -> None:
        if self._log is not None:
            self._log.write(json.dumps(facts) + "\n")
            self._log.flush()


def _sizes(stages: int, microbatches: int) -> str:
    from hetjax.render.units import plural

    return f"{plural(stages, 'stage')}, {plural(microbatches, 'microbatch', 'microbatches')}"


def _hash_of(facts: Mapping[str, Any]) -> str:
    from hetjax.ir.plan import Plan

    return Plan.from_json(json.dumps(facts["plan"])).hash


@contextlib.contextmanager
def _watched(asked: Asked, cluster: Cluster) -> Iterator[_Watch]:
    with contextlib.closing(_Watch(asked, cluster)) as watch:
        if asked.as_json or watch.plain:
            yield watch
            return
        from rich.console import Console
        from rich.live import Live
        from rich.text import Text

        shown: Callable[[], Text] = lambda: Text(watch.line(), no_wrap=True)  # noqa: E731
        console = Console(stderr=True)
        with Live(get_renderable=shown, console=console, refresh_per_second=5, transient=True):
            yield watch


def print_facts(facts: Mapping[str, Any]) -> None:
    """Prints a search's outcome in words."""
    from hetjax.ir.plan import Plan

    price = "" if facts["objective"] == "time" else f", {facts['value']:.4g} a step"
    click.echo(
        f"{facts['step']} on {facts['cluster']}: {facts['iteration_s']:.6g} s a step{price}, "
        f"batch {facts['global_batch']}, {facts['devices_used']} of {facts['devices']} devices"
    )
    if "loaded" in facts:
        fitted = "fitted to this step and cluster" if facts["changed"] else "as it was made"
        click.echo(f"replayed from {facts['loaded']}, {fitted}; nothing was searched")
        click.echo(str(Plan.from_json(json.dumps(facts["plan"]))))
        if facts["file"]:
            click.echo(f"  written: {facts['file']}")
        return
    proved = ", proved best" if facts["proved"] else ""
    click.echo(
        f"search {facts['search_value']:.6g}, lower bound {facts['lower_bound']:.6g}, gap {facts['gap']:.1%}{proved}; "
        f"{facts['evaluations']} plans in {facts['search_s']:.2f} s, seed {facts['seed']}, ended by {facts['stopped']}"
    )
    click.echo(str(Plan.from_json(json.dumps(facts["plan"]))))
    for u in facts["unused"]:
        click.echo(f"  left out: {u['devices']} {u['kind']} in {u['site']}: {u['why']}")
    for f in facts["judged_in_full"]:
        if f["over_memory"]:
            click.echo(f"  passed over, does not fit: {_sizes(f['stages'], f['microbatches'])}: {f['over_memory'][0]}")
    for name in ("file", "log"):
        if facts[name]:
            click.echo(f"  written: {facts[name]}")
