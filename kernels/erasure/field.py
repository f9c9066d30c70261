"""GF(2^8) with polynomial 0x11d, and the generator matrix that every path shares.

The matrix is the one ISA-L's `gf_gen_cauchy1_matrix` makes: k rows of identity (data is kept as it
is), then m rows with entry 1 / (i xor j) for row i in k..k+m-1 and column j. For m = 1 each column
is divided by its own entry, which leaves a row of ones: the parity is then the XOR of the data.
Scaling a column of a Cauchy matrix keeps every square submatrix invertible, so any k of the n
chunks still give back the data.

Reference for the construction: Bloemer et al., "An XOR-based erasure-resilient coding scheme",
ICSI TR-95-048, 1995.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

POLYNOMIAL = 0x11D
MAX_CHUNKS = 255


def _tables() -> tuple[np.ndarray, np.ndarray]:
    exp, log, x = np.zeros(512, np.uint8), np.zeros(256, np.int64), 1
    for power in range(255):
        exp[power], log[x] = x, power
        x = (x << 1) ^ (POLYNOMIAL if x & 0x80 else 0)
    exp[255:510] = exp[:255]
    return exp, log


_EXP, _LOG = _tables()


def multiply(a: np.ndarray | int, b: np.ndarray | int) -> np.ndarray:
    """Returns the product over GF(2^8), elementwise with broadcasting, as uint8."""
    a, b = np.asarray(a, np.uint8), np.asarray(b, np.uint8)
    product = _EXP[_LOG[a] + _LOG[b]]
    return np.where((a == 0) | (b == 0), np.uint8(0), product).astype(np.uint8)


def inverse(a: int) -> int:
    """Returns 1 / a over GF(2^8).

    Raises:
      ZeroDivisionError: a is 0.
    """
    if a == 0:
        raise ZeroDivisionError("0 has no inverse in GF(2^8)")
    return int(_EXP[255 - _LOG[a]])


def matmul(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Returns the matrix product [r, c] of a [r, k] and b [k, c] over GF(2^8)."""
    return np.bitwise_xor.reduce(multiply(a[:, :, None], b[None, :, :]), axis=1)


def invert(matrix: np.ndarray) -> np.ndarray:
    """Returns the inverse [k, k] over GF(2^8) by Gauss-Jordan elimination.

    Raises:
      ValueError: the matrix is singular.
    """
    k = len(matrix)
    work = np.concatenate([matrix.astype(np.uint8), np.eye(k, dtype=np.uint8)], axis=1)
    for column in range(k):
        pivots = np.flatnonzero(work[column:, column])
        if not len(pivots):
            raise ValueError(f"the {k}x{k} matrix is singular at column {column}")
        pivot = column + int(pivots[0])
        work[[column, pivot]] = work[[pivot, column]]
        work[column] = multiply(work[column], inverse(int(work[column, column])))
        for row in range(k):
            if row != column and work[row, column]:
                work[row] ^= multiply(work[column], work[row, column])
    return work[:, k:]


@functools.cache
def generator(k: int, m: int) -> np.ndarray:
    """Returns the generator matrix [k + m, k], uint8, read-only.

    Args:
      k: data chunks, at least 1.
      m: parity chunks, at least 0.

    Raises:
      ValueError: k or m out of range; GF(2^8) holds at most 255 chunks.
    """
    if k < 1 or m < 0 or k + m > MAX_CHUNKS:
        raise ValueError(f"need k >= 1, m >= 0 and k + m <= {MAX_CHUNKS}, got k={k}, m={m}")
    rows = np.eye(k, dtype=np.uint8)
    parity = np.array(
        [[inverse(i ^ j) for j in range(k)] for i in range(k, k + m)], np.uint8
    ).reshape(m, k)
    if m == 1:
        parity[:] = 1
    matrix = np.concatenate([rows, parity])
    matrix.setflags(write=False)
    return matrix


@functools.lru_cache(maxsize=4096)
def _recovery(k: int, m: int, have: tuple[int, ...], want: tuple[int, ...]) -> np.ndarray:
    matrix = generator(k, m)
    rows = matmul(matrix[list(want)], invert(matrix[list(have)]))
    rows.setflags(write=False)
    return rows


def recovery_rows(k: int, m: int, have: Sequence[int], want: Sequence[int]) -> np.ndarray:
    """Returns the rows [len(want), k] that turn the chunks `have` into the chunks `want`.

    Args:
      k: data chunks.
      m: parity chunks.
      have: exactly k distinct chunk numbers, in the order their bytes will be given.
      want: the chunk numbers to make, data (below k) or parity.

    Raises:
      ValueError: `have` is not k distinct chunk numbers of 0..k+m-1.
    """
    if len(set(have)) != k or any(not 0 <= i < k + m for i in (*have, *want)):
        raise ValueError(
            f"need {k} distinct chunks of 0..{k + m - 1} to rebuild {list(want)}, got {list(have)}"
        )
    return _recovery(k, m, tuple(have), tuple(want))
