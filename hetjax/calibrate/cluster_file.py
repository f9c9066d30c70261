"""Measured links in a cluster file: written in place, its comments kept; warned about where they differ."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, Link
from hetjax.ir.errors import ClusterError
from hetjax.ir.suggest import nearest

# A file and a measurement that differ by more are worth a warning.
DIFFER = 0.2
_REPLACED = (
    "like", "bandwidth_gb_s", "bandwidth_gbit_s", "bandwidth_bytes_s", "latency_us", "latency_ms",
    "latency_s", "curve_gb_s", "curve_bytes_s", "duplex", "source",
)  # fmt: skip
# Latencies below this are the software's, and differ from run to run.
_SMALL_S = 100e-6


def described_link(cluster: Cluster, name: str) -> Link:
    """Returns the link of a cluster by name, or by the two places it joins ("lyon-oslo").

    Raises:
      ClusterError: there is none; names the nearest.
    """
    for link in cluster.links:
        pairs = itertools.permutations(link.between, 2)
        if name == link.name or name in {"-".join(pair) for pair in pairs}:
            return link
    known = [x.name for x in cluster.links]
    raise ClusterError(f"links.{name}: cluster {cluster.name!r} has no link {name!r}{nearest(name, known)}")


def differences(described: Link, measured: Link) -> list[str]:
    """Returns a sentence per number in which a file and a measurement differ by over 20 %."""
    out = []
    for what, unit, old, new in (
        ("bandwidth", "bytes/s", described.bandwidth_bytes_s, measured.bandwidth_bytes_s),
        ("latency", "s", described.latency_s, measured.latency_s),
    ):
        if what == "latency" and max(old, new) < _SMALL_S:
            continue
        if abs(new - old) > DIFFER * old:
            share = f"{new / old - 1:+.0%}" if old else "from nothing"
            out.append(
                f"link {described.name!r}: {what} is {old:.4g} {unit} in the file and {new:.4g} "
                f"{unit} measured ({share})"
            )
    if described.duplex != measured.duplex:
        out.append(
            f"link {described.name!r}: duplex is {described.duplex!r} in the file and "
            f"{measured.duplex!r} measured"
        )
    return out


def write_link(path: str | Path, name: str, measured: Link) -> None:
    """Writes a measured link into a cluster file, in place of what it said of that link.

    Args:
      path: the file; its order, comments and other tables stay as they are.
      name: of the link in the file: a table of [links], or a preset that a site or node names.
      measured: the numbers.

    Raises:
      ClusterError: the file cannot be read or written, or would describe no cluster with it.
    """
    import tomlkit

    path = Path(path)
    link = described_link(Cluster.from_toml(path), name)
    document = tomlkit.parse(path.read_text(encoding="utf-8"))
    tables = document.setdefault("links", tomlkit.table(is_super_table=True))
    if link.name not in tables:
        if link.name not in presets.LINKS:
            raise ClusterError(f"{path}: links.{link.name}: described nowhere in this file")
        tables[link.name] = tomlkit.table()
    table = tables[link.name]
    for key in _REPLACED:
        table.pop(key, None)
    table["bandwidth_bytes_s"] = round(measured.bandwidth_bytes_s)
    table["latency_s"] = float(f"{measured.latency_s:.4g}")
    table["duplex"] = measured.duplex
    table["curve_bytes_s"] = [[n, round(b)] for n, b in _thinned(measured.curve)]
    table["source"] = measured.source
    text = tomlkit.dumps(document)
    Cluster.parse(text, str(path))  # what is written can be read
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ClusterError(f"cannot write {path}: {error}") from None


def _thinned(curve: Sequence[tuple[int, float]]) -> list[tuple[int, float]]:
    """Returns the curve without points that say what the one before said."""
    out: list[tuple[int, float]] = []
    for k, (nbytes, speed) in enumerate(curve):
        last = k == len(curve) - 1
        if not out or last or abs(speed / out[-1][1] - 1) > 0.005:
            out.append((nbytes, speed))
    return out


def link_toml(link: Link) -> str:
    """Returns a link as a table to paste into a cluster file."""
    import tomlkit

    table = tomlkit.table()
    table["bandwidth_bytes_s"] = round(link.bandwidth_bytes_s)
    table["latency_s"] = float(f"{link.latency_s:.4g}")
    table["duplex"] = link.duplex
    table["curve_bytes_s"] = [[n, round(b)] for n, b in _thinned(link.curve)]
    table["source"] = link.source
    return tomlkit.dumps({"links": {link.name: table}})
