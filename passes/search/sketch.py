"""About how fast a division of the batch can be, and with which stages: a relaxation solved in a moment.

Every pool is filled with stages of one sort, T seconds are given to each stage for a microbatch, and a stage
takes as many mean layers as T and its memory allow; where all layers are taken the step takes about
T * (M + stages - 1). The least of these over T and over the sorts is the sketch. It knows nothing of links,
of layers unlike each other, of stages with unlike replicas: those are the search's.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

from hetjax.passes.search.judge import INF, Judge
from hetjax.passes.search.moves import Moves, dearness, with_options
from hetjax.passes.search.space import PLAIN, Group, Micro

# T is tried from the pace of all devices together upwards, in so many steps of so much.
_STEPS, _STEP = 22, 1.05
# Of the stages a pool may have, so many that would take most are asked for their memory.
_MOST_SORTS = 8
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


class _Sort:
    """Stages of one sort: how many there may be, and how many mean layers each can take."""

    def __init__(self, judge: Judge, group: Group, count: int):
        self.judge, self.group, self.count = judge, group, count
        self.layer_s = _mean_layer_s(judge, group)
        self._ways: list[tuple[float, float, float, float]] = []
        options = sorted((PLAIN, *judge.problem.options), key=dearness)
        self._untried = list(dict.fromkeys(with_options(judge.problem, group, o) for o in options))

    def by_time(self, limit_s: float) -> int:
        """Returns how many layers a stage takes if it has the memory."""
        return int(limit_s / self.layer_s + 1e-9)

    def layers(self, limit_s: float, in_flight: float) -> int:
        """Returns how many layers a stage takes with the best of the options there are, cheap ones first."""
        enough, most, at = self.by_time(limit_s), 0, 0
        while most < enough:
            if at == len(self._ways) and not self._look():
                break
            seconds, state, kept, free = self._ways[at]
            most = max(most, int(min(limit_s / seconds, free / max(1.0, state + in_flight * kept)) + 1e-9))
            at += 1
        return most

    def _look(self) -> bool:
        """Notes seconds, bytes always there, bytes of a microbatch of a mean layer, and the bytes there are."""
        judge = self.judge
        layers = judge.problem.num_layers
        while self._untried:
            g = self._untried.pop(0)
            if judge.known(g):
                (low, free), (high, _) = judge.rooms(g, 1)[0], judge.rooms(g, 2)[0]
                kept = max(0.0, high[-1] - low[-1]) / layers
                self._ways.append((_mean_layer_s(judge, g), low[-1] / layers - kept, kept, free))
                return True
        return False


def _mean_layer_s(judge: Judge, group: Group) -> float:
    return max(1e-300, max(w[-1] for w in judge.works(group)) / judge.problem.num_layers)


def make_sketch(
    judge: Judge, moves: Moves, micro: Micro, ideal_s: float, allowed: Callable[[Group], bool], *, memory: bool
) -> Sketch:
    """Returns the best sketch of a division.

    Args:
      judge: for times and bytes.
      moves: the groups there may be.
      micro: the division.
      ideal_s: seconds of a microbatch if all devices worked at their best.
      allowed: whether a group may be used.
      memory: whether stages take no more than they can hold, which takes longer to find out.
    """
    problem, m = judge.problem, micro.num_microbatches
    sorts: dict[int, list[_Sort]] = {}
    for g in moves.groups(micro, (), False):
        if len(g.parts) == 1 and allowed(g) and (count := moves.counts((), g)):
            sorts.setdefault(g.parts[0].pool, []).append(_Sort(judge, g, count))
    best = Sketch(INF, ())
    for most in _MOST_STAGES if sorts else ():
        some = [[s for s in found if s.count <= most] for found in sorts.values()]
        some = [found for found in some if found]
        for step in range(_STEPS if some else 0):
            limit_s = ideal_s * _STEP**step
            if limit_s * m >= best.seconds:
                break
            if sum(max(s.count * s.by_time(limit_s) for s in found) for found in some) < problem.num_layers:
                continue
            held = min(m, max(1.0, min(most * len(some), problem.stage_limit) / 2)) if memory else 0.0
            found = _filled(some, limit_s, problem.num_layers, held)
            stages = sum(n for _, n in found)
            if 0 < stages <= problem.stage_limit and limit_s * (m + stages - 1) < best.seconds:
                best = Sketch(limit_s * (m + stages - 1), found)
    return best


def _filled(
    sorts: Sequence[Sequence[_Sort]], limit_s: float, need: int, held: float
) -> tuple[tuple[Group, int], ...]:
    """Returns the stages that take all layers within a limit, those that take most first; () where none do."""
    takes = []
    for found in sorts:
        best = (0, 0, 0)
        chosen = None
        for s in sorted(found, key=lambda s: -s.count * s.by_time(limit_s))[:_MOST_SORTS]:
            if s.count * s.by_time(limit_s) < best[0]:
                break  # memory makes none better
            n = s.layers(limit_s, held) if held else s.by_time(limit_s)
            if (s.count * n, -s.count, n) > best and n:
                best, chosen = (s.count * n, -s.count, n), s
        if chosen is not None:
            takes.append((best[2], chosen))
    out = []
    for layers, sort in sorted(takes, key=lambda x: -x[0] / x[1].group.devices):
        count = min(sort.count, -int(-need // layers)) if need > 0 else 0
        if count > 0:
            out.append((sort.group, count))
            need -= count * layers
    return tuple(out) if need <= 0 else ()
