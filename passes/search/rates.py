"""How fast devices and groups could work at best: what lower bounds on unfinished plans rest on."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence

from hetjax.passes.search.judge import INF, Judge
from hetjax.passes.search.space import Group, Micro, single_parts


class Rates:
    """Best speeds of one problem under one judge.

    Layers weigh w_l. Any weights make a bound; tried are the shapes that layers have on the best part of
    each pool, and the least of the shapes on any part, which keeps a layer that some kind happens to do well
    from making all of it look fast. Those with the largest bound are taken. In T seconds of a stage's time a
    group finishes at most T * rate of weighted examples, with

      rate = examples * max_l w_l / t_l                               t_l: its seconds for layer l

    and a device of pool p at most T * pace_p, the best of a single replica of any degree and share:

      pace = max share * (max_l w_l / t_l) / tensor

    so that whatever is still undecided, T >= batch * sum w / (rates of the groups + paces of what is left).

    Attributes:
      weights: of the layers; `total` is their sum.
    """

    def __init__(self, judge: Judge):
        self.judge = judge
        self.problem = judge.problem
        self._rates: dict[Group, float] = {}
        self._layers: dict[Group, float] = {}
        self._chains: dict[int, float] = {}
        self._single = [
            (part, group)
            for pool in range(len(self.problem.pools))
            for part in single_parts(self.problem, pool)
            if judge.known(group := Group((part,)))
        ]
        self.weights = self._layer_weights()
        self.total = sum(self.weights)

    def _layer_weights(self) -> list[float]:
        layers = self.problem.num_layers
        rows = [[b - a for a, b in itertools.pairwise(self.judge.works(g)[0])] for _, g in self._single]
        if not rows:
            return [1.0] * layers
        # Layers alike on all parts are one column.
        columns = list(zip(*rows))
        sorts = list(dict.fromkeys(columns))
        sort, count = [sorts.index(c) for c in columns], [columns.count(c) for c in sorts]
        table = [list(r) for r in zip(*sorts)]
        totals = [sum(n * t for n, t in zip(count, r)) for r in table]
        best: dict[int, tuple[float, int]] = {}
        for i, (part, _) in enumerate(self._single):
            pace = part.share / part.tensor / max(1e-300, totals[i])
            best[part.pool] = max(best.get(part.pool, (0.0, 0)), (pace, i))
        shapes = [[t / max(1e-300, total) for t in r] for r, total in zip(table, totals)]
        tried = [list(map(min, zip(*shapes))), *(shapes[i] for _, i in best.values())]

        def bound(weights: list[float]) -> float:
            paces: dict[int, float] = {}
            for (part, _), times in zip(self._single, table):
                most = max(w / max(t, 1e-12) for w, t in zip(weights, times))
                paces[part.pool] = max(paces.get(part.pool, 0.0), most * part.share / part.tensor)
            speed = sum(self.problem.pools[p].devices * pace for p, pace in paces.items())
            return sum(n * w for n, w in zip(count, weights)) / max(1e-300, speed)

        weights = max(tried, key=bound)
        return [weights[i] * layers for i in sort]

    def rate(self, group: Group) -> float:
        """Returns weighted examples per second at most."""
        found = self._rates.get(group)
        if found is None:
            weights = self.weights
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
        """Returns the seconds of the mean layer on the slowest part of a group."""
        found = self._layers.get(group)
        if found is None:
            slowest = max(work[-1] for work in self.judge.works(group))
            found = self._layers[group] = slowest / self.problem.num_layers
        return found

    def chain_s(self, share: int) -> float:
        """Returns the seconds of all layers, each on the part that does a microbatch of it quickest.

        Args:
          share: of the parts; 0 for any.
        """
        if share not in self._chains:
            rows = [
                [b - a for a, b in itertools.pairwise(self.judge.works(group)[0])]
                for part, group in self._single
                if share in (0, part.share)
            ]
            self._chains[share] = sum(map(min, zip(*rows))) if rows else INF
        return self._chains[share]

    @functools.cached_property
    def paces(self) -> dict[int, tuple[float, ...]]:
        """Returns the pace of one device of each pool, per share (0: over all shares)."""
        pools = range(len(self.problem.pools))
        shares: set[int] = {0}
        best: dict[tuple[int, int], float] = {}
        for part, group in self._single:
            pace = self.rate(group) / part.tensor
            for share in (0, part.share):
                shares.add(share)
                best[share, part.pool] = max(best.get((share, part.pool), 0.0), pace)
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
