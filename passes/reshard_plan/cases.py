"""The published micro-cases of cross-mesh resharding, with their links.

Meshes and tensors are those of the resharding benchmark of Alpa (alpa-projects/alpa,
benchmark/alpa/resharding/suite.py; the paper is arXiv 2211.05322): hosts of four V100 with one
10 Gbit/s interface each. Elements are float32 here.
"""

from __future__ import annotations

import dataclasses
import math

from hetjax.ir.cluster import Cluster
from hetjax.ir.program import Spec, StageMesh
from hetjax.passes.reshard_plan.bound import Bound, lower_bound
from hetjax.passes.reshard_plan.layout import Layout, layout

_R: tuple[str, ...] = ()
_H, _D = ("hosts",), ("gpus",)
_HD = ("hosts", "gpus")


@dataclasses.dataclass(frozen=True)
class Case:
    """One resharding.

    Attributes:
      name: "c1", "1-to-2x4".
      shape, itemsize: of the value.
      source, target: (hosts, devices of each).
      source_spec, target_spec: over axes "hosts" and "gpus".
    """

    name: str
    shape: tuple[int, ...]
    source: tuple[int, int]
    source_spec: Spec
    target: tuple[int, int]
    target_spec: Spec
    itemsize: int = 4

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.itemsize

    def scaled(self, factor: int) -> Case:
        """Returns the same case with every dimension divided by `factor`, at least 8 and a multiple of 24."""
        shrink = lambda n: max(8, 24 * (n // factor // 24)) if n != 170 else 10  # noqa: E731
        return dataclasses.replace(self, shape=tuple(shrink(n) for n in self.shape))


_CUBE = (1024, 1024, 512)
CASES: tuple[Case, ...] = (
    Case("c1", _CUBE, (2, 4), (_H, _R, _R), (2, 4), (_H, _R, _R)),
    Case("c2", _CUBE, (2, 4), (_R, _R, _R), (2, 4), (_H, _R, _R)),
    Case("c3", _CUBE, (2, 4), (_R, _H, _R), (2, 4), (_H, _R, _R)),
    Case("c4", _CUBE, (2, 4), (_R, _HD, _R), (2, 4), (_HD, _R, _R)),
    Case("c5", _CUBE, (2, 4), (_D, _R, _R), (2, 4), (_H, _R, _R)),
    Case("c6", (3072, 1024, 170), (2, 4), (_H, _R, _R), (3, 4), (_H, _R, _R)),
    Case("c7", _CUBE, (1, 4), (_D, _R, _R), (2, 4), (_R, _R, _R)),
    Case("c8", _CUBE, (1, 4), (_D, _R, _R), (2, 4), (_R, _R, _R)),
    Case("c9", _CUBE, (2, 4), (_R, _H, _R), (2, 4), (_R, _R, _H)),
    *(Case(f"1-to-{h}x{d}", (1 << 28,), (1, 1), (_R,), (h, d), (_R,))
      for h, d in ((1, 1), (1, 2), (1, 3), (1, 4), (2, 2), (3, 2), (4, 2))),
)


def cluster_of(hosts: int, devices: int = 4) -> Cluster:
    """Returns hosts of V100 with NVLink inside and a 10 Gbit/s interface each."""
    nodes = "".join(f'[[sites.nodes]]\nname = "h{i}"\nkind = "v100-16g"\ndevices = {devices}\nlink = "nvlink2"\n' for i in range(hosts))
    return Cluster.parse(f'name = "hosts"\n[[sites]]\nname = "room"\nlink = "10gbe"\n{nodes}')


def meshes_of(case: Case, devices: int = 4) -> tuple[Cluster, StageMesh, StageMesh]:
    """Returns the cluster of a case and its two meshes; a mesh takes the first devices of its hosts."""
    cluster = cluster_of(case.source[0] + case.target[0], devices)

    def mesh(name: str, first: int, size: tuple[int, int]) -> StageMesh:
        hosts, each = size
        at = tuple((first + h) * devices + d for h in range(hosts) for d in range(each))
        return StageMesh(name, "v100-16g", "room", (("hosts", hosts), ("gpus", each)), at)

    return cluster, mesh("s0", 0, case.source), mesh("s1", case.source[0], case.target)


def layouts_of(case: Case) -> tuple[Cluster, Layout, Layout]:
    """Returns the cluster of a case, where its value lies and where it shall lie."""
    cluster, source, target = meshes_of(case)
    return cluster, layout(source, case.source_spec, case.shape), layout(target, case.target_spec, case.shape)


def bound_of(case: Case) -> Bound:
    """Returns the lower bound of a case on its links."""
    return lower_bound(*layouts_of(case), case.itemsize)
