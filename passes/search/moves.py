"""The legal moves: how a plan is put together, decision by decision.

    start        how the batch is divided                        -> micro
    micro        the devices of the next stage, or no more       -> group, or structure
    group        how many stages in a row have such devices      -> micro
    structure    what the stages trade memory and time with      -> outlined
    outlined     the layers at which the stages meet             -> a whole plan

Every legal plan of a small problem can be reached on one path (up to pools that may change places). On
large ones three things are thinned out, and reached by local refinement instead: how many replicas, and which
shares, a mixed stage has in which pool (beyond `FINE` examples), options other than recomputation that
differ from stage to stage, and edges far from the
balanced ones.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence

from hetjax.passes.search.space import PLAIN, SHARDINGS, Group, Micro, Options, Part, Problem, fits

# Up to so many replicas every way to divide them between two pools is a move of its own.
FINE = 8
# Up to so many plans that differ in their options, or in their edges, only, each is a move of its own.
MOST_OPTIONS = 64
MOST_EDGES = 128
# After so many sorts of replicas that no group can be made of, drawing gives up.
_DRAWS = 20


Groups = tuple[Group, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class State:
    """What is decided so far.

    Attributes:
      micro: how the batch is divided, or None.
      groups: of the stages decided.
      pending: the group whose number of stages is to be decided next, or None.
      finished: whether there are no more stages.
      optioned: whether the groups have their final options.
      edges: the layers at which the stages meet, or None.
    """

    micro: Micro | None = None
    groups: tuple[Group, ...] = ()
    pending: Group | None = None
    finished: bool = False
    optioned: bool = False
    edges: tuple[int, ...] | None = None


ROOT = State()


def divisors(n: int) -> list[int]:
    """Returns the divisors of a number, ascending."""
    low = [d for d in range(1, math.isqrt(n) + 1) if n % d == 0]
    return sorted({*low, *(n // d for d in low)})


def micros(problem: Problem) -> list[Micro]:
    """Returns the ways to divide the batch exactly."""
    found = _micros(problem)
    return [m for m in found if m.num_microbatches in problem.counts] if problem.counts else found


def _micros(problem: Problem) -> list[Micro]:
    kinds = {p.kind for p in problem.pools}
    shares: set[int] = set()
    free = False
    for kind in kinds:
        for tensor in problem.table.tensors(kind):
            found = problem.table.shares(kind, tensor)
            free |= found is None
            shares.update(found or ())
    out = []
    if problem.alike:
        options = divisors(problem.batch) if free else sorted(shares)
        for share in options:
            for replicas in divisors(problem.batch):
                if replicas <= problem.device_limit and problem.batch % (share * replicas) == 0:
                    m = problem.batch // (share * replicas)
                    out.append(Micro(m, share * replicas, replicas))
        return out
    most = problem.batch if free else max(shares, default=0) * problem.device_limit
    return [
        Micro(m, problem.batch // m) for m in divisors(problem.batch) if problem.batch // m <= most
    ]


class Moves:
    """The moves of one problem; what was made once is kept.

    Args:
      problem: the problem.
      known: whether there are numbers for a group.
      apart: whether two pools are not to share a stage of more than `FINE` examples.
    """

    def __init__(
        self, problem: Problem, known: Callable[[Group], bool], apart: Callable[[int, int], bool] | None = None
    ):
        self.problem = problem
        self._known = known
        self._apart = apart
        self._left: dict[tuple[Group, ...], tuple[int, ...]] = {(): self._unused(())}
        self._most: dict[tuple[tuple[Group, ...], Group], int] = {}
        self._by_left: dict[tuple[Micro, tuple[int, ...], bool], tuple[Group, ...]] = {}
        self._seconds: dict[tuple[int, int, int], float] = {}
        self._optioned: dict[Group, tuple[Group, ...]] = {}
        self.micros = micros(problem)

    def left(self, groups: tuple[Group, ...]) -> tuple[int, ...]:
        """Returns how many devices of each pool may still be used."""
        found = self._left.get(groups)
        if found is None:
            found = self._left[groups] = self._unused(groups)
        return found

    def _unused(self, groups: Sequence[Group]) -> tuple[int, ...]:
        left = [p.devices for p in self.problem.pools]
        spare = self.problem.device_limit
        for group in groups:
            spare -= group.devices
            for p in group.parts:
                left[p.pool] -= p.tensor * p.replicas
        return tuple([min(n, spare) for n in left])

    # Groups.

    def groups(self, micro: Micro, used: tuple[Group, ...], mixed: bool) -> tuple[Group, ...]:
        """Returns the groups that the next stage may have.

        Args:
          micro: how the batch is divided.
          used: the groups decided.
          mixed: those with unlike replicas; else the others.
        """
        if mixed and not self.problem.mixed:
            return ()
        left = self.left(used)
        key = (micro, left, mixed)
        found = self._by_left.get(key)
        if found is None:
            room = self._room(left)
            made = self._mixed(micro, room) if mixed else self._pure(micro, room)
            found = self._by_left[key] = tuple(dict.fromkeys(g for g in made if self._known(g)))
        if self.problem.stage_pools:
            found = tuple(g for g in found if self.problem.allows(len(used), g))
        if self._even:
            return found
        return tuple(g for g in found if self._room_for(used, g))

    def draw(self, rng: random.Random, micro: Micro, used: tuple[Group, ...], mixed: bool) -> Group | None:
        """Returns one of `groups` at random, or None: first the sorts of replicas, then one of the groups of these.

        Where hundreds of devices make thousands of groups, this takes a hundredth of the time of their list.

        Args:
          rng: draws.
          micro, used, mixed: as for `groups`.
        """
        room, kinds = self._room(self.left(used)), [p.kind for p in self.problem.pools]
        sorts = sorted(room)
        if not sorts or (mixed and not self.problem.mixed):
            return None
        for _ in range(_DRAWS):
            a, b = rng.choice(sorts), rng.choice(sorts)
            if mixed:
                made = self._mixed(micro, {x: room[x] for x in sorted({a, b})})
            else:
                alike = {x: n for x, n in room.items() if x[1] == a[1] and kinds[x[0]] == kinds[a[0]]}
                made = (g for g in self._pure(micro, alike) if any(p.pool == a[0] for p in g.parts))
            legal = [
                g for g in made
                if self._known(g) and self.problem.allows(len(used), g) and (self._even or self._room_for(used, g))
            ]  # fmt: skip
            if legal:
                return rng.choice(legal)
        return None

    @functools.cached_property
    def _even(self) -> bool:
        """Returns whether nodes and degrees are powers of two, so that what fits by number fits."""
        pools = self.problem.pools
        return all(
            _power(p.per_node) and all(map(_power, self.problem.table.tensors(p.kind))) for p in pools
        )

    def _room_for(self, used: Sequence[Group], group: Group) -> bool:
        wanted: dict[int, list[tuple[int, int]]] = {}
        for g in (*used, group):
            for p in g.parts:
                wanted.setdefault(p.pool, []).append((p.tensor, p.replicas))
        return all(
            fits(self.problem.pools[p.pool], wanted[p.pool]) for p in group.parts
        )

    def _room(self, left: Sequence[int]) -> dict[tuple[int, int], int]:
        """Returns how many replicas can still be placed, by pool and tensor degree."""
        room = {
            (i, t): self._replicas(i, t, n)
            for i, n in enumerate(left)
            if n > 0
            for t in self.problem.table.tensors(self.problem.pools[i].kind)
        }
        return {key: n for key, n in room.items() if n > 0}

    def _pure(self, micro: Micro, room: Mapping[tuple[int, int], int]) -> Iterator[Group]:
        for (pool, tensor), n in room.items():
            for replicas, share in self._splits(micro, pool, tensor, n):
                yield Group((Part(pool, tensor, replicas, share),))
        if self.problem.mixed:
            yield from self._chains(micro, room)

    def _mixed(self, micro: Micro, room: Mapping[tuple[int, int], int]) -> Iterator[Group]:
        kinds = [p.kind for p in self.problem.pools]
        for (a, n), (b, k) in itertools.combinations(sorted(room.items()), 2):
            if self._apart is not None and micro.examples > FINE and self._apart(a[0], b[0]):
                continue
            # Like replicas in two pools are a chain, unless there are few enough to try every number.
            if (kinds[a[0]], a[1]) != (kinds[b[0]], b[1]) or micro.examples <= FINE:
                for group in self._pairs(micro, a, n, b, k):
                    # Two sorts in one pool take from the same devices.
                    if a[0] != b[0] or group.devices <= max(n * a[1], k * b[1]):
                        yield group

    def _replicas(self, pool: int, tensor: int, left: int) -> int:
        per_node = self.problem.pools[pool].per_node
        if tensor <= per_node and per_node % tensor:
            return min(left // tensor, self.problem.pools[pool].nodes * (per_node // tensor))
        return left // tensor

    def _shares(self, pool: int, tensor: int) -> tuple[int, ...] | None:
        return self.problem.table.shares(self.problem.pools[pool].kind, tensor)

    def _splits(self, micro: Micro, pool: int, tensor: int, room: int) -> Iterator[tuple[int, int]]:
        """Yields (replicas, share) of a stage in one pool."""
        shares = self._shares(pool, tensor)
        if micro.replicas:
            share = micro.examples // micro.replicas
            if micro.replicas <= room and (shares is None or share in shares):
                yield micro.replicas, share
            return
        for replicas in divisors(micro.examples):
            share = micro.examples // replicas
            if replicas <= room and (shares is None or share in shares):
                yield replicas, share

    def _chains(self, micro: Micro, room: Mapping[tuple[int, int], int]) -> Iterator[Group]:
        """Yields stages of one kind and degree that fill one pool after another, nearest first."""
        kinds: dict[tuple[str, int], list[int]] = {}
        for pool, tensor in room:
            kinds.setdefault((self.problem.pools[pool].kind, tensor), []).append(pool)
        for (_, tensor), pools in kinds.items():
            if len(pools) < 2:
                continue
            for first in pools:
                order = sorted(pools, key=lambda p: (p != first, -self._nearness(first, p), p))
                counts = [micro.replicas] if micro.replicas else divisors(micro.examples)
                for replicas in counts:
                    share = micro.examples // replicas
                    parts, missing = [], replicas
                    for pool in order:
                        shares = self._shares(pool, tensor)
                        n = min(missing, room[pool, tensor])
                        if n and (shares is None or share in shares):
                            parts.append(Part(pool, tensor, n, share))
                            missing -= n
                    if not missing and len(parts) > 1:
                        yield Group(tuple(sorted(parts, key=lambda p: p.pool)))

    def _nearness(self, a: int, b: int) -> float:
        return self.problem.link(a, b).bandwidth_bytes_s if a != b else math.inf

    def _pairs(
        self, micro: Micro, a: tuple[int, int], room_a: int, b: tuple[int, int], room_b: int
    ) -> Iterator[Group]:
        """Yields stages with replicas of two sorts."""
        if micro.replicas:
            share = micro.examples // micro.replicas
            for part in (a, b):
                shares = self._shares(*part)
                if shares is not None and share not in shares:
                    return
            low, high = max(1, micro.replicas - room_b), min(room_a, micro.replicas - 1)
            for n in _counts(low, high, micro.replicas):
                yield Group((Part(*a, n, share), Part(*b, micro.replicas - n, share)))
            return
        for share_a in self._some_shares(micro, *a):
            for share_b in self._beside(micro, a, share_a, b):
                most = min(room_a, (micro.examples - share_b) // share_a)
                for n in _counts(1, most, micro.examples // share_a):
                    rest = micro.examples - n * share_a
                    if rest % share_b == 0 and 0 < rest // share_b <= room_b:
                        yield Group((Part(*a, n, share_a), Part(*b, rest // share_b, share_b)))

    def _beside(self, micro: Micro, a: tuple[int, int], share_a: int, b: tuple[int, int]) -> list[int]:
        """Returns the shares of replicas beside others; of many, those two that take about as long."""
        shares = self._some_shares(micro, *b)
        if micro.examples <= FINE or len(shares) <= 2:
            return shares
        wanted = self._layer_s(*a, share_a)
        return sorted(shares, key=lambda s: abs(math.log((self._layer_s(*b, s) or 1e9) / (wanted or 1e9))))[:2]

    def _layer_s(self, pool: int, tensor: int, share: int) -> float:
        """Returns the seconds of all layers of one replica, 0 where there are no numbers."""
        key = (pool, tensor, share)
        if key not in self._seconds:
            times = self.problem.table.times(self.problem.pools[pool].kind, tensor, share)
            self._seconds[key] = sum(times.forward_s) + sum(times.backward_s) if times else 0.0
        return self._seconds[key]

    def _some_shares(self, micro: Micro, pool: int, tensor: int) -> list[int]:
        shares = self._shares(pool, tensor)
        if shares is None:
            shares = range(1, micro.examples) if micro.examples <= FINE else (
                1 << i for i in range(micro.examples.bit_length())
            )
        return [s for s in shares if s < micro.examples]

    def counts(self, used: tuple[Group, ...], group: Group) -> int:
        """Returns the most stages in a row that may have such devices."""
        key = (used, group)
        if key not in self._most:
            left = self.left(used)
            most = self.problem.stage_limit - len(used)
            spare = self.problem.device_limit - sum([g.devices for g in used])
            wanted: dict[int, int] = {}
            for p in group.parts:  # two parts may lie in one pool
                wanted[p.pool] = wanted.get(p.pool, 0) + p.devices
            most = min([most, spare // group.devices, *(left[i] // n for i, n in wanted.items())])
            while most > 1 and not self._even and not self._room_for([*used, *[group] * (most - 1)], group):
                most -= 1
            if self.problem.stage_pools:
                allowed = (self.problem.allows(len(used) + n, group) for n in range(most))
                most = next((n for n, ok in enumerate(allowed) if not ok), most)
            self._most[key] = most
        return self._most[key]

    # Options.

    def options(self, groups: Groups, most: int = 0) -> list[Groups]:
        """Returns the groups with every choice of options, each taking of it what makes sense for its devices.

        Args:
          groups: plain ones.
          most: where there would be more than so many, the stages make one choice of all but recomputation; where
            these are still more, like groups recompute alike, and where these are, all do. 0 for no limit.
        """
        choices = [self._choices(g) for g in groups]
        if not most or math.prod(map(len, choices)) <= most:
            return [tuple(outfit) for outfit in itertools.product(*choices)]
        rests = list(dict.fromkeys(dataclasses.replace(o, recompute=False) for o in (PLAIN, *self.problem.options)))
        again = self._again
        kinds = list(range(len(groups)))
        if len(rests) * len(again) ** len(groups) > most:
            names = list(dict.fromkeys(groups))
            kinds = [names.index(g) for g in groups]
        if len(rests) * len(again) ** len(set(kinds)) > most:
            kinds = [0] * len(groups)
        found: dict[Groups, None] = {}
        for rest in rests:
            for recompute in itertools.product(again, repeat=len(set(kinds))):
                found[tuple(
                    with_options(self.problem, g, dataclasses.replace(rest, recompute=recompute[k]))
                    for g, k in zip(groups, kinds)
                )] = None  # fmt: skip
        return list(found)

    def num_options(self, groups: Groups) -> int:
        """Returns how many choices of options there are, without a limit."""
        return math.prod(len(self._choices(g)) for g in groups)

    @functools.cached_property
    def _again(self) -> tuple[bool, ...]:
        return (False, True) if any(o.recompute for o in self.problem.options) else (False,)

    def _choices(self, group: Group) -> tuple[Group, ...]:
        """Returns one group with every choice of options that differs for it."""
        found = self._optioned.get(group)
        if found is None:
            found = self._optioned[group] = tuple(dict.fromkeys(
                with_options(self.problem, group, dataclasses.replace(o, recompute=again))
                for o in (PLAIN, *self.problem.options)
                for again in self._again
            ))  # fmt: skip
        return found

    # Edges.

    def edges(self, stages: int) -> Iterator[tuple[int, ...]]:
        """Yields every way to cut the layers."""
        num = self.problem.num_layers
        for inner in itertools.combinations(range(1, num), stages - 1):
            yield (0, *inner, num)

    def num_edges(self, stages: int) -> int:
        """Returns how many ways there are."""
        return math.comb(self.problem.num_layers - 1, stages - 1)


def with_options(problem: Problem, group: Group, options: Options) -> Group:
    """Returns a group with those of the options that it has something to split over for."""
    if options == PLAIN:
        return group.with_options(PLAIN)
    replicas = group.replicas
    experts = options.experts
    if experts > 1 and (problem.table.experts % experts or replicas % experts):
        experts = 1
    return group.with_options(
        Options(
            options.recompute,
            options.sharding if replicas > 1 else "none",
            options.sequence and max(p.tensor for p in group.parts) > 1,
            experts,
            options.exchange if problem.compressed and replicas > 1 else "dense",
        )
    )


def canonical(twins: Sequence[int], state: State) -> State:
    """Returns the state with pools that may change places numbered in the order of their first use."""
    if all(t == i for i, t in enumerate(twins)):
        return state
    rename: dict[int, int] = {}
    free: dict[int, list[int]] = {}
    for i, t in enumerate(twins):
        free.setdefault(t, []).append(i)

    def name(pool: int) -> int:
        if pool not in rename:
            rename[pool] = free[twins[pool]].pop(0)
        return rename[pool]

    def renamed(group: Group) -> Group:
        parts = [dataclasses.replace(p, pool=name(p.pool)) for p in group.parts]
        return Group(tuple(sorted(parts, key=lambda p: (p.pool, p.tensor))), group.options)

    groups = tuple(renamed(g) for g in state.groups)
    pending = renamed(state.pending) if state.pending is not None else None
    return dataclasses.replace(state, groups=groups, pending=pending)


def dearness(options: Options) -> tuple[float, ...]:
    """Returns a rank: about how much more time a stage with these options takes."""
    return (
        options.exchange != "dense", SHARDINGS.index(options.sharding) == 2, options.recompute,
        SHARDINGS.index(options.sharding), options.experts, options.sequence,
    )  # fmt: skip


def _counts(low: int, high: int, whole: int) -> list[int]:
    """Returns how many replicas one of two sorts may have: all numbers, or the ends and quarters."""
    if high < low:
        return []
    if whole <= FINE:
        return list(range(low, high + 1))
    marks = {low, high, *(whole * q // 4 for q in (1, 2, 3))}
    return sorted(n for n in marks if low <= n <= high)


def _power(n: int) -> bool:
    return n & (n - 1) == 0
