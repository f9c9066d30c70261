"""The calls of a step's layers, ready to be compiled and timed."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence

from hetjax.frontend.planning import Options, choose_microbatching
from hetjax.frontend.tracing import Traced
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import DeviceKind
from hetjax.ir.errors import MicrobatchError, PlanError
from hetjax.ir.program import Fragment, Program
from hetjax.passes.cost.layers import segments
from hetjax.passes.cost.program_price import fragment_ops, work_of
from hetjax.passes.cost.work import Work
from hetjax.passes.pipeline import analyse
from hetjax.passes.plan_stages import Request
from hetjax.planning.layered import Layered, rows_of


@dataclasses.dataclass(frozen=True)
class Unit:
    """One call to measure.

    Attributes:
      layer, phase: what it is.
      signature: of its work.
      work: what one device does.
      program, fragment: what is compiled.
      microbatch: examples.
    """

    layer: str
    phase: str
    signature: str
    work: Work
    program: Program
    fragment: Fragment
    microbatch: int


def step_at(traced: Traced, analysed: Bundle, num_microbatches: int) -> Bundle:
    """Returns the step with so many microbatches, proved.

    Raises:
      MicrobatchError: the number does not divide the batch, or is not proved.
    """
    graph, cluster = analysed.graph, analysed.cluster
    if graph is None or cluster is None:
        raise PlanError("nothing was traced")
    options = Options(num_microbatches=num_microbatches)
    graph, micro = choose_microbatching(graph, traced.retrace, cluster, options, Request())
    return analysed.replace(graph=graph, microbatching=micro)


def analysed_step(traced: Traced, kind: DeviceKind) -> Bundle:
    """Returns the traced step, labelled and with costs, on one device of a kind."""
    return analyse(Bundle(graph=traced.graph, cluster=rows_of(kind, 1, 1, None)))


def units(step: Layered) -> Iterator[Unit]:
    """Yields every call worth measuring: fragments of one layer and phase; equal ones again and again."""
    program, cluster = step.bundle.program, step.bundle.cluster
    if program is None or cluster is None:
        raise PlanError("the step is not cut")
    for fragment in program.fragments:
        ops = fragment_ops(program, fragment, cluster)
        parts = segments(program, fragment, ops, step.layers)
        if fragment.phase == "prologue" or not fragment.outputs or not parts:
            continue
        # What a fragment holds of other layers (a scalar that several update) counts with its own.
        main = max(parts, key=lambda s: len(s.ops))
        yield Unit(
            main.layer, main.phase, main.signature, work_of(main.phase, ops), program, fragment,
            step.microbatch,
        )  # fmt: skip


def legal_counts(batch: int, sizes: Sequence[int]) -> list[int]:
    """Returns the numbers of microbatches that give these sizes.

    Raises:
      MicrobatchError: a size does not divide the batch; names the nearest that do.
    """
    problems = []
    for size in sizes:
        if size < 1 or batch % size:
            legal = [n for n in range(1, batch + 1) if batch % n == 0]
            near = sorted(sorted(legal, key=lambda n: abs(n - size))[:3])
            problems.append(
                f"microbatches of {size} do not divide a batch of {batch}; nearest: "
                f"{', '.join(map(str, near))}"
            )
    if problems:
        raise MicrobatchError("\n".join(problems), reason="the batch does not divide")
    return [batch // size for size in sizes]


def usual_sizes(batch: int) -> list[int]:
    """Returns three microbatch sizes to measure: the batch in about 2, 4 and 8 parts."""
    legal = [m for m in range(1, batch + 1) if batch % m == 0]
    near = {min(legal, key=lambda m: abs(math.log(m / wanted))) for wanted in (2, 4, 8)}
    return sorted(batch // m for m in near)
