"""Makes a save again with the code that was asked for, once there are agents enough for it.

A save that found too few agents survives fewer losses than wanted, and repair alone cannot change
that: its stripes have too little parity. Here its bytes are read as a restore reads them and written
as a new object with more parity; the old one goes when the new one is committed. Both bear the name
of the same save, so manifests in step directories stay right. A save of the training always goes
first: nothing is freed for this, and what is being made gives way where memory is short.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from hetjax.eccheck.client import Client
from hetjax.eccheck.layout import form_groups
from hetjax.eccheck.manifest import remade
from hetjax.eccheck.reader import Found, ObjectReader, Range
from hetjax.eccheck.writer import WANTED, Request, commit_object, lay_out, write_bytes

_WINDOW_BYTES, _WINDOWS = 8 << 20, 24


class _Stored:
    """What one writer saved, read from the agents a window at a time."""

    def __init__(self, reader: ObjectReader, writer: int, total_bytes: int):
        self._reader, self._writer, self._total_bytes = reader, writer, total_bytes
        self._windows: dict[int, np.ndarray] = {}

    def _window(self, number: int) -> np.ndarray:
        if number not in self._windows:
            if len(self._windows) >= _WINDOWS:  # the columns of a stripe are read side by side
                del self._windows[next(iter(self._windows))]
            start = number * _WINDOW_BYTES
            data = np.empty(min(_WINDOW_BYTES, self._total_bytes - start), np.uint8)
            self._reader.read([Range(self._writer, start, data)])
            self._windows[number] = data
        return self._windows[number]

    def piece(self, offset: int, num_bytes: int) -> np.ndarray:
        stop, parts = min(offset + num_bytes, self._total_bytes), []
        for number in range(offset // _WINDOW_BYTES, -(-stop // _WINDOW_BYTES)):
            start = number * _WINDOW_BYTES
            parts.append(self._window(number)[max(0, offset - start) : stop - start])
        return parts[0] if len(parts) == 1 else np.concatenate([np.zeros(0, np.uint8), *parts])


def strengthen(client: Client, found: Found) -> dict[str, Any] | None:
    """Makes a save again with more parity, where that is possible now.

    Args:
      client: connections.
      found: a recoverable object, with its manifest.

    Returns:
      {"name", "step", "survived", "survives", "bytes"}; None where it is as strong as was asked
      for, or the agents that answer cannot make it stronger.

    Raises:
      CheckpointError: it could not be made; the old object is untouched.
    """
    manifest = found.manifest
    assert manifest is not None
    weak = min(layout.m for layout in manifest.layouts)
    k, m = manifest.extra.get(WANTED, (0, 0))
    if weak >= int(m):
        return None
    alive, silent = client.probe()
    addresses = [a for a in client.config.agents if a in alive]
    if not addresses or min(
            parity for _, parity, _ in form_groups(addresses, int(k), int(m), client.config.domains)) <= weak:
        return None
    writers = {
        number: {"home": layout.members[home] if home >= 0 else "", "bytes": num_bytes}
        for layout in manifest.layouts for number, home, num_bytes in layout.writers
    }
    own = Client(dataclasses.replace(client.config, k=int(k), m=int(m)))
    try:
        layouts, _ = lay_out(own, alive, silent, [writers[i] for i in sorted(writers)])
        strong = min(layout.m for layout in layouts)
        extra = {key: value for key, value in manifest.extra.items() if key != WANTED or strong < m}
        reader = ObjectReader(own, found, silent)

        def write(plan: dict[str, Any]) -> None:
            for number in sorted(writers):
                write_bytes(own, _Stored(reader, number, writers[number]["bytes"]), number, plan)

        commit_object(
            own, Request(found.name, found.step, extra=extra), layouts, list(manifest.leaves),
            remade(found.oid), max(int(r["epoch"]) for r in alive.values()), write,
            remakes=manifest.created_s,
        )
        own.pool.each(sorted(set(found.holders.values())), lambda a: own.pool.peer(a).call(
            "drop", oids=[found.oid], timeout_s=own.config.rpc_timeout_s))
    finally:
        own.close()
    return {"name": found.name, "step": found.step, "survived": weak, "survives": strong,
            "bytes": sum(w["bytes"] for w in writers.values())}
