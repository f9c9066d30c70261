"""schedule: puts fragments and reshards into one task list per mesh."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PassError, PlanError
from hetjax.ir.program import Fragment, Program, Reshard, Task
from hetjax.passes.insert_reshards import makers, source_form
from hetjax.passes.schedules import (
    SCHEDULES,
    PipelineCosts,
    check_schedule,
    schedule,
    schedule_info,
)
from hetjax.passes.schedules.auto import choose
from hetjax.passes.schedules.flush import TaskLists, warmup_lists
from hetjax.passes.simulator_program import pipeline_costs
from hetjax.passes.split_backward import is_split


@dataclasses.dataclass(frozen=True)
class Schedule:
    """Orders each mesh's work by a named schedule.

    A transfer is sent as soon as its value exists and received just before it is read.

    Attributes:
      kind: the schedule's name; "" takes the plan's.
    """

    name: ClassVar[str] = "schedule"
    summary: ClassVar[str] = "order forwards, backwards, transfers and updates on every mesh"
    requires: ClassVar[tuple[str, ...]] = ("program",)

    kind: str = ""

    def apply(self, bundle: Bundle) -> Bundle:
        program = bundle.program
        if program is None:
            raise PassError(self.name, "needs a program; run cut-stages first")
        plan = bundle.plan
        kind = self.kind or (plan.schedule if plan else "1f1b")
        predicted = [s.predicted_s for s in plan.stages] if plan else []
        times = [t or 1.0 for t in predicted]
        # Without predicted times there is no scale to hold a link's seconds against.
        cluster = bundle.cluster if predicted and all(predicted) else None
        warmups = plan.warmups if plan and not self.kind else ()
        tasks = schedule_tasks(program, kind, times, cluster, warmups)
        if tasks == program.tasks and kind == program.schedule:
            return bundle
        if head_fragments(program):
            bundle = bundle.note(
                "loss head", "it couples examples, so it runs once on the whole batch, between all forwards and all backwards"
            )
        return bundle.replace(program=program.replace(tasks=tasks, schedule=kind))


def schedule_tasks(
    program: Program, kind: str, stage_s: list[float] | None = None,
    cluster: Cluster | None = None, warmups: tuple[int, ...] = (),
) -> tuple[tuple[Task, ...], ...]:
    """Returns one task list per mesh.

    Args:
      program: with fragments and reshards.
      kind: the schedule's name.
      stage_s: predicted seconds of forward and backward of one microbatch, per stage.
      cluster: whose links the schedule should hide; None counts them as free.
      warmups: forwards before the first backward, per stage, where a plan has decided them.

    Raises:
      PlanError: the schedule is unknown, it splits the backward and the fragments do not (run
        split-backward), or the step goes back from update to forward, which more than one microbatch
        cannot follow.
    """
    num_stages = len(program.meshes)
    seconds = stage_s or [1.0] * num_stages
    costs = PipelineCosts(
        forward_s=tuple(t / 3 for t in seconds), backward_s=tuple(2 * t / 3 for t in seconds),
        num_microbatches=program.num_microbatches,
    )
    if cluster is not None:
        links = pipeline_costs(program, cluster, {})
        costs = costs.replace(
            latency_s=links.latency_s, serialisation_s=links.serialisation_s, lines=links.lines)
    if program.num_microbatches == 1:
        schedule_info(kind)  # checks the name, though one microbatch leaves no choice
        order: list[list[tuple[str, int | None, Fragment]]] = [
            [(_kind(f), None, f) for f in program.fragments if f.stage == s]
            for s in range(num_stages)
        ]
        weaver = _Weaver(program)
        return tuple(tuple(weaver.stage(s, items)) for s, items in enumerate(order))
    return weave(program, _compute(kind, costs, warmups, is_split(program)))


def weave(program: Program, compute: TaskLists) -> tuple[tuple[Task, ...], ...]:
    """Returns the program's task lists, compute in the order given, one list per mesh.

    Args:
      program: with fragments and reshards, and more than one microbatch.
      compute: F, B, I and W per stage, as `hetjax.passes.schedules.schedule` makes them.

    Raises:
      PlanError: a stage has several fragments of a kind.
    """
    weaver = _Weaver(program)
    return tuple(
        tuple(weaver.stage(s, _microbatched(program, s, items))) for s, items in enumerate(compute)
    )


def _compute(kind: str, costs: PipelineCosts, warmups: tuple[int, ...], split: bool) -> TaskLists:
    if kind == "auto":
        return choose(costs, split=split)[1]
    if schedule_info(kind).split and not split:
        whole = [n for n, i in SCHEDULES.items() if not i.split and costs.placement in i.placements]
        raise PlanError(
            f"schedule {kind} runs the backward in two halves, and this program's backward fragments are"
            f" whole; use {', '.join(whole)} or auto")
    if warmups:
        lists = warmup_lists(costs, warmups)
        check_schedule(lists, costs.num_microbatches)
        return lists
    return schedule(kind, costs)


def _kind(fragment: Fragment) -> str:
    return {
        "prologue": "prologue", "forward": "F", "backward": "B", "weight": "W", "update": "update",
    }[fragment.phase]


def _microbatched(
    program: Program, s: int, compute: tuple[Task, ...]
) -> list[tuple[str, int | None, Fragment]]:
    mine = [f for f in program.fragments if f.stage == s]
    by_kind = {k: [f for f in mine if f.phase == p] for k, p in (("F", "forward"), ("I", "backward"), ("W", "weight"))}
    for fragments in by_kind.values():
        if len(fragments) > 1:
            raise PlanError(
                f"stage {s} has {len(fragments)} {fragments[0].phase} fragments "
                f"({', '.join(f.name for f in fragments)}): its step goes back to an earlier stage, "
                "which only num_microbatches=1 can follow"
            )
    items: list[tuple[str, int | None, Fragment]] = [
        ("prologue", None, f) for f in mine if f.phase == "prologue"
    ]
    updates = [f for f in mine if f.phase == "update"]
    head = head_fragments(program)
    if head:  # all forwards, the loss head on all of them, all backwards
        items += [("F", t.microbatch, f) for t in compute if t.kind == "F" for f in by_kind["F"]]
        items += [("update", None, f) for f in updates if f.name in head]
        compute = tuple(t for t in compute if t.kind != "F")
        updates = [f for f in updates if f.name not in head]
    whole = by_kind["I"] + by_kind["W"]
    for t in compute:
        if t.kind == "B" and by_kind["W"]:  # a whole backward of a stage that has it in two fragments
            items += [("W" if f.phase == "weight" else "I", t.microbatch, f) for f in whole]
        else:
            items += [(t.kind, t.microbatch, f) for f in (whole if t.kind == "B" else by_kind[t.kind])]
    return items + [("update", None, f) for f in updates]


def head_fragments(program: Program) -> frozenset[str]:
    """Returns the names of the fragments that run at full batch before the first backward; fragments are in order."""
    phases = [f.phase for f in program.fragments]
    if program.num_microbatches == 1 or "backward" not in phases:
        return frozenset()
    before = program.fragments[: phases.index("backward")]
    return frozenset(f.name for f in before if f.phase == "update")


class _Weaver:
    """Sets sends and recvs between the compute tasks."""

    def __init__(self, program: Program) -> None:
        self.program = program
        self.leaving: dict[str, list[Reshard]] = {}
        self.arriving: dict[tuple[int, int, str], Reshard] = {}
        given = makers(program)
        for reshard in program.reshards:
            form = source_form(reshard.form)
            maker = next(
                f for f, _ in given[reshard.ref, form] if f.stage == reshard.source
            )
            self.leaving.setdefault(maker.name, []).append(reshard)
            self.arriving[reshard.target, reshard.ref, reshard.form] = reshard

    def stage(self, s: int, items: list[tuple[str, int | None, Fragment]]) -> list[Task]:
        last = self.program.num_microbatches - 1
        out: list[Task] = []
        received: set[tuple[str, int | None]] = set()
        for kind, microbatch, fragment in items:
            for port in fragment.inputs:
                form = "micro" if port.form == "concat" else port.form
                reshard = self.arriving.get((s, port.ref, form))
                if reshard is None:
                    continue
                if form != "micro" or self.program.num_microbatches == 1:
                    needed: list[int | None] = [None]
                elif microbatch is None:
                    needed = list(range(last + 1))
                else:
                    needed = [microbatch]
                for m in needed:
                    if (reshard.name, m) not in received:
                        received.add((reshard.name, m))
                        out.append(Task("recv", s, m, reshard.name))
            out.append(Task(kind, s, microbatch, fragment.name))
            for reshard in self.leaving.get(fragment.name, ()):
                once = reshard.form in ("sum", "last")
                if once and microbatch not in (None, last):
                    continue
                slices = microbatch is None and reshard.form == "micro" and last > 0
                sent = range(last + 1) if slices else [None if once else microbatch]
                out += [Task("send", s, m, reshard.name) for m in sent]
        return out
