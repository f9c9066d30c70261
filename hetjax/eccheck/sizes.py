"""Sizes and rates as people write them."""

from __future__ import annotations

import re

from hetjax.ir.errors import CheckpointError

_UNITS = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12,
          "ki": 1 << 10, "mi": 1 << 20, "gi": 1 << 30, "ti": 1 << 40}


def parse_bytes(text: str) -> int:
    """Returns bytes of a text as "512MiB", "1.5GB", "300".

    Raises:
      CheckpointError: it is not a size.
    """
    match = re.fullmatch(r"\s*([0-9]*\.?[0-9]+)\s*([kmgt]?i?)b?(?:/s)?\s*", text.lower())
    if not match or match[2] not in _UNITS:
        raise CheckpointError(f"'{text}' is not a size; write 512MiB, 1.5GB or a number of bytes")
    return int(float(match[1]) * _UNITS[match[2]])


def show_bytes(num_bytes: float) -> str:
    """Returns a size for people, in binary units."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit == "B" else f"{num_bytes:.1f} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"
