"""The agent's memory: one memfd, allocated and touched at start-up, shared with trainers of the host.

A memfd belongs to whoever holds a descriptor, so it outlives a killed trainer and vanishes with the
agent. Pages are touched at start: writing into fresh pages is about ten times slower than into warm
ones, and that would be the trainer's stall.
"""

from __future__ import annotations

import bisect
import contextlib
import mmap
import os
import pathlib
import sys

import numpy as np

from hetjax.ir.errors import CheckpointError

ALIGN_BYTES = 4096


def available_bytes() -> int:
    """Returns the memory this process may still take: the host's, or its container's if less."""
    amounts = []
    with contextlib.suppress(OSError, ValueError, IndexError, StopIteration):
        lines = pathlib.Path("/proc/meminfo").read_text().splitlines()
        amounts.append(1024 * int(next(x for x in lines if x.startswith("MemAvailable")).split()[1]))
    with contextlib.suppress(OSError, ValueError, IndexError):
        group = pathlib.Path("/proc/self/cgroup").read_text().splitlines()[-1].split(":", 2)[2]
        folder = pathlib.Path("/sys/fs/cgroup") / group.lstrip("/")
        limit = int((folder / "memory.max").read_text())
        amounts.append(limit - int((folder / "memory.current").read_text()))
    return max(0, min(amounts)) if amounts else 1 << 62


class Arena:
    """A memfd and a first-fit allocator over it; not thread-safe, its owner holds a lock.

    Args:
      capacity_bytes: size, rounded up to a page.

    Raises:
      CheckpointError: the platform has no memfd, or the memory is not there.
    """

    def __init__(self, capacity_bytes: int):
        if not hasattr(os, "memfd_create"):
            raise CheckpointError(
                f"the checkpoint agent needs memfd, which {sys.platform} does not have; run it on "
                "Linux (planning and optimizers work here)"
            )
        self.capacity_bytes = -(-capacity_bytes // ALIGN_BYTES) * ALIGN_BYTES
        # A memfd has no limit of its own: asking for too much would end in the kernel's hands.
        room = available_bytes()
        if self.capacity_bytes > room:
            raise CheckpointError(
                f"cannot hold {self.capacity_bytes} bytes in memory: {room} are available; give the "
                "agent less (--memory, --versions) or the host or container more"
            )
        self.fd = os.memfd_create("hetjax-eccheck", os.MFD_CLOEXEC)
        try:
            os.posix_fallocate(self.fd, 0, self.capacity_bytes)
            self.map = mmap.mmap(
                self.fd, self.capacity_bytes, mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
            )
        except OSError as error:
            os.close(self.fd)
            raise CheckpointError(
                f"cannot hold {self.capacity_bytes} bytes in memory: {error.strerror}; give the "
                "agent less (--memory, --versions) or the host or container more"
            ) from error
        self.bytes = np.frombuffer(self.map, np.uint8)
        self._free: list[tuple[int, int]] = [(0, self.capacity_bytes)]  # (offset, length), sorted

    @property
    def free_bytes(self) -> int:
        """Bytes in no allocation."""
        return sum(length for _, length in self._free)

    @property
    def largest_free_bytes(self) -> int:
        """The largest allocation that fits now."""
        return max((length for _, length in self._free), default=0)

    def allocate(self, num_bytes: int) -> int | None:
        """Returns the offset of a page-aligned region, or None where none is large enough."""
        need = max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        for i, (offset, length) in enumerate(self._free):
            if length >= need:
                self._free[i : i + 1] = [(offset + need, length - need)] if length > need else []
                return offset
        return None

    def release(self, offset: int, num_bytes: int) -> None:
        """Gives back what `allocate` returned for this many bytes."""
        length = max(ALIGN_BYTES, -(-num_bytes // ALIGN_BYTES) * ALIGN_BYTES)
        at = bisect.bisect(self._free, (offset, 0))
        self._free.insert(at, (offset, length))
        for i in (at, at - 1):  # join with the right neighbour, then with the left
            if 0 <= i < len(self._free) - 1 and sum(self._free[i]) == self._free[i + 1][0]:
                self._free[i : i + 2] = [(self._free[i][0], self._free[i][1] + self._free[i + 1][1])]
