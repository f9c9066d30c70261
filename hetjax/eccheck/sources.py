"""Where chunks are read from: this host's agent, another's, or the files of a drain.

A source gives the blocks of one position of one object, unverified; `read_verified` checks each
against the object's sums and says which are bad. Whoever reads decides what to do about those.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import numpy as np

from hetjax.eccheck.bulk import Land
from hetjax.eccheck.peer import Peer
from hetjax.eccheck.wire import Run, split_runs


class Source(Protocol):
    """The chunks of one position."""

    label: str

    def read(
        self, runs: Sequence[Run], block_bytes: int, land: Land | None = None
    ) -> Iterator[tuple[int, int, np.ndarray, bool]]:
        """Yields (stripe, first block, bytes, landed) of whole blocks, covering the runs in order.

        The bytes may be overwritten when the next are asked for. `land` may give the place where a
        piece is wanted; `landed` says that it lies there.
        """
        ...

    def sums(self, first: int, last: int) -> np.ndarray:
        """Returns the sums of the blocks of stripes first..last-1 as the holder knows them, uint64."""
        ...


class RemoteSource:
    """A position held by another host's agent.

    Args:
      peer: connection to it.
      oid: the object.
      timeout_of: bytes -> deadline in seconds.
    """

    def __init__(self, peer: Peer, oid: str, timeout_of: Any):
        self.peer, self.oid, self.timeout_of, self.label = peer, oid, timeout_of, peer.address

    def read(
        self, runs: Sequence[Run], block_bytes: int, land: Land | None = None
    ) -> Iterator[tuple[int, int, np.ndarray, bool]]:
        total = sum(count for _, _, count in runs) * block_bytes
        return self.peer.read_blocks(
            self.oid, runs, block_bytes, timeout_s=self.timeout_of(total), land=land
        )

    def sums(self, first: int, last: int) -> np.ndarray:
        return self.peer.sums(self.oid, first, last, timeout_s=self.timeout_of(0))


class MappedSource:
    """A position whose bytes are mapped here: the own agent's memory, or a file.

    Args:
      data: the bytes, uint8.
      chunk_offsets: start of each stripe's chunk in it.
      sums_of: (first stripe, last) -> sums.
      label: name for messages.
    """

    def __init__(self, data: np.ndarray, chunk_offsets: Sequence[int], sums_of: Any, label: str):
        self.data, self.chunk_offsets, self.sums_of, self.label = data, chunk_offsets, sums_of, label

    def read(
        self, runs: Sequence[Run], block_bytes: int, land: Land | None = None
    ) -> Iterator[tuple[int, int, np.ndarray, bool]]:
        for stripe, block, count in split_runs(runs, block_bytes):
            start = self.chunk_offsets[stripe] + block * block_bytes
            data = self.data[start : start + count * block_bytes]
            out = land(stripe, block, len(data)) if land is not None else None
            if out is not None:  # the copy is what is checked: whoever maps this may overwrite it
                np.copyto(out, data)
            yield stripe, block, data if out is None else out, out is not None

    def sums(self, first: int, last: int) -> np.ndarray:
        return self.sums_of(first, last)
