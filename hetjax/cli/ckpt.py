"""`hetjax ckpt`: look at, check, repair, drain and size checkpoints in the agents' memory."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hetjax.eccheck.client import Client
    from hetjax.eccheck.reader import Found


def _options(function: Callable[..., Any]) -> Callable[..., Any]:
    for option in (
        click.option("--json", "as_json", is_flag=True, help="Print one JSON object."),
        click.option("--timeout", default=None, type=float, metavar="SECONDS",
                     help="Deadline of a small call."),
        click.option("--job", default=None, help="The job's name."),
        click.option("--agents", default=None, metavar="HOST:PORT,...",
                     help="The agents; else from --config or HETJAX_AGENTS."),
        click.option("--config", default=None, metavar="TOML",
                     help="Configuration; else HETJAX_ECCHECK and the environment."),
    ):
        function = option(function)
    return function


def _client(config: str | None, agents: str | None, job: str | None, timeout: float | None) -> Client:
    import dataclasses

    from hetjax.eccheck.client import Client
    from hetjax.eccheck.config import load_config
    from hetjax.ir.errors import CheckpointError

    loaded = load_config(config)
    changes: dict[str, Any] = {"socket": ""}
    if agents:
        changes["agents"] = tuple(a.strip() for a in agents.split(",") if a.strip())
    if job:
        changes["job"] = job
    if timeout is not None:
        changes["rpc_timeout_s"] = timeout
    loaded = dataclasses.replace(loaded, **changes)
    if not loaded.agents:
        raise CheckpointError("no agents are named; give --agents, --config or HETJAX_AGENTS")
    return Client(loaded)


def _print(as_json: bool, result: dict[str, Any], table: Callable[[], None]) -> int:
    if as_json:
        click.echo(json.dumps(result))
    else:
        table()
    return 0 if result["ok"] else 1


def _table(title: str, columns: Iterable[str], rows: Iterable[Iterable[Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row(*(str(cell) for cell in row))
    Console().print(table)


def _describe(found: Found) -> dict[str, Any]:
    assert found.manifest is not None
    layouts = found.manifest.layouts
    return {
        "name": found.name, "step": found.step, "epoch": found.epoch, "oid": found.oid,
        "code": [f"{lay.k}+{lay.m}" for lay in layouts], "bytes": found.num_bytes,
        "state_bytes": sum(b for lay in layouts for _, _, b in lay.writers),
        "held": len(found.holders), "drained": len(found.files),
        "members": sum(lay.n for lay in layouts), "margin": found.margin(),
        "damaged_blocks": sum(found.damaged.values()), "missing": found.missing(),
        "recoverable": not found.missing(), "saved": found.created_s,
    }


@click.group()
def ckpt() -> None:
    """Looks after checkpoints in the agents' memory."""


@ckpt.command()
@_options
@click.option("--drain-dir", default="", metavar="DIR", help="Also what was drained to here.")
def ls(as_json: bool, drain_dir: str, **given: Any) -> int:
    """Lists committed steps and what they still survive."""
    from hetjax.eccheck.reader import survey
    from hetjax.eccheck.sizes import show_bytes

    client = _client(**given)
    seen = survey(client, drain_dir or client.config.drain_dir)
    steps = [_describe(f) for f in seen.found]
    result = {"ok": bool(steps) and all(s["recoverable"] for s in steps), "steps": steps,
              "silent": seen.silent}

    def table() -> None:
        _table("steps in memory", ("step", "item", "state", "memory", "code", "held", "survives"), [
            (s["step"], s["name"], show_bytes(s["state_bytes"]), show_bytes(s["bytes"]),
             ", ".join(s["code"]), f"{s['held']}/{s['members']}",
             f"{s['margin']} more" if s["recoverable"] else "LOST") for s in steps
        ])
        for address, why in seen.silent.items():
            click.echo(f"no answer from {address}: {why}", err=True)

    return _print(as_json, result, table)


