"""Runs a compiled program: one dispatcher, task lists merged in an order that never waits."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hetjax.ir.errors import LoweringError, RuntimeFault
from hetjax.ir.program import Program, Task
from hetjax.runtime.compiler import CompiledFragment
from hetjax.runtime.meshes import named_sharding

# Launches in flight per mesh on the CPU backend: more can starve its collectives of threads (measured: 64 hang, 16 do not).
MAX_IN_FLIGHT = 16

# Elsewhere launches are only remembered, so that a fault can be traced to its task.
MAX_REMEMBERED = 256

_Key = tuple[int, int, str | int]  # stage, ref, form or microbatch


@dataclasses.dataclass(slots=True)
class _Run:
    """Calls one compiled fragment (or makes its accumulators)."""

    task: Task
    call: Callable[..., Sequence[Any]]
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    frees: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class _Move:
    """Carries values from one mesh to others with one device_put."""

    tasks: list[Task]
    sources: list[int]
    targets: list[int]
    shardings: list[Any]
    nbytes: int
    frees: tuple[int, ...] = ()


@dataclasses.dataclass(slots=True)
class Counters:
    """What was executed since the start, counted where it happens.

    Attributes:
      steps: calls.
      launches: compiled calls.
      transfers: values sent between stages.
      bytes_between_stages: their bytes, each value once.
    """

    steps: int = 0
    launches: int = 0
    transfers: int = 0
    bytes_between_stages: int = 0


def merge_tasks(program: Program) -> list[Task]:
    """Returns all tasks in one order in which each recv follows its send.

    Meshes take turns, so that their launches interleave as they would run.

    Raises:
      LoweringError: the lists wait for each other; names the tasks that do.
    """
    sent: set[tuple[str, int | None]] = set()
    at = [0] * len(program.tasks)
    order: list[Task] = []
    while any(i < len(tasks) for i, tasks in zip(at, program.tasks)):
        progressed = False
        for s, tasks in enumerate(program.tasks):
            launched = False
            while at[s] < len(tasks):
                task = tasks[at[s]]
                if task.kind == "recv" and (task.work, task.microbatch) not in sent:
                    break
                if task.kind not in ("send", "recv"):
                    if launched:
                        break
                    launched = True
                if task.kind == "send":
                    sent.add((task.work, task.microbatch))
                order.append(task)
                at[s] += 1
                progressed = True
        if not progressed:
            stuck = [f"{t[i].work}[{t[i].microbatch}] on s{s}" for s, (i, t) in enumerate(zip(at, program.tasks)) if i < len(t)]
            raise LoweringError(f"the schedule waits for itself: {', '.join(stuck)}")
    return order


class Executor:
    """A program ready to run.

    Args:
      program: complete.
      fragments: its compiled fragments.
      meshes: jax mesh per stage.
      cap_in_flight: whether to bound launches in flight (needed on the CPU backend).
    """

    def __init__(
        self, program: Program, fragments: Mapping[str, CompiledFragment], meshes: Sequence[Any],
        cap_in_flight: bool,
    ):
        self.program, self.meshes, self.counters = program, list(meshes), Counters()
        self._slots: dict[_Key, int] = {}
        self._cap = cap_in_flight
        self._in_flight: list[collections.deque[Any]] = [collections.deque() for _ in meshes]
        self._instructions = self._translate(fragments)
        self.feed_slots = self._feed_slots()
        self._result_slots = [self._slot(r.stage, r.port.ref, "step") if r.stage is not None and r.port is not None else None for r in program.returns]
        self._free_after_last_use()

    # -- building ----------------------------------------------------------------------------------

    def _slot(self, stage: int, ref: int, form: str | int) -> int:
        return self._slots.setdefault((stage, ref, form), len(self._slots))

    def _translate(self, fragments: Mapping[str, CompiledFragment]) -> list[_Run | _Move]:
        reshards = {r.name: r for r in self.program.reshards}
        whole = self.program.num_microbatches == 1
        out: list[_Run | _Move] = []
        started: set[str] = set()
        for task in merge_tasks(self.program):
            if task.kind == "recv":
                continue
            if task.kind == "send":
                reshard = reshards[task.work]
                form: str | int = "step"
                if reshard.form == "sum":
                    form = "sum"
                elif reshard.form == "last" and not whole:
                    form = self.program.num_microbatches - 1
                elif task.microbatch is not None:
                    form = task.microbatch
                source = self._slot(reshard.source, reshard.ref, form)
                target = self._slot(reshard.target, reshard.ref, form)
                sharding = named_sharding(self.meshes[reshard.target], reshard.target_spec)
                # A transfer may run at its send or anywhere before its recv: at once, and together with its neighbours.
                if out and isinstance(out[-1], _Move):
                    move = out[-1]
                    move.tasks.append(task)
                    move.sources.append(source)
                    move.targets.append(target)
                    move.shardings.append(sharding)
                    move.nbytes += reshard.nbytes
                else:
                    out.append(_Move([task], [source], [target], [sharding], reshard.nbytes))
                continue
            unit = fragments[task.work]
            stage = unit.fragment.stage
            if not unit.function.outputs:  # the input gradient of a first stage
                continue
            if unit.zeros is not None and task.work not in started:
                started.add(task.work)
                slots = tuple(self._slot(stage, *slot) for slot, _, _ in unit.function.accumulators)
                out.append(_Run(task, unit.zeros, (), slots))
            current = "step" if task.microbatch is None else task.microbatch
            each = lambda form, m=current: m if form == "each" else form  # noqa: E731
            out.append(
                _Run(
                    task, unit.executable,
                    tuple(self._slot(stage, ref, each(form)) for (ref, form), _, _ in unit.function.inputs),
                    tuple(self._slot(stage, ref, each(form)) for (ref, form), _, _ in unit.function.outputs),
                )
            )
        return out

    def _feed_slots(self) -> list[tuple[int, str, Any, list[int], int | None]]:
        """Returns (argument, form, sharding, slots, axis) per feed."""
        out = []
        for feed in self.program.feeds:
            ref = feed.argument  # inputs are numbered first: the ref of argument k is k
            sharding = named_sharding(self.meshes[feed.stage], feed.spec)
            if feed.form == "micro":
                slots = [self._slot(feed.stage, ref, m) for m in range(self.program.num_microbatches)]
            else:
                slots = [self._slot(feed.stage, ref, "step")]
            out.append((feed.argument, feed.form, sharding, slots, feed.axis))
        return out

    def _free_after_last_use(self) -> None:
        kept = {s for s in self._result_slots if s is not None}
        last: dict[int, int] = {}
        for k, instruction in enumerate(self._instructions):
            used = instruction.inputs if isinstance(instruction, _Run) else instruction.sources
            made = instruction.outputs if isinstance(instruction, _Run) else instruction.targets
            for slot in (*used, *made):
                last[slot] = k
        frees: dict[int, list[int]] = {}
        for slot, k in last.items():
            if slot not in kept:
                frees.setdefault(k, []).append(slot)
        for k, slots in frees.items():
            self._instructions[k].frees = tuple(slots)

    # -- running -----------------------------------------------------------------------------------

    def run(self, feeds: Sequence[tuple[int, Any]]) -> list[Any]:
        """Returns one array per result, None where the result is no fragment's.

        Args:
          feeds: (slot, array) pairs, placed on their stages.

        Raises:
          RuntimeFault: a task failed; names stage, microbatch and module paths.
        """
        import jax

        values: list[Any] = [None] * len(self._slots)
        for slot, array in feeds:
            values[slot] = array
        counters = self.counters
        counters.steps += 1
        for instruction in self._instructions:
            try:
                if isinstance(instruction, _Run):
                    results = instruction.call(*[values[i] for i in instruction.inputs])
                    for slot, array in zip(instruction.outputs, results):
                        values[slot] = array
                    counters.launches += 1
                    if results:
                        self._bound(instruction.task, results[0])
                else:
                    moved = jax.device_put([values[i] for i in instruction.sources], instruction.shardings)
                    for slot, array in zip(instruction.targets, moved):
                        values[slot] = array
                    counters.transfers += len(moved)
                    counters.bytes_between_stages += instruction.nbytes
            except RuntimeFault:
                raise
            except Exception as error:
                raise self._fault(instruction, error) from error
            for slot in instruction.frees:
                values[slot] = None
        return [None if s is None else values[s] for s in self._result_slots]

    def _bound(self, task: Task, array: Any) -> None:
        """Remembers a launch, and waits for the oldest of its mesh when too many are in flight."""
        queue = self._in_flight[task.stage]
        queue.append((self.counters.launches, task, array))
        if len(queue) > (MAX_IN_FLIGHT if self._cap else MAX_REMEMBERED):
            self._wait(*queue.popleft())

    def _wait(self, _: int, task: Task, array: Any) -> None:
        try:
            if not array.is_deleted():
                array.block_until_ready()
        except Exception as error:
            raise self._fault_of(task, error) from error

    def drain(self) -> None:
        """Waits for every launch in flight, in the order they were made.

        Raises:
          RuntimeFault: one of them failed; the first that did is named.
        """
        launches = sorted((x for queue in self._in_flight for x in queue), key=lambda x: x[0])
        for queue in self._in_flight:
            queue.clear()
        for launch in launches:
            self._wait(*launch)

    def _fault(self, instruction: _Run | _Move, error: Exception) -> RuntimeFault:
        """Returns the fault of the launch that failed first: others only received its failure."""
        try:
            self.drain()
        except RuntimeFault as first:
            return first
        task = instruction.task if isinstance(instruction, _Run) else instruction.tasks[0]
        return self._fault_of(task, error)

    def _fault_of(self, task: Task, error: Exception) -> RuntimeFault:
        where = f"stage {task.stage}"
        if task.microbatch is not None:
            where += f", microbatch {task.microbatch}"
        fragment = next((f for f in self.program.fragments if f.name == task.work), None)
        modules = ""
        if fragment is not None:
            blocks = list(dict.fromkeys(op.block for op in fragment.ops if op.block))
            if blocks:
                modules = f", modules {blocks[0]}" + (f" … {blocks[-1]}" if len(blocks) > 1 else "")
        mesh = self.program.meshes[task.stage]
        return RuntimeFault(
            f"{task.work} failed on {where} ({len(mesh.devices)} x {mesh.kind} in {mesh.site}{modules}): "
            f"{_last_line(error)}"
        )


def _last_line(error: Exception) -> str:
    """Returns what an error says at its end: a callback's own message ends a long report of frames."""
    lines = [line for line in str(error).splitlines() if line.strip()]
    return lines[-1] if len(lines) > 3 else f"{type(error).__name__}: {error}"
