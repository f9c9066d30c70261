"""Pipelines whose transfers hold the device: sender and receiver meet, wait, and then compute on.

hetjax's own runtime sends while it computes (`hetjax.passes.simulator`). Frameworks with blocking
sends do not, and their measured plans are understood only that way:

  stage 0   F0 =a0> F1 ---------=a1>  <g0= B0 ...
  stage 1       =a0> F0   B0    =a1>  <g0= F1 B1 ...

The order is theirs (1F1B): a stage takes the gradient that is due before it hands its activation
on.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from hetjax.ir.errors import VerifyError

# ("F" or "B", stage, microbatch), or ("a" or "g", boundary, microbatch) for a transfer.
_Step = tuple[str, int, int]


@dataclasses.dataclass(frozen=True, slots=True)
class HeldSpan:
    """What holds a stage's device for a while.

    Attributes:
      name: "F3", "B3", or "a3>1" and "g3>0" for the activation and gradient of microbatch 3 on
        their way to a stage.
      stage: whose device; a transfer holds two and appears for each.
      start_s, end_s: when. A transfer starts when both sides have come to it.
    """

    name: str
    stage: int
    start_s: float
    end_s: float


def rendezvous_1f1b(
    forward_s: Sequence[float],
    backward_s: Sequence[float],
    activation_s: Sequence[float],
    gradient_s: Sequence[float],
    num_microbatches: int,
) -> tuple[HeldSpan, ...]:
    """Returns what holds the devices when, by end.

    Args:
      forward_s, backward_s: seconds of one microbatch, per stage.
      activation_s, gradient_s: seconds of one transfer, per boundary; both sides are held.
      num_microbatches: M.

    Raises:
      VerifyError: the stages wait for each other (a fault of the order; it names them).
    """
    stages = len(forward_s)
    programs = [_program(s, stages, num_microbatches) for s in range(stages)]
    compute_s = {"F": forward_s, "B": backward_s}
    transfer_s = {"a": activation_s, "g": gradient_s}
    at, clock = [0] * stages, [0.0] * stages
    waiting: dict[_Step, int] = {}
    running = list(range(stages))
    spans: list[HeldSpan] = []

    def hold(name: str, stage: int, start_s: float, end_s: float) -> None:
        spans.append(HeldSpan(name, stage, start_s, end_s))
        clock[stage] = end_s
        at[stage] += 1

    while running:
        s = running.pop()
        while at[s] < len(programs[s]):
            what, place, i = step = programs[s][at[s]]
            if what in compute_s:
                hold(f"{what}{i}", s, clock[s], clock[s] + compute_s[what][s])
            elif step in waiting:
                other = waiting.pop(step)
                start_s = max(clock[s], clock[other])
                name = f"{what}{i}>{place + (what == 'a')}"
                for side in (s, other):
                    hold(name, side, start_s, start_s + transfer_s[what][place])
                running.append(other)
            else:
                waiting[step] = s
                break
    if waiting:
        stuck = ", ".join(f"stage {s} at {what}{i}" for (what, _, i), s in waiting.items())
        raise VerifyError(f"the stages wait for each other: {stuck}")
    return tuple(sorted(spans, key=lambda x: (x.end_s, x.stage)))


def _program(s: int, stages: int, m: int) -> list[_Step]:
    """Returns what one stage does, in order."""
    warmups = min(m, stages - s)
    order = [("F", i) for i in range(warmups)]
    for i in range(m):
        order.append(("B", i))
        if warmups + i < m:
            order.append(("F", warmups + i))
    out: list[_Step] = []
    held: _Step | None = None  # the activation made last, not yet handed on
    for kind, i in order:
        takes = kind == "B" and s < stages - 1
        # Stage s + 1 turns to the gradient before it takes an activation beyond its warm-up.
        if held is not None and takes and held[2] >= min(m, stages - s - 1):
            out += [("g", s, i), held]
        else:
            out += [held] if held is not None else []
            out += [("g", s, i)] if takes else []
        held = None
        if kind == "F":
            out += [("a", s - 1, i)] if s else []
            out.append(("F", s, i))
            held = ("a", s, i) if s < stages - 1 else None
        else:
            out.append(("B", s, i))
            out += [("g", s - 1, i)] if s else []
    return out
