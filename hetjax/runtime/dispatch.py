"""Lanes: one thread per mesh, each through its own task list, waiting only for what it reads."""

from __future__ import annotations

import dataclasses
import queue
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.program import Task
from hetjax.runtime.instructions import Await, Instruction, Move, MoveKey, Run
from hetjax.runtime.links import SLACK_S, Parcel, Transport, be_punctual, wait_for

_now = time.perf_counter


@dataclasses.dataclass(frozen=True, slots=True)
class TaskTime:
    """When one task or transfer ran, in seconds since the step began.

    Attributes:
      task: which.
      lane: whose list it is from.
      start_s, end_s: when; a transfer starts when it gets its line and ends when it has arrived.
      posted_s: when a transfer could have started; start_s for tasks.
      nbytes: of a transfer.
    """

    task: Task
    lane: int
    start_s: float
    end_s: float
    posted_s: float
    nbytes: int = 0


class LaneFault(Exception):
    """A task failed; `task` says which, `__cause__` why."""

    def __init__(self, task: Task):
        self.task = task
        super().__init__(str(task))


class _Step:
    """One step under way.

    Attributes:
      values: by slot; each slot is written by one thread before others read it.
      watched: whether every task is waited for and its time kept.
      config: the caller's thread-local settings.
    """

    def __init__(self, values: list[Any], num_lanes: int, watched: bool):
        self.values, self.watched = values, watched
        self.config = _jax.local_config()
        self.started_s = _now()
        self.times: list[TaskTime] = []
        self.fault: LaneFault | None = None
        # Per lane, so that an arrival wakes only the lane that may wait for it.
        self._arrived: list[dict[MoveKey, float]] = [{} for _ in range(num_lanes)]
        self._changed = [threading.Condition() for _ in range(num_lanes)]
        self._left = num_lanes
        self._ended = threading.Condition()

    def deliver(
        self,
        move: Move,
        arrays: Sequence[Any],
        started_s: float,
        arrived_s: float,
        posted_s: float,
        lane: int,
    ) -> None:
        for slot, array in zip(move.targets, arrays):
            self.values[slot] = array
        if self.watched:
            self.note(move.tasks[0], lane, started_s, arrived_s, posted_s, move.nbytes)
        with self._changed[move.target_lane]:
            self._arrived[move.target_lane][move.key] = arrived_s
            self._changed[move.target_lane].notify()

    def note(
        self, task: Task, lane: int, start_s: float, end_s: float, posted_s: float, nbytes: int = 0
    ) -> None:
        at = self.started_s
        self.times.append(TaskTime(task, lane, start_s - at, end_s - at, posted_s - at, nbytes))

    def wait(self, lane: int, key: MoveKey) -> float:
        """Returns when a move arrived, once it has; 0.0 when the step failed meanwhile."""
        arrived = self._arrived[lane]
        with self._changed[lane]:
            while key not in arrived:
                if self.fault is not None:
                    return 0.0
                self._changed[lane].wait()
            return arrived[key]

    def fail(self, task: Task, error: BaseException) -> None:
        with self._ended:
            if self.fault is None:
                fault = LaneFault(task)
                fault.__cause__ = error
                self.fault = fault
        for changed in self._changed:
            with changed:
                changed.notify()

    def finish(self) -> None:
        with self._ended:
            self._left -= 1
            self._ended.notify()

    def join(self) -> None:
        with self._ended:
            while self._left:
                self._ended.wait()


