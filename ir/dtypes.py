"""Short dtype names ("f32", "bf16", "key<fry>") and what follows from a name alone."""

from __future__ import annotations

import re

# Short name -> (NumPy or ml_dtypes name, bytes per element). int4 and friends occupy a byte each in host memory.
_TABLE: dict[str, tuple[str, int]] = {
    "bool": ("bool", 1),
    "i2": ("int2", 1), "i4": ("int4", 1), "i8": ("int8", 1), "i16": ("int16", 2),
    "i32": ("int32", 4), "i64": ("int64", 8),
    "u2": ("uint2", 1), "u4": ("uint4", 1), "u8": ("uint8", 1), "u16": ("uint16", 2),
    "u32": ("uint32", 4), "u64": ("uint64", 8),
    "f16": ("float16", 2), "bf16": ("bfloat16", 2), "f32": ("float32", 4), "f64": ("float64", 8),
    "c64": ("complex64", 8), "c128": ("complex128", 16),
    "f4e2m1fn": ("float4_e2m1fn", 1), "f8e3m4": ("float8_e3m4", 1), "f8e4m3": ("float8_e4m3", 1),
    "f8e4m3b11fnuz": ("float8_e4m3b11fnuz", 1), "f8e4m3fn": ("float8_e4m3fn", 1),
    "f8e4m3fnuz": ("float8_e4m3fnuz", 1), "f8e5m2": ("float8_e5m2", 1),
    "f8e5m2fnuz": ("float8_e5m2fnuz", 1), "f8e8m0fnu": ("float8_e8m0fnu", 1),
    "float0": ("float0", 0),
    # The state of an opaque token or effect has no bytes.
    "token": ("token", 0),
}
_SHORT = {long: short for short, (long, _) in _TABLE.items()}
# Bytes of one typed PRNG key: threefry 2 words, rbg and unsafe_rbg 4 (jax.random documentation).
_KEY_BYTES = {"fry": 8, "rbg": 16, "urbg": 16}


def short_dtype(name: str) -> str:
    """Returns the short name of a NumPy dtype name; names not in the table pass through."""
    return _SHORT.get(name, name)


def long_dtype(short: str) -> str:
    """Returns the NumPy (or ml_dtypes) name of a short name; unknown names pass through."""
    return _TABLE[short][0] if short in _TABLE else short


def is_dtype_name(short: str) -> bool:
    """Returns whether `short` is a dtype name the text form may contain."""
    return short in _TABLE or bool(re.fullmatch(r"key<\w+>", short))


def is_key(short: str) -> bool:
    """Returns whether the dtype is a typed PRNG key."""
    return short.startswith("key<")


def is_inexact(short: str) -> bool:
    """Returns whether the dtype is floating point or complex."""
    return (short[0] in "fc" and short != "float0") or short == "bf16"


def dtype_itemsize(short: str) -> int:
    """Returns the bytes of one element in host memory."""
    if short in _TABLE:
        return _TABLE[short][1]
    if match := re.fullmatch(r"key<(\w+)>", short):
        return _KEY_BYTES.get(match[1], 8)
    return 8
