"""Clusters as text: TOML that reads back to an equal cluster, and a summary for people."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster, DeviceKind, Link
from hetjax.ir.cluster_toml import UNITS


def print_cluster(cluster: Cluster) -> str:
    """Returns TOML that parses back to an equal cluster; presets are named, not spelled out."""
    out = [f"name = {_text(cluster.name)}"]
    for site in cluster.sites:
        out += ["", "[[sites]]", f"name = {_text(site.name)}"]
        if site.link:
            out.append(f"link = {_text(site.link)}")
        for node in cluster.nodes_of(site.name):
            out += [
                "",
                "[[sites.nodes]]",
                f"name = {_text(node.name)}",
                f"kind = {_text(node.kind)}",
            ]
            out += [f"devices = {node.num_devices}", f"link = {_text(node.link)}"]
    for link in cluster.links:
        if presets.LINKS.get(link.name) != link:
            out += ["", f"[links.{_key(link.name)}]", *_link(link)]
    for kind in cluster.kinds:
        if presets.KINDS.get(kind.name) != kind:
            out += ["", f"[kinds.{_key(kind.name)}]", *_kind(kind)]
    return "\n".join(out) + "\n"


def _link(link: Link) -> Iterator[str]:
    if link.between:
        yield f"between = {_texts(link.between)}"
    yield _quantity("bandwidth_bytes_s", link.bandwidth_bytes_s)
    yield _quantity("latency_s", link.latency_s)
    if link.duplex != "full":
        yield f"duplex = {_text(link.duplex)}"
    if link.curve:
        yield f"curve_bytes_s = [{', '.join(f'[{n}, {b!r}]' for n, b in link.curve)}]"
    if link.uplink:
        yield f"uplink = {_text(link.uplink)}"
    if link.source:
        yield f"source = {_text(link.source)}"


def _kind(kind: DeviceKind) -> Iterator[str]:
    yield f"platform = {_text(kind.platform)}"
    yield _quantity("memory_bytes", kind.memory_bytes)
    yield _quantity("memory_bandwidth_bytes_s", kind.memory_bandwidth_bytes_s)
    if kind.emulated_dtypes:
        yield f"emulated_dtypes = {_texts(kind.emulated_dtypes)}"
    if kind.jaxlib:
        yield f"jaxlib = {_text(kind.jaxlib)}"
    if kind.device_kinds:
        yield f"device_kinds = {_texts(kind.device_kinds)}"
    if kind.source:
        yield f"source = {_text(kind.source)}"
    if kind.price_per_hour:
        yield f"price_per_hour = {kind.price_per_hour!r}"
    in_tera = [_exact(flops, 1e12) for _, flops in kind.peak_flops]
    whole = all(in_tera)
    numbers = in_tera if whole else [repr(flops) for _, flops in kind.peak_flops]
    peaks = (f"{_key(dtype)} = {number}" for (dtype, _), number in zip(kind.peak_flops, numbers))
    yield f"{'peak_tflops' if whole else 'peak_flops'} = {{ {', '.join(peaks)} }}"


def _text(value: str) -> str:
    # A JSON string is a TOML basic string but for DEL, which TOML wants escaped.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def _texts(values: tuple[str, ...]) -> str:
    return "[" + ", ".join(map(_text, values)) + "]"


def _key(name: str) -> str:
    return name if re.fullmatch(r"[A-Za-z0-9_-]+", name) else _text(name)


def _exact(value: float, factor: float) -> str:
    """Returns a short number that times the factor is exactly the value, or ""."""
    short = f"{value / factor:.6g}"
    if float(short) * factor != value:
        return ""
    return (
        str(int(float(short))) if float(short).is_integer() and abs(float(short)) < 1e6 else short
    )


def _quantity(field: str, value: float) -> str:
    """Writes a number in the unit that makes it shortest and reads back exactly."""
    *scaled, (raw, _) = UNITS[field].items()
    texts = [(text, key) for key, factor in scaled if (text := _exact(value, factor))]
    text, key = min(texts, key=lambda pair: len(pair[0]), default=(repr(value), raw))
    return f"{key} = {text}"


def summarise(cluster: Cluster) -> str:
    """Returns a few lines: sites, their devices, and what joins them."""
    count = len(cluster.sites)
    sites = f"{count} site{'s' * (count != 1)}"
    out = [f"cluster {cluster.name}: {cluster.num_devices} devices in {sites}"]
    for site in cluster.sites:
        link = f" (nodes joined by {speed(cluster.link_named(site.link))})" if site.link else ""
        out.append(f"  site {site.name}{link}")
        for node in cluster.nodes_of(site.name):
            memory = f"{cluster.kind(node.kind).memory_bytes / 1e9:.4g} GB"
            link = speed(cluster.link_named(node.link))
            devices = f"{node.num_devices} x {node.kind} ({memory})"
            out.append(f"    {node.name}: {devices}, joined by {link}")
    outer = [link for link in cluster.links if link.between]
    return "\n".join([*out, *(f"  {' - '.join(k.between)}: {speed(k)}" for k in outer)])


def speed(link: Link) -> str:
    """Returns "wan 1.25 GB/s, 10 ms" and what is unusual about the link."""
    rate = link.bandwidth_bytes_s
    bandwidth = f"{rate / 1e9:.4g} GB/s" if rate >= 1e8 else f"{rate / 1e6:.4g} MB/s"
    late = link.latency_s
    latency = f"{late * 1e3:.4g} ms" if late >= 1e-3 else f"{late * 1e6:.4g} us"
    half = ", half duplex" if link.duplex == "half" else ""
    return f"{link.name} {bandwidth}, {latency}{half}"
