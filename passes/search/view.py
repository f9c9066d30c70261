"""What principles and tree know of a problem."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

from hetjax.passes.search.evaluator import Cutter, Evaluator
from hetjax.passes.search.forest_bonus import PlanForest
from hetjax.passes.search.judge import INF, pipeline_s
from hetjax.passes.search.moves import Moves, State
from hetjax.passes.search.principles import SLOW, Principle, active
from hetjax.passes.search.rates import Rates
from hetjax.passes.search.sketch import Sketch, make_sketch
from hetjax.passes.search.space import Group, Micro


@dataclasses.dataclass(frozen=True, slots=True)
class Facts:
    """What principles ask of a group.

    Attributes:
      kinds, sites: names.
      tensors: degrees, per part.
      memory: bytes of the device that has least.
    """

    kinds: frozenset[str]
    sites: frozenset[str]
    tensors: tuple[int, ...]
    memory: float


class View:
    """A problem, its judge and the principles that are switched on; what is asked often is kept.

    Args:
      evaluator: judges, and knows the best plan.
      without: names of principles switched off.
      like: a view of the same problem, judge and principles, whose facts are used.
    """

    def __init__(self, evaluator: Evaluator, without: Sequence[str] = (), *, like: View | None = None):
        self.evaluator = evaluator
        self.judge = evaluator.judge
        self.problem = evaluator.problem
        self.rates = like.rates if like is not None else Rates(self.judge)
        self.forest: PlanForest | None = None  # where the search learns one
        self.principles = active(without)
        names = {p.name for p in self.principles}
        keep_apart = "no-dense-over-slow" in names and not self.problem.compressed
        self.moves = Moves(self.problem, self.judge.known, self.is_slow if keep_apart else None)
        self.prunes_by_bound = "bounds" in names
        self.cutter = Cutter(evaluator, by_speed="work-by-speed" in names)
        self._by_decision: dict[str, list[Principle]] = {}
        for p in self.principles:
            if p.weigh is not None:
                self._by_decision.setdefault(p.decides, []).append(p)
        self._bandwidth: dict[tuple[int, int], float] = {}
        self._fastest: dict[int, float] = {}
        self._slow: dict[tuple[frozenset[str], frozenset[str]], bool] = {}
        self._efficiency: dict[Group, float] = {}
        self._chains: dict[Micro, float] = {}
        self._facts: dict[Group, Facts] = {}
        self._sketches: dict[tuple[Micro, bool], Sketch] = {}
        self._weights: dict[Group, tuple[float, str]] = {}
        if like is not None:
            self.moves, self._sketches, self._weights = like.moves, like._sketches, like._weights
            self.cutter.share(like.cutter)

    def weigh(self, decides: str, *decision: object) -> tuple[float, str]:
        """Returns a decision's weight, and the reason where it is 0."""
        weight = 1.0
        for p in self._by_decision.get(decides, ()):
            assert p.weigh is not None
            weight *= p.weigh(self, *decision)
            if not weight:
                return 0.0, f"{p.name}: {p.reason}"
        return weight, ""

    def weigh_group(self, group: Group) -> tuple[float, str]:
        """Returns the weight of a stage's devices by themselves, and the reason where it is 0."""
        found = self._weights.get(group)
        if found is None:
            found = self._weights[group] = self.weigh("group", group)
        return found

    def weigh_next(self, state: State, group: Group) -> tuple[float, str]:
        """Returns the weight of a stage's devices after the stages decided."""
        return self.weigh("next", state, group) if state.groups else (1.0, "")

    # Facts that principles use.

    def facts(self, group: Group) -> Facts:
        found = self._facts.get(group)
        if found is None:
            pools = [self.problem.pools[p.pool] for p in group.parts]
            kinds = frozenset(p.kind for p in pools)
            memory = min(self.problem.cluster.kind(k).memory_bytes for k in kinds)
            found = self._facts[group] = Facts(
                kinds, frozenset(p.site for p in pools), tuple(p.tensor for p in group.parts), memory
            )
        return found

    def bandwidth(self, a: int, b: int) -> float:
        """Returns bytes/s between nodes of two pools."""
        key = (a, b)
        if key not in self._bandwidth:
            link = self.problem.link(a, b)
            self._bandwidth[key] = link.bandwidth_bytes_s
        return self._bandwidth[key]

    def inner_bandwidth(self, pool: int) -> float:
        """Returns bytes/s between devices of a node."""
        head = self.problem.heads[pool][0]
        return self.problem.cluster.link(head, head).bandwidth_bytes_s

    def fastest_from(self, pool: int) -> float:
        """Returns bytes/s of the fastest link from a pool to another."""
        if pool not in self._fastest:
            others = (i for i in range(len(self.problem.pools)) if i != pool)
            self._fastest[pool] = max((self.bandwidth(pool, i) for i in others), default=1.0)
        return self._fastest[pool]

    def is_slow(self, a: int, b: int) -> bool:
        """Returns whether the link between two pools is slow beside those inside them."""
        if self.problem.pools[a].site == self.problem.pools[b].site:
            return False
        inner = [self.bandwidth(p, p) for p in (a, b) if self.problem.pools[p].nodes > 1]
        if not inner:
            return False
        return self.bandwidth(a, b) < SLOW * min(inner)

    def spans_slow(self, group: Group) -> bool:
        """Returns whether the replicas of a group are joined by a slow link."""
        if len(group.parts) == 1:
            return False
        pools = [p.pool for p in group.parts]
        return any(self.is_slow(a, b) for a in pools for b in pools if a < b)

    def sites_slow(self, first: frozenset[str], second: frozenset[str]) -> bool:
        """Returns whether any two pools of two sets of sites are joined by a slow link."""
        key = (first, second)
        if key not in self._slow:
            pools = self.problem.pools
            ours = [i for i, p in enumerate(pools) if p.site in first]
            theirs = [i for i, p in enumerate(pools) if p.site in second]
            self._slow[key] = any(self.is_slow(a, b) for a in ours for b in theirs)
        return self._slow[key]

    def efficiency(self, group: Group) -> float:
        """Returns a group's best speed over what its devices could do at best, apart."""
        found = self._efficiency.get(group)
        if found is None:
            paces = self.rates.paces[0]
            best = sum(p.devices * paces[p.pool] for p in group.parts)
            found = self._efficiency[group] = self.rates.rate(group) / best if best > 0 else 0.0
        return found

    @functools.cached_property
    def speed(self) -> float:
        """Returns weighted examples per second that all devices could do at best, apart."""
        paces, limit = self.rates.paces[0], self.problem.device_limit
        total = 0.0
        for pace, pool in sorted(zip(paces, self.problem.pools), key=lambda x: -x[0]):
            n = min(limit, pool.devices)
            total, limit = total + n * pace, limit - n
        return total

    def likely_stages(self, micro: Micro) -> int:
        """Returns about how many stages a plan with this division may have."""
        if micro.replicas:
            return max(1, min(self.problem.stage_limit, self.problem.device_limit // (2 * micro.replicas)))
        return max(1, min(self.problem.stage_limit, self.sketch(micro).stages))

    def sketch(self, micro: Micro, memory: bool = False) -> Sketch:
        """Returns about how fast a division can be, and with which stages; see `make_sketch`."""
        found = self._sketches.get((micro, memory))
        if found is None:
            ideal_s = micro.examples * self.rates.total / max(1e-300, self.speed)
            found = self._sketches[micro, memory] = make_sketch(
                self.judge, self.moves, micro, ideal_s, lambda g: self.weigh_group(g)[0] > 0, memory=memory
            )
        return found

    @functools.cached_property
    def quickest_sketch_s(self) -> float:
        return min((self.sketch(m).seconds for m in self.moves.micros), default=INF)

    def bound(self, state: State) -> float:
        """Returns a value that no plan with these decisions falls below."""
        if state.micro is None:
            return min((self.bound(State(m)) for m in self.moves.micros), default=INF)
        micro, groups = state.micro, state.groups
        m = micro.num_microbatches
        if state.finished:
            return self.cutter.bound(micro, groups)
        decided = (*groups, state.pending) if state.pending else groups
        period_s = self.rates.period_s(micro, decided, self.moves.left(decided))
        seconds = pipeline_s(self.judge, m, period_s, self._chain_s(micro)) + self.judge.floor_s(micro)
        return seconds * self.evaluator.least_factor(decided)

    def _chain_s(self, micro: Micro) -> float:
        """Returns what a microbatch takes at least from the first layer to the last and back."""
        if micro not in self._chains:
            share = micro.examples // micro.replicas if micro.replicas else 0
            self._chains[micro] = self.rates.chain_s(share)
        return self._chains[micro]

    def look(self, micro: Micro, groups: tuple[Group, ...], climb_below: float, before: float) -> float:
        """Returns the best value of the plans with these groups that are worth a look.

        Args:
          micro: how the batch is divided.
          groups: plain, or with options that are to be kept.
          climb_below: cuts are shifted where the value is below this.
          before: what must be beaten; where the bound says that no plan does, none is judged.
        """
        if self.prunes_by_bound:
            period_s = self.rates.period_s(micro, groups, ())
            bound = pipeline_s(self.judge, micro.num_microbatches, period_s, 0.0) * self.evaluator.factor(groups)
            if bound >= before:
                return bound
            bound = self.cutter.bound(micro, groups)
            if bound >= before:
                return bound
        best, m = INF, micro.num_microbatches
        for outfit, edges in self.cutter.plans(m, groups):
            value = self.evaluator.value(m, outfit, edges)
            if value < climb_below:
                _, value = self.cutter.climb(m, outfit, edges, value)
            best = min(best, value)
        if self.forest is not None:
            self.forest.observe(micro, groups, best)
        return best
