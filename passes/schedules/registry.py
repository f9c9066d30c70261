"""The schedules by name, and the one function that makes and checks a schedule."""

from __future__ import annotations

import difflib
import importlib
from collections.abc import Callable

from hetjax.ir.errors import PlanError
from hetjax.passes.schedules.check import check_schedule
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.flush import TaskLists

# name -> (module, function, one line)
SCHEDULES: dict[str, tuple[str, str, str]] = {
    "gpipe": ("flush", "gpipe", "all forwards, then all backwards"),
    "1f1b": ("flush", "one_f_one_b", "one forward, one backward in turn after stages - s warm-ups"),
}


def schedule(name: str, costs: PipelineCosts) -> TaskLists:
    """Returns one checked task list per device.

    The lists hold compute tasks only (F, B, I, W): a transfer is due as soon as its value exists.

    Args:
      name: a key of `SCHEDULES`.
      costs: the pipeline's numbers.

    Raises:
      PlanError: the name is unknown, or the schedule needs more activations than a device may hold.
      VerifyError: the lists made break a rule (a fault of the schedule).
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise PlanError(f"unknown schedule {name!r}{hint} There are: {', '.join(SCHEDULES)}")
    module, attribute, _ = SCHEDULES[name]
    make: Callable[[PipelineCosts], TaskLists] = getattr(
        importlib.import_module(f"hetjax.passes.schedules.{module}"), attribute)
    lists = make(costs)
    peaks = check_schedule(lists, costs.num_microbatches)
    over = [
        f"  device {d} would hold {peak} microbatches' activations, its limit is {costs.limit(d)}"
        for d, peak in enumerate(peaks)
        if costs.max_in_flight is not None and peak > costs.max_in_flight[d]
    ]
    if over:
        raise PlanError("\n".join([
            f"schedule {name} does not fit in memory:", *over,
            "raise max_in_flight, or use virtual-1f1b or auto, which stay within it"]))
    return lists
