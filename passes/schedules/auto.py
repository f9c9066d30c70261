"""The quickest of all schedules that fit a pipeline."""

from __future__ import annotations

from hetjax.ir.errors import PlanError
from hetjax.passes.schedules.check import peak_in_flight
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.flush import TaskLists
from hetjax.passes.schedules.registry import SCHEDULES, schedule
from hetjax.passes.simulator import simulate, with_step_tasks


def auto(costs: PipelineCosts) -> TaskLists:
    """Returns the lists of `choose`."""
    return choose(costs)[1]


def choose(costs: PipelineCosts, *, split: bool = True) -> tuple[str, TaskLists]:
    """Returns the name and the lists of the quickest schedule that fits.

    Of equally quick ones, whole backwards win over split ones, then the one that holds fewer
    activations, then the one that comes first in `SCHEDULES`.

    Args:
      costs: any placement; schedules for other placements are left out.
      split: whether schedules that split the backward may be chosen.

    Raises:
      PlanError: none fits; each one's reason is given.
    """
    best: tuple[float, bool, int] | None = None
    found: tuple[str, TaskLists] | None = None
    reasons = []
    for name, info in SCHEDULES.items():
        if name == "auto" or costs.placement not in info.placements or (info.split and not split):
            continue
        try:
            lists = schedule(name, costs)
        except PlanError as error:
            reasons.append(f"  {name}: {error}")
            continue
        makespan = simulate(with_step_tasks(lists, costs), costs).makespan_s
        rank = (makespan, info.split, sum(peak_in_flight(lists)))
        # Rounding in the ninth digit must not decide between a whole and a split backward.
        if best is None or rank[0] < best[0] * (1 - 1e-9) or (
            rank[0] <= best[0] * (1 + 1e-9) and rank[1:] < best[1:]
        ):
            best, found = rank, (name, lists)
    if found is None:
        raise PlanError("\n".join(["no schedule fits:", *reasons]))
    return found
