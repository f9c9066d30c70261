"""Interleaved 1F1B: several stages per device, in a loop, so that filling and draining take less.

Two devices, two chunks each (stages 0 and 2 on device 0, 1 and 3 on device 1), four microbatches; a digit
is a forward of that microbatch in either chunk, a letter a backward:

    1f1b               s0  01..aa2bb3cc.dd                  (a column is two of those below)
                       s1  .0aa1bb2cc3dd..

    interleaved-1f1b   s0  01012.aa3bb2aa3bb.cc.ddccdd
                       s1  .010aa1bb2aa3bb2cc3ddccdd..

Microbatches go in groups of as many as there are devices: one group through chunk 0, then the same group
through chunk 1, then the next group. With v chunks the bubble is (devices - 1)(F + B) / v, for v times
as many transfers and more activations: device d runs 2 (devices - d - 1) + (v - 1) devices forwards of
chunks, and then one forward and one backward in turn.

Source: Narayanan et al. 2021, section 2.2 (which asks that microbatches divide by devices; so do we).
"""

from __future__ import annotations

from hetjax.ir.errors import PlanError
from hetjax.ir.program import Task
from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.flush import TaskLists


def interleaved_1f1b(costs: PipelineCosts) -> TaskLists:
    """Returns interleaved 1F1B for stages laid out in a loop; with one stage per device, 1F1B.

    Raises:
      PlanError: the stages are not in a loop, or the microbatches are not a multiple of the devices.
    """
    devices, m = costs.num_devices, costs.num_microbatches
    chunks = costs.num_stages // devices
    if costs.device_of != tuple(range(devices)) * chunks:
        raise PlanError(
            f"interleaved-1f1b needs stages in a loop over the devices, not device_of={costs.device_of};"
            " split_stages(costs, chunks) makes one")
    if chunks > 1 and m % devices:
        near = sorted({max(devices, m - m % devices), m - m % devices + devices})
        raise PlanError(
            f"interleaved-1f1b needs a multiple of {devices} microbatches (one per device), not {m};"
            f" use {' or '.join(map(str, near))}, or virtual-1f1b, which takes any number")
    lists = []
    for d in range(devices):
        forwards = _rounds("F", d, devices, range(chunks), m)
        backwards = _rounds("B", d, devices, range(chunks - 1, -1, -1), m)
        warmup = min(len(forwards), 2 * (devices - d - 1) + (chunks - 1) * devices + 1)
        if chunks == 1:
            warmup = min(m, devices - d)
        tasks = forwards[:warmup]
        for i, backward in enumerate(backwards):
            tasks.append(backward)
            tasks += forwards[warmup + i:warmup + i + 1]
        lists.append(tuple(tasks))
    return tuple(lists)


def _rounds(kind: str, device: int, devices: int, chunks: range, num_microbatches: int) -> list[Task]:
    """Returns a device's tasks of one kind: each group of microbatches through all chunks in turn."""
    return [
        Task(kind, chunk * devices + device, i)
        for start in range(0, num_microbatches, devices)
        for chunk in chunks
        for i in range(start, min(start + devices, num_microbatches))]
