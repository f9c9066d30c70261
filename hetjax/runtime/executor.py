"""Runs a compiled program: by one dispatcher that never waits, or by one thread per mesh.

One dispatcher launches all meshes' work in one order, which is as good as threads wherever launching
returns at once. Threads are for devices and links whose time is modelled, and for measuring.
"""

from __future__ import annotations

import collections
import dataclasses
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from hetjax.ir.errors import RuntimeFault
from hetjax.ir.program import Program, Task
from hetjax.runtime import nans
from hetjax.runtime.compiler import CompiledFragment
from hetjax.runtime.dispatch import LaneFault, Lanes, TaskTime
from hetjax.runtime.instructions import Move, Run, Translator, merge_tasks
from hetjax.runtime.links import EmulatedLinks, LocalLinks, TransferTime
from hetjax.runtime.meshes import named_sharding

__all__ = ["Counters", "Emulation", "Executor", "merge_tasks"]

# Launches in flight per mesh on the CPU backend: more can starve its collectives of threads (measured: 64 hang, 16 do not).
MAX_IN_FLIGHT = 16

# Elsewhere launches are only remembered, so that a fault can be traced to its task.
MAX_REMEMBERED = 256

# Starts of calls that are remembered, for seconds per step.
MAX_STARTS = 64


@dataclasses.dataclass(frozen=True)
class Emulation:
    """Devices and links that are not there, by what their work takes.

    Attributes:
      work_s: seconds of one run of each fragment, by name.
      transfers: what one send of each reshard takes, by name; reshards that share a line share it.
    """

    work_s: Mapping[str, float]
    transfers: Mapping[str, TransferTime]


@dataclasses.dataclass(slots=True)
class Counters:
    """What was executed since the start, counted where it happens.

    Attributes:
      steps: calls.
      launches: compiled calls.
      transfers: values sent between stages.
      bytes_between_stages: bytes that left one mesh for another; where pieces say nothing, each value once.
      starts_s: when the latest calls began, by `time.perf_counter`.
    """

    steps: int = 0
    launches: int = 0
    transfers: int = 0
    bytes_between_stages: int = 0
    starts_s: collections.deque[float] = dataclasses.field(
        default_factory=lambda: collections.deque(maxlen=MAX_STARTS)
    )


