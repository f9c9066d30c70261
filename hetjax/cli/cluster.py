"""`hetjax cluster`: shows, validates and writes cluster descriptions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import click

from hetjax.ir.errors import ClusterError, ParseError

_JSON = click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")


@click.group()
def cluster() -> None:
    """Show, validate and write cluster descriptions."""


@cluster.command()
@click.argument("file", required=False, type=click.Path(path_type=Path))
@click.option(
    "--presets", "show_presets", is_flag=True, help="List the kinds and links known by name."
)
@_JSON
def show(file: Path | None, show_presets: bool, as_json: bool) -> None:
    """Show what FILE describes: sites, devices, links, groups."""
    if show_presets == (file is not None):
        raise click.UsageError("give either a cluster FILE or --presets")
    if show_presets:
        _show_presets(as_json)
        return
    from hetjax.ir.cluster import Cluster

    described = Cluster.from_toml(file or "")
    if as_json:
        click.echo(json.dumps(_facts(described)))
        return
    click.echo(str(described))
    for group in described.groups():
        kind = described.kind(group.kind)
        peaks = ", ".join(f"{d} {v / 1e12:.4g}" for d, v in kind.peak_flops)
        click.echo(
            f"  group {group.site}/{group.kind}: {group.num_devices} devices, TFLOP/s each: {peaks}"
        )
        if kind.emulated_dtypes:
            click.echo(f"    emulates {', '.join(kind.emulated_dtypes)}")
        if kind.jaxlib:
            click.echo(f"    needs {kind.jaxlib}")
    click.echo(f"  hash {described.hash}")


@cluster.command()
@click.argument("file", type=click.Path(path_type=Path))
@click.option("--at-hand", is_flag=True, help="Also ask whether JAX sees the devices described.")
@click.option(
    "--rehearse", is_flag=True, help="With --at-hand: CPU devices may stand for any kind."
)
@_JSON
def validate(file: Path, at_hand: bool, rehearse: bool, as_json: bool) -> int:
    """Say everything that is wrong with FILE, by line and key; exit 1 if anything is."""
    from hetjax.ir.cluster import Cluster

    found: tuple[str, ...] = ()
    try:
        described = Cluster.from_toml(file)
        if at_hand:
            from hetjax.ir.accelerator import match_devices

            match_devices(described, rehearse=rehearse)
    except ClusterError as error:
        found = error.problems
    except ParseError as error:
        found = (str(error),)
    if as_json:
        click.echo(json.dumps({"ok": not found, "file": str(file), "problems": found}))
    elif found:
        click.echo("\n".join(found), err=True)
    else:
        click.echo(f"{file}: good")
    return 1 if found else 0


@cluster.command("from-jax")
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), help="Write here instead of printing."
)
@_JSON
def from_jax(output: Path | None, as_json: bool) -> None:
    """Describe the devices that JAX sees, as TOML to edit."""
    from hetjax.ir.cluster import Cluster

    described = Cluster.local()
    text = described.to_toml()
    if output:
        try:
            output.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ClusterError(f"cannot write {output}: {error}") from None
    if as_json:
        click.echo(json.dumps(_facts(described)))
    elif output:
        click.echo(f"wrote {output}: {described.num_devices} devices")
    else:
        click.echo(text, nl=False)


def _show_presets(as_json: bool) -> None:
    import dataclasses

    from hetjax.ir import presets
    from hetjax.ir.cluster_text import speed

    if as_json:
        kinds = {k: dataclasses.asdict(v) for k, v in presets.KINDS.items()}
        links = {k: dataclasses.asdict(v) for k, v in presets.LINKS.items()}
        click.echo(json.dumps({"kinds": kinds, "links": links, "usual_link": presets.KIND_LINK}))
        return
    click.echo('kinds (kind = "…"), peaks in TFLOP/s')
    for kind in presets.KINDS.values():
        peaks = ", ".join(f"{d} {v / 1e12:.4g}" for d, v in kind.peak_flops)
        memory = f"{kind.memory_bytes / 1e9:g} GB at {kind.memory_bandwidth_bytes_s / 1e9:g} GB/s"
        click.echo(f"  {kind.name:<11} {memory}; {peaks}")
        click.echo(f"  {'':<11} {kind.source}")
    click.echo('links (link = "…"), one direction')
    for link in presets.LINKS.values():
        click.echo(f"  {speed(link)}; {link.source}")


def _facts(described: Any) -> dict[str, Any]:
    import dataclasses

    return {
        "name": described.name,
        "hash": described.hash,
        "num_devices": described.num_devices,
        "sites": [dataclasses.asdict(s) for s in described.sites],
        "nodes": [dataclasses.asdict(n) for n in described.nodes],
        "groups": [dataclasses.asdict(g) for g in described.groups()],
        "kinds": [dataclasses.asdict(k) for k in described.kinds],
        "links": [dataclasses.asdict(k) for k in described.links],
    }
