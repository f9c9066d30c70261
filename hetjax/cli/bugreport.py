"""`hetjax bugreport`: one archive to send, with paths, host names and user names removed."""

from __future__ import annotations

import contextlib
import dataclasses
import getpass
import io
import json
import os
import platform
import re
import socket
import tarfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from hetjax.cli.main import EXIT_GOOD
from hetjax.cli.programs import read_text
from hetjax.ir.errors import HetjaxError

if TYPE_CHECKING:
    from hetjax.ir.bundle import Bundle
    from hetjax.ir.cluster import Cluster

_ABSOLUTE = re.compile(r"(?<![\w./<])~?(?:/[\w.@+~-]+)+/(?=[\w.@+~-])")
_ADDRESS = re.compile(r"\b\d{1,3}(?:\.\d{1,3}){3}\b|\b[\w.+-]+@[\w-]+\.[\w.-]+\b")
# Variables that change what runs; none holds a secret.
_VARIABLES = ("XLA_FLAGS", "JAX_PLATFORMS", "JAX_ENABLE_X64", "NPROC", "HETJAX_DISABLE")


@click.command()
@click.argument("files", nargs=-1, metavar="[FILE]...")
@click.option(
    "-o",
    "--output",
    metavar="FILE",
    default="hetjax-bugreport.tar.gz",
    show_default=True,
    help="The archive.",
)
@click.option("--cluster", metavar="FILE", help="The cluster file of the run.")
@click.option(
    "--hide", multiple=True, metavar="WORD", help="Another word to remove (may be repeated)."
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
def bugreport(
    files: tuple[str, ...], output: str, cluster: str | None, hide: tuple[str, ...], as_json: bool
) -> int:
    """Bundle reproducers, plans and other text FILEs with versions and cluster into one archive.

    Absolute paths lose their folders, sites and nodes their names; this machine's name, yours and addresses are
    removed. Parameters' and modules' names, source file names and line numbers stay. Look before you send it:
    `tar tzf` lists it.
    """
    redact = Redactor(hide)
    members = {"versions.json": redact(json.dumps(environment(), indent=1) + "\n")}
    if cluster is not None:
        members["cluster.toml"] = redact(anonymous_cluster(read_text(cluster), cluster))
    for i, name in enumerate(files):
        plain = redact(Path(name).name) if name != "-" else "stdin.hj"
        members[f"{i:02d}_{plain}"] = redact(anonymous_text(read_text(name)))
    _write_archive(Path(output), members)
    if as_json:
        click.echo(json.dumps({"ok": True, "file": output, "members": sorted(members)}))
    else:
        click.echo(output)
        for name in sorted(members):
            click.echo(f"  {name}", err=True)
    return EXIT_GOOD


def environment() -> dict[str, Any]:
    """Returns versions and settings a fault may depend on."""
    from hetjax.passes.dumping import versions

    return {
        "versions": versions(),
        "platform": platform.system(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "environment": {k: os.environ[k] for k in _VARIABLES if k in os.environ},
    }


class Redactor:
    """Removes what tells of this machine and its user.

    Args:
      words: more words to remove.
    """

    def __init__(self, words: tuple[str, ...] = ()):
        host = socket.gethostname()
        named = {host: "HOST", host.partition(".")[0]: "HOST", socket.getfqdn(): "HOST"}
        with contextlib.suppress(KeyError, OSError):
            named[getpass.getuser()] = "USER"
        named |= dict.fromkeys(words, "HIDDEN")
        # Words of every program would be destroyed by removing them.
        common = {
            "",
            "root",
            "user",
            "localhost",
            "main",
            "cpu",
            "gpu",
            "train",
            "model",
            "data",
            "state",
        }
        self.named = {
            w: to for w, to in named.items() if w in words or (w not in common and len(w) > 2)
        }

    def __call__(self, text: str) -> str:
        text = _ADDRESS.sub("ADDRESS", _ABSOLUTE.sub("", text))
        for word in sorted(self.named, key=len, reverse=True):
            text = re.sub(rf"(?<!\w){re.escape(word)}(?!\w)", self.named[word], text)
        return text


def anonymous_text(text: str) -> str:
    """Returns a `.hj` file with sites and nodes renamed; other text as it is."""
    from hetjax.ir.parser import parse_bundle
    from hetjax.ir.text import print_bundle

    try:
        bundle = parse_bundle(text)
    except HetjaxError:
        return text
    if bundle.cluster is None and bundle.plan is None and bundle.program is None:
        return text
    head = "".join(line for line in text.splitlines(keepends=True)[:20] if line.startswith("//"))
    return head + print_bundle(anonymous_bundle(bundle))


def anonymous_cluster(text: str, filename: str) -> str:
    """Returns a cluster file with sites, nodes and links renamed; as it is when it cannot be read."""
    from hetjax.ir.cluster import Cluster

    try:
        return rename_cluster(Cluster.parse(text, filename))[0].to_toml()
    except HetjaxError:
        return text


def rename_cluster(cluster: Cluster) -> tuple[Cluster, dict[str, str]]:
    """Returns the cluster with neutral names, and the new name by each old one."""
    names = {site.name: f"site{i}" for i, site in enumerate(cluster.sites)}
    names |= {node.name: f"node{i}" for i, node in enumerate(cluster.nodes)}
    # Inner links bear the names of presets; those between places are named after them.
    names |= {link.name: f"link{i}" for i, link in enumerate(cluster.links) if link.between}
    to = lambda name: names.get(name, name)  # noqa: E731
    uplinks = {
        u: f"uplink{i}"
        for i, u in enumerate(dict.fromkeys(x.uplink for x in cluster.links if x.uplink))
    }
    changed = dataclasses.replace(
        cluster,
        name="cluster",
        sites=tuple(
            dataclasses.replace(s, name=to(s.name), link=to(s.link)) for s in cluster.sites
        ),
        nodes=tuple(
            dataclasses.replace(n, name=to(n.name), site=to(n.site), link=to(n.link))
            for n in cluster.nodes
        ),
        links=tuple(
            dataclasses.replace(
                x,
                name=to(x.name),
                between=tuple(map(to, x.between)),
                uplink=uplinks.get(x.uplink, ""),
                source="",
            )
            for x in cluster.links
        ),
    )
    return changed, names


def anonymous_bundle(bundle: Bundle) -> Bundle:
    """Returns the bundle with neutral names of sites and nodes in cluster, plan and program."""
    names: dict[str, str] = {}
    cluster = bundle.cluster
    if cluster is not None:
        cluster, names = rename_cluster(cluster)
    else:
        stages = (
            bundle.plan.stages if bundle.plan else bundle.program.meshes if bundle.program else ()
        )
        sites = [s.site for s in stages]
        names = {site: f"site{i}" for i, site in enumerate(dict.fromkeys(sites))}
    plan, program = bundle.plan, bundle.program
    if plan is not None:
        plan = dataclasses.replace(
            plan,
            cluster="cluster",
            cluster_hash=cluster.hash if cluster is not None else "",
            stages=tuple(
                dataclasses.replace(s, site=names.get(s.site, s.site)) for s in plan.stages
            ),
        )
    if program is not None:
        program = program.replace(
            meshes=tuple(
                dataclasses.replace(m, site=names.get(m.site, m.site)) for m in program.meshes
            )
        )
    return bundle.replace(cluster=cluster, plan=plan, program=program)


def _write_archive(path: Path, members: dict[str, str]) -> None:
    try:
        with tarfile.open(path, "w:gz") as archive:
            for name, text in sorted(members.items()):
                data = text.encode()
                entry = tarfile.TarInfo(f"hetjax-bugreport/{name}")
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    except OSError as error:
        raise click.UsageError(f"{str(path)!r} cannot be written: {error}") from None
