"""What search, principles and forest earn: the same problems at equal evaluations, with one thing less each time."""

from __future__ import annotations

import dataclasses
import random
import statistics
import time
from collections.abc import Callable
from typing import Any

from _planner_large import BASELINES
from _planner_problems import four_sites, random_sites
from _planner_settings import Settings
from _report import Figure, Report

from hetjax.ir.errors import PlanError
from hetjax.passes.search import baselines
from hetjax.passes.search.evaluator import Evaluator, Improvement
from hetjax.passes.search.judge import INF
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.principles import PRINCIPLES
from hetjax.passes.search.result import search
from hetjax.passes.search.samples import random_problem
from hetjax.passes.search.space import Problem

NAMES = tuple(dict.fromkeys(p.name for p in PRINCIPLES))
# Small problems, decoders in sites, and evaluations each, of a full and a quick run; principles of a quick one.
_FULL, _QUICK, _QUICK_NAMES = (24, 8, 400), (3, 1, 150), 3
_NEAR = 1.01
# Of the large instance: evaluations and seeds.
_LARGE, _SEEDS = 1200, (0, 1, 2, 3)
_FORESTS = {"forest: bonus": ("bonus",), "forest: ranking": ("ranking",), "forest: both": ("bonus", "ranking")}
# The best plan known is at least that of a search with other draws and so many times the evaluations.
_LONG_SEED, _LONG = 9, 4


@dataclasses.dataclass(frozen=True)
class Arm:
    """One way to search.

    Attributes:
      name: of its row.
      run: given a problem, a limit of evaluations and a seed, returns the improvements.
    """

    name: str
    run: Callable[[Problem, int, int], list[Improvement]]


def searching(name: str, **options: Any) -> Arm:
    """Returns a search with some options."""

    def run(problem: Problem, evaluations: int, seed: int) -> list[Improvement]:
        evaluations *= options.get("times", 1)
        more = {"seed": seed, **{k: v for k, v in options.items() if k != "times"}}
        try:
            return list(search(OwnJudge(problem), max_evaluations=evaluations, **more).improvements)
        except PlanError:
            return []

    return Arm(name, run)


def baseline(name: str) -> Arm:
    def run(problem: Problem, evaluations: int, seed: int) -> list[Improvement]:
        evaluator = Evaluator(OwnJudge(problem), max_evaluations=evaluations)
        baselines.stopped(lambda: BASELINES[name](evaluator))
        return evaluator.improvements

    return Arm(name, run)


def problems(small: int, sites: int) -> list[Problem]:
    """Returns random problems of up to 24 devices, 12 layers and 3 sites, and decoders in sites; all have a plan."""
    rng, found = random.Random(0), []
    while len(found) < small:
        problem = random_problem(rng.randrange(10**6), devices=24, layers=12, sites=3)
        try:
            search(OwnJudge(problem), max_evaluations=20)
        except PlanError:
            continue
        found.append(problem)
    return found + [random_sites(seed) for seed in range(sites)]


def measured(settings: Settings, arm: Arm, name: str, problem: Problem, evaluations: int, seed: int) -> dict[str, Any]:
    """Returns (evaluations, value) of every better plan on the way, and the CPU seconds it took."""

    def run() -> dict[str, Any]:
        begin = time.process_time()
        found = arm.run(problem, evaluations, seed)
        return {"cpu_s": time.process_time() - begin, "found": [(i.evaluations, i.value) for i in found]}

    return settings.kept.row(f"ablation {arm.name} {name} {evaluations} {seed}", run)


def ablation_part(report: Report, settings: Settings) -> list[Figure]:
    small, sites, evaluations = _QUICK if report.quick else _FULL
    names = NAMES[:_QUICK_NAMES] if report.quick else NAMES
    whole, long = searching("search"), searching("search longer", seed=_LONG_SEED, times=_LONG)
    others = [baseline(name) for name in BASELINES]
    less = [searching(f"without {name}", without=[name]) for name in names]
    less.append(searching("without any of them", without=NAMES))
    forests = [searching(name, forest=ways) for name, ways in _FORESTS.items()]
    posed = [(str(i), p, evaluations, 0) for i, p in enumerate(problems(small, sites))]
    some = [whole, long, *others, *less, *forests]
    found = {a.name: [measured(settings, a, *entry) for entry in posed] for a in some}
    table = _tables(found, posed)
    parts = {f"{small} small problems": (0, small), f"{sites} decoders in sites": (small, len(posed))}
    for name, part in parts.items():
        report.tables[f"ablation: {name}, {evaluations} evaluations each"] = table([whole, *others], *part)
        report.tables[f"ablation: {name}, one principle less"] = table([whole, *less], *part)
        report.tables[f"ablation: {name}, forest"] = table([whole, *forests], *part)
    if not report.quick:
        entries = [("736 devices", four_sites(), _LARGE, seed) for seed in _SEEDS]
        large = {a.name: [measured(settings, a, *entry) for entry in entries] for a in (whole, *forests)}
        report.tables[f"ablation: 736 devices, {len(_SEEDS)} seeds, {_LARGE} evaluations each, forest"] = _tables(
            large, entries
        )([whole, *forests], 0, len(entries))
    if report.quick:
        report.not_measured.append(f"ablation: principles {', '.join(NAMES[_QUICK_NAMES:])}")
    ours, *rows = table([whole, *others], 0, len(posed))
    rest = min(rows, key=lambda r: (r["found none"], r["over best, mean"]))
    return [
        Figure("ablation: search over the best known plan", ours["over best, mean"], "share"),
        Figure(
            f"ablation: the best baseline over it ({rest['who']})", rest["over best, mean"], "share", "> search",
            rest["over best, mean"] > ours["over best, mean"],
        ),
        Figure("ablation: evaluations to within 1 % of the best", ours["evaluations to within 1 %"], "plans"),
    ]  # fmt: skip


def _tables(found: dict[str, list[dict[str, Any]]], posed: list[tuple[str, Problem, int, int]]):
    """Returns a function that gives the rows of some arms over some of the problems."""
    names = [name for name, *_ in posed]
    best = {n: min(v for rows in found.values() for r, m in zip(rows, names) if m == n for _, v in r["found"]) for n in names}

    def table(arms: list[Arm], begin: int, end: int) -> list[dict[str, Any]]:
        some = [best[n] for n in names[begin:end]]
        return [_row(a.name, found[a.name][begin:end], some, posed[begin][2]) for a in arms]

    return table


def _row(name: str, rows: list[dict[str, Any]], best: list[float], evaluations: int) -> dict[str, Any]:
    """Returns means over problems; where an arm never came within 1 %, all its evaluations count."""
    reached = [next((n for n, v in r["found"] if v <= _NEAR * b), INF) for r, b in zip(rows, best)]
    last = [r["found"][-1][1] / b - 1 for r, b in zip(rows, best) if r["found"]]
    return {
        "who": name, "evaluations to within 1 %": statistics.mean(min(n, evaluations) for n in reached),
        "never": sum(n == INF for n in reached), "over best, mean": statistics.mean(last or [INF]),
        "found none": len(rows) - len(last), "cpu_s": sum(r["cpu_s"] for r in rows),
    }  # fmt: skip
