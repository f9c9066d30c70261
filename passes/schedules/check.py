"""The proof a task list passes before it runs: it ends, it is complete, it fits.

    s0: F0 F1 B0 B1          s0: B0 F0     waits for itself: s0/B0 <- s0/F0 <- s0/B0
    s1: F0 B0 F1 B1          s1: F0 B0

Nothing here depends on times: a schedule that passes ends on any device and any link.
"""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.ir.errors import VerifyError
from hetjax.ir.program import Task

_COMPUTE = ("F", "B", "I", "W")
Node = tuple[int, int]  # device, position in its list


def check_schedule(
    tasks: Sequence[Sequence[Task]],
    num_microbatches: int,
    *,
    max_in_flight: Sequence[int] | None = None,
) -> tuple[int, ...]:
    """Returns the peak number of activations each device holds, or says all that is wrong.

    A device holds microbatch i's activation of a stage from the start of its forward to the end of
    its backward (of W, where the backward is split).

    Args:
      tasks: one list per device; a device may run several stages. Tasks of other kinds than F, B, I
        and W may be present; a `recv` waits for the `send` of the same work and microbatch.
      num_microbatches: M.
      max_in_flight: the declared peak, per device; None checks none.

    Raises:
      VerifyError: a microbatch misses its forward or backward or has two; a stage does not add up
        its gradients in ascending order; a device holds more than declared; tasks wait for each
        other in a circle (the circle is named).
    """
    problems = _completeness(tasks, num_microbatches)
    if not problems:
        problems += find_deadlock(tasks)
    peaks = peak_in_flight(tasks)
    for device, limit in enumerate(max_in_flight or ()):
        if peaks[device] > limit:
            problems.append(
                f"device {device} holds up to {peaks[device]} activations at once, its limit is {limit}")
    if problems:
        raise VerifyError(problems)
    return peaks


def _completeness(tasks: Sequence[Sequence[Task]], num_microbatches: int) -> list[str]:
    """Returns what is missing, doubled or out of order."""
    out: list[str] = []
    home: dict[int, int] = {}
    order: dict[tuple[str, int], list[int]] = {}
    for device, items in enumerate(tasks):
        for task in items:
            if task.kind not in _COMPUTE:
                continue
            if home.setdefault(task.stage, device) != device:
                out.append(f"stage {task.stage} runs on device {home[task.stage]} and on {device}")
            order.setdefault((task.kind, task.stage), []).append(
                -1 if task.microbatch is None else task.microbatch)
    stages = max(home, default=-1) + 1
    if set(home) != set(range(stages)):
        missing = sorted(set(range(stages)) - set(home))
        out.append(f"no device runs stage(s) {', '.join(map(str, missing))}")
    if not home:
        out.append("there is no F or B task at all")
    expected = list(range(num_microbatches))
    for stage in sorted(home):
        whole = ("B", stage) in order
        halves = ("I", stage) in order or ("W", stage) in order
        if whole and halves:
            out.append(f"stage {stage} has whole backwards (B) and split ones (I, W); use one of them")
        for kind in ("F", "I", "W") if halves and not whole else ("F", "B"):
            found = order.get((kind, stage), [])
            if found == expected:
                continue
            if sorted(found) == expected:
                first = next(i for i, mb in enumerate(found) if i != mb)
                out.append(
                    f"stage {stage} runs {kind}{found[first]} where {kind}{first} is due: microbatches"
                    " go in ascending order, so that sums round the same way every time")
                continue
            out += [
                f"stage {stage} runs {kind}{i} {_times(found.count(i))}, expected once"
                for i in expected if found.count(i) != 1]
            extra = sorted(set(found) - set(expected))
            if extra:
                out.append(
                    f"stage {stage} runs {kind} of microbatch(es) {', '.join(map(str, extra))}; there"
                    f" are only 0 to {num_microbatches - 1}")
    return out


def _times(n: int) -> str:
    return "never" if n == 0 else f"{n} times"


def peak_in_flight(tasks: Sequence[Sequence[Task]]) -> tuple[int, ...]:
    """Returns, per device, the most activations held at once by this order of tasks."""
    peaks = []
    for items in tasks:
        held = peak = 0
        split = {task.stage for task in items if task.kind == "W"}
        for task in items:
            if task.kind == "F":
                held += 1
                peak = max(peak, held)
            elif task.kind == "W" or (task.kind == "B" and task.stage not in split):
                held -= 1
        peaks.append(peak)
    return tuple(peaks)


def dependencies(tasks: Sequence[Sequence[Task]]) -> dict[Node, list[Node]]:
    """Returns what each task waits for, its predecessor in the list first.

    Lists with sends say themselves what crosses between stages; in others, activations and gradients
    cross every boundary.
    """
    at: dict[tuple[str, int, int | None], list[Node]] = {}
    sends: dict[tuple[str, int | None], Node] = {}
    for device, items in enumerate(tasks):
        for position, task in enumerate(items):
            if task.kind in _COMPUTE:
                at.setdefault((task.kind, task.stage, task.microbatch), []).append((device, position))
            elif task.kind == "send":
                sends[task.work, task.microbatch] = (device, position)
    last = max((key[1] for key in at), default=-1)
    waits: dict[Node, list[Node]] = {}
    for device, items in enumerate(tasks):
        for position, task in enumerate(items):
            found = [(device, position - 1)] if position else []
            for key in _needs(task, last, crossing=not sends):
                nodes = at.get(key, [])
                if len(nodes) == 1:  # a step that takes several gradients has a forward for each
                    found += nodes
            if task.kind == "recv" and (task.work, task.microbatch) in sends:
                found.append(sends[task.work, task.microbatch])
            waits[device, position] = found
    return waits


def _needs(task: Task, last: int, crossing: bool) -> list[tuple[str, int, int | None]]:
    """Returns the tasks whose results this one reads; of B and I only the one present will match."""
    s, i = task.stage, task.microbatch
    if task.kind == "F":
        return [("F", s - 1, i)] if s and crossing else []
    if task.kind in ("B", "I"):
        own = [("F", s, i)]
        return own if s == last or not crossing else [*own, ("B", s + 1, i), ("I", s + 1, i)]
    if task.kind == "W":
        return [("I", s, i)]
    return []


def find_deadlock(tasks: Sequence[Sequence[Task]]) -> list[str]:
    """Returns one sentence that names a circle of waiting tasks, or nothing."""
    waits = dependencies(tasks)
    waiting = {node: len(found) for node, found in waits.items()}
    readers: dict[Node, list[Node]] = {}
    for node, found in waits.items():
        for other in found:
            readers.setdefault(other, []).append(node)
    ready = [node for node, n in waiting.items() if n == 0]
    while ready:
        node = ready.pop()
        del waiting[node]
        for reader in readers.get(node, ()):
            waiting[reader] -= 1
            if waiting[reader] == 0:
                ready.append(reader)
    if not waiting:
        return []
    # Every task left waits for one that is left too, so walking back must come round.
    node, trail = next(iter(waiting)), []
    while node not in trail:
        trail.append(node)
        node = next(other for other in waits[node] if other in waiting)
    circle = [*trail[trail.index(node):], node]
    names = " waits for ".join(f"s{tasks[d][p].stage}/{tasks[d][p]}" for d, p in circle)
    return [f"deadlock: {names}; {len(waiting)} task(s) would never run"]
