"""The cost model as a judge: published plans it never saw, golden cases, speed.

    python benchmarks/cost.py            the whole run, a table
    python benchmarks/cost.py --quick    the same within 50 s
    python benchmarks/cost.py --json     one object
    python benchmarks/cost.py --data DIR the published data [../shared/data/sailor or $HETJAX_SHARED]

The published plans ran on other people's machines; nothing here is fitted to a group of plans that is
scored: constants come from the other groups of the same cluster, or stay at their defaults where there
is no other group.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hetjax.cli.devices import force_cpu_devices
from hetjax.passes.cost.forest import train_forest
from hetjax.passes.cost.imported import published_samples
from hetjax.passes.cost.installation import PUBLISHED, Installation, fit_memory, fit_sync
from hetjax.passes.cost.published import estimate, installation_of, stage_bytes
from hetjax.passes.cost.sailor import Model, PublishedPlan, plan_cluster, read_model, read_plan
from hetjax.passes.cost.splits import leaving_clusters_out, rank_correlation, within_clusters
from hetjax.passes.schedules import check_schedule, schedule
from hetjax.passes.schedules.samples import GOLDEN
from hetjax.passes.simulator import simulate

Figure = dict[str, Any]
# Their `real` and `max_mem` are a copy of another group's.
SUSPECT = "mit/N3/plan_config_N3_D1.json"


def figure(name: str, value: float, unit: str, target: str, holds: bool | None) -> Figure:
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}


@dataclasses.dataclass(frozen=True)
class Case:
    """One executed plan: its file, its group (folder) and its cluster (first folder)."""

    name: str
    plan: PublishedPlan

    @property
    def group(self) -> str:
        return self.name.rsplit("/", 1)[0]

    @property
    def cluster(self) -> str:
        return self.name.split("/", 1)[0]


def read_cases(folder: Path) -> list[Case]:
    files = sorted((folder / "measured").rglob("*.json"))
    cases = [
        Case(str(f.relative_to(folder / "measured")), read_plan(f.read_text(), str(f)))
        for f in files
    ]
    return [c for c in cases if c.name != SUSPECT]


def seconds(
    cases: Sequence[Case], model: Model, folder: Path, constants: Installation
) -> list[float]:
    return [
        estimate(c.plan, model, plan_cluster(folder, c.plan), constants).iteration_s for c in cases
    ]


def from_the_others(case: Case, cases: Sequence[Case], model: Model, folder: Path) -> Installation:
    """Returns constants for a plan from the other groups of its cluster."""
    keeps = installation_of(case.plan).keeps_scores
    base = Installation(keeps_scores=keeps)
    others = [c for c in cases if c.cluster == case.cluster and c.group != case.group]
    if len(others) < 4:
        return base
    measured = [float(c.plan.measured_s or 0) for c in others]
    base = fit_sync(lambda constants: seconds(others, model, folder, constants), measured, base)
    stages = [
        [stage_bytes(c.plan, model, keeps, s) for s in range(c.plan.num_stages)] for c in others
    ]
    return fit_memory(
        [(s, float(c.plan.measured_bytes or 0)) for s, c in zip(stages, others)], base
    )


def published(folder: Path) -> tuple[list[Figure], list[str]]:
    model = read_model(folder, "OPT-350")
    cases = read_cases(folder)
    rows = [
        "plan                                            measured  predicted   error   bound/predicted  memory"
    ]
    time_errors, memory_errors, plain_errors, by_group = {}, {}, {}, {}
    constants: dict[str, Installation] = {}
    for case in cases:
        if case.group not in constants:
            constants[case.group] = from_the_others(case, cases, model, folder)
        cluster = plan_cluster(folder, case.plan)
        found = estimate(case.plan, model, cluster, constants[case.group])
        measured = float(case.plan.measured_s or 0)
        time_errors[case.name] = found.iteration_s / measured - 1
        memory_errors[case.name] = max(found.peak_bytes) / float(case.plan.measured_bytes or 0) - 1
        plain = estimate(case.plan, model, cluster, Installation())
        plain_errors[case.name] = plain.iteration_s / measured - 1
        by_group.setdefault(case.group, []).append((measured, found.iteration_s))
        rows.append(
            f"{case.name:47} {measured:9.4f} {found.iteration_s:10.4f} {time_errors[case.name]:+7.1%}"
            f" {found.lower_bound_s / found.iteration_s:12.3f} {memory_errors[case.name]:+13.1%}"
        )
    in_order = sum(
        [p for _, p in sorted(pairs)] == sorted(p for _, p in pairs) for pairs in by_group.values()
    )

    def mape(errors: dict[str, float], prefix: str = "") -> float:
        return statistics.fmean(abs(e) for name, e in errors.items() if name.startswith(prefix))

    gh, low = "clariden", min(memory_errors.values())
    figures = [
        figure(
            "17 plans, time, constants from other groups",
            mape(time_errors),
            "MAPE",
            "<= 0.08",
            mape(time_errors) <= 0.08,
        ),
        figure(
            "15 plans on GH200, the same",
            mape(time_errors, gh),
            "MAPE",
            "<= 0.08",
            mape(time_errors, gh) <= 0.08,
        ),
        figure("17 plans, time, nothing fitted at all", mape(plain_errors), "MAPE", "", None),
        figure(
            "groups in measured order",
            in_order,
            f"of {len(by_group)}",
            str(len(by_group)),
            in_order == len(by_group),
        ),
        figure(
            "17 plans, peak memory",
            mape(memory_errors),
            "mean error",
            "<= 0.10",
            mape(memory_errors) <= 0.10,
        ),
        figure(
            "15 plans on GH200, peak memory",
            mape(memory_errors, gh),
            "mean error",
            "<= 0.10",
            mape(memory_errors, gh) <= 0.10,
        ),
        figure("lowest memory prediction", low, "error", ">= -0.05", low >= -0.05),
    ]
    shipped = [PUBLISHED[k] for k in ("gh200", "titan-rtx")]
    rows.append(f"shipped constants, from all plans: {shipped[0]}; mixed RTX: {shipped[1]}")
    rows.append(
        "mixed RTX has one usable group: its constants are defaults, except that attention scores are not"
        " kept, which the peaks of these two plans say themselves"
    )
    return figures, rows


def golden() -> list[Figure]:
    exact = 0
    for case in GOLDEN:
        for name, expected in (
            ("gpipe", case.gpipe),
            ("1f1b", case.one_f_one_b),
            ("eager-1f1b", case.eager),
        ):
            lists = schedule(name, case.costs)
            check_schedule(lists, case.costs.num_microbatches)
            exact += simulate(lists, case.costs).makespan_s == expected
    total = 3 * len(GOLDEN)
    return [figure("golden makespans exact", exact, f"of {total}", str(total), exact == total)]


def speed(folder: Path | None, budget_s: float) -> list[Figure]:
    """Returns evaluations per second of the judge on one core."""
    from hetjax.passes.schedules import PipelineCosts
    from hetjax.passes.simulator_fast import makespan_s

    costs = PipelineCosts((1.0,) * 8, (2.0,) * 8, 32, (0.25,) * 7, (0.5,) * 7)
    lists = schedule("1f1b", costs)
    makespan_s(lists, costs)
    # Seconds of this process, so that what else runs on the machine does not count.
    count, start = 0, time.process_time()
    while time.process_time() - start < budget_s:
        makespan_s(lists, costs)
        count += 1
    rate = count / (time.process_time() - start)
    out = [figure("makespans, 8 stages x 32 microbatches", rate, "per s", ">= 2000", rate >= 2000)]
    if folder is not None:
        model, case = read_model(folder, "OPT-350"), read_cases(folder)[3]
        cluster = plan_cluster(folder, case.plan)
        start, count = time.process_time(), 0
        while time.process_time() - start < budget_s:
            estimate(case.plan, model, cluster)
            count += 1
        rate = count / (time.process_time() - start)
        out.append(figure("published plans, 4 stages x 32 microbatches", rate, "per s", "", None))
    return out


def forest(folder: Path, quick: bool) -> list[Figure]:
    """Returns how well layers that were held out are predicted, with and without the forest."""
    models = [read_model(folder, name) for name in ("OPT-350", "GPT-Neo-2.7")]
    samples = [s for model in models for s in published_samples(folder, model)]
    out = [figure("published layers", len(samples), "of 7 kinds", "", None)]
    trees = 60 if quick else 100
    for name, score in (
        ("within clusters", within_clusters(samples, trees=trees)),
        ("a cluster left out", leaving_clusters_out(samples, trees=trees)),
    ):
        out += [
            figure(f"{name}: analytic alone", score.analytic_error, "mean error", "", None),
            figure(f"{name}: with the forest", score.forest_error, "mean error", "", None),
            figure(f"{name}: rank, analytic alone", score.analytic_rank, "Spearman", "", None),
            figure(f"{name}: rank, with the forest", score.forest_rank, "Spearman", "", None),
        ]
    trained = train_forest(samples, trees=trees)
    kind = samples[0].kind
    works = [(s.work, s.group) for s in samples if s.kind is kind]
    start, count = time.process_time(), 0
    while time.process_time() - start < 1.0:
        trained.predict_many(works, kind)
        count += len(works)
    rate = count / (time.process_time() - start)
    return [*out, figure("forest predictions, many at once", rate, "per s", "", None)]


def order(quick: bool) -> list[Figure]:
    """Returns whether tasks run in the order that the simulator says."""
    from _cost_order import SCHEDULES, agreement

    schedules = SCHEDULES[1:2] if quick else SCHEDULES
    ran, agreed = agreement(schedules)
    name = f"tasks and transfers run in the simulator's order ({', '.join(schedules)})"
    return [figure(name, agreed, f"of {ran}", str(ran), agreed == ran > 0)]


def on_this_machine() -> tuple[list[Figure], list[str]]:
    """Returns predicted against measured steps of twelve plans on eight CPU devices."""
    from _cost_plans import compare

    from hetjax.calibrate.report import mean_error

    found, count, took_s, host = compare()
    measured = [r["measured_s"] for r in found]
    halves = [[r[key] for r in found] for key in ("before_s", "after_s")]
    rows = [
        f"{r['plan']:36} measured {r['measured_s'] * 1e3:8.2f} ms  predicted {r['predicted_s'] * 1e3:8.2f}"
        f" ({r['predicted_s'] / r['measured_s'] - 1:+.1%})  by the data sheet {r['analytic_s'] * 1e3:8.2f}  {r['sources']}"
        for r in found
    ]
    rows.append(f"eight CPU devices share the machine's processors; driving them costs {host}")
    out = [
        figure("calls measured by calibrate", count, f"in {took_s:.0f} s", "", None),
        # What no prediction can beat: the same plans, measured twice.
        figure("12 plans here, measured twice", mean_error(*halves), "MAPE", "", None),
        figure("12 plans here, measured twice: rank", rank_correlation(*halves), "Spearman", "", None),
    ]
    for name, key in (
        ("calibrated", "predicted_s"),
        ("calibrated, processors and hand-overs for nothing", "makespan_s"),
        ("by the data sheet", "analytic_s"),
    ):
        predicted = [r[key] for r in found]
        out += [
            figure(f"12 plans here, {name}", mean_error(predicted, measured), "MAPE", "", None),
            figure(f"12 plans here, {name}: rank", rank_correlation(predicted, measured), "Spearman", "", None),
        ]
    return out, rows


def find_data(given: Path | None) -> Path | None:
    root = Path(__file__).resolve().parents[1]
    shared = Path(os.environ.get("HETJAX_SHARED", root.parent / "shared"))
    folder = given or shared / "data" / "sailor"
    return folder if (folder / "llm_info.json").exists() else None


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--data", type=Path)
    args = parser.parse_args()
    force_cpu_devices(only_cpu=True)
    folder = find_data(args.data)
    figures, rows = golden(), []
    skipped = []
    if folder is None:
        skipped.append("published plans (their data is not here; --data DIR)")
    else:
        found, rows = published(folder)
        figures += found
        figures += forest(folder, args.quick)
    figures += speed(folder, 1.0 if args.quick else 4.0)
    figures += order(args.quick)
    if args.quick:
        skipped.append("12 plans on eight CPU devices after calibrating (takes minutes)")
    else:
        found, more = on_this_machine()
        figures, rows = figures + found, rows + more
    machine = {
        "cpus": os.cpu_count(),
        "machine": platform.machine(),
        "python": platform.python_version(),
    }
    if args.json:
        print(json.dumps({"figures": figures, "machine": machine, "not_measured": skipped}))
        return
    print("\n".join(rows))
    print()
    for f in figures:
        verdict = "" if f["holds"] is None else ("holds" if f["holds"] else "MISSED")
        value = (
            f["value"]
            if not isinstance(f["value"], float) or math.isinf(f["value"])
            else f"{f['value']:.4g}"
        )
        print(f"{f['name']:48} {value:>10} {f['unit']:12} {f['target']:10} {verdict}")
    print("not measured:", "; ".join(skipped))


if __name__ == "__main__":
    main()