@ckpt.command()
@_options
def status(as_json: bool, **given: Any) -> int:
    """Shows every agent: memory, epoch, objects, traffic, damage."""
    from hetjax.eccheck.sizes import show_bytes
    from hetjax.ir.errors import CheckpointError

    client = _client(**given)
    replies = client.pool.each(client.config.agents, lambda a: client.pool.peer(a).call(
        "status", timeout_s=client.config.rpc_timeout_s)[0])
    agents: list[dict[str, Any]] = [
        {"agent": a, "error": str(r)} if isinstance(r, CheckpointError) else {"agent": a, **r}
        for a, r in replies
    ]
    result = {"ok": not any("error" in a for a in agents), "agents": agents}

    def table() -> None:
        _table("agents", ("agent", "epoch", "memory", "free", "objects", "damaged", "moved"), [
            (a["agent"], a["error"], "", "", "", "", "") if "error" in a else
            (a["agent"], a["epoch"], show_bytes(a["capacity_bytes"]), show_bytes(a["free_bytes"]),
             ", ".join(f"{o['name']}@{o['step']} {o['state']}" for o in a["objects"]) or "-",
             sum(len(o["damaged"]) for o in a["objects"]),
             ", ".join(f"{k} {show_bytes(v)}" for k, v in sorted(a["counters"].items())) or "-")
            for a in agents
        ])

    return _print(as_json, result, table)


def _progress(as_json: bool, total: int, title: str) -> Any:
    """Returns a progress bar, hidden where the output is for machines or no terminal."""
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    bar = Progress(console=console, disable=as_json or not console.is_terminal)
    return bar, bar.add_task(title, total=total)


@ckpt.command()
@_options
def scrub(as_json: bool, **given: Any) -> int:
    """Checks the checksum of every block in memory, now; reports damage by place."""
    from hetjax.ir.errors import CheckpointError

    client = _client(**given)
    bar, task = _progress(as_json, len(client.config.agents), "scrubbing")
    agents: list[dict[str, Any]] = []

    def one(address: str) -> dict[str, Any]:
        with client.pool.peer(address).watched(client.config.rpc_timeout_s) as peer:
            reply, _ = peer.call("scrub", timeout_s=24 * 3600.0)
        bar.advance(task)
        return reply

    with bar:
        for address, reply in client.pool.each(client.config.agents, one):
            if isinstance(reply, CheckpointError):
                agents.append({"agent": address, "error": str(reply), "damaged": []})
            else:
                agents.append({"agent": address, **reply})
    damaged = [{"agent": a["agent"], **d} for a in agents for d in a["damaged"]]
    ok = not damaged and not any("error" in a for a in agents)
    result = {"ok": ok, "damaged": damaged, "agents": agents}

    def table() -> None:
        for a in agents:
            if "error" in a:
                click.echo(f"{a['agent']}: {a['error']}", err=True)
        for d in damaged:
            kind = f"data {d['role']}" if d["role"] < d["k"] else f"parity {d['role'] - d['k']}"
            click.echo(f"damaged: {d['name']}@{d['step']} on {d['agent']}: stripe {d['stripe']} "
                       f"({kind}), block {d['block']}")
        checked = sum(a.get("checked_bytes", 0) for a in agents)
        click.echo(f"{checked} bytes checked, {len(damaged)} blocks damaged"
                   + ("; run `hetjax ckpt repair`" if damaged else ""))

    return _print(as_json, result, table)


@ckpt.command()
@_options
def repair(as_json: bool, **given: Any) -> int:
    """Rebuilds damaged blocks and what lost agents held, and strengthens what too few agents took."""
    from hetjax.eccheck.mend import mend

    client = _client(**given)
    bar, task = _progress(as_json, 1, "repairing")

    def told(done: int, total: int) -> None:
        bar.update(task, completed=done, total=total)

    with bar:
        report = mend(client, told)
    result = {"ok": not report["failed"], **report}

    def table() -> None:
        for r in report["repaired"]:
            click.echo(f"{r['name']}@{r['step']}: position {r['position']} of group {r['group']} on "
                       f"{r['agent']}, {r['bytes']} bytes")
        for r in report["strengthened"]:
            click.echo(f"{r['name']}@{r['step']}: made again, survives {r['survives']} losses instead of "
                       f"{r['survived']}")
        for line in report["failed"]:
            click.echo(line, err=True)
        click.echo(f"{len(report['repaired'])} repaired, {len(report['strengthened'])} made stronger, {len(report['failed'])} failed")

    return _print(as_json, result, table)


