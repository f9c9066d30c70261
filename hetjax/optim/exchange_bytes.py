"""What a sparse moment exchange costs in bytes: the formula the planner prices and the tests hold.

Shapes in, bytes out; needs no jax.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class ExchangeBytes:
    """Payload of one worker's all-reduces, in bytes; a ring moves 2 (N - 1) / N of it each way.

    Attributes:
      step_bytes: all-reduced in every step.
      average_bytes: all-reduced in addition in a step that averages parameters.
      dense_bytes: all-reduced in every step by a dense float32 gradient exchange.
    """

    step_bytes: int
    average_bytes: int
    dense_bytes: int

    def amortised_bytes(self, sync_every: int) -> float:
        """Bytes per step over a long run that averages every `sync_every` steps (0: never)."""
        return self.step_bytes + (self.average_bytes / sync_every if sync_every else 0.0)

    def of_dense(self, sync_every: int) -> float:
        """Amortised bytes over those of the dense exchange."""
        return self.amortised_bytes(sync_every) / self.dense_bytes


def slamb_bytes(
    shapes: Iterable[tuple[int, ...]],
    *,
    compress_ratio: float = 0.1,
    min_size: int = 9000,
    nu_ratio: float = 0.0,
    comm_itemsize_bytes: int = 4,
    finite_vote: bool = True,
) -> ExchangeBytes:
    """The bytes `hetjax.slamb` exchanges for parameters of these shapes.

    itemsize * (first moment + second moment + vote); of each moment the sum over large leaves of
    ceil(n / C) and all elements of the others, with C = floor(1 / ratio) and its own ratio; a leaf is
    large if it has two dimensions or more and at least `min_size` elements.

    Args:
      shapes: the shape of every parameter.
      compress_ratio: fraction sent of the first moment of large leaves, in (0, 1].
      min_size: elements from which a leaf is large.
      nu_ratio: fraction sent of the second moment of large leaves; 0: none of it, of any leaf.
      comm_itemsize_bytes: bytes of one element of `comm_dtype`.
      finite_vote: whether the vote on finite gradients travels, as one element.

    Returns:
      An `ExchangeBytes`. Averaging is counted in float32.

    Raises:
      ValueError: a compress ratio outside (0, 1], or a ratio of the second moment outside [0, 1].
    """
    if not 0 < compress_ratio <= 1:
        raise ValueError(f"compress_ratio must lie in (0, 1], got {compress_ratio!r}")
    if not 0 <= nu_ratio <= 1:
        raise ValueError(f"nu_ratio must lie in [0, 1], got {nu_ratio!r}")
    shapes = list(shapes)
    total = sum(map(math.prod, shapes))

    def elements(ratio: float) -> int:
        chunks = int(1.0 / ratio + 1e-9)
        return sum(
            -(-math.prod(s) // chunks) if len(s) > 1 and math.prod(s) >= min_size else math.prod(s)
            for s in shapes)

    sent = elements(compress_ratio) + (elements(nu_ratio) if nu_ratio else 0) + finite_vote
    return ExchangeBytes(
        step_bytes=comm_itemsize_bytes * sent, average_bytes=4 * total, dense_bytes=4 * total)
