"""ZB-H1, ZB-H2 and ZB-V: the backward in two halves, so that weight gradients fill the drain.

Only the input gradient I is waited for upstream; the weight gradient W may come later. Three stages,
four microbatches, F = I = W = 1 (a digit is a forward, i and w the halves of its backward):

    1f1b    s0  0 1 2 . . . . [0 0] 3 [1 1] . . .        bubble (stages - 1)(F + B)
    zb-h1   s0  0 1 2 . . i0 w0 3 i1 w1 i2 w2 i3 w3      bubble (stages - 1)(F + I - W)
            s1  . 0 1 . i0 2 . i1 w0 3 i2 w1 i3 w2 w3
            s2  . . 0 i0 1 i1 2 i2 w0 3 i3 w1 w2 w3

Stage s runs its W `s` microbatches behind its I in ZB-H1, so that no stage holds more activations than
stage 0 of 1F1B does. ZB-H2 spends 2 stages - 1 of them on every stage: 2 (stages - s) - 1 warm-ups and W
2s behind. That leaves no gap between a device's first and last task when F = I = W; within one step the
last stage still starts late and stage 0 ends early, so it pays where the next step's forwards may start
on stages that have updated.

ZB-V gives each device two stages, the second half of the model in reverse, so that the last stage is on
device 0 and its backward can start there at once. No device holds more than 1F1B's stage 0 (two half
activations for each device), and for F = I = W hardly a gap is left. Two devices, one microbatch:

    device 0   F0 .  .  F3 I3 W3 .  .  I0 W0
    device 1   .  F1 F2 .  .  I2 I1 W2 W1

Sources: zero bubble pipeline parallelism (Qi et al. 2024) for ZB-H1 and ZB-H2; pipeline parallelism with
controllable memory (Qi et al. 2024) for the V placement. ZB-V's order is found by list scheduling here,
so that it holds for uneven stages and slow links too.
"""

from __future__ import annotations

from hetjax.ir.program import Task
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.flush import TaskLists


def zb_h1(costs: PipelineCosts) -> TaskLists:
    """Returns ZB-H1: 1F1B's warm-ups, weight gradients s microbatches late; peak is `stages`."""
    stages = costs.num_stages
    return tuple(
        _delayed(s, stages - s, s, costs.num_microbatches) for s in range(stages))


def zb_h2(costs: PipelineCosts) -> TaskLists:
    """Returns ZB-H2: 2 (stages - s) - 1 warm-ups, weight gradients 2s late; peak is 2 stages - 1."""
    stages = costs.num_stages
    return tuple(
        _delayed(s, 2 * (stages - s) - 1, 2 * s, costs.num_microbatches) for s in range(stages))


def zb_v(costs: PipelineCosts) -> TaskLists:
    """Returns ZB-V: the quickest order found on a V placement within 1F1B's memory.

    Args:
      costs: two stages per device in a vee, see `split_stages`. A lower memory limit is respected.
    """
    from hetjax.passes.schedules.virtual import search

    devices = costs.num_devices
    caps = costs.max_in_flight or (2 * devices,) * devices
    return search(costs.replace(max_in_flight=tuple(min(k, 2 * devices) for k in caps)), split=True)


def _delayed(stage: int, warmup: int, delay: int, num_microbatches: int) -> tuple[Task, ...]:
    """Returns one stage's list with W of microbatch i after I of microbatch i + delay."""
    warmup = min(warmup, num_microbatches)
    tasks = [Task("F", stage, i) for i in range(warmup)]
    for i in range(num_microbatches):
        tasks.append(Task("I", stage, i))
        if i >= delay:
            tasks.append(Task("W", stage, i - delay))
        if warmup + i < num_microbatches:
            tasks.append(Task("F", stage, warmup + i))
    first_left = max(num_microbatches - delay, 0)
    tasks += [Task("W", stage, i) for i in range(first_left, num_microbatches)]
    return tuple(tasks)