class Executor:
    """A program ready to run.

    Args:
      program: complete.
      fragments: its compiled fragments.
      meshes: jax mesh per stage.
      cap_in_flight: whether to bound launches in flight (needed on the CPU backend).
      threads: whether every mesh is dispatched by a thread of its own.
      emulation: of devices and links that take modelled time; needs threads, and gets them.

    Attributes:
      counters: what ran.
      times: of the tasks of the last step that was watched or emulated.
    """

    def __init__(
        self,
        program: Program,
        fragments: Mapping[str, CompiledFragment],
        meshes: Sequence[Any],
        cap_in_flight: bool,
        threads: bool = False,
        emulation: Emulation | None = None,
    ):
        self.program, self.meshes, self.counters = program, list(meshes), Counters()
        self._fragments = dict(fragments)
        self.emulation = emulation
        self.times: list[TaskTime] = []
        self._threads = threads or emulation is not None
        self._cap = cap_in_flight
        self._in_flight: list[collections.deque[Any]] = [collections.deque() for _ in meshes]
        self._lanes: Lanes | None = None
        self._lock = threading.Lock()
        work_s = emulation.work_s if emulation else None
        self._translator = translator = Translator(program, fragments, meshes, work_s)
        self.feed_slots = self._feed_slots()
        self._result_slots = [
            translator.slot(r.stage, r.port.ref, "step")
            if r.stage is not None and r.port is not None
            else None
            for r in program.returns
        ]
        translator.kept = {s for s in self._result_slots if s is not None}
        self._instructions = translator.merged()
        moves = [i for i in self._instructions if isinstance(i, Move)]
        self._launches = sum(isinstance(i, Run) and i.call is not None for i in self._instructions)
        self._transfers = sum(len(m.tasks) for m in moves)
        self._bytes = sum(m.nbytes for m in moves)

    def _feed_slots(self) -> list[tuple[int, str, Any, list[int], int | None]]:
        """Returns (argument, form, sharding, slots, axis) per feed."""
        out = []
        for feed in self.program.feeds:
            ref = feed.argument  # inputs are numbered first: the ref of argument k is k
            sharding = named_sharding(self.meshes[feed.stage], feed.spec)
            forms = range(self.program.num_microbatches) if feed.form == "micro" else ("step",)
            slots = [self._translator.slot(feed.stage, ref, form) for form in forms]
            out.append((feed.argument, feed.form, sharding, slots, feed.axis))
        return out

    def bytes_of_reshards(self) -> dict[str, int]:
        """Returns what one send of each reshard brings from mesh to mesh, by name."""
        out = {}
        for r in self.program.reshards:
            pieces = self._translator.pieces_of(r)
            out[r.name] = r.nbytes if pieces is None else pieces.bytes_between
        return out

    # -- running -----------------------------------------------------------------------------------

    def run(self, feeds: Sequence[tuple[int, Any]], watched: bool = False) -> list[Any]:
        """Returns one array per result, None where the result is no fragment's.

        Args:
          feeds: (slot, array) pairs, placed on their stages.
          watched: whether to wait for every task and keep its time in `times`.

        Raises:
          RuntimeFault: a task failed; names stage, microbatch and module paths.
          NanFault: jax_debug_nans or jax_debug_infs is on, and a result is not finite.
        """
        values: list[Any] = [None] * len(self._translator.slots)
        for slot, array in feeds:
            values[slot] = array
        counters = self.counters
        started_s = time.perf_counter()
        if kinds := nans.looked_for():
            with nans.unchecked():
                self._run_checked(values, kinds)
        elif self._threads or watched:
            self._run_lanes(values, watched or self.emulation is not None)
        else:
            self._run_merged(values)
        # A step that failed is not counted: what it launched is not known, and rates are per step.
        counters.steps += 1
        counters.starts_s.append(started_s)
        counters.launches += self._launches
        counters.transfers += self._transfers
        counters.bytes_between_stages += self._bytes
        return [None if s is None else values[s] for s in self._result_slots]

    def _run_merged(self, values: list[Any]) -> None:
        from jax.profiler import TraceAnnotation

        for k, instruction in enumerate(self._instructions):
            try:
                if isinstance(instruction, Run):
                    if instruction.call is None:
                        continue
                    with TraceAnnotation(instruction.label):
                        results = instruction.call(*[values[i] for i in instruction.inputs])
                    for slot, array in zip(instruction.outputs, results):
                        values[slot] = array
                    if results:
                        self._bound(k, instruction.task, results[0])
                elif instruction.carry is not None:
                    moved = instruction.carry([values[i] for i in instruction.sources])
                    for slot, array in zip(instruction.targets, moved):
                        values[slot] = array
            except RuntimeFault:
                raise
            except Exception as error:
                task = instruction.task if isinstance(instruction, Run) else instruction.tasks[0]
                raise self._fault(task, error) from error
            for slot in instruction.frees:
                values[slot] = None

    def _run_checked(self, values: list[Any], kinds: Sequence[str]) -> None:
        """Runs in one order, keeping what every fragment was given, and looks at the results."""
        launches: list[nans.Launch] = []
        for instruction in self._instructions:
            if isinstance(instruction, Run):
                if instruction.call is None:
                    continue
                given = [values[i] for i in instruction.inputs]
                compiled = self._fragments.get(instruction.task.work)
                if compiled is not None and instruction.call is compiled.executable:
                    launches.append(nans.Launch(instruction.task, given))
                    given = nans.spared(compiled.function, given)
                found, slots = instruction.call(*given), instruction.outputs
            elif instruction.carry is not None:
                found, slots = instruction.carry([values[i] for i in instruction.sources]), instruction.targets
            else:
                continue
            for slot, array in zip(slots, found):
                values[slot] = array
        results = [values[s] for s in self._result_slots if s is not None]
        if nans.holds(kinds, results):
            raise nans.fault(self.program, launches, kinds)

    def _run_lanes(self, values: list[Any], watched: bool) -> None:
        try:
            self.times = self._side_by_side().run(values, watched) or self.times
        except LaneFault as fault:
            error = fault.__cause__
            if isinstance(error, RuntimeFault):
                raise error from error.__cause__
            if not isinstance(error, Exception):
                raise
            raise self._fault(fault.task, error) from error

    def _side_by_side(self) -> Lanes:
        with self._lock:
            if self._lanes is None:
                lists = self._translator.lanes()
                links = (
                    EmulatedLinks(self.emulation.transfers)
                    if self.emulation
                    else LocalLinks(len(lists))
                )
                # A method would keep the executor, and with it the threads, alive for ever.
                self._lanes = Lanes(lists, links, _Bound(self._in_flight, self._cap, self.program))
            return self._lanes

    def _bound(self, order: int, task: Task, array: Any) -> None:
        """Remembers a launch, and waits for the oldest of its mesh when too many are in flight."""
        waiting = self._in_flight[task.stage]
        waiting.append(((self.counters.steps, order), task, array))
        if len(waiting) > (MAX_IN_FLIGHT if self._cap else MAX_REMEMBERED):
            _wait(self.program, *waiting.popleft())

    def drain(self) -> None:
        """Waits for every launch in flight, in the order they were made.

        Raises:
          RuntimeFault: one of them failed; the first that did is named.
        """
        launches = sorted((x for waiting in self._in_flight for x in waiting), key=lambda x: x[0])
        for waiting in self._in_flight:
            waiting.clear()
        for launch in launches:
            _wait(self.program, *launch)

    def _fault(self, task: Task, error: Exception) -> RuntimeFault:
        """Returns the fault of the launch that failed first: others only received its failure."""
        try:
            self.drain()
        except RuntimeFault as first:
            return first
        return fault_of(self.program, task, error)