class Lanes:
    """Threads that run a program's lists side by side.

    Args:
      lists: instructions per lane.
      transport: carries moves.
      launched: called by a lane's thread with each task launched and one of its arrays; may wait.
    """

    def __init__(
        self,
        lists: Sequence[Sequence[Instruction]],
        transport: Transport,
        launched: Callable[[Task, Any], None] | None = None,
    ):
        self._queues: list[queue.SimpleQueue[_Step | None]] = []
        self._order = threading.Lock()
        threads: list[threading.Thread] = []
        for k, instructions in enumerate(lists):
            waiting: queue.SimpleQueue[_Step | None] = queue.SimpleQueue()
            lane = _Lane(k, instructions, transport, launched)
            threads.append(threading.Thread(
                target=_work, args=(waiting, lane), name=f"hetjax-lane-{k}", daemon=True))
            threads[-1].start()
            self._queues.append(waiting)
        self.close = weakref.finalize(self, _close, self._queues, threads, transport)

    def run(self, values: list[Any], watched: bool = False) -> list[TaskTime]:
        """Runs one step; returns once its last task is launched (ended, where time is modelled).

        Args:
          values: by slot, inputs filled in; filled further.
          watched: whether to wait for every task and keep its time.

        Returns:
          the times, if watched.

        Raises:
          LaneFault: a task failed.
        """
        step = _Step(values, len(self._queues), watched)
        with self._order:  # two callers' steps in another order on each lane would wait for each other
            for waiting in self._queues:
                waiting.put(step)
        step.join()
        if step.fault is not None:
            raise step.fault
        return step.times


def _close(
    queues: Sequence[queue.SimpleQueue[_Step | None]], threads: Sequence[threading.Thread], transport: Transport
) -> None:
    for waiting in queues:
        waiting.put(None)
    wait_for(threads)
    transport.close()


@dataclasses.dataclass(frozen=True, slots=True)
class _Lane:
    number: int
    instructions: Sequence[Instruction]
    transport: Transport
    launched: Callable[[Task, Any], None] | None


def _work(waiting: queue.SimpleQueue[_Step | None], lane: _Lane) -> None:
    if any(isinstance(i, Run) and i.seconds is not None for i in lane.instructions):
        be_punctual()
    while (step := waiting.get()) is not None:
        try:
            with _jax.with_local_config(step.config):
                _run_list(lane, step)
        finally:
            step.finish()
            del step


def _run_list(lane: _Lane, step: _Step) -> None:
    # When the modelled device is free, and when what it has received was there.
    free_s = ready_s = step.started_s
    values = step.values
    for instruction in lane.instructions:
        if step.fault is not None:
            return
        if isinstance(instruction, Await):
            ready_s = max(ready_s, step.wait(lane.number, instruction.key))
            continue
        task = instruction.task if isinstance(instruction, Run) else instruction.tasks[0]
        try:
            if isinstance(instruction, Run):
                free_s = _launch(lane, step, instruction, free_s, ready_s)
            else:
                _post(lane, step, instruction, free_s)
        except BaseException as error:
            step.fail(task, error)
            return
        for slot in instruction.frees:
            values[slot] = None


def _launch(lane: _Lane, step: _Step, run: Run, free_s: float, ready_s: float) -> float:
    """Calls a fragment; returns when its lane's device is free again, by the model or by the clock."""
    import jax

    values, results = step.values, ()
    arguments = [values[i] for i in run.inputs]
    if step.watched and run.seconds is None:
        jax.block_until_ready(arguments)
    start_s = _now()
    if run.call is not None:
        with jax.profiler.TraceAnnotation(run.label):
            results = run.call(*arguments)
        for slot, array in zip(run.outputs, results):
            values[slot] = array
    if run.seconds is not None:
        start_s = max(free_s, ready_s, start_s - SLACK_S)
        end_s = start_s + run.seconds
        while (left := end_s - _now()) > 0:
            time.sleep(left)
    elif not step.watched:
        if lane.launched is not None and results:
            lane.launched(run.task, results[0])
        return free_s
    else:
        end_s = 0.0
    jax.block_until_ready(results)
    # A device that computes longer than its model says is late; a thread that wakes up late is not.
    end_s = max(end_s, _now() - (SLACK_S if run.seconds is not None else 0.0))
    if step.watched and run.seconds != 0.0:
        step.note(run.task, lane.number, start_s, end_s, start_s)
    return end_s


def _post(lane: _Lane, step: _Step, move: Move, free_s: float) -> None:
    posted_s = max(free_s, _now() - SLACK_S)

    def deliver(move: Move, arrays: Sequence[Any], started_s: float, arrived_s: float) -> None:
        step.deliver(move, arrays, started_s, arrived_s, posted_s, lane.number)

    def fail(move: Move, error: Exception) -> None:
        step.fail(move.tasks[0], error)

    arrays = [step.values[i] for i in move.sources]
    lane.transport.post(Parcel(move, arrays, posted_s, deliver, fail, step.config), lane.number)
