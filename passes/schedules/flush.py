"""GPipe, 1F1B and eager 1F1B: the plain schedules, which ignore what a link costs.

Three stages, four microbatches, backward twice as long as forward, no link time. A column is one forward's
time; a digit is the forward of that microbatch, a letter its backward (a for 0, b for 1), a dot idle:

    gpipe   s0  0123......aabbccdd
            s1  .0123...aabbccdd..
            s2  ..0123aabbccdd....

    1f1b    s0  012....aa3bb.cc.dd
            s1  .01..aa2bb3cc.dd..
            s2  ..0aa1bb2cc3dd....

Both take (stages - 1)(F + B) longer than the work of one stage when all stages are alike. GPipe holds
all M activations on every stage; 1F1B holds stages - s of them on stage s.

Sources: GPipe (Huang et al. 2019), PipeDream-flush (Narayanan et al. 2021).
"""

from __future__ import annotations

from hetjax.ir.program import Task
from hetjax.passes.schedules.costs import PipelineCosts

TaskLists = tuple[tuple[Task, ...], ...]


def gpipe(costs: PipelineCosts) -> TaskLists:
    """Returns all forwards, then all backwards, on every stage."""
    return warmup_lists(costs, (costs.num_microbatches,) * costs.num_stages)


def one_f_one_b(costs: PipelineCosts) -> TaskLists:
    """Returns 1F1B: stage s runs `stages - s` forwards, then one backward and one forward in turn."""
    return warmup_lists(costs, warmups_1f1b(costs.num_stages))


def warmups_1f1b(num_stages: int) -> tuple[int, ...]:
    return tuple(num_stages - s for s in range(num_stages))


def warmup_lists(costs: PipelineCosts, warmups: tuple[int, ...]) -> TaskLists:
    """Returns the 1F1B pattern with the given number of warm-up forwards per stage.

    Args:
      costs: one stage per device.
      warmups: k_s forwards before stage s's first backward; the stage then holds at most
        min(k_s, M) activations. More than M counts as M.
    """
    return tuple(
        stage_list(s, min(k, costs.num_microbatches), costs.num_microbatches)
        for s, k in enumerate(warmups))


def stage_list(stage: int, warmup: int, num_microbatches: int) -> tuple[Task, ...]:
    """Returns one stage's tasks: `warmup` forwards, then B and F in turn, then the last backwards."""
    tasks = [Task("F", stage, i) for i in range(warmup)]
    for i in range(num_microbatches):
        tasks.append(Task("B", stage, i))
        if warmup + i < num_microbatches:
            tasks.append(Task("F", stage, warmup + i))
    return tuple(tasks)


def eager_1f1b(costs: PipelineCosts) -> TaskLists:
    """Returns eager 1F1B: 2 (stages - s) - 1 warm-ups, which is one virtual stage on every link.

    With links of one forward's time in the pipeline above, it takes 22 where 1F1B takes 26:

        s0  0123.......aa.bb.cc.dd
        s1  ..012...aa3bb.cc.dd...
        s2  ....0aa1bb2cc3dd......

    It spends this memory on every link, slow or not, and no more on a slower one.
    """
    stages = costs.num_stages
    return warmup_lists(costs, tuple(2 * (stages - s) - 1 for s in range(stages)))
