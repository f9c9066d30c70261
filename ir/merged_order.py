"""The order in which one dispatcher launches the tasks of all meshes."""

from __future__ import annotations

from hetjax.ir.errors import LoweringError
from hetjax.ir.program import Program, Task

MoveKey = tuple[str, int | None]  # work and microbatch of a send and its recv


def merge_tasks(program: Program) -> list[Task]:
    """Returns all tasks in one order in which each recv follows its send.

    Meshes take turns, so that their launches interleave as they would run.

    Raises:
      LoweringError: the lists wait for each other; names the tasks that do.
    """
    sent: set[MoveKey] = set()
    at = [0] * len(program.tasks)
    order: list[Task] = []
    while any(i < len(tasks) for i, tasks in zip(at, program.tasks)):
        progressed = False
        for s, tasks in enumerate(program.tasks):
            launched = False
            while at[s] < len(tasks):
                task = tasks[at[s]]
                if task.kind == "recv" and (task.work, task.microbatch) not in sent:
                    break
                if task.kind not in ("send", "recv"):
                    if launched:
                        break
                    launched = True
                if task.kind == "send":
                    sent.add((task.work, task.microbatch))
                order.append(task)
                at[s] += 1
                progressed = True
        if not progressed:
            stuck = [
                f"{t[i].work}[{t[i].microbatch}] on s{s}"
                for s, (i, t) in enumerate(zip(at, program.tasks))
                if i < len(t)
            ]
            raise LoweringError(f"the schedule waits for itself: {', '.join(stuck)}")
    return order
