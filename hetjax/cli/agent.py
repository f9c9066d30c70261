"""`hetjax agent`: the checkpoint agent of this host."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

import click


@click.command()
@click.option("--listen", default="127.0.0.1:7471", show_default=True, metavar="HOST:PORT",
              help="Address to bind, on a private interface; port 0 picks one.")
@click.option("--memory", default="1GiB", show_default=True, metavar="SIZE",
              help="Memory of one version of what this host holds; see `hetjax ckpt size`.")
@click.option("--versions", default=2, show_default=True, type=click.IntRange(2),
              help="Versions that fit; orbax's max_to_keep plus one.")
@click.option("--socket", "socket_path", default="", metavar="PATH", envvar="HETJAX_AGENT_SOCKET",
              help="Unix socket for the trainers of this host.")
@click.option("--job", default="default", show_default=True, envvar="HETJAX_JOB",
              help="The job to serve; every other is refused.")
@click.option("--token-file", default="", envvar="HETJAX_JOB_TOKEN_FILE", metavar="PATH",
              help="File with the job's secret. [env: HETJAX_JOB_TOKEN holds the secret itself]")
@click.option("--tls-cert", default="", metavar="PEM", help="Own certificate; switches TLS on.")
@click.option("--tls-key", default="", metavar="PEM", help="Own private key.")
@click.option("--tls-ca", default="", metavar="PEM", help="Authority that signed all certificates.")
@click.option("--tls-name", default="", metavar="NAME",
              help="Name in the peers' certificates, if it is not their address.")
@click.option("--scrub-interval", default=600.0, show_default=True, metavar="SECONDS",
              help="Pause between checks of all checksums; 0 for none.")
@click.option("--rpc-timeout", default=10.0, show_default=True, metavar="SECONDS",
              help="Deadline of small calls to other agents.")
@click.option("--min-rate", default="20MB/s", show_default=True, metavar="RATE",
              help="Slowest bulk transfer to wait for.")
@click.option("--rate-limit", default="0", metavar="RATE",
              help="Ceiling on encoding and repair traffic.")
@click.option("--drain-dir", default="", metavar="DIR",
              help="Shared directory that SIGTERM writes the newest committed step to.")
@click.option("--drain-grace", default=25.0, show_default=True, metavar="SECONDS",
              help="How long that may take; keep it below the scheduler's kill delay.")
@click.option("--bulk-port", default=0, metavar="PORT",
              help="Port of bulk transfers, for firewalls; 0 picks one. With TLS there is none.")
@click.option("--metrics-port", default=0, metavar="PORT", help="Serve Prometheus metrics here.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object once it answers.")
def agent(as_json: bool, **given: Any) -> int:
    """Holds this host's part of the job's checkpoints, in memory, until SIGTERM.

    Start one on every host before the trainers, as a process of its own: what it holds survives
    them. Losing it counts as losing the host.
    """
    from hetjax.eccheck.agent import AgentOptions
    from hetjax.eccheck.config import Tls, read_token
    from hetjax.eccheck.server import run
    from hetjax.eccheck.sizes import parse_bytes, show_bytes
    from hetjax.ir.errors import CheckpointError

    tls_files = (given["tls_ca"], given["tls_cert"], given["tls_key"])
    if any(tls_files) and not all(tls_files):
        raise CheckpointError("TLS needs all of --tls-ca, --tls-cert and --tls-key")
    options = AgentOptions(
        listen=given["listen"], memory_bytes=parse_bytes(given["memory"]),
        versions=given["versions"], socket=given["socket_path"], job=given["job"],
        token=read_token(os.environ.get("HETJAX_JOB_TOKEN", ""), given["token_file"]),
        tls=Tls(*tls_files, given["tls_name"]) if all(tls_files) else None,
        scrub_interval_s=given["scrub_interval"], rpc_timeout_s=given["rpc_timeout"],
        min_rate_bytes_s=parse_bytes(given["min_rate"]),
        rate_limit_bytes_s=parse_bytes(given["rate_limit"]),
        drain_dir=given["drain_dir"], drain_grace_s=given["drain_grace"],
        metrics_port=given["metrics_port"], bulk_port=given["bulk_port"],
    )
    if not options.token and not options.listen.startswith(("127.", "localhost:", "[::1]")):
        raise CheckpointError(
            f"an agent on {options.listen} without a token would serve anybody; give --token-file "
            "or HETJAX_JOB_TOKEN"
        )

    if options.drain_dir:  # better now than at SIGTERM
        try:
            os.makedirs(options.drain_dir, exist_ok=True)
        except OSError as error:
            raise CheckpointError(f"cannot drain to {options.drain_dir}: {error}") from error
        if not os.access(options.drain_dir, os.W_OK | os.X_OK):
            raise CheckpointError(f"cannot drain to {options.drain_dir}: it cannot be written")

    def ready(hello: dict[str, Any]) -> None:
        if as_json:
            click.echo(json.dumps(hello))
        else:
            click.echo(
                f"agent {hello['address']} of job '{hello['job']}' holds "
                f"{show_bytes(hello['capacity_bytes'])} ({options.versions} versions), "
                f"pid {hello['pid']}"
            )
        sys.stdout.flush()

    return run(options, ready)
