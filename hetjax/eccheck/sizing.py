"""How much memory and traffic a code costs, and what it survives.

Formulas, for hosts with S bytes of state each, groups of n = k + m:

- memory of one version: S * n / k a host;
- bytes sent per save: S * (1 + (m - 1) / k) a host;
- f of N hosts lost at once: the state survives if no group of n lost more than m. Of the C(N, f)
  ways, the survivable ones are the coefficient of x^f in (sum_{i<=m} C(n, i) x^i)^(N/n);
- r copies in groups of r are the case k = 1, m = r - 1.
- wasted time at mean time between failures M with a save every tau that stalls delta and a recovery
  of R: delta / tau + tau / (2 M) + R / M, least at tau = sqrt(2 delta M) (Young 1974, Daly 2006).
"""

from __future__ import annotations

import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

from hetjax.ir.errors import CheckpointError


def survivable_subsets(groups: Sequence[tuple[int, int]], lost: int) -> int:
    """Returns how many ways of losing this many hosts leave every group able to rebuild.

    Args:
      groups: (members, losses it survives) of each group.
      lost: hosts lost at once.
    """
    ways = [1] + [0] * lost
    for members, m in groups:
        ways = [
            sum(ways[f - i] * math.comb(members, i) for i in range(min(m, members, f) + 1))
            for f in range(lost + 1)
        ]
    return ways[lost]


def survival_probability(groups: Sequence[tuple[int, int]], lost: int) -> float:
    """Returns the probability that a loss of this many hosts, all sets alike, is survived."""
    hosts = sum(members for members, _ in groups)
    return survivable_subsets(groups, lost) / math.comb(hosts, lost) if lost <= hosts else 0.0


def loss_probability(groups: Sequence[tuple[int, int]], p: float) -> float:
    """Returns the probability that the state is lost when each host fails with probability p."""
    survives = 1.0
    for members, m in groups:
        survives *= sum(
            math.comb(members, i) * p**i * (1 - p) ** (members - i) for i in range(min(m, members) + 1)
        )
    return 1.0 - survives


@dataclass(frozen=True)
class Sizing:
    """What a choice of k and m costs per host, and what it survives.

    Attributes:
      groups: (members, losses survived) of each group.
      version_bytes: agent memory for one version.
      memory_bytes: agent memory for all versions.
      sent_bytes: per save.
      send_s: the time that takes at the link's rate.
      repair_read_bytes: what a group reads to rebuild one lost host.
      repair_s: the time that takes, over the links of all survivors together.
      replication_bytes: memory of one version that r = m + 1 copies would take.
    """

    groups: tuple[tuple[int, int], ...]
    version_bytes: float
    memory_bytes: float
    sent_bytes: float
    send_s: float
    repair_read_bytes: float
    repair_s: float
    replication_bytes: float


def size(
    state_bytes: float, hosts: int, k: int, m: int, *, link_bytes_s: float, versions: int = 2
) -> Sizing:
    """Returns what a code costs.

    Args:
      state_bytes: of the whole job, equally on all hosts.
      hosts: number of hosts.
      k: data chunks of a group.
      m: losses a group survives.
      link_bytes_s: rate of one host's link.
      versions: versions held at a time.

    Raises:
      CheckpointError: the numbers cannot be met.
    """
    if min(hosts, k, m, versions) < 1 or state_bytes < 0 or link_bytes_s <= 0:
        raise CheckpointError("hosts, k, m, versions and the link speed must be above 0")
    if hosts < k + m:
        raise CheckpointError(
            f"{hosts} hosts cannot form a group of k + m = {k + m}; use k <= {max(1, hosts - m)}"
        )
    from hetjax.eccheck.layout import form_groups

    formed = form_groups([f"h{i}:1" for i in range(hosts)], k, m)
    groups = tuple((k_ + m_, m_) for k_, m_, _ in formed)
    per_host = state_bytes / hosts
    worst_k = min(k_ for k_, _, _ in formed)  # the group that takes most memory a host
    version = per_host * (worst_k + m) / worst_k
    sent = per_host * (1 + (m - 1) / worst_k)
    read = per_host * (worst_k + m)  # k chunks of each of n stripes
    return Sizing(
        groups, version, versions * version, sent, sent / link_bytes_s, read,
        max(version, read / (worst_k + m - 1)) / link_bytes_s, per_host * (m + 1),
    )


def best_interval_s(stall_s: float, mtbf_s: float) -> float:
    """Returns the interval between saves that wastes least (Young 1974)."""
    return math.sqrt(2 * stall_s * mtbf_s)


def wasted_fraction(stall_s: float, interval_s: float, mtbf_s: float, recovery_s: float) -> float:
    """Returns the part of all time that is lost to saving, to work done twice and to recovery."""
    return stall_s / interval_s + (interval_s / 2 + recovery_s) / mtbf_s


@dataclass(frozen=True)
class SaveTier:
    """One place that saves go to.

    Attributes:
      interval_s: from the beginning of a save to that of the next.
      stall_s: how long each keeps the training waiting.
      complete_s: from its beginning until it can be restored.
      recovery_s: time of a restore.
    """

    interval_s: float
    stall_s: float
    complete_s: float
    recovery_s: float

    def lost_s(self, now_s: float) -> float:
        """Returns the work lost by a failure at this time: all since the newest complete save began."""
        return (now_s - self.complete_s) % self.interval_s + self.complete_s


def replay_trace(
    *, hosts: int, groups: Sequence[tuple[int, int]], mtbf_s: float, duration_s: float,
    disk: SaveTier, memory: SaveTier | None = None, burst: float = 0.0, seed: int = 0,
) -> float:
    """Returns the fraction of time wasted over a seeded trace of failures.

    Failures come as a Poisson process; each takes one host, and with probability `burst` a second,
    third, ... one more. If there is a memory tier and every group can rebuild, work since the last
    complete save to memory is lost; otherwise that since the last to disk. Stalls of both tiers
    count. The time to notice a failure and to start again is the same for all and is not in it.

    Args:
      hosts: number of hosts; members of a group stand next to each other.
      groups: (members, losses survived), of the memory tier.
      mtbf_s: mean time between failures of the job.
      duration_s: length of the trace.
      disk: saves to disk.
      memory: saves to memory, or None for disk alone.
      burst: probability that a failure takes one host more, again and again.
      seed: of the trace.
    """
    draw = random.Random(seed)
    now = wasted = 0.0
    while True:
        now += draw.expovariate(1 / mtbf_s)
        if now > duration_s:
            break
        count = 1
        while draw.random() < burst and count < hosts:
            count += 1
        lost = draw.sample(range(hosts), count)
        start, survived = 0, memory is not None
        for members, m in groups:
            survived &= sum(start <= h < start + members for h in lost) <= m
            start += members
        tier = memory if memory is not None and survived else disk
        wasted += tier.lost_s(now) + tier.recovery_s
    for tier in (disk, memory):
        if tier is not None:
            wasted += tier.stall_s * duration_s / tier.interval_s
    return wasted / duration_s
