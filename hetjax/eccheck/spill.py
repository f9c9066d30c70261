"""A save of several processes on disk, where the agents could not take it in the middle.

orbax's own files would need every replica in every process, and collective calls beside the training.
So each process writes just the bytes of its snapshot into the step's directory, which they share:

    hetjax_eccheck.w{writer}.bytes   its bytes, then the XXH3 sum of each block, uint64
    hetjax_eccheck.w{writer}.json    {"bytes", "block_bytes", "sums": hash of the sums, "leaves"}

and the first process, once it has heard from all, the manifest: one without coding groups, whose
`extra` has "spilled": number of writers. orbax deletes the files with the step.
"""

from __future__ import annotations

import json
import os
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from hetjax.eccheck.manifest import Manifest
from hetjax.eccheck.reader import Range
from hetjax.eccheck.snapshot import Snapshot
from hetjax.ir.errors import CheckpointError
from hetjax.kernels.erasure import block_sums, find_bad_blocks

SPILLED = "spilled"
_BLOCK_BYTES = 1 << 20


def _paths(directory: Any, writer: int) -> tuple[pathlib.Path, pathlib.Path]:
    base = pathlib.Path(str(directory))
    return base / f"hetjax_eccheck.w{writer}.bytes", base / f"hetjax_eccheck.w{writer}.json"


def write_part(directory: Any, snapshot: Snapshot, writer: int) -> None:
    """Writes what this process holds.

    Raises:
      CheckpointError: the disk does not take it.
    """
    from xxhash import xxh3_128_hexdigest

    data, about = _paths(directory, writer)
    sums = []
    try:
        with open(data, "wb") as file:
            for start in range(0, snapshot.total_bytes, _BLOCK_BYTES):
                piece = snapshot.piece(start, min(_BLOCK_BYTES, snapshot.total_bytes - start))
                sums.append(block_sums(piece, _BLOCK_BYTES))
                file.write(piece.data)
            joined = np.concatenate(sums).tobytes() if sums else b""
            file.write(joined)
            file.flush()
            os.fsync(file.fileno())
        about.write_text(json.dumps({
            "bytes": snapshot.total_bytes, "block_bytes": _BLOCK_BYTES,
            "sums": xxh3_128_hexdigest(joined), "leaves": snapshot.leaves,
        }))
    except OSError as error:
        raise CheckpointError(f"cannot write {data}: {error}") from error


def leaves_of(directory: Any, writer: int) -> list[Mapping[str, Any]]:
    """Returns the leaves that a process described beside its bytes.

    Raises:
      CheckpointError: the directory is not one that this process sees too.
    """
    path = _paths(directory, writer)[1]
    try:
        return json.loads(path.read_text())["leaves"]
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError(
            f"{path}: {error!r}; the processes of the job must share the checkpoint directory"
        ) from error


class SpillReader:
    """Reads the bytes of leaves from the files of a spilled save.

    Args:
      directory: where they lie.
      manifest: of the save.
    """

    def __init__(self, directory: Any, manifest: Manifest):
        self.manifest, self._directory = manifest, directory
        self._parts: dict[int, tuple[np.ndarray, np.ndarray, int, int]] = {}

    def _part(self, writer: int) -> tuple[np.ndarray, np.ndarray, int, int]:
        """Returns file, sums, length and block length of a writer."""
        from xxhash import xxh3_128_hexdigest

        if writer not in self._parts:
            data, about = _paths(self._directory, writer)
            try:
                head = json.loads(about.read_text())
                length, block = int(head["bytes"]), int(head["block_bytes"])
                whole = np.memmap(data, np.uint8, "r")
                sums = np.array(whole[length:])
                if xxh3_128_hexdigest(sums.tobytes()) != head["sums"]:
                    raise CheckpointError(f"{data}: cut short, or its checksums are damaged")
            except (OSError, ValueError, KeyError) as error:
                raise CheckpointError(f"{data}: {error!r}") from error
            self._parts[writer] = whole, sums.view(np.uint64), length, block
        return self._parts[writer]

    def read(self, ranges: Iterable[Range]) -> None:
        """Fills the destinations.

        Raises:
          CheckpointError: bytes are damaged or missing; says where.
        """
        for item in ranges:
            data, sums, length, block = self._part(item.writer)
            stop = item.offset + len(item.out)
            if stop > length:
                raise CheckpointError(f"{_paths(self._directory, item.writer)[0]} ends before byte {stop}")
            for number in range(item.offset // block, -(-stop // block)):
                start, end = number * block, min((number + 1) * block, length)
                low, high = max(start, item.offset), min(end, stop)
                piece = np.array(data[start:end])  # a copy: what is checked is what is given
                if find_bad_blocks(piece, sums[number : number + 1], block):
                    raise CheckpointError(
                        f"{_paths(self._directory, item.writer)[0]}: bytes {start} to {end} are "
                        "damaged; restore another step"
                    )
                item.out[low - item.offset : high - item.offset] = piece[low - start : high - start]
