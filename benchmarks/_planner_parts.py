"""The parts of `benchmarks/planner.py`."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import statistics
import time
from collections.abc import Callable

from _planner_problems import DECODER_7B, four_sites, scaled_sites, slamb_ratio, two_sites
from _planner_published import published_part
from _planner_settings import Settings, holds_at_least, holds_at_most
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


def small_problem(seed: int) -> Problem:
    """Returns a random problem whose every plan exhaustive search can reach: up to 3 sites, 8 devices, 6 layers."""
    problem = random_problem(seed)
    return dataclasses.replace(problem, batch=min(problem.batch, FINE))


# Against exhaustive search.


def exhaustive_part(report: Report, settings: Settings) -> list[Figure]:
    equal_wanted, near_wanted = (12, 40) if report.quick else (200, 1000)
    rows: list[dict[str, float]] = []
    looked_at = 0
    while len(rows) < near_wanted:
        seed, looked_at = looked_at, looked_at + 1
        both = len(rows) < equal_wanted
        row = settings.kept.row(f"exhaustive {seed} {both}", lambda seed=seed, both=both: _against_exhaustive(seed, both))
        if row is not None:
            rows.append({"seed": seed, **row})
    whole = [r["equal"] for r in rows if "equal" in r]
    near = sum(r["over_best"] <= 0.01 for r in rows)
    report.tables["missed at a tenth of the evaluations"] = [
        {k: r[k] for k in ("seed", "plans", "over_best")} for r in rows if r["over_best"] > 0.01
    ]
    return [
        holds_at_least(f"equal to exhaustive search, of {len(whole)}", sum(whole) / len(whole), "share", 1.0),
        holds_at_least(f"within 1 % at a tenth of the evaluations, of {len(rows)}", near / len(rows), "share", 0.98),
        Figure("problems looked at for these", looked_at, "problems"),
    ]  # fmt: skip


def _against_exhaustive(seed: int, both: bool) -> dict[str, float] | None:
    """Returns how the search does on one small problem; None where it is none to compare on.

    Args:
      seed: of the problem.
      both: whether to search with as many evaluations too.
    """
    problem = small_problem(seed)
    if not _LEAST <= baselines.count_plans(problem, OwnJudge(problem).known, _MOST) <= _MOST:
        return None
    whole = Evaluator(OwnJudge(problem))
    baselines.exhaustive(whole)
    if whole.best == INF:
        return None
    row: dict[str, float] = {"plans": whole.evaluations}
    if both:
        found = search(OwnJudge(problem), max_evaluations=whole.evaluations)
        row["equal"] = abs(found.value / whole.best - 1) <= _EPS
    try:
        row["over_best"] = search(OwnJudge(problem), max_evaluations=whole.evaluations // 10).value / whole.best - 1
    except PlanError:
        row["over_best"] = INF
    return row


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
    evaluations = 100 if report.quick else 400
    rows = [settings.kept.row(f"scaling {n} {evaluations}", lambda n=n: _scaled(n, evaluations)) for n in sizes]
    report.tables["scaling"] = rows
    first, last = rows[0], rows[-1]
    power = math.log(last["cpu_s"] / first["cpu_s"]) / math.log(last["devices"] / first["devices"])
    slopes = [math.log(b["cpu_s"] / a["cpu_s"]) / math.log(b["devices"] / a["devices"]) for a, b in itertools.pairwise(rows)]
    return [
        holds_at_most(f"scaling: search time ~ devices ** this, {sizes[0]} to {sizes[-1]}", power, "power", 1.0),
        Figure("scaling: the steepest step", max(slopes), "power"),
    ]


def _scaled(devices: int, evaluations: int) -> dict[str, float]:
    problem = scaled_sites(devices)
    begin = time.process_time()
    found = search(OwnJudge(problem), max_evaluations=evaluations)
    took_s = time.process_time() - begin
    return {
        "devices": devices, "cpu_s": took_s, "us per device": 1e6 * took_s / devices, "step_s": found.value,
        "over_bound": found.value / found.lower_bound - 1, "evaluations": found.evaluations,
    }  # fmt: skip


# Crossover.

_LINKS_GB_S = (0.1, 1, 3, 10, 30, 100, 300, 1000, 4000)


def crossover_part(report: Report, settings: Settings) -> list[Figure]:
    ratio = slamb_ratio(DECODER_7B)
    evaluations = 150 if report.quick else 1500
    speeds = (1, 10, 300, 4000) if report.quick else _LINKS_GB_S
    rows = [settings.kept.row(f"crossover {n} {evaluations}", lambda n=n: _crossed(n, ratio, evaluations)) for n in speeds]
    ways = [row["planner"] for row in rows]
    report.tables[f"crossover, a compressed exchange has {ratio:.3f} of the bytes"] = rows
    order = ["one site", "cut there", "replicas, compressed", "replicas, dense"]
    ranks = [order.index(w) for w in ways]
    return [
        Figure("crossover: ways taken as the link speeds up", len(set(ranks)), "ways", ">= 3", len(set(ranks)) >= 3),
        Figure("crossover: steps back on the way", sum(b < a for a, b in itertools.pairwise(ranks)), "steps", "= 0", ranks == sorted(ranks)),
        Figure("crossover: bytes of the compressed exchange", ratio, "of dense"),
    ]  # fmt: skip


def _crossed(gb_s: float, ratio: float, evaluations: int) -> dict[str, float | str]:
    """Returns what the planner does with a link, and what each way of using it comes to."""
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
    return {"link GB/s": gb_s, "planner": way_of(problem, found), "step_s": found.value, **{f"{n}, s": v for n, v in best.items()}}


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


Part = Callable[[Report, Settings], list[Figure]]

# name to (about how many seconds a quick run takes, the part)
PARTS: dict[str, tuple[float, Part]] = {
    "large": (33.0, large_part),
    "exhaustive": (16.0, exhaustive_part),
    "published": (26.0, published_part),
    "scaling": (12.0, scaling_part),
    "crossover": (10.0, crossover_part),
    "ablation": (15.0, ablation_part),
}
