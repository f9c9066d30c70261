"""How long a step takes: the task lists of a few warm-ups simulated, long steps by their pace."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence

from hetjax.passes.schedules.costs import PipelineCosts
from hetjax.passes.schedules.periodic import shortest_period_s
from hetjax.passes.schedules.virtual import virtual_warmups
from hetjax.passes.search.judge import INF
from hetjax.passes.simulator_fast import ends_of, finish_s, tables, warmup_ops


class Steps:
    """Steps simulated; what was simulated once is kept."""

    def __init__(self) -> None:
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
        if costs.num_microbatches > 2 * _window(costs):
            wanted = self._filling(costs)[1]
            seconds = _by_warmups(costs, wanted) if wanted else None
            found = (INF, ()) if seconds is None else (seconds, _allowed(costs, wanted))
        else:
            found = _quickest(costs)
        self._simulated[costs] = found
        return found

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
            first_s, wanted = self._filling(costs)
            second = _by_warmups(_shortened(costs, 2 * window), wanted) if wanted else None
            if second is None:
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
