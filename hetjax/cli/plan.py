"""`hetjax plan`: search for a plan, or list what guides the search."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.main import EXIT_GOOD, EXIT_NEGATIVE, EXIT_REFUSED
from hetjax.ir.errors import HetjaxError, MicrobatchError, PlanError

if TYPE_CHECKING:
    from hetjax.passes.search.result import SearchResult

# The published instances are solved well within this; a budget in seconds ends the search early.
_EVALUATIONS, _BUDGET_S = 6000, 3.0


def _seconds(text: str) -> float:
    """Returns the seconds of "30s", "2m" or "30"."""
    units = {"s": 1.0, "m": 60.0}
    number, unit = (text[:-1], units[text[-1]]) if text and text[-1] in units else (text, 1.0)
    try:
        value = float(number) * unit
    except ValueError:
        value = -1.0
    if not 0 < value < 1e9:
        raise click.UsageError(f"--budget {text!r} is no time; write 30s, 2m or a number of seconds")
    return value


@click.command()
@click.argument("step", required=False, metavar="[STEP]")
@click.option("--cluster", metavar="FILE", help="STEP: the cluster file [the local devices].")
@click.option("--microbatches", type=click.IntRange(1), help="STEP: fix the number of microbatches.")
@click.option("--schedule", help="STEP: fix the schedule.")
@click.option("-o", "--output", metavar="FILE", help="STEP: where the plan goes [plan.json; nowhere with --load].")
@click.option("--log", metavar="FILE", help="STEP: where the search's history goes [search.jsonl beside the plan].")
@click.option("--objective", type=click.Choice(("time", "cost")), default="time", show_default=True, help="STEP: what is made small: seconds of a step, or its price.")
@click.option("--price", multiple=True, metavar="KIND=PRICE", help="STEP: price of a device-hour, for --objective cost [price_per_hour in the cluster file].")
@click.option("--pin", multiple=True, metavar="PIN", help="STEP: fix a decision: 'stage[1]=v100', 'stage[1].sequence=true' or 'params/.../kernel=(None,tp)'.")
@click.option("--load", metavar="PLAN", help="STEP: take this plan, fitted to the step and cluster, and search nothing.")
@click.option("--diff", nargs=2, metavar="PLAN PLAN", help="Say in what two plans differ, and end.")
@click.option("--principles", is_flag=True, help="List the principles that guide the search, and end.")
@click.option("--profiles", type=click.Path(exists=True, path_type=Path), help="Folder of published profiles to plan from, without a STEP. STEP: a profile store of hetjax calibrate to price by.")
@click.option("--model", help="The model, a name in the profiles.")
@click.option("--availability", help="FILE.csv[:ROW], the GPUs there are; rows count from 0.")
@click.option("--gbs", type=int, help="Examples of a step [what STEP has].")
@click.option("--cost", type=click.Choice(("own", "published")), default="own", show_default=True, help="Who judges profiles: hetjax, or the published simulator's equations.")
@click.option("--budget", help=f"Stop after this time [30s for a STEP, {_BUDGET_S:g}s].")
@click.option("--evaluations", type=click.IntRange(1), default=_EVALUATIONS, show_default=True, help="Stop after so many plans.")
@click.option("--seed", type=int, default=0, show_default=True, help="Of the search; the same seed and evaluations find the same plan.")
@click.option("--processes", type=click.IntRange(1), help="Profiles: search in so many processes [1]; the same seed and evaluations find the same plan in any number.")
@click.option("--without", multiple=True, metavar="NAME", help="Switch a principle off.")
@click.option("--forest", multiple=True, type=click.Choice(("bonus", "ranking")), help="Use a random forest of the plans judged so (see --principles) [off]. Needs xgboost.")
@click.option("--max-devices", type=click.IntRange(1), help="Use no more devices.")
@click.option("--emit", type=click.Choice(("sailor",)), help="Profiles: print the plan in this form only.")
@click.option("--explore", type=click.Path(dir_okay=False, path_type=Path), help="Also write the search to explore: .html, .txt, or .dot for Graphviz.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def plan(step: str | None, principles: bool, emit: str | None, as_json: bool, **options: Any) -> int:
    """Search for the plan under which a step takes least time, or costs least.

    STEP is FILE.py:build, traced as other commands do. The plan goes to plan.json, every better plan on the way to
    search.jsonl. Ctrl-C ends the search and keeps the best plan so far. Without a STEP, plans from published profiles.
    """
    if principles:
        return _list_principles(as_json)
    try:
        if options["diff"]:
            return _diff(options["diff"][0], options["diff"][1], as_json)
        if step is not None:
            return _plan_step(step, emit, as_json, options)
        return _plan_profiles(emit, as_json, options)
    except MicrobatchError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "refused": True, "error": str(error)}))
        return EXIT_REFUSED
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "error": str(error)}))
        return EXIT_NEGATIVE


def _plan_step(step: str, emit: str | None, as_json: bool, options: dict[str, Any]) -> int:
    from hetjax.cli.plan_step import Asked, load_plan, plan_step, print_facts

    wrong = [f"--{n}" for n in ("model", "availability") if options[n] is not None]
    if wrong or emit:
        raise click.UsageError(f"{', '.join(wrong) or '--emit'}: only published profiles need it, and STEP is traced")
    if options["processes"]:
        raise click.UsageError("--processes: STEP is searched in one process, as a traced step cannot be given to another")
    load = options["load"]
    if load and (options["explore"] or options["log"] or options["max_devices"] or options["microbatches"] or options["schedule"]):
        raise click.UsageError("--load replays a plan; --explore, --log, --max-devices, --microbatches and --schedule are for a search")
    output = options["output"] or (None if load else "plan.json")
    log = None if load else options["log"] or str(Path(output or "").parent / "search.jsonl")
    asked = Asked(
        step, options["cluster"], options["gbs"], options["microbatches"], options["schedule"],
        options["evaluations"], _seconds(options["budget"] or "30s"), options["seed"], options["without"], options["forest"],
        options["objective"], _prices(options["price"]), options["max_devices"] or 0, options["pin"], output, log,
        str(options["profiles"] or ""), as_json,
    )  # fmt: skip
    if load:
        facts = load_plan(asked, load)
    else:
        facts, found = plan_step(asked)
        if options["explore"] is not None:
            _write_search(found, options["explore"])
    if as_json:
        click.echo(json.dumps(facts))
    else:
        print_facts(facts)
    return EXIT_GOOD


def _diff(first: str, second: str, as_json: bool) -> int:
    from hetjax.cli.plan_step import diff_plans, print_diff

    facts = diff_plans(first, second)
    if as_json:
        click.echo(json.dumps(facts))
    else:
        print_diff(facts)
    return EXIT_GOOD


def _prices(texts: Sequence[str]) -> dict[str, float]:
    out = {}
    for text in texts:
        kind, _, number = text.partition("=")
        try:
            out[kind] = float(number)
        except ValueError:
            out[kind] = -1.0
        if not kind or not 0 <= out[kind] < 1e9:
            raise click.UsageError(f"--price {text!r} is no price; write KIND=PRICE, as in a100-80g=1.8")
    return out


def _plan_profiles(emit: str | None, as_json: bool, options: dict[str, Any]) -> int:
    missing = [f"--{n}" for n in ("profiles", "model", "availability", "gbs") if options[n] is None]
    if missing:
        raise click.UsageError(f"give a STEP (FILE.py:build) to plan, or {', '.join(missing)}, or --principles")
    of_step = ("cluster", "microbatches", "schedule", "output", "log", "load", "pin")
    wrong = [f"--{n}" for n in of_step if options[n]]
    if wrong or options["objective"] != "time" or options["price"]:
        raise click.UsageError(f"{', '.join(wrong) or '--objective and --price'}: only a STEP takes it")
    if not options["profiles"].is_dir():
        raise click.UsageError(f"--profiles {options['profiles']}: a folder of published profiles is wanted, or give a STEP")
    names = ("profiles", "model", "availability", "gbs", "cost", "evaluations", "seed", "without", "forest", "max_devices", "processes")
    budget_s = _seconds(options["budget"] or f"{_BUDGET_S}s")
    facts, published, found = _from_profiles(budget_s=budget_s, **{n: options[n] for n in names})
    if options["explore"] is not None:
        _write_search(found, options["explore"])
    if emit:
        click.echo(json.dumps(published))
    elif as_json:
        click.echo(json.dumps(facts))
    else:
        _print(facts)
    return EXIT_GOOD


def _list_principles(as_json: bool) -> int:
    from hetjax.passes.search.forest_bonus import WAYS, forest_there
    from hetjax.passes.search.principles import PRINCIPLES

    rows = [{"name": p.name, "decides": p.decides, "summary": p.summary} for p in PRINCIPLES]
    state = "off; --forest " if forest_there() else "off, as xgboost is not installed; --forest "
    rows += [{"name": f"forest-{way}", "decides": "any", "summary": f"{text} ({state}{way})"} for way, text in WAYS.items()]
    if as_json:
        click.echo(json.dumps(rows))
        return 0
    for row in rows:
        click.echo(f"{row['name']:20} {row['decides']:8} {row['summary']}")
    return 0


def _from_profiles(
    *, profiles: Path, model: str, availability: str, gbs: int, cost: str, budget_s: float, evaluations: int,
    seed: int, without: tuple[str, ...], forest: tuple[str, ...], max_devices: int | None, processes: int | None,
) -> tuple[dict[str, Any], dict[str, Any], SearchResult]:
    """Returns what `--json` prints, the plan in the published form, and the search."""
    from hetjax.passes.cost.availability import availability_cluster, read_availability
    from hetjax.passes.cost.sailor import read_model
    from hetjax.passes.search.own_judge import OwnJudge
    from hetjax.passes.search.published_judge import PublishedJudge
    from hetjax.passes.search.published_plan import sailor_plan
    from hetjax.passes.search.result import describe, search
    from hetjax.passes.search.space import Problem, pools_of
    from hetjax.passes.search.table import PublishedTable

    if gbs < 1:
        raise PlanError(f"--gbs must be at least 1, not {gbs}")
    file, _, row = availability.rpartition(":")
    if not file or not row.isdigit():
        file, row = availability, "0"
    available = read_availability(file, int(row))
    cluster = availability_cluster(profiles, available)
    table = PublishedTable(read_model(profiles, model), repaired=cost == "own")
    problem = Problem(table, cluster, pools_of(cluster), gbs, alike=True, max_devices=max_devices or 0)
    judge = PublishedJudge(problem, profiles) if cost == "published" else OwnJudge(problem)
    found = search(judge, seed=seed, max_evaluations=evaluations, budget_s=budget_s, without=without, forest=forest, processes=processes)
    outline, seconds = found.outline, found.report.seconds
    other = OwnJudge(problem) if cost == "published" else PublishedJudge(problem, profiles)
    beside = other.report(outline)
    used = outline.used(len(problem.pools))
    facts: dict[str, Any] = {
        "ok": True, "model": model, "cost": cost, "search_s": found.search_s, "evaluations": found.evaluations,
        "simulations": found.simulations, "seed": seed, "iteration_s": seconds,
        "iterations_per_s": 1 / seconds, "lower_bound_s": found.lower_bound, "gap": found.gap,
        "proved": found.proved, "stopped": found.stopped, "devices_used": sum(used), "devices": problem.num_devices,
        "global_batch": outline.num_microbatches * outline.groups[0].examples,
        f"{other.name}_iteration_s": beside.seconds if not beside.problems else None,
        "peak_bytes": [s.peak_bytes for s in found.report.stages],
        "unused": [{"devices": n, "kind": k, "site": s, "why": w} for n, k, s, w in found.unused],
        "plan": {
            "num_microbatches": outline.num_microbatches, "schedule": found.report.schedule,
            "warmups": list(found.report.warmups), "stages": describe(problem, outline),
        },
    }  # fmt: skip
    return facts, sailor_plan(problem, outline, seconds), found


def _write_search(found: SearchResult, path: Path) -> None:
    """Writes the search as `notebook.search` shows it, or its tree for Graphviz."""
    from hetjax import notebook
    from hetjax.cli.programs import writing

    with writing(path):
        if path.suffix == ".dot":
            notebook.save_dot(found, path)
        else:
            notebook.search(found).save(path)


def _print(facts: dict[str, Any]) -> None:
    click.echo(f"{facts['model']}: {facts['iteration_s']:.6g} s a step ({facts['iterations_per_s']:.5g} /s) by {facts['cost']} cost")
    click.echo(f"lower bound {facts['lower_bound_s']:.6g} s, gap {facts['gap']:.1%}{', proved best' * facts['proved']}")
    click.echo(f"{facts['evaluations']} plans judged in {facts['search_s']:.2f} s, seed {facts['seed']}")
    plan = facts["plan"]
    click.echo(f"batch {facts['global_batch']} in {plan['num_microbatches']} microbatches, {plan['schedule']}, {facts['devices_used']} of {facts['devices']} devices")
    for s, stage in enumerate(plan["stages"]):
        parts = " + ".join(
            f"{p['replicas']} x {p['tensor']} {p['kind']} in {p['site']}" for p in stage["parts"]
        )
        click.echo(f"  stage {s}: layers {stage['layers'][0]} … {stage['layers'][1]} on {parts}")
    for u in facts["unused"]:
        click.echo(f"  left out: {u['devices']} {u['kind']} in {u['site']}: {u['why']}")
