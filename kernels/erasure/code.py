"""A systematic Cauchy Reed-Solomon code: encode, and rebuild any chunk from any k others.

Every path multiplies by the same matrix, so parity made by one is decoded by another:

| backend | what it is                          | needs                       |
|---------|-------------------------------------|-----------------------------|
| isal    | SIMD in C, at memory speed          | the pyeclib wheel (Linux)   |
| xor     | numpy XOR                           | coefficients of 0 and 1     |
| swar    | one fused elementwise JAX kernel    | jax, on any device          |
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np

from hetjax.kernels.erasure import field, isal

BACKENDS = ("isal", "xor", "swar")

# Below this many bytes a second thread costs more than it brings.
_THREAD_BYTES = 1 << 20
_XOR_BLOCK_BYTES = 1 << 18  # stays in the second-level cache


def _xor(rows: np.ndarray, sources: Sequence[np.ndarray], outs: Sequence[np.ndarray]) -> None:
    if rows.max(initial=0) > 1:
        raise ValueError("the xor path takes coefficients of 0 and 1 only; use isal or swar")
    for start in range(0, len(outs[0]), _XOR_BLOCK_BYTES):
        part = slice(start, start + _XOR_BLOCK_BYTES)
        for row, out in zip(rows, outs):
            target, first = out[part], True
            for coefficient, source in zip(row, sources):
                if not coefficient:
                    continue
                if first:
                    np.copyto(target, source[part])
                    first = False
                else:
                    np.bitwise_xor(target, source[part], out=target)
            if first:
                target[:] = 0


def pick_backend(rows: np.ndarray) -> str:
    """Returns the fastest backend at hand for these coefficients."""
    if isal.library() is not None:
        return "isal"
    return "xor" if rows.max(initial=0) <= 1 else "swar"


def default_threads() -> int:
    """Returns how many threads a large combination uses: the cores of this process, at most 4.

    One core does not draw the memory bandwidth of a socket; beyond four nothing was gained.
    """
    return min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else 1)


_pools: dict[int, ThreadPoolExecutor] = {}


def _pool(threads: int) -> ThreadPoolExecutor:
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools[threads] = ThreadPoolExecutor(threads, thread_name_prefix="erasure")
    return pool


def combine(
    rows: np.ndarray,
    sources: Sequence[np.ndarray],
    outs: Sequence[np.ndarray],
    *,
    backend: str = "auto",
    threads: int = 1,
) -> None:
    """Writes rows @ sources over GF(2^8) into outs.

    Args:
      rows: coefficients [len(outs), len(sources)], uint8.
      sources: contiguous one-dimensional uint8 arrays of one length.
      outs: writable arrays like the sources, not overlapping them.
      backend: one of BACKENDS, or "auto" for the fastest at hand.
      threads: how many threads share the work (isal and xor); 0 means default_threads().

    Raises:
      ValueError: lengths, dtypes or the number of rows do not match, or no such backend.
    """
    rows = np.ascontiguousarray(rows, np.uint8)
    if rows.shape != (len(outs), len(sources)):
        raise ValueError(
            f"{len(outs)} outputs from {len(sources)} inputs need a matrix of that shape, "
            f"got {rows.shape}"
        )
    if not outs:
        return
    lengths = {a.nbytes for a in (*sources, *outs)}
    bad = [a for a in (*sources, *outs) if a.dtype != np.uint8 or a.ndim != 1
           or not a.flags.c_contiguous]
    if len(lengths) != 1 or bad:
        raise ValueError(
            f"chunks must be contiguous one-dimensional uint8 arrays of one length; got lengths "
            f"{sorted(lengths)} and {len(bad)} of another form"
        )
    if backend == "auto":
        backend = pick_backend(rows)
    length = lengths.pop()
    if not length:
        return
    if backend == "swar":
        from hetjax.kernels.erasure import swar

        swar.combine(rows, sources, outs)
        return
    if backend not in BACKENDS:
        raise ValueError(f"no erasure backend '{backend}'; there are {', '.join(BACKENDS)}")
    if backend == "isal" and isal.library() is None:
        raise ValueError("ISA-L is not here; pip install 'pyeclib>=1.8', or use swar")
    run = isal.combine if backend == "isal" else _xor
    threads = threads or default_threads()
    pieces = min(threads, max(1, length // _THREAD_BYTES))
    # ISA-L takes the length as a C int, and a piece should start on a cache line.
    step = min(-(-length // pieces) + 63 & ~63, 1 << 30)
    spans = [slice(start, min(start + step, length)) for start in range(0, length, step)]
    if len(spans) == 1:
        run(rows, sources, outs)
        return

    def part(span: slice) -> None:
        run(rows, [s[span] for s in sources], [o[span] for o in outs])

    if pieces == 1:
        for span in spans:
            part(span)
    else:
        list(_pool(pieces).map(part, spans))


@dataclass(frozen=True)
class Code:
    """A code of k data and m parity chunks; any k of the k + m give back all.

    Attributes:
      k: data chunks.
      m: parity chunks, the number of chunks that may be lost.
    """

    k: int
    m: int

    def __post_init__(self) -> None:
        field.generator(self.k, self.m)

    @property
    def n(self) -> int:
        """The number of chunks in a stripe."""
        return self.k + self.m

    @property
    def matrix(self) -> np.ndarray:
        """The generator matrix [n, k], uint8."""
        return field.generator(self.k, self.m)

    def encode(
        self, data: Sequence[np.ndarray], parity: Sequence[np.ndarray], *,
        backend: str = "auto", threads: int = 1,
    ) -> None:
        """Writes the m parity chunks of k data chunks.

        Args:
          data: k contiguous uint8 arrays of one length.
          parity: m writable arrays of that length.
          backend: see `combine`.
          threads: see `combine`.

        Raises:
          ValueError: the number, length or dtype of the chunks is wrong.
        """
        combine(self.matrix[self.k :], data, parity, backend=backend, threads=threads)

    def reconstruct(
        self, have: Mapping[int, np.ndarray], want: Mapping[int, np.ndarray], *,
        backend: str = "auto", threads: int = 1,
    ) -> None:
        """Writes wanted chunks, data or parity, from any k others.

        Args:
          have: chunk number -> its bytes; the first k by number are used.
          want: chunk number -> where to write it.
          backend: see `combine`.
          threads: see `combine`.

        Raises:
          ValueError: fewer than k chunks are given, or their form is wrong.
        """
        if len(have) < self.k:
            raise ValueError(
                f"{self.k} of {self.n} chunks are needed and {len(have)} are here "
                f"({sorted(have)}); {self.k - len(have)} more must be found"
            )
        numbers = sorted(have)[: self.k]
        rows = field.recovery_rows(self.k, self.m, numbers, list(want))
        sources, outs = [have[i] for i in numbers], list(want.values())
        combine(rows, sources, outs, backend=backend, threads=threads)
