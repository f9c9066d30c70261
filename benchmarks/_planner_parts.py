"""The parts of `benchmarks/planner.py`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import random
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from _planner_problems import DECODER_7B, four_sites, scaled_sites, slamb_ratio, two_sites
from _report import Figure, Report

from hetjax.ir.errors import PlanError
from hetjax.passes.search import baselines
from hetjax.passes.search.dynamic import dynamic
from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.judge import INF
from hetjax.passes.search.moves import FINE
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.principles import PRINCIPLES
from hetjax.passes.search.result import SearchResult, search
from hetjax.passes.search.samples import random_problem
from hetjax.passes.search.space import Problem, problems_of
from hetjax.passes.search.view import View

# Small problems are those that exhaustive search walks in seconds, and whose tenth is more than a few plans.
_LEAST, _MOST = 500, 8000
_EPS = 1e-9


@dataclasses.dataclass(frozen=True)
class Settings:
    """What the command line says: the folder of published data, seconds of the large search (0: the default)."""

    data: str | None
    large_s: float


def holds_at_least(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, value, unit, f">= {bound:g}", value >= bound)


def holds_at_most(name: str, value: float, unit: str, bound: float) -> Figure:
    return Figure(name, value, unit, f"<= {bound:g}", value <= bound)


def small_problem(seed: int) -> Problem:
    """Returns a random problem whose every plan exhaustive search can reach: up to 3 sites, 8 devices, 6 layers."""
    problem = random_problem(seed)
    return dataclasses.replace(problem, batch=min(problem.batch, FINE))


# Against exhaustive search.


def exhaustive_part(report: Report, settings: Settings) -> list[Figure]:
    equal_wanted, near_wanted = (12, 40) if report.quick else (200, 1000)
    equal = near = equal_of = near_of = seed = 0
    worst: list[dict[str, float]] = []
    while near_of < near_wanted:
        problem = small_problem(seed)
        seed += 1
        size = baselines.count_plans(problem, OwnJudge(problem).known, _MOST)
        if not _LEAST <= size <= _MOST:
            continue
        whole = Evaluator(OwnJudge(problem))
        baselines.exhaustive(whole)
        if whole.best == INF:
            continue
        if equal_of < equal_wanted:
            equal_of += 1
            found = search(OwnJudge(problem), max_evaluations=whole.evaluations)
            equal += abs(found.value / whole.best - 1) <= _EPS
        near_of += 1
        try:
            ratio = search(OwnJudge(problem), max_evaluations=whole.evaluations // 10).value / whole.best
        except PlanError:
            ratio = INF
        near += ratio <= 1.01
        if ratio > 1.01:
            worst.append({"seed": seed - 1, "plans": whole.evaluations, "over_best": ratio - 1})
    report.tables["missed at a tenth of the evaluations"] = worst
    return [
        holds_at_least(f"equal to exhaustive search, of {equal_of}", equal / equal_of, "share", 1.0),
        holds_at_least(f"within 1 % at a tenth of the evaluations, of {near_of}", near / near_of, "share", 0.98),
    ]  # fmt: skip


# Published instances.

INSTANCES = (
    ("32 A100", "gpu_trace_scaled.csv", 0, 0.1251),
    ("32 A100 + 96 V100", "gpu_trace_heterogeneous_imbalanced.csv", 0, 0.1905),
    ("5 zones x 32 A100", "gpu_trace_multizone.csv", 0, 0.4148),
    ("80 A100 + 240 V100", "gpu_trace_heterogeneous_imbalanced.csv", 1, 0.361),
    ("128 A100 + 384 V100", "gpu_trace_heterogeneous_imbalanced.csv", 2, 0.523),
)


def published_folder(given: str | None) -> Path | None:
    root = Path(__file__).resolve().parents[1]
    shared = Path(os.environ.get("HETJAX_SHARED", root.parent / "shared"))
    folder = Path(given) if given else shared / "data" / "sailor"
    return folder if (folder / "llm_info.json").exists() else None


def published_part(report: Report, settings: Settings) -> list[Figure]:
    from hetjax.passes.cost.availability import availability_cluster, read_availability
    from hetjax.passes.cost.sailor import read_model
    from hetjax.passes.search.published_judge import PublishedJudge
    from hetjax.passes.search.space import pools_of
    from hetjax.passes.search.table import PublishedTable

    folder = published_folder(settings.data)
    if folder is None:
        report.not_measured.append("published instances: their data is not here; --data DIR")
        return []
    figures, rows = [], []
    for name, file, row, least in INSTANCES:
        begin = time.perf_counter()
        available = read_availability(folder / "availability" / file, row)
        cluster = availability_cluster(folder, available)
        table = PublishedTable(read_model(folder, "OPT-350"), repaired=False)
        problem = Problem(table, cluster, pools_of(cluster), 1024, alike=True)
        found = search(PublishedJudge(problem, folder), max_evaluations=6000, budget_s=3.0)
        took_s = time.perf_counter() - begin
        outline, rate = found.outline, 1 / found.report.seconds
        batch = outline.num_microbatches * outline.groups[0].examples
        own = OwnJudge(dataclasses.replace(problem, table=PublishedTable(read_model(folder, "OPT-350"), repaired=True)))
        beside = own.report(outline)
        line = {
            "instance": name, "it/s": rate, "search_s": took_s, "evaluations": found.evaluations, "batch": batch,
            "own it/s": 1 / beside.seconds, "gap": found.gap,
        }  # fmt: skip
        figures += [
            holds_at_least(f"{name}, published equations", rate, "it/s", least),
            Figure(f"{name}, our own simulator", 1 / beside.seconds, "it/s"),
            holds_at_most(f"{name}, search", took_s, "s", 4.0),
            Figure(f"{name}, global batch", batch, "examples", "= 1024", batch == 1024),
        ]  # fmt: skip
        rows.append(line)
    report.tables["published instances"] = rows
    report.not_measured.append("published instances by the published simulator itself: emit a plan (hetjax plan --emit sailor)")
    return figures


# The large instance.


def baseline_runs(seed: int = 0) -> dict[str, Callable[[Evaluator], None]]:
    return {
        "random": lambda e: baselines.randomly(e, seed), "greedy": baselines.greedy, "uniform grid": baselines.uniform,
        "dynamic program": dynamic,
    }  # fmt: skip


def large_part(report: Report, settings: Settings) -> list[Figure]:
    problem = four_sites()
    begin = time.perf_counter()
    found = search(OwnJudge(problem), budget_s=settings.large_s or 18.0)
    took_s = time.perf_counter() - begin
    view = View(Evaluator(OwnJudge(problem)))
    dense = sum(view.spans_slow(g) and g.options.exchange == "dense" for g in found.outline.groups)
    wrong = list(problems_of(problem, found.outline)) + list(found.report.problems)
    report.tables["large: quality over time"] = [
        {"elapsed_s": i.elapsed_s, "evaluations": i.evaluations, "step_s": i.value, "over_bound": i.value / found.lower_bound - 1}
        for i in thinned(found)
    ]  # fmt: skip
    rows, lead = [], {}
    cap_s = 2.0 if report.quick else 300.0
    for name, run in baseline_runs().items():
        evaluator = Evaluator(OwnJudge(problem), max_evaluations=10 * found.evaluations, budget_s=cap_s)
        capped = baselines.stopped(lambda run=run, evaluator=evaluator: run(evaluator)) and (
            evaluator.evaluations < 10 * found.evaluations
        )
        rows.append({
            "who": name, "evaluations": evaluator.evaluations, "step_s": evaluator.best,
            "over search": evaluator.best / found.value - 1, "ended by": f"{cap_s:g} s" if capped else "evaluations or its end",
        })  # fmt: skip
        lead[name] = evaluator.best
    for site in baselines.sites(problem):
        own = OwnJudge(baselines.on_site(problem, site))
        try:
            alone = search(own, max_evaluations=found.evaluations, budget_s=2.0 if report.quick else 18.0).value
        except PlanError:
            alone = INF
        rows.append({"who": f"{site} alone", "evaluations": found.evaluations, "step_s": alone, "over search": alone / found.value - 1, "ended by": "the same budget"})
        lead[f"{site} alone"] = alone
    report.tables["large: baselines and single sites"] = rows
    best = min(lead, key=lambda n: lead[n])
    figures = [
        holds_at_most("large: search, feasible plan", took_s, "s", 20.0),
        Figure("large: reasons why the plan is none", len(wrong), "reasons", "= 0", not wrong),
        Figure("large: step", found.value, "s"),
        Figure("large: proved lower bound", found.lower_bound, "s"),
        holds_at_most("large: over the lower bound", found.value / found.lower_bound - 1, "share", 0.10),
        Figure("large: dense collectives over a slow link", dense, "stages", "= 0", dense == 0),
        Figure(f"large: shorter than the best other ({best})", 1 - found.value / lead[best], "share", "> 0", lead[best] > found.value),
        Figure("large: evaluations", found.evaluations, "plans"),
        Figure("large: devices in use", sum(found.outline.used(len(problem.pools))), "devices"),
    ]  # fmt: skip
    if report.quick:
        report.not_measured.append("large: baselines at ten times the evaluations (each was stopped after 2 s)")
    return figures


def thinned(found: SearchResult):
    """Yields the improvements of a search that made the plan better by a hundredth, and the last."""
    last = INF
    for i in found.improvements:
        if i.value < 0.99 * last or i is found.improvements[-1]:
            last = i.value
            yield i


# Scaling.


def scaling_part(report: Report, settings: Settings) -> list[Figure]:
    sizes = (64, 256, 1024, 4096) if report.quick else (64, 128, 256, 512, 1024, 2048, 4096)
    evaluations, rows, slopes = (100 if report.quick else 400), [], []
    for devices in sizes:
        problem = scaled_sites(devices)
        begin = time.process_time()
        found = search(OwnJudge(problem), max_evaluations=evaluations)
        took_s = time.process_time() - begin
        rows.append({
            "devices": devices, "cpu_s": took_s, "us per device": 1e6 * took_s / devices, "step_s": found.value,
            "over_bound": found.value / found.lower_bound - 1, "evaluations": found.evaluations,
        })  # fmt: skip
    report.tables["scaling"] = rows
    first, last = rows[0], rows[-1]
    power = math.log(last["cpu_s"] / first["cpu_s"]) / math.log(last["devices"] / first["devices"])
    slopes = [math.log(b["cpu_s"] / a["cpu_s"]) / math.log(b["devices"] / a["devices"]) for a, b in itertools.pairwise(rows)]
    return [
        holds_at_most(f"scaling: search time ~ devices ** this, {sizes[0]} to {sizes[-1]}", power, "power", 1.0),
        Figure("scaling: the steepest step", max(slopes), "power"),
    ]


# Crossover.

_LINKS_GB_S = (0.1, 1, 3, 10, 30, 100, 300, 1000, 4000)


def crossover_part(report: Report, settings: Settings) -> list[Figure]:
    ratio = slamb_ratio(DECODER_7B)
    evaluations = 150 if report.quick else 1500
    speeds = (1, 10, 300, 4000) if report.quick else _LINKS_GB_S
    rows, ways = [], []
    for gb_s in speeds:
        problem = two_sites(gb_s * 1e9, ratio)
        families = {
            "one site": baselines.on_site(dataclasses.replace(problem, compressed=0.0), "east"),
            "cut there": dataclasses.replace(problem, mixed=False, compressed=0.0),
            "replicas, compressed": dataclasses.replace(problem, max_stages=1),
            "replicas, dense": dataclasses.replace(problem, max_stages=1, compressed=0.0),
        }
        best = {}
        for name, family in families.items():
            try:
                best[name] = search(OwnJudge(family), max_evaluations=max(100, evaluations // 4)).value
            except PlanError:
                best[name] = INF
        found = search(OwnJudge(problem), max_evaluations=evaluations)
        way = way_of(problem, found)
        ways.append(way)
        # Of one stage in both sites, what the exchange takes.
        rows.append({"link GB/s": gb_s, "planner": way, "step_s": found.value, **{f"{n}, s": v for n, v in best.items()}})
    report.tables[f"crossover, a compressed exchange has {ratio:.3f} of the bytes"] = rows
    order = ["one site", "cut there", "replicas, compressed", "replicas, dense"]
    ranks = [order.index(w) for w in ways]
    return [
        Figure("crossover: ways taken as the link speeds up", len(set(ranks)), "ways", ">= 3", len(set(ranks)) >= 3),
        Figure("crossover: steps back on the way", sum(b < a for a, b in itertools.pairwise(ranks)), "steps", "= 0", ranks == sorted(ranks)),
        Figure("crossover: bytes of the compressed exchange", ratio, "of dense"),
    ]  # fmt: skip


def way_of(problem: Problem, found: SearchResult) -> str:
    """Returns what a plan does with the link between two sites."""
    stages = [{problem.pools[p.pool].site for p in g.parts} for g in found.outline.groups]
    across = [g for g, where in zip(found.outline.groups, stages) if len(where) > 1]
    if across:
        return "replicas, compressed" if any(g.options.exchange == "compressed" for g in across) else "replicas, dense"
    return "cut there" if len(set().union(*stages)) > 1 else "one site"


# Ablation.


def ablation_part(report: Report, settings: Settings) -> list[Figure]:
    count, evaluations = (4, 150) if report.quick else (24, 400)
    rng = random.Random(0)
    problems = []
    while len(problems) < count:
        problem = random_problem(rng.randrange(10**6), devices=24, layers=12, sites=3)
        try:
            search(OwnJudge(problem), max_evaluations=20)
        except PlanError:
            continue
        problems.append(problem)
    best = [search(OwnJudge(p), seed=9, max_evaluations=4 * evaluations).value for p in problems]
    whole = [search(OwnJudge(p), max_evaluations=evaluations) for p in problems]
    best = [min(b, w.value) for b, w in zip(best, whole)]
    rows = [{"who": "search", "over best, mean": mean_over([w.value for w in whole], best)}]
    for name, run in baseline_runs().items():
        values = []
        for p in problems:
            evaluator = Evaluator(OwnJudge(p), max_evaluations=evaluations)
            baselines.stopped(lambda run=run, evaluator=evaluator: run(evaluator))
            values.append(evaluator.best)
        rows.append({"who": name, "over best, mean": mean_over(values, best), "found none": sum(v == INF for v in values)})
    report.tables[f"ablation: {count} problems, {evaluations} evaluations each"] = rows
    reached = statistics.mean(evaluations_to(w, b, evaluations) for w, b in zip(whole, best))
    without = [{"without": "(nothing)", "evaluations to within 1 %": reached, "over best, mean": rows[0]["over best, mean"]}]
    names = list(dict.fromkeys(p.name for p in PRINCIPLES))
    for name in names[:3] if report.quick else names:
        found = [search(OwnJudge(p), max_evaluations=evaluations, without=[name]) for p in problems]
        without.append({
            "without": name,
            "evaluations to within 1 %": statistics.mean(evaluations_to(f, b, evaluations) for f, b in zip(found, best)),
            "over best, mean": mean_over([f.value for f in found], best),
        })  # fmt: skip
    report.tables["ablation: one principle less"] = without
    rest = min(r["over best, mean"] for r in rows[1:])
    if report.quick:
        report.not_measured.append(f"ablation: principles {', '.join(names[3:])}")
    return [
        Figure("ablation: search over the best known plan", rows[0]["over best, mean"], "share"),
        Figure("ablation: the best baseline over it", rest, "share", "> search", rest > rows[0]["over best, mean"]),
        Figure("ablation: evaluations to within 1 % of the best", reached, "plans"),
    ]


def mean_over(values: list[float], best: list[float]) -> float:
    """Returns the mean share by which values that were found exceed the best ones; infinite where none was."""
    return statistics.mean([v / b - 1 for v, b in zip(values, best) if v < INF] or [INF])


def evaluations_to(found: SearchResult, best: float, most: int) -> int:
    """Returns the evaluations until a plan within 1 % of the best, `most` where it was never found."""
    return next((i.evaluations for i in found.improvements if i.value <= 1.01 * best), most)


# name to (about how many seconds a quick run takes, the part)
PARTS: dict[str, tuple[float, Callable[[Report, Settings], list[Figure]]]] = {
    "large": (33.0, large_part),
    "exhaustive": (16.0, exhaustive_part),
    "published": (17.0, published_part),
    "scaling": (12.0, scaling_part),
    "crossover": (10.0, crossover_part),
    "ablation": (15.0, ablation_part),
}
