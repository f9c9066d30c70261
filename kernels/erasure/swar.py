"""The same code as plain JAX: four bytes in a 32-bit word, Horner's rule over the coefficient's bits.

Multiplying by x is a shift, a mask and one XOR of 0x1d per byte that overflowed; there is no table
and no gather, so XLA fuses the whole combination into one elementwise kernel on any backend. It is
what runs on an accelerator, and wherever ISA-L is missing.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np

from hetjax.kernels.erasure import field


@functools.lru_cache(maxsize=256)
def _compiled(rows: bytes, num_rows: int, k: int) -> Any:
    import jax
    import jax.numpy as jnp

    matrix = np.frombuffer(rows, np.uint8).reshape(num_rows, k)
    low_bits, reduce_by = np.uint32(0x01010101), np.uint32(field.POLYNOMIAL & 0xFF)

    def times_x(word: Any) -> Any:
        overflow = (word >> np.uint32(7)) & low_bits
        return ((word << np.uint32(1)) & np.uint32(0xFEFEFEFE)) ^ (overflow * reduce_by)

    def one(row: np.ndarray, words: Sequence[Any]) -> Any:
        total = None
        for bit in range(7, -1, -1):
            if total is not None:
                total = times_x(total)
            for coefficient, word in zip(row, words):
                if (int(coefficient) >> bit) & 1:
                    total = word if total is None else total ^ word
        return jnp.zeros_like(words[0]) if total is None else total

    return jax.jit(lambda *words: tuple(one(row, words) for row in matrix))


def combine_words(rows: np.ndarray, words: Sequence[Any]) -> tuple[Any, ...]:
    """Returns rows @ words over GF(2^8), as uint32 arrays on the devices where the words are.

    Args:
      rows: coefficients [r, k], uint8.
      words: k arrays of one shape, dtype uint32, four bytes each in memory order.
    """
    rows = np.ascontiguousarray(rows, np.uint8)
    return _compiled(rows.tobytes(), len(rows), len(words))(*words)


def combine(rows: np.ndarray, sources: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
    """Writes rows @ sources over GF(2^8) into outs, computed by JAX's default device.

    Args:
      rows: coefficients [len(outs), len(sources)], uint8.
      sources: contiguous uint8 arrays of one length.
      outs: writable contiguous uint8 arrays of the same length.
    """
    length = len(outs[0])
    whole = length - length % 4

    def words(source: np.ndarray) -> np.ndarray:
        if whole == length:
            return source.view(np.uint32)
        padded = np.zeros(whole + 4, np.uint8)
        padded[:length] = source
        return padded.view(np.uint32)

    for out, result in zip(outs, combine_words(rows, [words(s) for s in sources])):
        np.copyto(out, np.asarray(result).view(np.uint8)[:length])
