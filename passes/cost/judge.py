"""What is known of devices beyond their data sheets, put to use: measurements first, then the forest.

A fragment is priced layer by layer. A layer that was measured (the same ops on the same types, split
the same way, on the same kind) takes what it took. Any other takes its analytic time by the fitted
curve, multiplied by what the residual forest says, where that has data of the kind. Measured calls
each bore the cost of a call; it is taken off the layers and added once to the fragment.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from pathlib import Path

from hetjax.ir import presets
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import PlanError
from hetjax.ir.program import Fragment, Program
from hetjax.passes.cost.forest import Residual, ResidualForest, train_forest
from hetjax.passes.cost.group import Group, mesh_group
from hetjax.passes.cost.layers import LayerMap, Segment, segments
from hetjax.passes.cost.program_price import (
    CALL,
    FragmentPrice,
    OpWork,
    fragment_ops,
    num_arrays,
    price_ops,
    work_of,
)
from hetjax.passes.cost.store import Measured, ProfileStore
from hetjax.passes.cost.work import Work, work_price

MEASURED, FOREST, ANALYTIC = "measured", "analytic x forest", "analytic"


@dataclasses.dataclass(frozen=True)
class Judge:
    """Prices fragments by what is known.

    Attributes:
      store: the measurements.
      forest: trained from them, or None.
    """

    store: ProfileStore
    forest: ResidualForest | None = None

    @classmethod
    def of(cls, store: ProfileStore) -> Judge:
        """Returns a judge by a store, with a forest where the store has enough for one."""
        try:
            return cls(store, train_forest(store.samples()))
        except PlanError:
            return cls(store)

    @classmethod
    def load(cls, path: str | Path) -> Judge:
        """Returns a judge by a store's file and the forest beside it, which is trained where it is missing.

        Raises:
          PlanError: a file cannot be read, or holds something else.
        """
        store, forest = ProfileStore.load(path), forest_path(path)
        return cls(store, ResidualForest.load(forest)) if forest.exists() else cls.of(store)

    @classmethod
    def at(cls, path: str | Path) -> Judge | None:
        """Returns the judge by a store's file, None for "".

        Raises:
          PlanError: as in `load`.
        """
        return _kept(str(path), _state(path), _state(forest_path(path))) if path else None

    @functools.cached_property
    def _by_work(self) -> dict[tuple[str, str, int, int, int], Measured]:
        # A later version's measurement takes the place of an earlier one's.
        rows = sorted(self.store.measured.values(), key=lambda m: m.versions)
        return {m.key[:5]: m for m in rows if m.signature}

    def measured(self, signature: str, kind: str, group: Group) -> Measured | None:
        """Returns the measurement of a layer on a group like this one, or None."""
        return self._by_work.get((signature, kind, group.data, group.model, group.nodes))

    def knows(self, kind: str) -> bool:
        """Returns whether anything is known of a device kind beyond its data sheet."""
        return kind in self._kinds or bool(self.forest and self.forest.covers(kind))

    @functools.cached_property
    def _kinds(self) -> frozenset[str]:
        return frozenset([*self.store.efficiency, *(m.kind for m in self.store.measured.values())])

    def why_not(self, kind: str) -> str:
        """Returns why a kind is priced by its data sheet alone, "" where it is not."""
        if self.knows(kind):
            return ""
        if self.forest is not None:
            return self.forest.why_not(kind)
        return f"nothing was measured on a {kind}: its times are analytic alone; run hetjax calibrate on one"

    def wired(self, cluster: Cluster) -> Cluster:
        """Returns the cluster with measured links in place of a preset's assumed ones inside nodes."""
        found = {}
        for node in cluster.nodes:
            link, measured = cluster.link_named(node.link), self.store.links.get(node.kind)
            if measured is not None and link == presets.LINKS.get(link.name):
                found[link.name] = dataclasses.replace(measured, name=link.name)
        if not found:
            return cluster
        links = tuple(found.get(x.name, x) for x in cluster.links)
        return dataclasses.replace(cluster, links=links)

    def price(
        self, program: Program, fragment: Fragment, cluster: Cluster, layers: LayerMap | None
    ) -> FragmentPrice:
        """Returns the price of one call of a fragment.

        Args:
          program: what it belongs to.
          fragment: its ops have costs.
          cluster: where it runs.
          layers: of the step; None prices the fragment as one layer that was never measured.

        Raises:
          PlanError: the ops have no costs, or the kind cannot compute in one of their dtypes.
        """
        ops = fragment_ops(program, fragment, cluster)
        analytic = price_ops(program, fragment, cluster, ops, self.store.efficiency)
        mesh = program.meshes[fragment.stage]
        kind = cluster.kind(mesh.kind)
        if not self.knows(kind.name):
            return analytic
        group = mesh_group(cluster, mesh)
        curve = self.store.efficiency.get(kind.name)
        parts = _parts(program, fragment, ops, layers)
        found = [self.measured(s.signature, kind.name, group) if s else None for s, _ in parts]
        other = [work for (_, work), m in zip(parts, found) if m is None]
        ratios = iter(
            self.forest.predict_many([(w, group) for w in other], kind, curve)
            if self.forest is not None
            else [Residual(1.0, math.inf)] * len(other)
        )
        seconds = {MEASURED: 0.0, FOREST: 0.0, ANALYTIC: 0.0, CALL: 0.0}
        variance = host_s = 0.0
        host = self.store.hosts.get(kind.name)
        processors = host.processors if host else 0
        for (_, work), m in zip(parts, found):
            if m is not None:
                net_s = self.store.net_s(m)
                seconds[MEASURED] += net_s
                host_s += m.host_s * net_s / m.seconds
                continue
            ratio, spread = next(ratios)
            known = math.isfinite(spread)
            took = (work_price(work, kind, curve).seconds + work.collective_s) * ratio
            seconds[FOREST if known else ANALYTIC] += took
            variance += (took * spread) ** 2 if known else 0.0
            host_s += took * min(group.num_devices, processors)
        call = self.store.calls.get((kind.name, group.num_devices))
        if call is not None:
            seconds[CALL] = call.seconds(num_arrays(program, fragment))
            host_s += seconds[CALL] * bool(processors)
        total = sum(seconds.values())
        return dataclasses.replace(
            analytic,
            judged_s=total,
            uncertainty=math.sqrt(variance) / total if total else 0.0,
            sources=tuple((name, s) for name, s in seconds.items() if s),
            host_s=host_s,
        )


@functools.lru_cache(maxsize=4)
def _kept(path: str, *_: tuple[int, int]) -> Judge:
    # A pipeline asks several times, and the forest takes its time to read.
    return Judge.load(path)


def _state(path: str | Path) -> tuple[int, int]:
    """Returns what tells a file's content from an earlier one's."""
    try:
        stat = Path(path).stat()
    except OSError:
        return 0, 0
    return stat.st_mtime_ns, stat.st_size


def forest_path(store: str | Path) -> Path:
    """Returns where the forest of a store is kept: beside it."""
    return Path(store).with_suffix(".forest.json")


def _parts(
    program: Program, fragment: Fragment, ops: list[OpWork], layers: LayerMap | None
) -> list[tuple[Segment | None, Work]]:
    if layers is None or fragment.phase == "prologue":
        return [(None, work_of(fragment.phase, ops))] if ops else []
    found = segments(program, fragment, ops, layers)
    return [(s, work_of(s.phase, s.ops)) for s in found]
