"""What a search asks of a judge, whoever it is, and what a judge says of one plan in full.

A judge is asked hundreds of thousands of times: it takes plain arguments and returns plain numbers, `inf`
where a plan does not fit in memory or nothing is known of it. `report` takes its time and tells why.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Protocol

from hetjax.passes.search.space import Group, Micro, Outline, Problem

INF = math.inf
Edges = tuple[int, ...]
Groups = tuple[Group, ...]
# Running sums over layers of what a layer needs, and how much a stage may need.
Room = tuple[Sequence[float], float]


@dataclasses.dataclass(frozen=True)
class StageReport:
    """One stage in full.

    Attributes:
      forward_s, backward_s: of one microbatch.
      sync_s, update_s: after the last one.
      peak_bytes: on the device that holds most, against
      memory_bytes: what it has.
      in_flight: activations held at once.
    """

    forward_s: float
    backward_s: float
    sync_s: float
    update_s: float
    peak_bytes: float
    memory_bytes: float
    in_flight: int


@dataclasses.dataclass(frozen=True)
class Report:
    """What a judge says of a plan.

    Attributes:
      seconds: a step; infinite where the plan cannot run.
      bound_s: what no schedule of the same stages can beat.
      schedule, warmups: the order it is judged by; () where the schedule has its own.
      stages: each in full.
      crossing_s: per boundary, what one activation takes on its way.
      problems: why it cannot run, in sentences.
    """

    seconds: float
    bound_s: float
    schedule: str
    warmups: tuple[int, ...]
    stages: tuple[StageReport, ...]
    crossing_s: tuple[float, ...]
    problems: tuple[str, ...] = ()


class Judge(Protocol):
    """Prices plans; see the module's text.

    Attributes:
      name: "own" or "published".
      problem: what it judges plans for.
      exact: whether `bound_s` is `seconds` already.
      adds_up: whether the slowest stage waits for all others once: its time counts m - 1 times, beside
        everybody's; else m times, or the way of one microbatch, whichever is longer.
      fixed_memory: whether `in_flight` is what a stage holds, come what may; else it can do with one.
    """

    name: str
    problem: Problem
    exact: bool
    adds_up: bool
    fixed_memory: bool

    def twins(self) -> tuple[int, ...]:
        """Returns, per pool, the first pool that it could change places with at no cost."""
        ...

    def bound_s(self, m: int, groups: Groups, edges: Edges) -> float:
        """Returns the closed form: never more than `seconds`."""
        ...

    def seconds(self, m: int, groups: Groups, edges: Edges, than: float = INF) -> float:
        """Returns the seconds of a step; where they are not less than `than`, about these."""
        ...

    def works(self, group: Group) -> tuple[Sequence[float], ...]:
        """Returns, per part, running sums over layers of a microbatch's forward and backward."""
        ...

    def step_works(self, m: int, group: Group, *, least: bool = False) -> tuple[Sequence[float], ...]:
        """Returns, per part, running sums over layers of a step's seconds, per microbatch.

        They are never more than what the stage's device is busy with, exchange and update included.

        Args:
          m: microbatches.
          group: the group.
          least: whether to count what the cheapest options would cost, instead of its own.
        """
        ...

    def rooms(self, group: Group, in_flight: int) -> tuple[Room, ...]:
        """Returns, per part, running sums of bytes and the bytes there are, with so many in flight."""
        ...

    def in_flight(self, stage: int, stages: int, m: int) -> int:
        """Returns how many activations a stage should have room for."""
        ...

    def known(self, group: Group) -> bool:
        """Returns whether there are numbers for a group."""
        ...

    def floor_s(self, micro: Micro) -> float:
        """Returns seconds that every plan with this division pays beyond its pipeline."""
        ...

    def least_crossing_s(self, source: Group, target: Group) -> float:
        """Returns what one microbatch spends between two stages at least, there and back, wherever the cut is."""
        ...

    def least_line_s(self, source: Group, target: Group) -> float:
        """Returns for how long one microbatch keeps the line between two stages busy at least, one way."""
        ...

    def report(self, outline: Outline) -> Report:
        """Returns all there is to say of a plan."""
        ...


def pipeline_s(judge: Judge, m: int, period_s: float, chain_s: float) -> float:
    """Returns what a pipeline takes at least.

    Args:
      judge: how its parts add up.
      m: microbatches.
      period_s: of one on the slowest stage, at least.
      chain_s: of one on its way through all stages and back, at least.
    """
    if judge.adds_up:
        return (m - 1) * period_s + max(period_s, chain_s)
    return max(m * period_s, chain_s)
