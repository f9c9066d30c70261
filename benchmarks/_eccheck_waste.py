"""What losing hosts costs: survivable losses counted, and time wasted over a trace of failures."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hetjax.eccheck.sizing import (
    SaveTier,
    best_interval_s,
    replay_trace,
    survivable_subsets,
    survival_probability,
)

HOSTS, BURST, SEEDS = 16, 0.3, 5

# Every arm is judged by the same rules; they are printed beside the figures.
ASSUMPTIONS = (
    f"{HOSTS} hosts; failures at random times (Poisson), each of one host and with probability {BURST} of one "
    "more, again and again; five seeds, 400 failures each in the mean",
    "every save stalls the training by the blocking time measured here and counts once it is complete; a failure "
    "loses the work since the newest complete save began; copying, coding and sending behind the training are "
    "free, for orbax's writing as for the agents'",
    "a tier saves at the interval that wastes least for its stall and for the failures it answers (Young 1974), "
    "never closer than its complete save takes",
    "both memory arms stand over the same disk tier, whose stalls they pay: it serves what memory does not survive",
    "recovery is the restore measured here with as many agents dead as the code covers, from disk with the page "
    "cache dropped; noticing the failure and starting again cost all arms the same and are not counted",
    "both memory arms take twice the state in memory; disk and agents are this machine's",
)


def figure(name: str, value: float, unit: str, target: str = "", holds: bool = True) -> dict[str, Any]:
    return {"name": name, "value": value, "unit": unit, "target": target, "holds": holds}


def subset_figures() -> Iterator[dict[str, Any]]:
    """Survivable losses counted one by one, beside the formula."""
    for label, groups in (("2+2", [(4, 2)] * 4), ("6+2", [(8, 2)] * 2), ("2 copies", [(2, 1)] * 8)):
        hosts = sum(n for n, _ in groups)
        group_of = [g for g, (n, _) in enumerate(groups) for _ in range(n)]
        exact = True
        for lost in range(1, 6):
            counted = 0
            for chosen in itertools.combinations(range(hosts), lost):
                hits = [0] * len(groups)
                for host in chosen:
                    hits[group_of[host]] += 1
                counted += all(h <= m for h, (_, m) in zip(hits, groups))
            exact &= counted == survivable_subsets(groups, lost)
        yield figure(f"{label} on 16 hosts: four lost at once are survived", survival_probability(groups, 4), "",
                     "brute force = formula", exact)


@dataclass(frozen=True)
class Measured:
    """What a save and a restore of one arm took, in seconds."""

    stall_s: float
    complete_s: float
    recovery_s: float

    def tier(self, mtbf_s: float) -> SaveTier:
        """Returns the arm saving at its best interval, for failures this far apart."""
        interval_s = max(self.complete_s, best_interval_s(self.stall_s, mtbf_s))
        return SaveTier(interval_s, self.stall_s, self.complete_s, self.recovery_s)


def waste_figures(disk: Measured, copies: Measured, coded: Measured) -> Iterator[dict[str, Any]]:
    """Time wasted under a seeded trace of failures, from the times just measured.

    Args:
      disk: orbax alone.
      copies: two copies in memory, in pairs of hosts.
      coded: 2+2 in memory, in groups of four.
    """
    arms = {"disk only": ((), None), "2 copies": ([(2, 1)] * 8, copies), "2+2": ([(4, 2)] * 4, coded)}
    for hours in (0.25, 1, 4):
        mtbf_s = hours * 3600
        for name, (groups, measured) in arms.items():
            memory = None if measured is None else measured.tier(mtbf_s)
            unsurvived = 1.0 if measured is None else sum(
                (1 - BURST) * BURST ** (lost - 1) * (1 - survival_probability(groups, lost))
                for lost in range(1, HOSTS + 1))
            waste = statistics.mean(
                replay_trace(
                    hosts=HOSTS, groups=groups, mtbf_s=mtbf_s, duration_s=400 * mtbf_s, memory=memory,
                    disk=disk.tier(mtbf_s / unsurvived), burst=BURST, seed=seed)
                for seed in range(SEEDS))
            yield figure(f"time wasted, {HOSTS} hosts, a failure every {hours:g} h: {name}", 100 * waste, "%")
