"""ZB-H1, ZB-H2 and ZB-V: the backward in two halves, so that weight gradients fill the drain.

Only the input gradient I is waited for upstream; the weight gradient W may come later. Three stages,
four microbatches, F = I = W = 1; a digit is a forward, a small letter I (in 1f1b: I and W as one), a
capital W, a dot idle:

    1f1b    s0  012....aa3bb.cc.dd      bubble (stages - 1)(F + B)
            s1  .01..aa2bb3cc.dd..
            s2  ..0aa1bb2cc3dd....

    zb-h1   s0  012..aA3bBcCdD          bubble (stages - 1)(F + I - W)
            s1  .01.a2bA3cBdCD
            s2  ..0a1b2cA3dBCD

    zb-h2   s0  0123.aAbBcCdD.          nothing idle inside a device's step once it is long enough
            s1  .012a3b.cAdBCD
            s2  ..0a1b2c3dABCD

Stage s runs its W `s` microbatches behind its I in ZB-H1, so that no stage holds more activations than
stage 0 of 1F1B does. ZB-H2 spends 2 stages - 1 of them on every stage: 2 (stages - s) - 1 warm-ups and W
2s behind. Within one step the last stage still starts late and stage 0 ends early, so it pays only where
the next step's forwards may start on stages that have updated.

ZB-V gives each device two stages, the second half of the model in reverse, so that the last stage is on
device 0 and its backward can start there at once. No device holds more than 1F1B's stage 0 (two half
activations for each device), and for F = I = W hardly a gap is left. Two devices, four microbatches, both
stages of a device by the same signs:

    zb-v    s0  0120aA1abABb32cBCcC3dD.dD
            s1  .0011aaAAbb22BBcc33CCddDD

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
