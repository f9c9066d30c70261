"""What a view is of: anything that has, or leads to, a planned step."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping
from typing import Any

from hetjax.frontend.dry_run import Rehearsal
from hetjax.frontend.parallel_function import ParallelFunction
from hetjax.frontend.whatif import Costing
from hetjax.ir.bundle import Bundle
from hetjax.ir.errors import PlanError
from hetjax.ir.graph import Graph
from hetjax.ir.plan import Plan
from hetjax.ir.program import Program
from hetjax.passes.cost.estimate import ProgramEstimate, estimate_program
from hetjax.passes.simulator import Span, Timeline
from hetjax.render.gantt import Run, predicted


@dataclasses.dataclass(frozen=True)
class Subject:
    """A planned step with what is predicted and, where it ran watched, measured.

    Attributes:
      bundle: graph, cluster, plan and program.
      given: the estimate where somebody has made it already.
      measured: when everything ran, or None.
      modelled: what of the measured run took modelled time.
    """

    bundle: Bundle
    given: ProgramEstimate | None = None
    measured: Timeline | None = None
    modelled: frozenset[Span] = frozenset()

    @functools.cached_property
    def estimate(self) -> ProgramEstimate:
        """Returns what the program should take.

        Raises:
          PlanError: the bundle is not complete.
        """
        return self.given or estimate_program(self.bundle)

    @property
    def program(self) -> Program:
        """Returns the program.

        Raises:
          PlanError: there is none.
        """
        if self.bundle.program is None or not any(self.bundle.program.tasks):
            raise PlanError(
                "there is no scheduled program to show; lower the step first (hetjax opt -p default)"
            )
        return self.bundle.program

    @property
    def graph(self) -> Graph:
        """Returns the graph.

        Raises:
          PlanError: there is none.
        """
        if self.bundle.graph is None:
            raise PlanError("there is no graph; give the step and not its plan alone")
        return self.bundle.graph

    @property
    def names(self) -> list[str]:
        """Returns what the rows of a timeline are called: the stages with their devices."""
        return [f"{m.name} {len(m.devices)} x {m.kind}" for m in self.program.meshes]

    @property
    def runs(self) -> list[Run]:
        """Returns the predicted run, and the measured one below it where there is one."""
        out = [predicted(self.estimate.timeline)]
        if self.measured is not None:
            out.append(Run("measured", self.measured, self.modelled))
        return out

    @property
    def nbytes(self) -> Mapping[str, int]:
        """Returns the bytes of each reshard by its name."""
        return {r.name: r.nbytes for r in self.program.reshards}


def subject_of(value: Any) -> Subject:
    """Returns what a value is, or leads to.

    Args:
      value: a function made parallel, its plan, a rehearsal, a bundle, or a subject.

    Raises:
      PlanError: it leads to no planned step.
    """
    if isinstance(value, Subject):
        return value
    if isinstance(value, Rehearsal):
        return Subject(value.bundle, value.estimate)
    if isinstance(value, Plan):
        if value.costing is None:
            raise PlanError(
                f"plan {value.name!r} came without its step, so nothing but its decisions is known; take "
                "train_step.plan, or hetjax.rehearse(step, cluster, …).plan"
            )
        return subject_of(value.costing)
    if isinstance(value, Costing):
        return Subject(value.bundle, value.estimate)
    if isinstance(value, Bundle):
        return Subject(value)
    if isinstance(value, ParallelFunction):
        return _of_function(value)
    raise PlanError(
        f"a {type(value).__name__} leads to no planned step; give a function made parallel, its plan, a "
        "rehearsal or a bundle"
    )


def _of_function(function: ParallelFunction) -> Subject:
    from hetjax.frontend.realtime import timeline

    entry = function._in_use()
    costing = entry.plan.costing
    known = costing.estimate if costing is not None else None
    executor = entry.executor
    if executor is None or not executor.times:
        return Subject(entry.bundle, known)
    measured = timeline(executor.times, len(entry.program.tasks))
    if known is not None:
        measured = on_lines_of(measured, known.timeline)
    emulation = executor.emulation
    modelled: set[Span] = set(measured.transfers) if emulation is not None else set()
    if emulation is not None:
        # Emulated stages take the model's seconds, unless the CPU took longer than that.
        for span in (s for row in measured.spans for s in row):
            if math.isclose(
                span.end_s - span.start_s, emulation.work_s[span.task.work], rel_tol=1e-3
            ):
                modelled.add(span)
    return Subject(entry.bundle, known, measured, frozenset(modelled))


def on_lines_of(measured: Timeline, simulated: Timeline) -> Timeline:
    """Returns measured times with transfers on the lines the simulator has them on, so that they are drawn together."""
    place = {s.task.work: s.place for s in simulated.transfers if s.task.work}
    moved = (
        dataclasses.replace(s, place=place.get(s.task.work, s.place)) for s in measured.transfers
    )
    return dataclasses.replace(measured, transfers=tuple(moved))
