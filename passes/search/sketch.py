"""About how fast a division of the batch can be, and with which stages: a relaxation solved in a moment.

Every pool is filled with stages of one sort, T seconds are given to each stage for a microbatch, and a stage
takes as many usual layers as T and its memory allow; where all layers are taken the step takes about
T * (M + stages - 1). The least of these over T and over the sorts is the sketch. It knows nothing of links,
of layers unlike the usual one, of stages with unlike replicas: those are the search's.
"""

from __future__ import annotations

import dataclasses
import itertools
import statistics

from hetjax.passes.search.judge import INF, Judge
from hetjax.passes.search.moves import Moves, with_options
from hetjax.passes.search.space import PLAIN, Group, Micro

# T is tried from the pace of all devices together upwards, in so many steps of so much.
_STEPS, _STEP = 22, 1.05
# Most stages of one pool: few large ones or many small ones.
_MOST_STAGES = (1, 2, 4, 8, 16, 1 << 30)


@dataclasses.dataclass(frozen=True, slots=True)
class Sketch:
    """A plan in rough strokes.

    Attributes:
      seconds: about what a step takes; infinite where no pools hold all layers.
      fillings: (devices of a stage, how many such stages), per pool in use.
    """

    seconds: float
    fillings: tuple[tuple[Group, int], ...]

    @property
    def stages(self) -> int:
        return sum(n for _, n in self.fillings)


@dataclasses.dataclass(frozen=True, slots=True)
class _Sort:
    """Stages of one sort: seconds and bytes of a usual layer, how many stages there may be."""

    group: Group
    layer_s: float
    state_bytes: float
    kept_bytes: float
    free_bytes: float
    count: int

    def layers(self, limit_s: float, in_flight: float) -> int:
        by_time = limit_s / self.layer_s
        by_memory = self.free_bytes / max(1.0, self.state_bytes + in_flight * self.kept_bytes)
        return int(min(by_time, by_memory) + 1e-9)


def make_sketch(judge: Judge, moves: Moves, micro: Micro, ideal_s: float, allowed) -> Sketch:
    """Returns the best sketch of a division.

    Args:
      judge: for times and bytes.
      moves: the groups there may be.
      micro: the division.
      ideal_s: seconds of a microbatch if all devices worked at their best.
      allowed: whether a group may be used.
    """
    problem, m = judge.problem, micro.num_microbatches
    sorts: dict[int, list[_Sort]] = {}
    for g in moves.groups(micro, (), False):
        if len(g.parts) == 1 and allowed(g):
            sorts.setdefault(g.parts[0].pool, []).extend(_sorts(judge, g, moves.counts((), g)))
    if not sorts:
        return Sketch(INF, ())
    first = next(iter(sorts.values()))[0]
    work = judge.works(first.group)[0]
    usual = statistics.median(b - a for a, b in itertools.pairwise(work))
    need = work[-1] / usual if usual > 0 else problem.num_layers
    best = Sketch(INF, ())
    for most in _MOST_STAGES:
        some = {p: [s for s in found if s.count <= most] or found[-1:] for p, found in sorts.items()}
        for step in range(_STEPS):
            limit_s = ideal_s * _STEP**step
            if limit_s * m >= best.seconds:
                break
            found = _filled(some, limit_s, need, m, min(most, problem.stage_limit // len(some) + 1))
            if found and limit_s * (m + sum(n for _, n in found) - 1) < best.seconds:
                stages = sum(n for _, n in found)
                if stages <= problem.stage_limit:
                    best = Sketch(limit_s * (m + stages - 1), found)
    return best


def _sorts(judge: Judge, group: Group, count: int) -> list[_Sort]:
    problem = judge.problem
    layers = problem.num_layers
    choices = dict.fromkeys(with_options(problem, group, o) for o in (PLAIN, *problem.options))
    out = []
    for g in choices:
        if not judge.known(g):
            continue
        seconds = max(statistics.median(b - a for a, b in itertools.pairwise(w)) for w in judge.works(g))
        state = kept = 0.0
        free = INF
        for (low, room), (high, _) in zip(judge.rooms(g, 1), judge.rooms(g, 2)):
            kept = max(kept, (high[-1] - low[-1]) / layers)
            state = max(state, (2 * low[-1] - high[-1]) / layers)
            free = min(free, room)
        if seconds > 0:
            out.append(_Sort(group, seconds, max(0.0, state), max(0.0, kept), free, count))
    return out


def _filled(
    sorts: dict[int, list[_Sort]], limit_s: float, need: float, m: int, most: int
) -> tuple[tuple[Group, int], ...]:
    """Returns the stages that take all layers within a limit, those that take most first; () where none do."""
    held = min(m, max(1.0, most * len(sorts) / 2))
    takes = []
    for found in sorts.values():
        layers = [(s.count * n, -s.count, n, s) for s in found if (n := s.layers(limit_s, held)) > 0]
        if layers:
            takes.append(max(layers, key=lambda x: x[:2]))
    out = []
    for _, _, layers, sort in sorted(takes, key=lambda x: -x[2] / x[3].group.devices):
        count = min(sort.count, -int(-need // layers)) if need > 0 else 0
        if count > 0:
            out.append((sort.group, count))
            need -= count * layers
    return tuple(out) if need <= 0 else ()
