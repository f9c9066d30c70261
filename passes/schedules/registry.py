"""The schedules by name, and the one function that makes and checks a schedule."""

from __future__ import annotations

import dataclasses
import difflib
import importlib

from hetjax.ir.errors import PlanError
from hetjax.passes.schedules.check import check_schedule
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.flush import TaskLists


@dataclasses.dataclass(frozen=True, slots=True)
class ScheduleInfo:
    """What there is to know about a schedule before it is made.

    Attributes:
      summary: one line.
      function: "module.function" in this package.
      placements: the placements of stages on devices it can use, see `PipelineCosts.placement`.
      split: whether it runs backwards in two halves.
      declared_peak: what a device may hold by this schedule's own promise, in words.
    """

    summary: str
    function: str
    placements: tuple[str, ...]
    split: bool
    declared_peak: str


_ANY = ("line", "loop", "vee", "other")
SCHEDULES: dict[str, ScheduleInfo] = {
    "gpipe": ScheduleInfo(
        "all forwards, then all backwards", "flush.gpipe", ("line",), False, "microbatches"),
    "1f1b": ScheduleInfo(
        "one forward, one backward in turn after stages - s warm-ups", "flush.one_f_one_b", ("line",),
        False, "stages - s"),
    "eager-1f1b": ScheduleInfo(
        "1f1b with 2 (stages - s) - 1 warm-ups", "flush.eager_1f1b", ("line",), False,
        "2 (stages - s) - 1"),
    "interleaved-1f1b": ScheduleInfo(
        "1f1b with several stages per device, in a loop", "interleaved.interleaved_1f1b",
        ("line", "loop"), False, "2 (devices - d) - 1 + (chunks - 1) devices"),
    "zb-h1": ScheduleInfo(
        "1f1b with weight gradients in the drain, in 1f1b's memory", "zero_bubble.zb_h1", ("line",), True,
        "stages"),
    "zb-h2": ScheduleInfo(
        "zb-h1 with more warm-ups, no gap inside a device's step", "zero_bubble.zb_h2", ("line",), True,
        "2 stages - 1"),
    "zb-v": ScheduleInfo(
        "two stages per device in a V, split backwards, 1f1b's memory", "zero_bubble.zb_v", ("vee",), True,
        "2 devices"),
    "virtual-1f1b": ScheduleInfo(
        "warm-ups that hide slow links, found by search within the memory limit", "virtual.virtual_1f1b",
        _ANY, False, "max_in_flight"),
    "virtual-zb": ScheduleInfo(
        "virtual-1f1b with split backwards", "virtual.virtual_zb", _ANY, True, "max_in_flight"),
    "auto": ScheduleInfo(
        "the quickest of all that fit", "auto.auto", _ANY, True, "max_in_flight"),
}


def schedule_info(name: str) -> ScheduleInfo:
    """Returns a schedule's description.

    Raises:
      PlanError: the name is unknown; the message has the nearest one.
    """
    if name not in SCHEDULES:
        near = difflib.get_close_matches(name, SCHEDULES, n=1)
        hint = f"; did you mean {near[0]}?" if near else "."
        raise PlanError(f"unknown schedule {name!r}{hint} There are: {', '.join(SCHEDULES)}")
    return SCHEDULES[name]


def schedule(name: str, costs: PipelineCosts) -> TaskLists:
    """Returns one checked task list per device.

    The lists hold compute tasks only (F, B, I, W): a transfer is due as soon as its value exists.

    Args:
      name: a key of `SCHEDULES`.
      costs: the pipeline's numbers.

    Raises:
      PlanError: the name is unknown, or the schedule needs more activations than a device may hold,
        another placement of stages, or another number of microbatches.
      VerifyError: the lists made break a rule (a fault of the schedule).
    """
    info = schedule_info(name)
    if costs.placement not in info.placements:
        raise PlanError(
            f"schedule {name} needs its stages in a {' or '.join(info.placements)}, these are in a"
            f" {costs.placement} (device_of={costs.device_of}); split_stages(costs, chunks, layout) makes"
            " a loop or a vee of one stage per device")
    module, attribute = info.function.split(".")
    lists = getattr(importlib.import_module(f"hetjax.passes.schedules.{module}"), attribute)(costs)
    peaks = check_schedule(lists, costs.num_microbatches)
    over = [
        f"  device {d} would hold {peak} activations, its limit is {costs.limit(d)}"
        for d, peak in enumerate(peaks)
        if costs.max_in_flight is not None and peak > costs.max_in_flight[d]
    ]
    if over:
        raise PlanError("\n".join([
            f"schedule {name} does not fit in memory:", *over,
            "raise max_in_flight, or use virtual-1f1b or auto, which stay within it"]))
    return lists
