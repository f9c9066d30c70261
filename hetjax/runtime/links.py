"""What carries values between stages while the stages go on computing.

A `Transport` is the seam between one process and many: schedules, task lists and instructions say what
moves and when it is wanted; a transport says how. Both here stay in one process: `LocalLinks` moves at
once, on threads of its own; `EmulatedLinks` lets every transfer wait as long as the links it stands
for would take.
"""

from __future__ import annotations

import contextlib
import dataclasses
import heapq
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from hetjax.ir import _jax
from hetjax.runtime.instructions import Move

# How far the clock may be behind the model before what is late counts: threads wake up some ms late, which devices that are
# fed ahead of time would not notice. Lateness is forgiven up to this once a step, not once a task.
SLACK_S = 0.005


class TransferTime(Protocol):
    """What one transfer takes; the simulator's `Transfer` is one."""

    @property
    def lines(self) -> tuple[str, ...]:
        """The lines it occupies, from one moment on."""
        ...

    @property
    def serialisation_s(self) -> float:
        """Seconds until the last of them is free."""
        ...

    @property
    def line_s(self) -> tuple[float, ...]:
        """Seconds it occupies each line; () where all are occupied to the end."""
        ...

    @property
    def latency_s(self) -> float:
        """Seconds until it arrives after that."""
        ...


def be_punctual() -> None:
    """Lets the calling thread run as soon as it wakes up, where the system allows that.

    For threads that stand for a device or a link: they sleep nearly all the time, and on a busy machine
    an ordinary thread is woken tens of ms late.
    """
    with contextlib.suppress(AttributeError, OSError):  # not on this system, or not permitted
        os.sched_setscheduler(0, os.SCHED_RR | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def wait_for(threads: Sequence[threading.Thread]) -> None:
    """Waits for threads that were told to end.

    A thread that is still inside XLA when the interpreter goes away takes the process down with it
    ("exception not rethrown"). One that hangs is left behind after some seconds.
    """
    for thread in threads:
        if thread is not threading.current_thread():  # a finalizer runs in whatever thread collects
            thread.join(timeout=5.0)


@dataclasses.dataclass(slots=True)
class Parcel:
    """Values on their way.

    Attributes:
      move: where to.
      arrays: the values, at their source.
      posted_s: when the sender had them, by `time.perf_counter`.
      deliver: called with the values at their target, and when they started and arrived.
      fail: called with the move and an exception instead.
      config: the caller's thread-local settings, from `local_config`.
      started_s: when they got their line.
    """

    move: Move
    arrays: Sequence[Any]
    posted_s: float
    deliver: Callable[[Move, Sequence[Any], float, float], None]
    fail: Callable[[Move, Exception], None]
    config: Sequence[tuple[Any, Any]] = ()
    started_s: float = 0.0

    def carry(self) -> bool:
        """Brings the values to their target's devices; returns whether that was possible."""
        try:
            if self.move.carry is not None:
                with _jax.with_local_config(self.config):
                    self.arrays = self.move.carry(self.arrays)
            return True
        except Exception as error:
            self.fail(self.move, error)
            return False


class Transport(Protocol):
    """Carries parcels; each arrives once, those of one sender to one target in order of posting."""

    def post(self, parcel: Parcel, lane: int) -> None:
        """Takes a parcel from a lane's thread and returns without waiting."""
        ...

    def close(self) -> None:
        """Ends the transport's threads."""
        ...


class LocalLinks:
    """Moves values within one process, one thread per sending lane.

    Args:
      num_lanes: how many lanes send.
    """

    def __init__(self, num_lanes: int):
        self._queues: list[queue.SimpleQueue[Parcel | None]] = [
            queue.SimpleQueue() for _ in range(num_lanes)
        ]
        self._threads = [
            threading.Thread(target=_carry_each, args=(waiting,), name=f"hetjax-link-{k}", daemon=True)
            for k, waiting in enumerate(self._queues)
        ]
        for thread in self._threads:
            thread.start()

    def post(self, parcel: Parcel, lane: int) -> None:
        self._queues[lane].put(parcel)

    def close(self) -> None:
        for waiting in self._queues:
            waiting.put(None)
        wait_for(self._threads)


def _carry_each(waiting: queue.SimpleQueue[Parcel | None]) -> None:
    while (parcel := waiting.get()) is not None:
        if parcel.carry():
            parcel.deliver(parcel.move, parcel.arrays, parcel.posted_s, time.perf_counter())
        del parcel


class EmulatedLinks:
    """Lets transfers take the real time that the links they stand for would take.

    A transfer waits until all its lines are free, occupies them for its serialisation (some of them for
    less, where few of its pieces pass), and arrives a latency later; the lines are free meanwhile. Lines serve in order of posting, as in the simulator.
    Lines that several reshards name are shared: an uplink of a site, both ways of a half-duplex link.

    Args:
      transfers: what one transfer takes, by the work of its task.
    """

    def __init__(self, transfers: Mapping[str, TransferTime]):
        self._transfers = transfers
        self._free_s: dict[str, float] = {}
        self._changed = threading.Condition()
        self._new: list[tuple[float, int, Parcel]] = []
        self._posted = 0
        self._closed = False
        self._thread = threading.Thread(target=self._work, name="hetjax-emulated-links", daemon=True)
        self._thread.start()

    def post(self, parcel: Parcel, lane: int) -> None:
        price = self._transfers[parcel.move.tasks[0].work]
        with self._changed:
            now = max(parcel.posted_s, time.perf_counter() - SLACK_S)
            start = max(now, *(self._free_s.get(name, 0.0) for name in price.lines))
            done = start + price.serialisation_s
            held_s = price.line_s or (price.serialisation_s,) * len(price.lines)
            self._free_s.update((name, start + s) for name, s in zip(price.lines, held_s))
            parcel.started_s = start
            self._new.append((done + price.latency_s, self._posted, parcel))
            self._posted += 1
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()
        wait_for((self._thread,))

    def _work(self) -> None:
        be_punctual()
        under_way: list[tuple[float, int, Parcel]] = []
        while True:
            with self._changed:
                wait_s = under_way[0][0] - time.perf_counter() if under_way else None
                if not self._new and not self._closed and (wait_s is None or wait_s > 0):
                    self._changed.wait(wait_s)
                new, self._new = self._new, []
                if self._closed:
                    return
            for item in new:
                if item[2].carry():
                    heapq.heappush(under_way, item)
            while under_way and under_way[0][0] <= time.perf_counter():
                arrival_s, _, parcel = heapq.heappop(under_way)
                parcel.deliver(parcel.move, parcel.arrays, parcel.started_s, arrival_s)
                del parcel
