"""The collectives of a lowered or compiled program and the bytes each carries, read off its text."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

_ITEMSIZE_BYTES = {
    "pred": 1, "i1": 1, "s8": 1, "u8": 1, "i8": 1, "ui8": 1,
    "f16": 2, "bf16": 2, "s16": 2, "u16": 2, "i16": 2, "ui16": 2,
    "f32": 4, "s32": 4, "u32": 4, "i32": 4, "ui32": 4,
    "f64": 8, "s64": 8, "u64": 8, "i64": 8, "ui64": 8,
    "f8e4m3fn": 1, "f8e5m2": 1,
}
_KINDS = "all[-_]reduce|all[-_]gather|reduce[-_]scatter|all[-_]to[-_]all|collective[-_]permute"
_HLO_OP = re.compile(rf"=\s+(\([^=]*?\)|\S+)\s+({_KINDS})(?:-start)?\(")
_HLO_TYPE = re.compile(r"\b([a-z]\w*)\[([\d,]*)\]")
_STABLEHLO_OP = re.compile(
    rf'"?stablehlo\.({_KINDS})"?\(.*?:\s\(tensor<[^)]*\)\s->\s(\([^)]*\)|tensor<[^>]*>)', re.DOTALL)
_STABLEHLO_TYPE = re.compile(r"tensor<((?:\d+x)*)([a-z]\w*)>")


@dataclass(frozen=True)
class Collective:
    """One collective operation in a program's text.

    Attributes:
      kind: `all-reduce`, `all-gather`, `reduce-scatter`, `all-to-all` or `collective-permute`.
      payload_bytes: bytes of its result on one device.
      types: element type and number of elements of each result, as in `f32[217503]`.
    """

    kind: str
    payload_bytes: int
    types: tuple[str, ...]


def collectives_in(text: str) -> list[Collective]:
    """Every collective in compiled HLO or in StableHLO text, in order of appearance.

    A conditional's collectives are listed whether or not its branch would be taken. XLA for CPU widens
    a bfloat16 all-reduce to float32, and one of eight bits to float16, when it compiles; read the
    payload dtype off the StableHLO.

    Args:
      text: `jitted.lower(...).as_text()` or `….compile().as_text()`.

    Returns:
      One `Collective` each.

    Raises:
      ValueError: a result of an element type this reader does not know.
    """
    if "stablehlo." in text:
        ops = [(m.group(1), m.group(2), _STABLEHLO_TYPE) for m in _STABLEHLO_OP.finditer(text)]
    else:
        ops = [(m.group(2), m.group(1), _HLO_TYPE) for m in _HLO_OP.finditer(text)]
    return [_collective(kind, types, pattern) for kind, types, pattern in ops]


def _collective(kind: str, types: str, pattern: re.Pattern) -> Collective:
    payload_bytes, names = 0, []
    for match in pattern.finditer(types):
        dims, dtype = match.groups() if pattern is _STABLEHLO_TYPE else match.groups()[::-1]
        dtype = dtype.lower()  # StableHLO writes f8E4M3FN
        if dtype not in _ITEMSIZE_BYTES:
            raise ValueError(f"collectives_in: unknown element type {dtype!r} in {types!r}")
        elements = math.prod(int(d) for d in re.split("[x,]", dims) if d)
        payload_bytes += elements * _ITEMSIZE_BYTES[dtype]
        names.append(f"{dtype}[{elements}]")
    return Collective(kind.replace("_", "-"), payload_bytes, tuple(names))
