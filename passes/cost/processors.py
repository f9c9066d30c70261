"""Work that shares processors: when each job runs if the processors are never idle while there is work.

A job, alone, takes so many seconds and keeps so many processors busy. Where all that run at once want
more than there are, each runs slower by the same factor. Two processors that share a core, its caches
or the way to memory do less than twice the work of one; `together` says how much.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence


@dataclasses.dataclass(frozen=True, slots=True)
class Job:
    """One piece of work.

    Attributes:
      seconds: it takes when it runs alone.
      cores: processors it keeps busy meanwhile.
      needs: positions of earlier jobs that end before it starts.
    """

    seconds: float
    cores: float = 1.0
    needs: tuple[int, ...] = ()


def work_rate(cores: float, processors: int, together: float) -> float:
    """Returns the work done at once by so many busy processors, in those of one alone.

    Args:
      cores: how many are wanted; more than there are do no more.
      processors: how many there are.
      together: what all of them do, in those of one alone: `processors` where they share nothing.
    """
    busy = min(cores, float(processors))
    if busy <= 1 or processors < 2:
        return min(busy, 1.0)
    return 1 + (busy - 1) * (together - 1) / (processors - 1)


def work_together(processors: int, cores: float, slower: float) -> float:
    """Returns `together` of `work_rate` from a measurement.

    Args:
      processors: so many jobs, each as good as the next, ran at once.
      cores: processors that one of them keeps busy when it runs alone.
      slower: how much longer they took at once than one alone.
    """
    extra = (min(cores, float(processors)) - 1) / (processors - 1)
    # Each does 1 + extra * (together - 1) in the time of one alone; all of them `together` in theirs.
    left = slower - processors * extra
    found = processors * (1 - extra) / left if left > 0 else float(processors)
    return min(float(processors), max(1.0, found))


def shared_times(
    jobs: Sequence[Job], processors: int, together: float | None = None
) -> list[tuple[float, float]]:
    """Returns when each job starts and ends; each starts when all it needs have ended.

    Args:
      jobs: a job needs earlier ones only.
      processors: shared by all jobs; 0 for enough of them.
      together: see `work_rate`; None for processors that share nothing.

    Raises:
      ValueError: a job needs itself or a later one.
    """
    wrong = [(i, n) for i, job in enumerate(jobs) for n in job.needs if not 0 <= n < i]
    if wrong:
        raise ValueError(f"job {wrong[0][0]} needs job {wrong[0][1]}, which is not before it")
    gain = float(processors) if together is None else together
    readers: list[list[int]] = [[] for _ in jobs]
    missing = [len(set(job.needs)) for job in jobs]
    for i, job in enumerate(jobs):
        for n in set(job.needs):
            readers[n].append(i)
    times = [(0.0, 0.0)] * len(jobs)
    left: dict[int, float] = {}  # seconds alone of the jobs that run
    ready = [i for i, n in enumerate(missing) if n == 0]
    now = 0.0
    while ready or left:
        for i in ready:
            times[i] = (now, now)
            left[i] = jobs[i].seconds
        slower = _slowdown([jobs[i] for i in left], processors, gain)
        soonest = min(left.values())
        now += soonest * slower
        ready = []
        # Jobs that end together end at one moment, whatever rounding says.
        done = [i for i, s in left.items() if s - soonest <= 1e-12 * max(1.0, s)]
        for i in list(left):
            left[i] -= soonest
        for i in done:
            del left[i]
            times[i] = (times[i][0], now)
            for r in readers[i]:
                missing[r] -= 1
                if not missing[r]:
                    ready.append(r)
    return times


def _slowdown(running: Sequence[Job], processors: int, together: float) -> float:
    """Returns how much longer each running job takes than alone."""
    if not processors:
        return 1.0
    asked = sum(work_rate(j.cores, processors, together) for j in running)
    return max(1.0, asked / work_rate(sum(j.cores for j in running), processors, together)) if asked else 1.0