@ckpt.command()
@_options
@click.option("--step", default=None, type=int, help="Only this step; else every step.")
def verify(as_json: bool, step: int | None, **given: Any) -> int:
    """Reads whole steps as a restore would, and compares stripes: data against parity."""
    from hetjax.eccheck.mend import verify_object
    from hetjax.eccheck.reader import survey
    from hetjax.ir.errors import CheckpointError

    client = _client(**given)
    found = [f for f in survey(client).found if step is None or f.step == step]
    bar, task = _progress(as_json, len(found), "verifying")
    checks: list[dict[str, Any]] = []
    with bar:
        for item in found:
            started = time.monotonic()
            try:
                check = verify_object(client, item)
            except CheckpointError as error:
                check = {"good": False, "problems": [str(error)], "bytes": 0}
            checks.append({"name": item.name, "step": item.step, **check,
                           "seconds": time.monotonic() - started})
            bar.advance(task)
    result = {"ok": bool(checks) and all(c["good"] for c in checks), "steps": checks}

    def table() -> None:
        if not checks:
            click.echo("no such step is in memory", err=True)
        for c in checks:
            click.echo(f"{c['name']}@{c['step']}: {'good' if c['good'] else 'BAD'}, {c['bytes']} bytes "
                       f"in {c['seconds']:.2f} s")
            for problem in c["problems"]:
                click.echo(f"  {problem}")

    return _print(as_json, result, table)


@ckpt.command()
@_options
@click.option("--to", "directory", default="", metavar="DIR",
              help="Shared directory; else each agent's --drain-dir.")
@click.option("--grace", default=600.0, show_default=True, metavar="SECONDS",
              help="How long it may take.")
def drain(as_json: bool, directory: str, grace: float, **given: Any) -> int:
    """Has the agents write the newest committed step to a shared directory, without the trainer."""
    from hetjax.ir.errors import CheckpointError

    client = _client(**given)
    bar, task = _progress(as_json, len(client.config.agents), "draining")

    if not 0 < grace < float("inf"):
        raise CheckpointError(f"--grace must be above 0 and finite, got {grace:g}")

    def one(address: str) -> dict[str, Any]:
        reply, _ = client.pool.peer(address).call("drain", dir=directory, timeout_s=grace)
        bar.advance(task)
        return reply

    with bar:
        replies = client.pool.each(client.config.agents, one)
    agents: list[dict[str, Any]] = [
        {"agent": a, "error": str(r)} if isinstance(r, CheckpointError) else {"agent": a, **r}
        for a, r in replies
    ]
    result = {"ok": any(a.get("steps") for a in agents) and not any("error" in a for a in agents),
              "agents": agents}

    def table() -> None:
        _table("drained", ("agent", "steps", "bytes", "seconds"), [
            (a["agent"], a["error"], "", "") if "error" in a else
            (a["agent"], ", ".join(f"{n}@{s}" for n, s in a["steps"].items()) or "nothing",
             a["bytes"], f"{a['seconds']:.2f}") for a in agents
        ])

    return _print(as_json, result, table)


@ckpt.command()
@click.option("--state", required=True, metavar="SIZE", help="State of the whole job.")
@click.option("--hosts", required=True, type=int, help="Number of hosts.")
@click.option("-k", "k", required=True, type=int, help="Data chunks of a group.")
@click.option("-m", "m", required=True, type=int, help="Losses a group survives.")
@click.option("--link", default="1.25GB/s", show_default=True, metavar="RATE",
              help="Rate of one host's link.")
@click.option("--versions", default=2, show_default=True, help="Versions held at a time.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def size(state: str, hosts: int, k: int, m: int, link: str, versions: int, as_json: bool) -> int:
    """Says what a code costs in memory, bytes and seconds, and which losses it survives."""
    import dataclasses

    from hetjax.eccheck import sizing
    from hetjax.eccheck.sizes import parse_bytes, show_bytes

    link_bytes_s = parse_bytes(link)
    answer = sizing.size(parse_bytes(state), hosts, k, m, link_bytes_s=link_bytes_s, versions=versions)
    losses = {f: sizing.survival_probability(answer.groups, f) for f in range(1, min(hosts, m + 4) + 1)}
    result = {"ok": True, **dataclasses.asdict(answer), "survival_of_losses": losses,
              "loss_probability_at_1_percent": sizing.loss_probability(answer.groups, 0.01)}

    def table() -> None:
        _table(f"{k}+{m} on {hosts} hosts", ("per host", ""), [
            ("agent --memory (one version)", show_bytes(answer.version_bytes)),
            (f"memory of {versions} versions", show_bytes(answer.memory_bytes)),
            (f"with {m + 1} copies instead, one version", show_bytes(answer.replication_bytes)),
            ("sent per save", f"{show_bytes(answer.sent_bytes)} ({answer.send_s:.2f} s)"),
            ("repair of one host reads", f"{show_bytes(answer.repair_read_bytes)} "
             f"({answer.repair_s:.2f} s)"),
            ("any losses survived", f"{m} in each of {len(answer.groups)} groups"),
            *[(f"{f} lost at once, survives", f"{p:.4f}") for f, p in losses.items() if f > m],
        ])

    return _print(as_json, result, table)
