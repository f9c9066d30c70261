"""One process that drives several devices: what handing work and values to them costs it, and the step's time.

A single dispatcher launches every task and hand-over of a step in one order (`merge_tasks`), which is what
the runtime does; a task starts when it was launched, its device is free and its inputs have arrived.
Where the devices are CPUs, they and the dispatcher share the host's processors.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from hetjax.ir.blocks import elements
from hetjax.ir.merged_order import merge_tasks
from hetjax.ir.program import Program, Reshard, Task
from hetjax.passes.cost.processors import Job, shared_times
from hetjax.passes.cost.program_price import CALL, FragmentPrice, num_arrays

# The runtime lets so many launches of one mesh be in flight on CPU devices.
MAX_IN_FLIGHT = 16


@dataclasses.dataclass(frozen=True, slots=True)
class HostTime:
    """What a host's own work costs, as measured.

    Attributes:
      processors: that all devices of the host share; 0 where devices do not compute on them.
      together: the work of all processors at once, in that of one alone; 0 where that is not known.
      launch_s: the dispatcher's seconds of a launch, as between other work: nothing of it is in a cache.
      launch_array_s: of each array that a launched call takes or gives.
      launch_shard_s: of each further device that such an array lies on.
      move_s: seconds of one hand-over of arrays to other devices, before any of them counts.
      array_s: of each array in it.
      byte_s: of each byte that is copied.
      step_s: of a call of a step, beside what it launches.
      leaf_s: of each leaf of the call's arguments and results.
    """

    processors: int = 0
    together: float = 0.0
    launch_s: float = 0.0
    launch_array_s: float = 0.0
    launch_shard_s: float = 0.0
    move_s: float = 0.0
    array_s: float = 0.0
    byte_s: float = 0.0
    step_s: float = 0.0
    leaf_s: float = 0.0

    @property
    def drives(self) -> bool:
        """Returns whether it is known what driving devices costs."""
        return self.launch_s > 0 or self.move_s > 0

    def launching_s(self, devices: int, arrays: int) -> float:
        """Returns the dispatcher's seconds of launching a call on so many devices with so many arrays."""
        return self.launch_s + arrays * (self.launch_array_s + (devices - 1) * self.launch_shard_s)


def host_step_s(program: Program, prices: Mapping[str, FragmentPrice], host: HostTime) -> float:
    """Returns what a step takes where one process drives all devices of a program.

    Args:
      program: scheduled.
      prices: of its fragments, judged by measurements.
      host: what the process's own work costs.
    """
    jobs = host_jobs(program, prices, host)
    times = shared_times(jobs, host.processors, host.together or None)
    return max((end for _, end in times), default=0.0)


def host_jobs(
    program: Program, prices: Mapping[str, FragmentPrice], host: HostTime
) -> list[Job]:
    """Returns the step as jobs: the dispatcher's in a row, and what they set going; see `host_step_s`."""
    fragments = {f.name: f for f in program.fragments}
    reshards = {r.name: r for r in program.reshards}
    hand_over = {r.name: _hand_over_s(program, r, host) for r in program.reshards}
    step = _Step(host, [Job(_start_s(program, host))])
    moving = False
    for task in merge_tasks(program):
        if task.kind == "recv":
            step.receive(task)
        elif task.kind == "send":
            # Sends that stand together are one hand-over.
            spent_s = hand_over[task.work] - (host.move_s if moving else 0.0)
            step.send(task, spent_s, _bytes(program, reshards[task.work]) * host.byte_s)
            moving = True
        elif fragments[task.work].outputs:
            fragment = fragments[task.work]
            spent_s = host.launching_s(
                len(program.meshes[task.stage].devices), num_arrays(program, fragment)
            )
            step.run(task, prices[task.work], spent_s)
            moving = False
    return step.jobs


