"""How fast devices and groups could work at best: what lower bounds on unfinished plans rest on."""

from __future__ import annotations

import functools
import itertools
import statistics
from collections.abc import Sequence

from hetjax.passes.search.judge import INF, Judge
from hetjax.passes.search.space import Group, Micro, single_parts


class Rates:
    """Best speeds of one problem under one judge.

    Layers weigh w_l: the least, over device kinds, degrees and shares, of a layer's seconds over those of
    the usual layer there. Any weights make a bound; with these, no layer that a kind happens to do well
    makes all of it look fast. In T seconds of a stage's time a group finishes at most T * rate of weighted
    examples, with

      rate = examples * max_l w_l / t_l                               t_l: its seconds for layer l

    and a device of pool p at most T * pace_p, the best of a single replica of any degree and share:

      pace = max share * (max_l w_l / t_l) / tensor

    so that whatever is still undecided, T >= batch * sum w / (rates of the groups + paces of what is left).
    """

    def __init__(self, judge: Judge):
        self.judge = judge
        self.problem = judge.problem
        self._rates: dict[Group, float] = {}
        self._layers: dict[Group, float] = {}
        self._weights = self._layer_weights()
        self.total = sum(self._weights)

    def _layer_weights(self) -> list[float]:
        layers = self.problem.num_layers
        weights: list[float] | None = None
        for pool in range(len(self.problem.pools)):
            for part in single_parts(self.problem, pool):
                group = Group((part,))
                if not self.judge.known(group):
                    continue
                work = self.judge.works(group)[0]
                times = [b - a for a, b in itertools.pairwise(work)]
                usual = statistics.median(times) or max(times)
                if usual > 0:
                    shape = [t / usual for t in times]
                    weights = shape if weights is None else list(map(min, weights, shape))
        return weights or [1.0] * layers

    def rate(self, group: Group) -> float:
        """Returns weighted examples per second at most."""
        found = self._rates.get(group)
        if found is None:
            weights = self._weights
            # The slowest part holds the others up.
            best = min(
                max(
                    (w / max(work[i + 1] - work[i], 1e-12) for i, w in enumerate(weights) if w > 0),
                    default=0.0,
                )
                for work in self.judge.works(group)
            )
            found = self._rates[group] = best * group.examples
        return found

    def layer_s(self, group: Group) -> float:
        """Returns the seconds of a usual layer on the slowest part of a group."""
        found = self._layers.get(group)
        if found is None:
            found = self._layers[group] = max(
                statistics.median([b - a for a, b in itertools.pairwise(work)])
                for work in self.judge.works(group)
            )
        return found

    def chain_s(self, share: int) -> float:
        """Returns the seconds of all layers, each on the part that does a microbatch of it quickest.

        Args:
          share: of the parts; 0 for any.
        """
        least = [INF] * self.problem.num_layers
        for pool in range(len(self.problem.pools)):
            for part in single_parts(self.problem, pool):
                group = Group((part,))
                if share in (0, part.share) and self.judge.known(group):
                    work = self.judge.works(group)[0]
                    least = [min(t, b - a) for t, (a, b) in zip(least, itertools.pairwise(work))]
        return sum(least)

    @functools.cached_property
    def paces(self) -> dict[int, tuple[float, ...]]:
        """Returns the pace of one device of each pool, per share (0: over all shares)."""
        pools = range(len(self.problem.pools))
        shares: set[int] = {0}
        best: dict[tuple[int, int], float] = {}
        for pool in pools:
            for part in single_parts(self.problem, pool):
                group = Group((part,))
                if not self.judge.known(group):
                    continue
                pace = self.rate(group) / part.tensor
                for share in (0, part.share):
                    shares.add(share)
                    best[share, pool] = max(best.get((share, pool), 0.0), pace)
        return {s: tuple(best.get((s, p), 0.0) for p in pools) for s in shares}

    def period_s(self, micro: Micro, groups: Sequence[Group], left: Sequence[int]) -> float:
        """Returns what one microbatch costs the busiest stage at least.

        Args:
          micro: how the batch is divided.
          groups: decided already.
          left: devices of each pool that may still be used.
        """
        share = micro.examples // micro.replicas if micro.replicas else 0
        paces = self.paces.get(share)
        speed = sum(self.rate(g) for g in groups)
        if paces is not None:
            speed += sum(n * pace for n, pace in zip(left, paces))
        return micro.examples * self.total / speed if speed > 0 else INF
