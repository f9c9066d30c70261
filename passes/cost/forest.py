"""A random forest of what the analytic model gets wrong: log(measured / analytic) by layer and place.

The analytic model carries over to any shape and any machine; what it misses (kernels chosen by size,
caches, launch overhead that hides or does not) is learned from measurements and multiplied on. A
forest knows only what it saw, so it answers for device kinds it has data of and for no other.

The forest is the one of xgboost's `XGBRFRegressor`, read out of its model, so that asking it needs
numpy alone: a search asks often.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from hetjax.ir.cluster import DeviceKind
from hetjax.ir.cluster_check import PLATFORMS
from hetjax.ir.dtypes import dtype_itemsize
from hetjax.ir.errors import PlanError
from hetjax.ir.json_text import parse_json
from hetjax.ir.suggest import nearest
from hetjax.passes.cost.group import Group
from hetjax.passes.cost.roofline import ASSUMED, Efficiency
from hetjax.passes.cost.work import WORK_PHASES, Work, work_price

VERSION = 1
# A kind with fewer measured layers than this is one the forest does not know.
LEAST_SAMPLES = 8

FEATURES = (
    "phase", "product_flops", "other_flops", "bytes", "intensity", "kernels", "product_share",
    "launch_share", "flops_per_product", "analytic_s", "dtype_bytes", "peak_flops",
    "memory_bandwidth", "memory_bytes", "platform", "data", "model", "nodes", "collective_share",
    "collective_bytes", "link_bandwidth", "link_latency",
)  # fmt: skip


class Residual(NamedTuple):
    """What to multiply an analytic time by.

    Attributes:
      ratio: measured over analytic, expected; 1.0 where the forest does not know the kind.
      uncertainty: standard deviation of log(ratio) across the trees: 0.1 is about 10 %. Infinite
        where the forest does not know the kind.
    """

    ratio: float
    uncertainty: float


UNKNOWN = Residual(1.0, math.inf)


@dataclasses.dataclass(frozen=True, slots=True)
class Sample:
    """One measured layer.

    Attributes:
      work: what it does on one device.
      kind: the device kind.
      group: the devices it ran on.
      seconds: what it took.
      cluster: where it was measured; the unit that is left out to see what carries over.
      efficiency: of the kind, as far as it was fitted.
    """

    work: Work
    kind: DeviceKind
    group: Group
    seconds: float
    cluster: str = ""
    efficiency: Efficiency | None = None

    @property
    def analytic_s(self) -> float:
        """Returns what the analytic model says."""
        return analytic_s(self.work, self.kind, self.efficiency)


def analytic_s(work: Work, kind: DeviceKind, efficiency: Efficiency | None = None) -> float:
    """Returns the analytic seconds of work on a kind, collectives included.

    Raises:
      PlanError: the kind neither has nor emulates a dtype.
    """
    return work_price(work, kind, efficiency).seconds + work.collective_s


def features(
    work: Work, kind: DeviceKind, group: Group, efficiency: Efficiency | None = None
) -> list[float]:
    """Returns the numbers a forest decides by, in the order of `FEATURES`; sizes as log10."""
    price = work_price(work, kind, efficiency)
    total = max(price.seconds + work.collective_s, 1e-12)
    products = [k for k in work.kernels if k.product]
    product_flops = sum(k.count * k.flops for k in products)
    other_flops = sum(k.count * k.flops for k in work.kernels if not k.product)
    nbytes = sum(k.count * k.nbytes for k in work.kernels)
    kernels = sum(k.count for k in work.kernels)
    largest = max(products, key=lambda k: k.count * k.flops, default=None)
    dtype = largest.dtype if largest is not None else ""
    launch_s = (efficiency or ASSUMED[kind.platform]).launch_s * kernels
    peaks = dict(kind.peak_flops)
    link = group.link
    return [
        float(WORK_PHASES.index(work.phase)),
        _log(product_flops),
        _log(other_flops),
        _log(nbytes),
        _log(product_flops + other_flops) - _log(nbytes),
        math.log2(1 + kernels),
        min(1.0, price.arithmetic_s / total),
        min(1.0, launch_s / total),
        _log(product_flops / max(1, sum(k.count for k in products))),
        math.log10(total),
        float(dtype_itemsize(dtype)) if dtype else 0.0,
        _log(peaks.get(dtype) or max(peaks.values())),
        _log(kind.memory_bandwidth_bytes_s),
        _log(kind.memory_bytes),
        float(PLATFORMS.index(kind.platform)),
        math.log2(group.data),
        math.log2(group.model),
        math.log2(group.nodes),
        min(1.0, work.collective_s / total),
        _log(work.collective_bytes),
        _log(link.bandwidth_bytes_s) if link else 0.0,
        math.log10(max(link.latency_s, 1e-9)) if link else 0.0,
    ]


def _log(x: float) -> float:
    return math.log10(1 + x)


@dataclasses.dataclass(frozen=True)
class ResidualForest:
    """A trained forest.

    Attributes:
      left, right: [tree, node] positions of the children; leaves point to themselves.
      feature, threshold: [tree, node]; a node goes left where feature < threshold.
      value: [tree, node] log ratio of a leaf.
      kinds: (device kind, how many samples) pairs it was trained on.
      clusters: where those were measured.
      made_with: of xgboost, for the record.
    """

    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    value: np.ndarray
    kinds: tuple[tuple[str, int], ...]
    clusters: tuple[str, ...] = ()
    made_with: str = ""

    @functools.cached_property
    def _known(self) -> frozenset[str]:
        return frozenset(kind for kind, n in self.kinds if n >= LEAST_SAMPLES)

    def covers(self, kind: str) -> bool:
        """Returns whether it has data of a device kind."""
        return kind in self._known

    def why_not(self, kind: str) -> str:
        """Returns the sentence that says why it does not answer for a kind, "" where it does."""
        if self.covers(kind):
            return ""
        there = ", ".join(f"{k} ({n})" for k, n in self.kinds) or "none"
        few = dict(self.kinds).get(kind, 0)
        has = f"has {few} measured layers, fewer than {LEAST_SAMPLES}," if few else "has none"
        return (
            f"the residual forest {has} of kind {kind!r}{nearest(kind, self._known)}: its times are "
            f"analytic alone; it knows {there}; run hetjax calibrate on such a device"
        )

    def predict(
        self,
        work: Work,
        kind: DeviceKind,
        group: Group | None = None,
        efficiency: Efficiency | None = None,
    ) -> Residual:
        """Returns what to multiply the analytic time of one layer (or op) by.

        Args:
          work: what it does on one device of the group.
          kind: the device kind.
          group: the devices it runs on; one alone when not given.
          efficiency: of the kind, as far as it was fitted.
        """
        return self.predict_many([(work, group or Group())], kind, efficiency)[0]

    def predict_many(
        self,
        works: Sequence[tuple[Work, Group]],
        kind: DeviceKind,
        efficiency: Efficiency | None = None,
    ) -> list[Residual]:
        """Returns `predict` of many layers at once, which is much quicker."""
        if not works:
            return []
        if not self.covers(kind.name):
            return [UNKNOWN] * len(works)
        rows = [features(work, kind, group, efficiency) for work, group in works]
        logs = self.trees(np.array(rows))
        means, spread = logs.mean(axis=1), logs.std(axis=1)
        return [Residual(math.exp(m), float(s)) for m, s in zip(means, spread)]

    def trees(self, rows: np.ndarray) -> np.ndarray:
        """Returns the log ratio that each tree gives to each row of features, as [row, tree]."""
        roots, down, feature, threshold, value, depth = self._flat
        rows = np.asarray(rows, np.float32)
        first = (np.arange(len(rows)) * rows.shape[1])[:, None]
        at = np.tile(roots, (len(rows), 1))
        for _ in range(depth):
            found = rows.take(feature.take(at) + first)
            at = down.take(2 * at + (found >= threshold.take(at)))
        return value.take(at)

    @functools.cached_property
    def _flat(self) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray, np.ndarray, int]:
        """Returns the trees end to end: roots, children in pairs, features, thresholds, values, depth."""
        trees, size = self.left.shape
        roots = np.arange(trees) * size
        pairs = np.stack([self.left + roots[:, None], self.right + roots[:, None]], axis=-1)
        depth, at = 0, np.unique(roots)
        while True:
            below = np.setdiff1d(pairs.reshape(-1, 2)[at], at)
            if not below.size:
                break
            depth, at = depth + 1, below
        feature, threshold = self.feature.ravel(), self.threshold.ravel()
        return roots, pairs.ravel(), feature, threshold, self.value.ravel().astype(float), depth

    # Text.

    def to_json(self) -> str:
        """Returns JSON that reads back to an equal forest."""
        names = ("left", "right", "feature", "threshold", "value")
        data = {
            "hetjax_forest": VERSION,
            "features": FEATURES,
            "kinds": dict(self.kinds),
            "clusters": self.clusters,
            "made_with": self.made_with,
            **{name: getattr(self, name).tolist() for name in names},
        }
        return json.dumps(data) + "\n"

    @classmethod
    def from_json(cls, text: str, filename: str = "<json>") -> ResidualForest:
        """Returns the forest that JSON text holds.

        Raises:
          ParseError: the text is not JSON.
          PlanError: it holds no forest of this version, or one that decides by other features.
        """
        data = parse_json(text, filename)
        again = "train it again: hetjax calibrate"
        if not isinstance(data, dict) or "hetjax_forest" not in data:
            raise PlanError(f"{filename}: not a residual forest; {again}")
        if data["hetjax_forest"] != VERSION:
            raise PlanError(
                f"{filename}: hetjax_forest: version {data['hetjax_forest']!r} is not known; this "
                f"hetjax reads version {VERSION}; {again}"
            )
        if tuple(data.get("features", ())) != FEATURES:
            raise PlanError(f"{filename}: features: it decides by other features; {again}")
        whole, real = np.int32, np.float32
        kinds = {"left": whole, "right": whole, "feature": whole, "threshold": real, "value": real}
        try:
            arrays = {name: np.array(data[name], kind) for name, kind in kinds.items()}
            shapes = {a.shape for a in arrays.values()}
            size = arrays["left"].shape[1]
            # Children come after their parents, so that every way down ends.
            own = np.arange(size)
            inside = all(((a >= own) & (a < size)).all() for a in (arrays["left"], arrays["right"]))
            known = ((arrays["feature"] >= 0) & (arrays["feature"] < len(FEATURES))).all()
            counts = tuple((str(k), int(n)) for k, n in data["kinds"].items())
            clusters = tuple(map(str, data["clusters"]))
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise PlanError(f"{filename}: a damaged forest ({error!r}); {again}") from None
        if len(shapes) != 1 or not inside or not known:
            raise PlanError(f"{filename}: a damaged forest (its trees do not fit); {again}")
        return cls(**arrays, kinds=counts, clusters=clusters, made_with=str(data["made_with"]))

    def save(self, path: str | Path) -> None:
        """Writes the forest's JSON to a file."""
        Path(path).write_text(self.to_json(), encoding="utf-8")

    @classmethod
    def load(cls, path: str | Path) -> ResidualForest:
        """Returns the forest in a JSON file.

        Raises:
          PlanError: the file cannot be read or holds no forest.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise PlanError(f"cannot read the forest {path}: {error}") from None
        return cls.from_json(text, str(path))


def train_forest(
    samples: Sequence[Sample], *, trees: int = 100, depth: int = 8, seed: int = 0
) -> ResidualForest:
    """Returns a forest of the samples' log(measured / analytic).

    Args:
      samples: measured layers, all with a positive time.
      trees: how many.
      depth: of each, at most.
      seed: of the rows and features each tree sees; equal seeds give equal forests.

    Raises:
      PlanError: there are too few samples of every kind.
    """
    kinds = Counter(s.kind.name for s in samples)
    if not any(n >= LEAST_SAMPLES for n in kinds.values()):
        raise PlanError(
            f"a residual forest takes at least {LEAST_SAMPLES} measured layers of a device kind; "
            f"there are {dict(kinds) or 'none'}; run hetjax calibrate"
        )
    import xgboost

    rows = np.array([features(s.work, s.kind, s.group, s.efficiency) for s in samples])
    goal = np.array([math.log(s.seconds / s.analytic_s) for s in samples])
    version = f"xgboost {xgboost.__version__}, {trees} trees of depth {depth}, seed {seed}"
    clusters = tuple(sorted({s.cluster for s in samples if s.cluster}))
    grown = grow(rows, goal, trees=trees, depth=depth, seed=seed)
    return dataclasses.replace(grown, kinds=tuple(sorted(kinds.items())), clusters=clusters, made_with=version)


def grow(
    rows: np.ndarray, goal: np.ndarray, *, trees: int, depth: int, seed: int, bins: int = 1024
) -> ResidualForest:
    """Returns a random forest of rows of numbers, which need not be those of `FEATURES`; it knows no device kind.

    Args:
      rows: [row, feature].
      goal: what it is to say of each row.
      trees, depth, seed: as for `train_forest`.
      bins: values of a feature that are told apart.
    """
    import xgboost

    # Centred here, so that what the library adds to every prediction is nothing.
    centre = float(goal.mean())
    # What XGBRFRegressor trains; that class itself asks for scikit-learn, which nothing else here needs.
    booster = xgboost.train(
        {
            "objective": "reg:squarederror", "num_parallel_tree": trees, "learning_rate": 1.0, "max_depth": depth,
            "subsample": 0.8, "colsample_bynode": 0.6, "base_score": 0.0, "reg_lambda": 1e-3, "seed": seed, "nthread": 1,
            "tree_method": "hist", "max_bin": bins,
        },
        xgboost.DMatrix(rows, goal - centre, nthread=1), num_boost_round=1,
    )  # fmt: skip
    raw = json.loads(bytes(booster.save_raw("json")))
    grown = _arrays(raw["learner"]["gradient_booster"]["model"]["trees"], centre)
    return ResidualForest(**grown, kinds=(), clusters=(), made_with="")


def _arrays(trees: Sequence[Any], centre: float) -> dict[str, np.ndarray]:
    """Returns xgboost's trees as arrays of equal length.

    The library divides each leaf by the number of trees, so that they add up to the mean.
    """
    size = max(len(t["left_children"]) for t in trees)
    left = np.tile(np.arange(size, dtype=np.int32), (len(trees), 1))
    right = left.copy()
    feature = np.zeros((len(trees), size), np.int32)
    threshold, value = np.zeros((2, len(trees), size), np.float32)
    for i, tree in enumerate(trees):
        down = np.array(tree["left_children"])
        n, inner = len(down), np.nonzero(down >= 0)[0]
        conditions = np.array(tree["split_conditions"], np.float32)
        left[i, inner], right[i, inner] = down[inner], np.array(tree["right_children"])[inner]
        feature[i, inner] = np.array(tree["split_indices"])[inner]
        threshold[i, inner] = conditions[inner]
        leaves = np.setdiff1d(np.arange(n), inner)
        value[i, leaves] = conditions[leaves] * len(trees) + centre
    return {"left": left, "right": right, "feature": feature, "threshold": threshold, "value": value}
