"""The large instance: 736 devices of four kinds in four sites; its bound, baselines at ten times the budget, sites alone."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from typing import Any

from _planner_problems import four_sites
from _planner_settings import Settings, holds_at_most
from _report import Figure, Report

from hetjax.ir.errors import PlanError
from hetjax.passes.search import baselines
from hetjax.passes.search.dynamic import dynamic
from hetjax.passes.search.evaluator import Evaluator
from hetjax.passes.search.judge import INF
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.result import SearchResult, search
from hetjax.passes.search.space import problems_of
from hetjax.passes.search.view import View

_SEARCH_S, _PROCESSES = 18.0, 2
# A baseline has so many times the seconds of the search; in a quick run so many seconds.
_TIMES, _QUICK_S = 10, 2.0

BASELINES: dict[str, Callable[[Evaluator], None]] = {
    "random": lambda e: baselines.randomly(e, 0), "random stages": lambda e: baselines.randomly(e, 0, cut=True),
    "greedy": baselines.greedy, "uniform grid": baselines.uniform, "dynamic program": dynamic,
}  # fmt: skip


def large_part(report: Report, settings: Settings) -> list[Figure]:
    budget_s, quick = settings.large_s or _SEARCH_S, report.quick
    row = settings.kept.row
    found = row(f"large {budget_s}", lambda: _searched(budget_s))
    report.tables["large: quality over time"] = found.pop("curve")
    rows = [
        row(f"large {name} {budget_s} {quick}", lambda name=name: _baseline(name, _QUICK_S if quick else _TIMES * budget_s))
        for name in BASELINES
    ]
    rows += [
        row(f"large {site} {budget_s} {quick}", lambda site=site: _alone(site, _QUICK_S if quick else budget_s))
        for site in baselines.sites(four_sites())
    ]
    for r in rows:
        r["over search"] = r["step_s"] / found["step_s"] - 1 if r["step_s"] else None
    report.tables["large: baselines and single sites (0: nothing that fits)"] = rows
    best = min((r for r in rows if r["step_s"]), key=lambda r: r["step_s"])
    figures = [
        holds_at_most("large: search, feasible plan", found["search_s"], "s", 20.0),
        Figure("large: reasons why the plan is none", found["wrong"], "reasons", "= 0", not found["wrong"]),
        Figure("large: step", found["step_s"], "s"),
        Figure("large: proved lower bound", found["bound_s"], "s"),
        holds_at_most("large: over the lower bound", found["step_s"] / found["bound_s"] - 1, "share", 0.10),
        Figure("large: dense collectives over a slow link", found["dense"], "stages", "= 0", not found["dense"]),
        Figure(
            f"large: shorter than the best other ({best['who']})", 1 - found["step_s"] / best["step_s"], "share", "> 0",
            best["step_s"] > found["step_s"],
        ),
        Figure("large: evaluations", found["evaluations"], "plans"),
        Figure("large: devices in use", found["devices"], "devices"),
    ]  # fmt: skip
    if quick:
        report.not_measured.append(f"large: baselines with {_TIMES} times the seconds (each was stopped after {_QUICK_S:g} s)")
    return figures


def _searched(budget_s: float) -> dict[str, Any]:
    problem = four_sites()
    begin = time.perf_counter()
    found = search(OwnJudge(problem), budget_s=budget_s, processes=_PROCESSES)
    took_s = time.perf_counter() - begin
    view = View(Evaluator(OwnJudge(problem)))
    return {
        "search_s": took_s, "step_s": found.value, "bound_s": found.lower_bound, "evaluations": found.evaluations,
        "devices": sum(found.outline.used(len(problem.pools))),
        "dense": sum(view.spans_slow(g) and g.options.exchange == "dense" for g in found.outline.groups),
        "wrong": len([*problems_of(problem, found.outline), *found.report.problems]),
        "curve": [
            {"elapsed_s": i.elapsed_s, "evaluations": i.evaluations, "step_s": i.value, "over_bound": i.value / found.lower_bound - 1}
            for i in thinned(found)
        ],
    }  # fmt: skip


def _baseline(name: str, budget_s: float) -> dict[str, Any]:
    evaluator = Evaluator(OwnJudge(four_sites()), budget_s=budget_s)
    capped = baselines.stopped(lambda: BASELINES[name](evaluator))
    return {
        "who": name, "seconds": evaluator.elapsed_s, "evaluations": evaluator.evaluations,
        "fit": sum(v < INF for _, v in itertools.islice(evaluator.judged(), 100_000)),
        "step_s": evaluator.best if evaluator.best < INF else 0.0, "ended by": f"{budget_s:g} s" if capped else "its end",
    }  # fmt: skip


def _alone(site: str, budget_s: float) -> dict[str, Any]:
    own = OwnJudge(baselines.on_site(four_sites(), site))
    row: dict[str, Any] = {"who": f"{site} alone", "seconds": budget_s, "ended by": f"{budget_s:g} s"}
    try:
        found = search(own, budget_s=budget_s, processes=_PROCESSES)
    except PlanError:
        return {**row, "step_s": 0.0}
    return {**row, "evaluations": found.evaluations, "step_s": found.value}


def thinned(found: SearchResult):
    """Yields the improvements of a search that made the plan better by a hundredth, and the last."""
    last = INF
    for i in found.improvements:
        if i.value < 0.99 * last or i is found.improvements[-1]:
            last = i.value
            yield i
