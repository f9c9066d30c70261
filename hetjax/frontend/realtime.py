"""Task lists in real time without a model: stages take modelled seconds, links let transfers wait.

The lanes, links and clocks are those that run real arrays (`hetjax.runtime.dispatch`,
`hetjax.runtime.links`); only the values are left out. What a schedule promises can so be tried for
pipelines of any size and speed on a machine that has neither.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.ir.errors import VerifyError
from hetjax.ir.program import Task
from hetjax.passes.schedules.check import find_deadlock
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.simulator import Span, Timeline, Transfer
from hetjax.runtime.dispatch import Lanes, TaskTime
from hetjax.runtime.instructions import Await, Instruction, Move, Run
from hetjax.runtime.links import EmulatedLinks


def run_lists(tasks: Sequence[Sequence[Task]], costs: PipelineCosts, steps: int = 1) -> Timeline:
    """Returns when each task ran, having run them: the call takes as long as the pipeline would.

    Args:
      tasks: one list per device, of F, B, I, W, sync and update tasks, as `schedule` and
        `with_step_tasks` make them.
      costs: seconds per stage and boundary.
      steps: how often the lists run, one after the other. A stage starts on the next step as soon as
        its own list has ended; microbatches are numbered on.

    Raises:
      VerifyError: the tasks wait for each other.
    """
    again = [
        [
            Task(t.kind, t.stage, (t.microbatch or 0) + k * costs.num_microbatches)
            for k in range(steps)
            for t in items
        ]
        for items in tasks
    ]
    circle = find_deadlock(again)
    if circle:
        raise VerifyError(circle)
    lists, prices = _instructions(again, costs)
    lanes = Lanes(lists, EmulatedLinks(prices))
    try:
        return timeline(lanes.run([], watched=True), len(tasks))
    finally:
        lanes.close()


def _instructions(
    tasks: Sequence[Sequence[Task]], costs: PipelineCosts
) -> tuple[list[list[Instruction]], dict[str, Transfer]]:
    seconds = {
        "F": costs.forward_s,
        "B": costs.backward_s,
        "I": costs.input_s,
        "W": costs.weight_s,
        "update": costs.update_s,
    }
    last = costs.num_stages - 1
    prices: dict[str, Transfer] = {}
    lists: list[list[Instruction]] = []
    for device, items in enumerate(tasks):
        out: list[Instruction] = []
        for task in items:
            s, m = task.stage, task.microbatch
            if task.kind == "sync":
                prices[f"sync s{s}"] = Transfer((f"network {device}",), costs.sync_s[s], 0.0)
                out.append(Move([Task("sync", s, m, f"sync s{s}")], [], [], None, 0, device))
                continue
            if task.kind == "update" and costs.sync_s[s]:
                out.append(Await((f"sync s{s}", m)))
            if task.kind == "F" and s and costs.crosses(s - 1):
                out.append(Await((f"F s{s - 1}", m)))
            if task.kind in ("B", "I") and s < last and costs.crosses(s):
                out.append(Await((f"B s{s + 1}", m)))
            out.append(Run(task, None, seconds=seconds[task.kind][s], label=f"s{s}/{task}"))
            way = 0 if task.kind == "F" else 1
            boundary, target = (s, s + 1) if way == 0 else (s - 1, s - 1)
            if task.kind in ("F", "B", "I") and 0 <= target <= last and costs.crosses(boundary):
                work = f"{'B' if way else 'F'} s{s}"
                prices[work] = Transfer(
                    costs.route(boundary, way),
                    costs.serialisation_s[boundary],
                    costs.latency_s[boundary],
                )
                out.append(
                    Move([Task("send", s, m, work)], [], [], None, 0, costs.device_of[target])
                )
        lists.append(out)
    return lists, prices


def timeline(times: Sequence[TaskTime], num_lanes: int) -> Timeline:
    """Returns measured times in the simulator's form, for its figures, charts and traces."""
    spans: list[list[Span]] = [[] for _ in range(num_lanes)]
    travel: list[Span] = []
    for t in sorted(times, key=lambda t: t.start_s):
        if t.task.kind in ("send", "sync"):
            travel.append(
                Span(t.task, f"line {t.task.work}", t.lane, t.start_s, t.end_s, t.posted_s)
            )
        else:
            spans[t.lane].append(
                Span(t.task, f"device {t.lane}", t.lane, t.start_s, t.end_s, t.posted_s)
            )
    busy = tuple(sum(s.end_s - s.start_s for s in items) for items in spans)
    ends = [s.end_s for items in spans for s in items] + [
        s.end_s for s in travel if s.task.kind == "sync"
    ]
    return Timeline(
        max(ends, default=0.0),
        tuple(map(tuple, spans)),
        tuple(travel),
        busy,
        (0.0,) * num_lanes,
        tuple(() for _ in spans),
        tuple(() for _ in spans),
    )
