"""From task lists to instructions: what is called on which values, and what moves where."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hetjax.ir.merged_order import MoveKey, merge_tasks
from hetjax.ir.program import Program, Reshard, Task
from hetjax.runtime.compiler import CompiledFragment
from hetjax.runtime.meshes import named_sharding
from hetjax.runtime.resharding import PieceMove, make_move


@dataclasses.dataclass(slots=True)
class Run:
    """Calls one compiled fragment, makes its accumulators, or completes a value that came in shares.

    Attributes:
      task: which it is.
      call: takes and returns flat arrays; None where only time passes.
      inputs, outputs: slots.
      seconds: what it takes by a model, None where it takes what it takes.
      frees: slots without a later reader.
      label: "s1/F3", for the profiler.
    """

    task: Task
    call: Callable[..., Sequence[Any]] | None
    inputs: tuple[int, ...] = ()
    outputs: tuple[int, ...] = ()
    seconds: float | None = None
    frees: tuple[int, ...] = ()
    label: str = ""


@dataclasses.dataclass(slots=True)
class Move:
    """Carries values from one mesh to others.

    Attributes:
      tasks: the sends.
      sources, targets: slots.
      carry: takes the values and returns them on the target's devices; None where only time passes.
      nbytes: that leave one mesh for another; where pieces say nothing, each value once.
      target_lane: whose thread waits for it.
      frees: slots without a later reader.
    """

    tasks: list[Task]
    sources: list[int]
    targets: list[int]
    carry: Callable[[Sequence[Any]], Sequence[Any]] | None
    nbytes: int
    target_lane: int = 0
    frees: tuple[int, ...] = ()

    @property
    def key(self) -> MoveKey:
        return self.tasks[0].work, self.tasks[0].microbatch


@dataclasses.dataclass(slots=True)
class Await:
    """Waits for what a move brings."""

    key: MoveKey


Instruction = Run | Move | Await


def make_carry(
    reshards: Sequence[Reshard],
    meshes: Sequence[Any],
    by_pieces: Sequence[Callable[[Any], Any] | None],
) -> Callable[[Sequence[Any]], Sequence[Any]]:
    """Returns what brings the reshards' values to their target meshes: the one place where values move.

    Args:
      reshards: one per value.
      meshes: jax mesh per stage.
      by_pieces: what carries each value by its pieces, None where one device_put does.
    """
    import jax

    shardings = [
        named_sharding(meshes[r.target], r.target_spec)
        for r, pieces in zip(reshards, by_pieces)
        if pieces is None
    ]

    def carry(arrays: Sequence[Any]) -> Sequence[Any]:
        whole = [x for x, pieces in zip(arrays, by_pieces) if pieces is None]
        moved = iter(jax.device_put(whole, shardings) if whole else ())
        return [next(moved) if p is None else p(x) for x, p in zip(arrays, by_pieces)]

    return carry


class Translator:
    """Turns tasks into instructions over numbered slots.

    Args:
      program: with task lists.
      fragments: compiled, by name.
      meshes: jax mesh per stage.
      work_s: modelled seconds of fragments by name; None where devices take their own time.
    """

    def __init__(
        self,
        program: Program,
        fragments: Mapping[str, CompiledFragment],
        meshes: Sequence[Any],
        work_s: Mapping[str, float] | None = None,
    ):
        self.program, self.fragments, self.meshes, self.work_s = program, fragments, meshes, work_s
        self.slots: dict[tuple[int, int, str | int], int] = {}
        self.kept: set[int] = set()
        self._reshards = {r.name: r for r in program.reshards}
        self._by_pieces: dict[str, PieceMove | None] = {}
        self._lane = {t.stage: k for k, tasks in enumerate(program.tasks) for t in tasks}

    def slot(self, stage: int, ref: int, form: str | int) -> int:
        """Returns the number of a value on a stage: whole, summed up, or of one microbatch."""
        return self.slots.setdefault((stage, ref, form), len(self.slots))

    def pieces_of(self, reshard: Reshard) -> PieceMove | None:
        """Returns what carries a reshard by its pieces, None where one device_put does."""
        if reshard.name not in self._by_pieces:
            stages = reshard.source, reshard.target
            source, target = (self.program.meshes[s] for s in stages)
            devices = {
                d: device
                for s in stages
                for d, device in zip(self.program.meshes[s].devices, self.meshes[s].devices.flat)
            }
            avals = self.program.avals if reshard.form == "step" else self.program.micro_avals
            self._by_pieces[reshard.name] = make_move(
                reshard, avals[reshard.ref], source, target, self.meshes[reshard.target], devices
            )
        return self._by_pieces[reshard.name]

    def merged(self) -> list[Run | Move]:
        """Returns one list for one dispatcher; sends that stand together move together."""
        found = self._translate(merge_tasks(self.program), together=True)
        return [i for i in found if not isinstance(i, Await)]

    def lanes(self) -> list[list[Instruction]]:
        """Returns one list per mesh, for threads that wait for each other."""
        return [self._translate(tasks, together=False) for tasks in self.program.tasks]

    def _translate(self, tasks: Iterable[Task], together: bool) -> list[Instruction]:
        out: list[Instruction] = []
        started: set[str] = set()
        gathered: list[Reshard] = []
        for task in tasks:
            if task.kind == "recv":
                if not together:
                    out.append(Await((task.work, task.microbatch)))
                    out += self._complete(task)
            elif task.kind == "send":
                # A transfer may run at its send or anywhere before its recv: at once, and together with its neighbours.
                reshard = self._reshards[task.work]
                previous = out[-1] if out else None
                if together and isinstance(previous, Move):
                    gathered.append(reshard)
                else:
                    gathered = [reshard]
                    previous = Move([], [], [], None, 0, self._lane[reshard.target])
                    out.append(previous)
                self._extend(previous, task, reshard)
                moves = [self.pieces_of(r) for r in gathered]
                carry = moves if together else [m and m.bring for m in moves]
                previous.carry = make_carry(gathered, self.meshes, carry)
            else:
                out += self._runs(task, started)
        self._free_after_last_use(out)
        return out

    def _complete(self, task: Task) -> list[Run]:
        """Returns the collective by which a mesh completes what it received, [] where it got all.

        The mesh's own lane launches it: all devices of a mesh must see its collectives in one order.
        """
        reshard = self._reshards[task.work]
        pieces = self.pieces_of(reshard)
        if pieces is None or not pieces.completes:
            return []
        at = (self.slot(reshard.target, reshard.ref, self._form(task, reshard)),)
        zero = None if self.work_s is None else 0.0  # its time is part of the transfer's
        call = lambda x: (pieces.complete(x),)  # noqa: E731
        return [Run(task, call, at, at, zero, label=f"s{reshard.target}/{task}")]

    def _form(self, task: Task, reshard: Reshard) -> str | int:
        """Returns which of a value's slots a send or recv is about."""
        if reshard.form == "sum":
            return "sum"
        if reshard.form == "last" and self.program.num_microbatches > 1:
            return self.program.num_microbatches - 1
        return "step" if task.microbatch is None else task.microbatch

    def _extend(self, move: Move, task: Task, reshard: Reshard) -> None:
        form = self._form(task, reshard)
        pieces = self.pieces_of(reshard)
        move.tasks.append(task)
        move.sources.append(self.slot(reshard.source, reshard.ref, form))
        move.targets.append(self.slot(reshard.target, reshard.ref, form))
        move.nbytes += reshard.nbytes if pieces is None else pieces.bytes_between

    def _runs(self, task: Task, started: set[str]) -> list[Run]:
        unit = self.fragments[task.work]
        stage, out = unit.fragment.stage, []
        seconds = None if self.work_s is None else self.work_s[task.work]
        label = f"s{stage}/{task}"
        acts = any(op.eqn is not None and op.eqn.effects for op in unit.fragment.ops)
        if not unit.function.outputs and not acts:  # the input gradient of a first stage
            return [Run(task, None, seconds=seconds, label=label)] if seconds else []
        if unit.zeros is not None and task.work not in started:
            started.add(task.work)
            slots = tuple(self.slot(stage, *slot) for slot, _, _ in unit.function.accumulators)
            zero = None if seconds is None else 0.0
            out.append(Run(task, unit.zeros, (), slots, zero, label=f"s{stage}/zeros"))
        current = "step" if task.microbatch is None else task.microbatch
        each = lambda form: current if form == "each" else form  # noqa: E731
        inputs = tuple(
            self.slot(stage, ref, each(form)) for (ref, form), _, _ in unit.function.inputs
        )
        outputs = tuple(
            self.slot(stage, ref, each(form)) for (ref, form), _, _ in unit.function.outputs
        )
        return [*out, Run(task, unit.executable, inputs, outputs, seconds, label=label)]

    def _free_after_last_use(self, instructions: Sequence[Instruction]) -> None:
        last: dict[int, int] = {}
        for k, i in enumerate(instructions):
            if isinstance(i, Run):
                last.update((slot, k) for slot in (*i.inputs, *i.outputs))
            elif isinstance(i, Move):
                last.update((slot, k) for slot in i.sources)
        frees: dict[int, list[int]] = {}
        for slot, k in last.items():
            if slot not in self.kept:
                frees.setdefault(k, []).append(slot)
        for k, slots in frees.items():
            instruction = instructions[k]
            if not isinstance(instruction, Await):
                instruction.frees = tuple(slots)
