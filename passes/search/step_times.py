"""How long a step takes: the task lists of a few warm-ups simulated, long steps by their pace."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence

from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.periodic import shortest_period_s
from hetjax.passes.schedules.virtual import virtual_warmups
from hetjax.passes.search.judge import INF
from hetjax.passes.simulator_fast import ends_of, finish_s, tables, warmup_ops

# Schedules that are the 1F1B pattern with warm-ups of their own: (stage, stages, microbatches) to what a stage holds.
WARMUPS: dict[str, Callable[[int, int, int], int]] = {
    "gpipe": lambda stage, stages, m: m,
    "1f1b": lambda stage, stages, m: min(m, stages - stage),
    "eager-1f1b": lambda stage, stages, m: min(m, 2 * (stages - stage) - 1),
}


class Steps:
    """Steps simulated; what was simulated once is kept.

    Args:
      schedule: one of `WARMUPS`, or "" for the quickest warm-ups of a few, within memory.
    """

    def __init__(self, schedule: str = "") -> None:
        self._warmups = WARMUPS.get(schedule)
        self._simulated: dict[PipelineCosts, tuple[float, tuple[int, ...]]] = {}
        self._estimated: dict[PipelineCosts, float] = {}

    def seconds(self, costs: PipelineCosts, than: float = INF) -> float:
        """Returns the seconds of a step; where they are not less than `than`, about these."""
        # The simulation of thousands of microbatches is for plans that a shorter one leaves in the race.
        if costs.num_microbatches > 2 * _window(costs) and (seconds := self._extrapolated_s(costs)) >= than:
            return seconds
        return self.simulate(costs)[0]

    def simulate(self, costs: PipelineCosts) -> tuple[float, tuple[int, ...]]:
        """Returns the seconds under the quickest of a few warm-ups, and these.

        Of a long step, the warm-ups are those that are quickest while the pipeline fills.
        """
        found = self._simulated.get(costs)
        if found is not None:
            return found
        if self._warmups is not None:
            seconds, warmups = self._as_asked(costs), self._asked(costs)
            found = (INF, ()) if seconds is None else (seconds, warmups)
        elif costs.num_microbatches > 2 * _window(costs):
            wanted = self._filling(costs)[1]
            seconds = _by_warmups(costs, wanted) if wanted else None
            found = (INF, ()) if seconds is None else (seconds, _allowed(costs, wanted))
        else:
            found = _quickest(costs)
        self._simulated[costs] = found
        return found

    def _asked(self, costs: PipelineCosts) -> tuple[int, ...]:
        assert self._warmups is not None
        stages, m = costs.num_stages, costs.num_microbatches
        return tuple(self._warmups(s, stages, m) for s in range(stages))

    def _as_asked(self, costs: PipelineCosts) -> float | None:
        """Returns the seconds under the warm-ups of the schedule, None where memory does not allow them."""
        warmups = self._asked(costs)
        if any(k > most for k, most in zip(warmups, costs.max_in_flight or warmups)):
            return None
        return _by_warmups(costs, warmups)

    def _filling(self, costs: PipelineCosts) -> tuple[float, tuple[int, ...]]:
        """Returns the seconds of as many microbatches as fill the pipeline, and the warm-ups for more."""
        window = _window(costs)
        seconds, warmups = self.simulate(_shortened(costs, window))
        # What held as many as it could may hold more where there is more.
        return seconds, tuple([2 * window if k >= window else k for k in warmups])

    def _extrapolated_s(self, costs: PipelineCosts) -> float:
        """Returns about what many microbatches take: as many as fill the pipeline, and the pace of the last.

        The pace is that of one window of microbatches after another, never less than the busiest device or
        line has; filling and draining are simulated. Within 0.1 % of the whole simulation on nearly all plans.
        """
        found = self._estimated.get(costs)
        if found is None:
            window, m = _window(costs), costs.num_microbatches
            twice = _shortened(costs, 2 * window)
            if self._warmups is not None:
                first_s, second = self._as_asked(_shortened(costs, window)), self._as_asked(twice)
            else:
                first_s, wanted = self._filling(costs)
                second = _by_warmups(twice, wanted) if wanted else None
            if first_s is None or second is None:
                return INF
            pace_s = max((second - first_s) / window, shortest_period_s(costs))
            found = self._estimated[costs] = second + (m - 2 * window) * pace_s
        return found


def _quickest(costs: PipelineCosts) -> tuple[float, tuple[int, ...]]:
    stages = costs.num_stages
    plain = [stages - s for s in range(stages)]
    best: tuple[float, tuple[int, ...]] | None = None
    for wanted in (virtual_warmups(costs), plain, [2 * k - 1 for k in plain]):
        seconds = _by_warmups(costs, wanted)
        if seconds is not None and (best is None or seconds < best[0] * (1 - 1e-12)):
            best = (seconds, _allowed(costs, wanted))
    return best or (INF, ())


def _by_warmups(costs: PipelineCosts, warmups: Sequence[int]) -> float | None:
    """Returns the seconds of the 1F1B pattern with these warm-ups, as far as memory allows; None for a deadlock."""
    table = tables(costs, False)
    ends = ends_of(warmup_ops(table, _allowed(costs, warmups)), table)
    return None if ends is None else finish_s(ends, costs)


def _allowed(costs: PipelineCosts, warmups: Sequence[int]) -> tuple[int, ...]:
    """Returns warm-ups cut to what memory allows; a stage that waits for more than reach it would wait for ever."""
    return tuple(itertools.accumulate(map(min, warmups, costs.max_in_flight or warmups), min))


def _window(costs: PipelineCosts) -> int:
    """Returns how many microbatches fill a pipeline and its links well."""
    waits = 2 * sum(costs.link_s) / shortest_period_s(costs)
    return costs.num_stages + math.ceil(waits) + 8


def _shortened(costs: PipelineCosts, m: int) -> PipelineCosts:
    limits = costs.max_in_flight
    return dataclasses.replace(
        costs, num_microbatches=m, max_in_flight=limits and tuple([min(m, k) for k in limits])
    )