@dataclasses.dataclass(frozen=True, slots=True)
class _Bound:
    """Bounds the launches in flight of lanes; each lane has the queues of its own stages."""

    in_flight: Sequence[collections.deque[Any]]
    cap: bool
    program: Program

    def __call__(self, task: Task, array: Any) -> None:
        waiting = self.in_flight[task.stage]
        waiting.append(((0, time.perf_counter()), task, array))
        if len(waiting) > (MAX_IN_FLIGHT if self.cap else MAX_REMEMBERED):
            _wait(self.program, *waiting.popleft())


def _wait(program: Program, _: Any, task: Task, array: Any) -> None:
    try:
        if not array.is_deleted():
            array.block_until_ready()
    except Exception as error:
        raise fault_of(program, task, error) from error


def fault_of(program: Program, task: Task, error: Exception) -> RuntimeFault:
    """Returns the fault of a task, with its stage, microbatch, devices and modules."""
    where = f"stage {task.stage}"
    if task.microbatch is not None:
        where += f", microbatch {task.microbatch}"
    fragment = next((f for f in program.fragments if f.name == task.work), None)
    modules = ""
    if fragment is not None:
        blocks = list(dict.fromkeys(op.block for op in fragment.ops if op.block))
        if blocks:
            modules = f", modules {blocks[0]}" + (f" … {blocks[-1]}" if len(blocks) > 1 else "")
    mesh = program.meshes[task.stage]
    return RuntimeFault(
        f"{task.work} failed on {where} ({len(mesh.devices)} x {mesh.kind} in {mesh.site}{modules}): "
        f"{_last_line(error)}"
    )


def _last_line(error: Exception) -> str:
    """Returns what an error says at its end: a callback's own message ends a long report of frames."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if len(lines) > 3 else f"{type(error).__name__}: {error}"
