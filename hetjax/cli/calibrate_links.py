"""`hetjax calibrate --links`: the way between two hosts."""

from __future__ import annotations

import dataclasses
import datetime
import json
import socket
import sys
from typing import Any

import click

from hetjax.ir.errors import HetjaxError


def calibrate_links(
    serving: bool, keep: bool, bind: str, port: int | None, connect: str | None, cluster: str | None,
    link_name: str | None, sizes: tuple[int, ...] | None, budget_s: float, as_json: bool,
) -> int:
    """Serves, or measures and writes; returns the exit code."""
    if serving == (connect is not None):
        raise click.UsageError("give --serve on one host and --connect HOST on the other")
    if keep and not serving:
        raise click.UsageError("--keep needs --serve")
    if (cluster is None) != (link_name is None):
        raise click.UsageError("--cluster FILE and --link NAME go together: which link of which file")
    try:
        if serving:
            return _serve(bind, port, keep, as_json)
        answer = _connect(str(connect), port, cluster, link_name, sizes, budget_s)
    except HetjaxError as error:
        if not as_json:
            raise
        click.echo(json.dumps({"ok": False, "error": str(error)}))
        return 1
    if as_json:
        click.echo(json.dumps(answer))
    else:
        _print(answer)
    return 0


def _serve(bind: str, port: int | None, keep: bool, as_json: bool) -> int:
    from hetjax.calibrate.links import DEFAULT_PORT, open_server, serve

    with open_server(bind, DEFAULT_PORT if port is None else port) as server:
        taken = server.getsockname()[1]
        # Told at once and unbuffered: what starts both sides waits for this line.
        if as_json:
            click.echo(json.dumps({"ok": True, "serving": bind, "port": taken}))
        else:
            click.echo(
                f"serving on {bind}, port {taken}; on the other host: hetjax calibrate --links --connect "
                f"{socket.gethostname()} --port {taken}"
            )
        sys.stdout.flush()
        serve(server, keep=keep, told=lambda line: click.echo(line, err=True))
    return 0


def _connect(
    host: str, port: int | None, cluster: str | None, link_name: str | None, sizes: tuple[int, ...] | None,
    budget_s: float,
) -> dict[str, Any]:
    from hetjax.calibrate.cluster_file import described_link, differences, link_toml, write_link
    from hetjax.calibrate.links import DEFAULT_PORT, MESSAGE_BYTES, measure
    from hetjax.cli.calibrate import _progress
    from hetjax.ir.cluster import Cluster

    described = None
    if cluster is not None and link_name is not None:  # before minutes of measuring
        described = described_link(Cluster.from_toml(cluster), link_name)
    with _progress() as tell:
        found = measure(
            host, DEFAULT_PORT if port is None else port, sizes=sorted(sizes or MESSAGE_BYTES), budget_s=budget_s,
            told=lambda what: tell(what, 0, 0),
        )
    today = datetime.date.today().isoformat()
    source = f"measured with hetjax calibrate --links over TCP, {today}"
    link = found.link(described.name if described else host.replace(".", "-"), source)
    answer: dict[str, Any] = {
        "ok": True, "host": host, **dataclasses.asdict(found), "bandwidth_bytes_s": link.bandwidth_bytes_s,
        "warnings": differences(described, link) if described else [], "toml": link_toml(link), "cluster": cluster,
        "link": link.name,
    }
    if cluster is not None and described is not None:
        write_link(cluster, described.name, link)
    return answer


def _print(answer: dict[str, Any]) -> None:
    click.echo(f"latency {answer['latency_s'] * 1e6:.4g} us one way, {answer['duplex']} duplex "
               f"(both directions at once take {answer['both_over_one']:.2f} times one)")
    back = {nbytes: speed for nbytes, speed in answer["back"]}
    click.echo(f"{'message':>12} {'there':>12} {'back':>12}  (MB/s)")
    for nbytes, speed in answer["there"]:
        other = back.get(nbytes)
        click.echo(f"{nbytes:12} {speed / 1e6:12.4g} {'-' if other is None else f'{other / 1e6:.4g}':>12}")
    for sentence in answer["warnings"]:
        click.echo(f"warning: {sentence}", err=True)
    if answer["cluster"]:
        click.echo(f"written into {answer['cluster']}, link {answer['link']}")
    else:
        click.echo("for a cluster file:\n" + answer["toml"])
