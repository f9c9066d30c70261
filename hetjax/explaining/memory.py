"""Who holds a device's memory at the moment it holds most."""

from __future__ import annotations

import dataclasses
import math

from hetjax.explaining.naming import Names
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Ref
from hetjax.passes.cost.memory import StageMemory, fragment_memory, port_bytes, stage_memory
from hetjax.passes.schedules.check import peak_in_flight


@dataclasses.dataclass(frozen=True)
class Holder:
    """One thing that takes memory on each device of a stage.

    Attributes:
      what: the value by the user's name, or the fragment whose temporaries these are.
      kind: parameters, optimizer, gradients, activations, transfers, temporaries or new values.
      nbytes: on one device, all copies together.
      copies: how many: activations are held once per microbatch in flight.
      source: the line that makes it.
    """

    what: str
    kind: str
    nbytes: int
    copies: int = 1
    source: str = ""


@dataclasses.dataclass(frozen=True)
class StagePeak:
    """The peak of one stage's devices.

    Attributes:
      stage: "s0".
      moment: "a forward or backward" or "the update".
      holders: largest first; together they are `memory.peak_bytes`.
      memory: the totals.
      capacity: bytes a device has.
    """

    stage: str
    moment: str
    holders: tuple[Holder, ...]
    memory: StageMemory
    capacity: float


def stage_peaks(bundle: Bundle) -> list[StagePeak]:
    """Returns each stage's peak with everything held then.

    Raises:
      PlanError: the bundle is not complete.
    """
    graph, program, cluster = bundle.graph, bundle.program, bundle.cluster
    if graph is None or program is None or cluster is None or not any(program.tasks):
        raise PlanError(
            "memory is known of a complete program only; give FILE.py:build or a lowered step.hj"
        )
    in_flight = peak_in_flight(program.tasks)
    out = []
    for s, mesh in enumerate(program.meshes):
        memory = stage_memory(graph, program, s, max(1, in_flight[s]))
        running = memory.activations * memory.in_flight + memory.transfers + memory.temporaries
        updating = memory.update > running
        holders = _Holders(bundle, s, memory).at_peak(updating)
        out.append(
            StagePeak(
                mesh.name,
                "the update" if updating else "a forward or backward",
                tuple(sorted(holders, key=lambda h: (-h.nbytes, h.what))),
                memory,
                cluster.kind(mesh.kind).memory_bytes,
            )
        )
    return out


class _Holders:
    """The itemised form of `stage_memory`."""

    def __init__(self, bundle: Bundle, stage: int, memory: StageMemory):
        graph, program = bundle.graph, bundle.program
        if graph is None or program is None:
            raise PlanError("memory needs a graph and a program")
        self.graph, self.program, self.stage, self.memory = graph, program, stage, memory
        self.names = Names(graph)
        self.mine = [f for f in program.fragments if f.stage == stage]
        self.mesh = program.meshes[stage]

    def value(self, ref: Ref, kind: str, nbytes: int, copies: int = 1) -> Holder:
        return Holder(self.names.of(ref), kind, nbytes * copies, copies, self.names.source(ref))

    def at_peak(self, updating: bool) -> list[Holder]:
        found = [*self.state(), *self.gradients()]
        return found + (self.update() if updating else self.running())

    def state(self) -> list[Holder]:
        out = []
        for feed in self.program.feeds:
            argument = self.graph.inputs[feed.argument]
            if feed.stage == self.stage and argument.role != "batch":
                nbytes = math.ceil(
                    self.graph.avals[argument.ref].nbytes / math.prod(self.mesh.parts(feed.spec))
                )
                out.append(
                    Holder(
                        argument.path,
                        "optimizer" if "opt_state" in argument.path else "parameters",
                        nbytes,
                    )
                )
        return out

    def gradients(self) -> list[Holder]:
        sums = {p.ref: (f, p) for f in self.mine for p in f.outputs if p.form == "sum"}
        return [
            self.value(r, "gradients", port_bytes(self.program, f, p, given=True))
            for r, (f, p) in sums.items()
        ]

    def running(self) -> list[Holder]:
        fed = {
            self.graph.inputs[f.argument].ref for f in self.program.feeds if f.stage == self.stage
        }
        made = {p.ref for f in self.mine for p in f.outputs}
        read_back = {p.ref for f in self.mine if f.phase == "backward" for p in f.inputs}
        held = {p.ref for f in self.mine if f.phase == "forward" for p in f.inputs} & read_back
        out, received = [], {}
        forward: dict[Ref, int] = {}
        for f in self.mine:
            for p in f.outputs:
                nbytes = port_bytes(self.program, f, p, given=True)
                if p.form != "sum" and f.phase == "forward" and p.ref in read_back:
                    forward[p.ref] = nbytes
                elif p.form != "sum" and f.phase == "prologue":
                    out.append(self.value(p.ref, "transfers", nbytes))
            for p in f.inputs:
                if p.ref not in made and p.ref not in fed:
                    received[p.ref, p.form] = port_bytes(self.program, f, p, given=False)
        for r, nbytes in forward.items():
            out.append(self.value(r, "activations", nbytes, self.memory.in_flight))
        for (r, _), nbytes in received.items():
            if r in held:
                out.append(self.value(r, "activations", nbytes, self.memory.in_flight))
            else:
                out.append(self.value(r, "transfers", nbytes))
        largest = max(
            (f for f in self.mine if f.per_microbatch),
            key=lambda f: fragment_memory(self.program, f).temporary_bytes,
            default=None,
        )
        if largest is not None and self.memory.temporaries:
            out.append(
                Holder(f"temporaries of {largest.name}", "temporaries", self.memory.temporaries)
            )
        return out

    def update(self) -> list[Holder]:
        needs = {}
        for f in self.mine:
            if f.phase == "update":
                reused = sum(
                    port_bytes(self.program, f, f.inputs[i], given=False) for i in f.donated
                )
                memory = fragment_memory(self.program, f)
                needs[f.name] = (
                    f,
                    memory,
                    reused,
                    memory.output_bytes - reused + memory.temporary_bytes,
                )
        if not needs:
            return []
        f, memory, reused, _ = max(needs.values(), key=lambda x: x[3])
        out = [
            self.value(p.ref, "new values", port_bytes(self.program, f, p, given=True))
            for p in f.outputs
        ]
        if reused:
            out.append(Holder(f"buffers {f.name} reuses", "new values", -reused))
        if memory.temporary_bytes:
            out.append(Holder(f"temporaries of {f.name}", "temporaries", memory.temporary_bytes))
        return out
