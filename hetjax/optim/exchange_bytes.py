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
    comm_itemsize_bytes: int = 4,
    finite_vote: bool = True,
    sync_nu: bool = False,
) -> ExchangeBytes:
    """The bytes `hetjax.slamb` exchanges for parameters of these shapes.

    itemsize * (moments * (sum over large leaves of ceil(n / C) + elements of all others) + vote), with
    C = floor(1 / compress_ratio); a leaf is large if it has two dimensions or more and at least
    `min_size` elements.

    Args:
      shapes: the shape of every parameter.
      compress_ratio: fraction sent of large leaves, in (0, 1].
      min_size: elements from which a leaf is large.
      comm_itemsize_bytes: bytes of one element of `comm_dtype`; 4 for float32.
      finite_vote: whether the vote on finite gradients travels, as one element.
      sync_nu: whether the second moment travels too.

    Returns:
      An `ExchangeBytes`. Averaging is counted in float32.

    Raises:
      ValueError: a compress ratio outside (0, 1].
    """
    if not 0 < compress_ratio <= 1:
        raise ValueError(f"compress_ratio must lie in (0, 1], got {compress_ratio!r}")
    chunks = int(1.0 / compress_ratio + 1e-9)
    total = sent = 0
    for shape in shapes:
        size = math.prod(shape)
        total += size
        sent += -(-size // chunks) if len(shape) > 1 and size >= min_size else size
    elements = sent * (2 if sync_nu else 1) + (1 if finite_vote else 0)
    return ExchangeBytes(
        step_bytes=comm_itemsize_bytes * elements, average_bytes=4 * total, dense_bytes=4 * total)
