"""A lower bound on a step by a relaxation that keeps whole layers, tensor parallelism's sums, filling and memory.

Asked is whether a step of M microbatches of E examples may take T seconds. Devices have prices: one of pool p
costs its best pace (`Rates`), all that may be used cost B together. A stage does the layers [a, b) with parts
(pool, degree t, share e) whose shares add up to E, so that it costs at least E * min price * t / e over the parts
that can be in it. The least price of stages for all layers is found by dynamic programming from the last layer to
the first; where it is more than B, no step takes T or less.

A part can be in a stage that has less than R seconds of one microbatch behind it, of C on its whole way, where

  time     (M - 1) w + C - R <= T             w: its forward and backward of [a, b)
  memory   state + passing + k kept <= usable and k >= M (R + w) / (T - C + R + w), k a whole number

Proof. On its way a microbatch spends x_j >= w in every stage, of every part of it, and crosses every boundary twice.
Let R_s be the sum over stage s and those after it, crossings included; C = R_0. Nothing starts on s before the
forwards and crossings before it, after its last backward the backwards and crossings before it follow: together
C - R_s. Between lie M times x_s, so T >= C - R_s + M x_s: the first line, with R_s - x_s >= R. And every microbatch
holds its activations on s from its forward to its backward, for R_s at least; no more than k do so at once, hence
M R_s <= k (T - C + R_s): the second. R is kept from below: nothing of crossings, rounded down to a grid. It may be
raised at will, as a part may have more behind it than was counted, so a plan's true R is always among those tried.

C is unknown: its range is halved where a step might still take T, and each part is asked with its least C, whose
time and memory allow most.

Assumed of tables with numbers for any share: a share of more examples takes no less time, and no more per example;
what is kept grows with the examples.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator

import numpy as np

from hetjax.passes.search.judge import INF
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.space import Group, Micro, Options, Part
from hetjax.passes.search.view import View

# Seconds are told apart to this share of a stage's longest; the range of C is halved so often at most.
_GRID, _HALVINGS = 1 / 8, 3
# The bound is known to this share of itself, and looked for up to so many times the simple one.
_CLOSE, _FURTHEST = 0.004, 1.1
# Ways through more stages of the longest are not told apart.
_STAGES = 24
# Shares up to here are tried one by one, larger ones in classes so wide.
_SINGLY, _CLASS = 16, 1.1
_EPS = 1e-9
# Layers are taken for alike that differ by less.
_ROUNDING = 1e-8


@dataclasses.dataclass(frozen=True)
class _Kinds:
    """The kinds of parts there may be, one per column.

    Attributes:
      work, state, kept: running sums over layers (rows) of seconds and bytes, at least.
      passing: bytes per layer, at least.
      usable: bytes.
      price: of devices, per example.
      least, most: examples.
    """

    work: np.ndarray
    state: np.ndarray
    kept: np.ndarray
    passing: np.ndarray
    usable: np.ndarray
    price: np.ndarray
    least: np.ndarray
    most: np.ndarray


@dataclasses.dataclass(frozen=True)
class _Windows:
    """Parts that can do the layers from some layer on: end, seconds, price, most microbatches held."""

    end: np.ndarray
    work: np.ndarray
    price: np.ndarray
    held: np.ndarray


class Relaxation:
    """The relaxation of one problem under hetjax's own judge; see the module's text.

    Args:
      view: the problem.
      furthest_s: no more is looked for, nor than a tenth more than the simple bound.
    """

    def __init__(self, view: View, furthest_s: float = INF):
        assert isinstance(view.judge, OwnJudge)
        self.view, self.judge, self.problem = view, view.judge, view.problem
        self.rates = view.rates
        self.simple_s = view.problem.batch * view.rates.total / max(1e-300, view.speed)
        self.furthest_s = max(self.simple_s, min(furthest_s, _FURTHEST * self.simple_s))
        self._weights = np.concatenate([[0.0], np.cumsum(view.rates.weights)])
        self._windows: dict[Micro, list[_Windows | None]] = {}

    def bound_s(self) -> float:
        """Returns seconds that no step falls below: the simple bound if nothing more can be shown."""
        if self.simple_s <= 0 or self.simple_s == INF:
            return 0.0
        micros = sorted(self.view.moves.micros, key=lambda m: self.view.sketch(m).seconds)
        best = self.furthest_s
        for micro in micros:
            if self._rules_out(micro, best):
                continue
            low = self.simple_s
            while best - low > _CLOSE * low:
                middle = (low + best) / 2
                if self._rules_out(micro, middle):
                    low = middle
                else:
                    best = middle
            best = low
        return best * (1 - _ROUNDING)

    def _rules_out(self, micro: Micro, seconds: float) -> bool:
        """Returns whether no step with this division takes so many seconds or less."""
        if seconds <= self.simple_s * (1 + _EPS):
            return True
        windows = self._windows_of(micro)
        # No more stages, none longer than this.
        most_s = min(seconds, min(_STAGES, self.problem.stage_limit) * seconds / micro.num_microbatches)
        ranges = [(most_s, INF, 0)] if most_s < seconds else []
        ranges += [(most_s * i / 4, most_s * (i + 1) / 4, _HALVINGS) for i in range(4)]
        while ranges:
            low_s, high_s, halvings = ranges.pop()
            if self._priceless(micro, windows, seconds, low_s, high_s):
                continue
            if not halvings:
                return False
            middle_s = (low_s + high_s) / 2
            ranges += [(low_s, middle_s, halvings - 1), (middle_s, high_s, halvings - 1)]
        return True

    def _priceless(
        self, micro: Micro, windows: list[_Windows | None], seconds: float, low_s: float, high_s: float
    ) -> bool:
        """Returns whether all stages cost more than there is where C is in a range."""
        m, layers = micro.num_microbatches, self.problem.num_layers
        limit_s = seconds / m * (1 + _EPS)
        grid_s = _GRID * seconds / m
        last = int(min(low_s if high_s == INF else high_s, seconds) / grid_s)
        budget = self.view.speed * (1 + _EPS)
        ideal = self._weights * micro.examples * m / seconds
        # More than the least price of its layers no stage may cost beyond this.
        spare = budget - ideal[-1]
        # Of the layers from a on, by the seconds behind them: the least price; infinite left of the first.
        before = 1 + int(1 / _GRID) + 1
        least = np.full((layers + 1, before + last + 1), INF)
        least[layers, before:] = 0.0
        behind = np.arange(last + 1)
        for a in range(layers - 1, -1, -1):
            w = windows[a]
            if w is None:
                continue
            good = (w.work <= limit_s) & (w.price <= spare + ideal[w.end] - ideal[a])
            good &= least[w.end, -1] + w.price <= budget - ideal[a]
            if not good.any():
                continue
            end, work, price, held = w.end[good], w.work[good], w.price[good], w.held[good]
            steps = (work / grid_s).astype(np.int64)
            # R from which on the time is enough, and up to which (with w) the memory is.
            first = np.floor(((m - 1) * work - seconds + low_s) / grid_s * (1 - _EPS) - _EPS)
            room = held * (seconds - low_s) / np.maximum(1e-9, m - held)
            most = np.where(held >= min(m, _STAGES + 1), INF, room / grid_s * (1 + _EPS) + _EPS)
            source = before + behind[None, :] - steps[:, None]
            found = least[end[:, None], source] + price[:, None]
            bad = behind[None, :] < (first + steps)[:, None]
            bad |= behind[None, :] > most[:, None]
            found[bad] = INF
            row = found.min(axis=0)
            if high_s == INF:  # the last column stands for all beyond it
                beyond = np.where(last <= most, least[end, -1] + price, INF).min()
                row[-1] = min(row[-1], beyond)
            row = np.minimum.accumulate(row)
            row[row > budget - ideal[a]] = INF
            least[a, before:] = row
        return bool(least[0, -1] == INF)

    # Parts.

    def _windows_of(self, micro: Micro) -> list[_Windows | None]:
        found = self._windows.get(micro)
        if found is None:
            found = self._windows[micro] = list(self._make_windows(micro))
        return found

    def _make_windows(self, micro: Micro) -> Iterator[_Windows | None]:
        kinds, sorts = self._kinds_of(micro), self._sorts
        # What the other layers leave of the budget at least, were there the most time of all.
        ideal = self._weights * micro.examples * micro.num_microbatches / self.furthest_s
        left, examples = self.view.speed * (1 + _EPS) - ideal[-1], micro.examples
        if kinds is None:
            yield from [None] * self.problem.num_layers
            return
        layers, longest_s = self.problem.num_layers, self.furthest_s / micro.num_microbatches
        known: dict[tuple[int, ...], tuple[np.ndarray, np.ndarray, np.ndarray] | None] = {}
        for a in range(layers):
            ends, rows = [], []
            for b in range(a + 1, layers + 1):
                key = sorts[a:b]
                if key not in known:
                    known[key] = self._able(kinds, a, b, longest_s, (left + ideal[b] - ideal[a]) / examples)
                found = known[key]
                if found is None:
                    break  # no kind is quick enough, for more layers neither
                ends.append(np.full(len(found[0]), b))
                rows.append(found)
            if not ends:
                yield None
                continue
            work, price, held = map(np.concatenate, zip(*rows))
            yield _Windows(np.concatenate(ends), work, price * examples, held)

    @staticmethod
    def _able(kinds: _Kinds, a: int, b: int, longest_s: float, dearest: float):
        """Returns seconds, price and most held of the parts that can do the layers [a, b); the best of them only."""
        work = kinds.work[b] - kinds.work[a]
        quick = work <= longest_s
        if not quick.any():
            return None
        able = np.flatnonzero(quick & (kinds.price <= dearest))
        kept = kinds.kept[b, able] - kinds.kept[a, able]
        free = kinds.usable[able] - (kinds.state[b, able] - kinds.state[a, able])
        free -= kinds.passing[a:b, able].max(axis=0)
        held = np.zeros(len(work))
        held[able] = np.where(free >= 0, np.floor(free / np.maximum(kept, 1e-9) + 1e-6), 0.0)
        held = np.minimum(held, _STAGES + 1)
        able = able[held[able] >= 1]
        left = able[np.lexsort((-held[able], kinds.price[able], work[able]))]
        chosen: list[int] = []
        while len(left):  # the quickest of those left, which then makes others needless
            best = left[0]
            chosen.append(int(best))
            left = left[(kinds.price[left] < kinds.price[best]) | (held[left] > held[best])]
        return work[chosen], kinds.price[chosen], held[chosen]

    @functools.cached_property
    def _kinds(self) -> _Kinds | None:
        """Returns every kind of part that a stage of some division may have, whatever its options."""
        blocks: list[tuple] = []
        for pool in range(len(self.problem.pools)):
            kind = self.problem.pools[pool].kind
            for tensor in self.problem.table.tensors(kind):
                if tensor <= self.problem.pools[pool].devices:
                    for options in self._option_kinds(tensor):
                        blocks += self._blocks(pool, tensor, options)
        return _Kinds(*(np.concatenate(column, axis=-1) for column in zip(*blocks))) if blocks else None

    def _kinds_of(self, micro: Micro) -> _Kinds | None:
        """Returns those of one division."""
        kinds = self._kinds
        if kinds is None:
            return None
        able = kinds.least <= micro.examples
        if micro.replicas:
            share = micro.examples // micro.replicas
            able = (kinds.least <= share) & (share <= kinds.most)
        return _Kinds(*(getattr(kinds, field.name)[..., able] for field in dataclasses.fields(kinds)))

    @functools.cached_property
    def _sorts(self) -> tuple[int, ...]:
        """Returns a number per layer, the same for layers that are alike for all kinds."""
        kinds = self._kinds
        if kinds is None:
            return ()
        sums = (kinds.work, kinds.state, kinds.kept)
        rows = np.concatenate([*(np.diff(x, axis=0) for x in sums), kinds.passing], axis=1)
        rows = np.round(rows / np.maximum(1e-300, np.abs(rows).max(axis=0)), 9)
        known: dict[bytes, int] = {}
        return tuple(known.setdefault(row.tobytes(), len(known)) for row in rows)

    def _option_kinds(self, tensor: int) -> list[Options]:
        """Returns the options that change a stage's seconds, as far as the problem offers them."""
        offered = self.problem.options
        found = [Options(), *(Options(recompute=o.recompute, sequence=o.sequence and tensor > 1) for o in offered)]
        # Every stage recomputes or not, whatever else was chosen.
        again = {o.recompute for o in found}
        return list(dict.fromkeys(dataclasses.replace(o, recompute=r) for o in found for r in again))

    def _blocks(self, pool: int, tensor: int, options: Options) -> Iterator[tuple]:
        """Yields kinds of parts of one pool, degree and options, for every share or class of shares."""
        batch = self.problem.batch
        listed = self.problem.table.shares(self.problem.pools[pool].kind, tensor)
        if listed is not None:
            for share in listed:
                if share <= batch:
                    yield from self._block(pool, tensor, (share, share), options, [(share, share)])
            return
        low = 1
        while low <= batch:
            classes = list(_classes(low, min(2 * low - 1, batch)))
            yield from self._block(pool, tensor, (low, min(2 * low, batch)), options, classes)
            low *= 2

    def _block(
        self, pool: int, tensor: int, known: tuple[int, int], options: Options, classes: list[tuple[int, int]]
    ) -> Iterator[tuple]:
        """Yields the kinds with shares between two that are known, in classes, if these are known."""
        low, high = known
        t, above = (self._sums(pool, tensor, share, options) for share in known)
        if t is None or above is None:
            return
        least, most = np.array(classes, float).T
        alike = np.ones(len(least))
        yield (
            np.maximum(t[0], above[0] * (least / high)), self._state(tensor)[:, None] * alike,
            t[1] * (least / low), t[2] * alike, t[3] * alike, self.rates.paces[0][pool] * tensor / most, least, most,
        )  # fmt: skip

    def _sums(
        self, pool: int, tensor: int, share: int, options: Options
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray, float] | None:
        """Returns a part's seconds, kept and passing bytes as columns, and its usable bytes; None if unknown."""
        found = self.judge.tables(Group((Part(pool, tensor, 1, share),), options))
        if found is None:
            return None
        t = found[0]
        work, kept, passing = (np.array(column)[:, None] for column in (t.work, t.kept, t.passing))
        return work, kept, passing, t.usable

    def _state(self, tensor: int) -> np.ndarray:
        """Returns running sums over layers of the bytes that a device holds at least, however state is sharded."""
        table, options = self.problem.table, self.problem.options
        sizes = table.sizes(tensor)
        assert sizes is not None
        experts = max([1, *(o.experts for o in options)])
        mine = [p - e + e / experts for p, e in zip(sizes.parameters, sizes.expert_parameters)]
        parameter, gradient, optimizer = table.state_bytes
        each = parameter + gradient + optimizer
        shardings = {o.sharding for o in options}
        if "optimizer" in shardings:
            each = parameter + gradient
        if "all" in shardings:
            each = min(each, (parameter + gradient + optimizer) / min(self.problem.batch, self.problem.device_limit))
        return np.concatenate([[0.0], np.cumsum(mine)]) * each


def lower_bound_of(view: View, simple: float) -> float:
    """Returns a value that no plan of a problem falls below, no less than one that is known."""
    timed = view.evaluator.objective.name == "time" and isinstance(view.judge, OwnJudge)
    if not timed or not view.prunes_by_bound:
        return simple
    return max(simple, Relaxation(view, view.quickest_sketch_s).bound_s())


def _classes(low: int, high: int) -> Iterator[tuple[int, int]]:
    """Yields (least, most) of classes of shares that together are all from `low` to `high`."""
    while low <= high:
        most = min(high, low if low < _SINGLY else int(low * _CLASS))
        yield low, most
        low = most + 1
