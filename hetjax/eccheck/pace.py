"""A ceiling on what is sent, and the place where a schedule can say when.

Encoding and sending run beside the training step and share its links. A pacer is any callable that
takes the bytes about to be moved and returns when they may: a rate limit here, the idle times of a
pipeline schedule where the runtime provides them (`set_pacer`).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

Pacer = Callable[[int], None]


class RateLimit:
    """A token bucket: returns at once below the rate, waits above it.

    Args:
      rate_bytes_s: ceiling; 0 means none.
      burst_s: how much unused time may be made up for.
    """

    def __init__(self, rate_bytes_s: float, burst_s: float = 0.1):
        self.rate_bytes_s, self.burst_s = rate_bytes_s, burst_s
        self._lock = threading.Lock()
        self._ready_s = 0.0

    def __call__(self, num_bytes: int) -> None:
        if self.rate_bytes_s <= 0:
            return
        with self._lock:
            now = time.monotonic()
            start = max(self._ready_s, now - self.burst_s)
            self._ready_s = start + num_bytes / self.rate_bytes_s
        if self._ready_s > now:
            time.sleep(self._ready_s - now)