@dataclasses.dataclass
class _Step:
    """The jobs so far, and which of them the next ones need.

    Attributes:
      host: what its work costs.
      jobs: so far.
      launched: the dispatcher's latest.
      runs: of each mesh.
      arrived: the end of each transfer.
      awaited: what a mesh's next run waits for.
    """

    host: HostTime
    jobs: list[Job]
    launched: int = 0
    runs: dict[int, list[int]] = dataclasses.field(default_factory=dict)
    arrived: dict[tuple[str, int | None], int] = dataclasses.field(default_factory=dict)
    awaited: dict[int, list[int]] = dataclasses.field(default_factory=dict)

    def add(self, seconds: float, cores: float, *needs: int) -> int:
        self.jobs.append(Job(max(0.0, seconds), cores, needs))
        return len(self.jobs) - 1

    def receive(self, task: Task) -> None:
        self.awaited.setdefault(task.stage, []).append(self.arrived[task.work, task.microbatch])

    def send(self, task: Task, spent_s: float, copy_s: float) -> None:
        self.launched = self.add(spent_s, 1.0, self.launched)
        made = self.runs.get(task.stage, ())[-1:]
        self.arrived[task.work, task.microbatch] = self.add(copy_s, 1.0, self.launched, *made)

    def run(self, task: Task, price: FragmentPrice, spent_s: float) -> None:
        before = self.runs.setdefault(task.stage, [])
        processors = self.host.processors
        held = before[-MAX_IN_FLIGHT:][:1] if processors and len(before) >= MAX_IN_FLIGHT else []
        self.launched = self.add(spent_s, 1.0, self.launched, *held)
        # What a call took in the row in which it was measured is not part of what runs.
        call_s = dict(price.sources).get(CALL, 0.0)
        net_s = max(0.0, price.seconds - call_s)
        cores = 0.0
        if processors:
            busy = (price.host_s - call_s) / net_s if net_s else 1.0
            cores = min(max(1.0, busy), float(processors))
        needs = (self.launched, *before[-1:], *self.awaited.pop(task.stage, ()))
        before.append(self.add(net_s, cores, *needs))


def _start_s(program: Program, host: HostTime) -> float:
    """Returns what a call of the step takes before anything is launched: its leaves, and placing the batch."""
    placed = sum(program.num_microbatches for f in program.feeds if f.form == "micro")
    leaves = len({f.argument for f in program.feeds}) + len(program.returns)
    loose = len(program.meshes) > 1
    return host.step_s + host.leaf_s * leaves + host.move_s * (1 + loose) + host.array_s * placed


def _hand_over_s(program: Program, reshard: Reshard, host: HostTime) -> float:
    """Returns the dispatcher's seconds of one send: slices, copies started, blocks joined."""
    source, target = program.meshes[reshard.source], program.meshes[reshard.target]
    if not reshard.pieces or (len(source.devices) == 1 and len(target.devices) == 1):
        return host.move_s + host.array_s
    aval = (program.avals if reshard.form == "step" else program.micro_avals)[reshard.ref]
    own = source.blocks(reshard.source_spec, aval.shape)
    due = target.blocks(reshard.target_spec, aval.shape)
    cut = {
        (p.source, p.start, p.stop) for p in reshard.pieces
        if p.source in own and (p.start, p.stop) != own[p.source]
    }  # fmt: skip
    relayed = any(p.source not in own for p in reshard.pieces)
    parts: dict[int, int] = {}
    for p in reshard.pieces:
        parts[p.target] = parts.get(p.target, 0) + (p.source in own)
    joined = sum(n > 1 for d, n in parts.items() if d in due)
    arrays = len(reshard.pieces) + len(source.devices) + len(target.devices)
    launches = (len(cut) + joined) * host.launching_s(1, 2)
    # What the target mesh completes by itself is one collective over it.
    completed = host.launching_s(len(target.devices), 2) if relayed else 0.0
    return host.move_s + host.array_s * arrays + launches + completed


def _bytes(program: Program, reshard: Reshard) -> float:
    if not reshard.pieces:
        return float(reshard.nbytes)
    aval = (program.avals if reshard.form == "step" else program.micro_avals)[reshard.ref]
    each = reshard.nbytes / max(1, math.prod(aval.shape))
    return each * sum(elements((p.start, p.stop)) for p in reshard.pieces if p.source != p.target)
