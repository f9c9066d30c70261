"""A checksum for each block of a chunk: XXH3, 64 bits, at memory speed.

XXH3 finds accidental damage; it is no defence against somebody who wants to forge a block.
"""

from __future__ import annotations

import numpy as np


def block_sums(data: np.ndarray, block_bytes: int) -> np.ndarray:
    """Returns the sum of every block, uint64 [ceil(len(data) / block_bytes)].

    Args:
      data: contiguous uint8 array; the last block may be short.
      block_bytes: length of a block.
    """
    from xxhash import xxh3_64_intdigest

    view = data.data
    return np.array(
        [xxh3_64_intdigest(view[i : i + block_bytes]) for i in range(0, len(data), block_bytes)],
        np.uint64,
    )


def find_bad_blocks(data: np.ndarray, sums: np.ndarray, block_bytes: int) -> list[int]:
    """Returns the numbers of the blocks whose bytes do not have their sum.

    Args:
      data: contiguous uint8 array.
      sums: the sums it should have, uint64, as `block_sums` returns.
      block_bytes: length of a block.
    """
    actual = block_sums(data, block_bytes)
    if len(actual) != len(sums):
        raise ValueError(f"{len(actual)} blocks of data and {len(sums)} sums")
    return np.flatnonzero(actual != sums).tolist()
