"""Numbers as people read them: bytes, seconds, rates."""

from __future__ import annotations


def human_bytes(n: float) -> str:
    """Returns "3.2 MiB"."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(n) < 1024:
            return f"{n:.0f} {unit}" if unit == "B" else f"{n:.1f} {unit}"
        n = n / 1024 if abs(n) < 1e300 else 1e300
    return f"{n:.1f} TiB" if abs(n) < 1e15 else f"{n:.3g} TiB"


def human_seconds(s: float) -> str:
    """Returns "1.24 ms", four digits at most."""
    size = abs(s)
    if size == 0:
        return "0 s"
    for bound, factor, unit in (
        (1e-6, 1e9, "ns"),
        (1e-3, 1e6, "us"),
        (1, 1e3, "ms"),
        (600, 1, "s"),
    ):
        if size < bound:
            return f"{s * factor:.4g} {unit}"
    return f"{s / 60:.4g} min" if size < 7200 else f"{s / 3600:.4g} h"


def human_rate(n: float, unit: str) -> str:
    """Returns "312 TFLOP/s" for a rate in units per second; `unit` is "FLOP/s" or "B/s"."""
    for prefix, size in (("P", 1e15), ("T", 1e12), ("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if abs(n) >= size:
            return f"{n / size:.4g} {prefix}{unit}"
    return f"{n:.4g} {unit}"


def human_count(n: float) -> str:
    """Returns "6,606" or "1.2e12"."""
    return f"{n:,.0f}" if abs(n) < 1e9 else f"{n:.3g}" if abs(n) < 1e300 else "over 1e300"


def plural(n: int, one: str, many: str = "") -> str:
    """Returns "1 op" or "6,606 ops"."""
    return f"{n:,} {one if n == 1 else many or one + 's'}"
