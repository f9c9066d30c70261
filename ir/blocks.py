"""Blocks of a value: what two share, and how one is cut into chunks."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable

from hetjax.ir.program import Block

MIN_CHUNK_BYTES = 1 << 16
CHUNKS = 256


def elements(block: Block) -> int:
    """Returns how many elements a block has."""
    return math.prod(max(0, b - a) for a, b in zip(*block))


def common(x: Block, y: Block) -> Block | None:
    """Returns the block two blocks share, None where they do not meet."""
    start = tuple(map(max, x[0], y[0]))
    stop = tuple(map(min, x[1], y[1]))
    return (start, stop) if all(a < b for a, b in zip(start, stop)) else None


def covers(outer: Block, block: Block) -> bool:
    """Returns whether a block contains another."""
    return all(a <= c and d <= b for a, b, c, d in zip(*outer, *block))


def remainder(block: Block, held: Iterable[Block]) -> list[Block]:
    """Returns what is left of a block once the parts that others hold are taken away, as disjoint blocks."""
    left = [block] if elements(block) else []
    for other in held:
        if not left:
            break
        left = [rest for b in left for rest in _without(b, other)]
    return left


def _without(block: Block, other: Block) -> list[Block]:
    """Returns a block without what it shares with another."""
    shared = common(block, other)
    if shared is None:
        return [block]
    out, (start, stop) = [], (list(block[0]), list(block[1]))
    for d, (a, b) in enumerate(zip(*shared)):
        if start[d] < a:
            out.append((tuple(start), (*stop[:d], a, *stop[d + 1 :])))
        if b < stop[d]:
            out.append(((*start[:d], b, *start[d + 1 :]), tuple(stop)))
        start[d], stop[d] = a, b
    return out


def chunk_bytes(nbytes: float) -> int:
    """Returns how large the chunks of a value of `nbytes` should be: small against it, large against a message."""
    return max(MIN_CHUNK_BYTES, int(nbytes) // CHUNKS)


def chunk_edges(start: tuple[int, ...], stop: tuple[int, ...], itemsize: int, limit: int) -> list[tuple[tuple[int, ...], tuple[int, ...]]]:
    """Returns a block as consecutive blocks of about `limit` bytes at most, cut along one dimension.

    The first dimension that is long enough is cut, so that chunks lie in few runs of memory.
    """
    extent = [b - a for a, b in zip(start, stop)]
    size = itemsize
    for n in extent:
        size *= n
    count = -(-size // limit) if limit else 1
    if count <= 1:
        return [(start, stop)]
    d = next((d for d, n in enumerate(extent) if 2 * n >= count), max(range(len(extent)), key=lambda d: extent[d]))
    count = min(count, extent[d])
    edges = [start[d] + extent[d] * k // count for k in range(count + 1)]
    put = lambda x, v: (*x[:d], v, *x[d + 1 :])  # noqa: E731
    return [(put(start, a), put(stop, b)) for a, b in itertools.pairwise(edges)]
