"""What a layer asks of a device, before any device is named: its kernels and what it exchanges."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

from hetjax.ir.cluster import DeviceKind
from hetjax.passes.cost.roofline import FREE, Efficiency, Price, op_price

WORK_PHASES = ("forward", "backward", "weight", "update", "prologue")


@dataclasses.dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel on one device.

    Attributes:
      flops: floating point operations.
      nbytes: bytes read from and written to main memory.
      dtype: what a matrix product or convolution takes; "" for other arithmetic.
      precise: whether an f32 product asks for more than JAX's default precision.
      count: how many such kernels there are.
    """

    flops: float
    nbytes: float
    dtype: str = ""
    precise: bool = False
    count: int = 1

    @property
    def product(self) -> bool:
        return bool(self.dtype)


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one call of a layer, or of a whole fragment, does on one device of its group.

    Attributes:
      phase: one of `WORK_PHASES`.
      kernels: equal ones once, with their count.
      collective_s: seconds of the collectives inside it, by the analytic model of the group's links.
      collective_bytes: what they reduce or gather.
    """

    phase: str
    kernels: tuple[Kernel, ...]
    collective_s: float = 0.0
    collective_bytes: float = 0.0

    def split(self, parts: int) -> Work:
        """Returns the share of one of several devices, or of a smaller batch; it exchanges nothing."""
        kernels = (
            dataclasses.replace(k, flops=k.flops / parts, nbytes=k.nbytes / parts)
            for k in self.kernels
        )
        return Work(self.phase, tuple(kernels))

    def with_collectives(self, seconds: float, nbytes: float) -> Work:
        """Returns the same work with these collectives."""
        return dataclasses.replace(self, collective_s=seconds, collective_bytes=nbytes)

    def to_row(self) -> dict[str, Any]:
        """Returns what JSON holds of it; `from_row` reads it back."""
        return {
            "phase": self.phase,
            "kernels": [[k.flops, k.nbytes, k.dtype, k.precise, k.count] for k in self.kernels],
            "collective_s": self.collective_s,
            "collective_bytes": self.collective_bytes,
        }

    @classmethod
    def from_row(cls, row: Mapping[str, Any]) -> Work:
        """Returns the work that `to_row` wrote.

        Raises:
          KeyError, TypeError, ValueError: it is not of that form.
        """
        kernels = tuple(
            Kernel(float(flops), float(nbytes), str(dtype), bool(precise), int(count))
            for flops, nbytes, dtype, precise, count in row["kernels"]
        )
        if row["phase"] not in WORK_PHASES:
            raise ValueError(f"phase {row['phase']!r}")
        return cls(
            row["phase"], kernels, float(row["collective_s"]), float(row["collective_bytes"])
        )


def gathered(phase: str, kernels: Iterable[Kernel], *, collective_s: float = 0.0, collective_bytes: float = 0.0) -> Work:
    """Returns work of kernels in any order, equal ones counted together."""
    counts: collections.Counter[Kernel] = collections.Counter()
    for k in kernels:
        counts[dataclasses.replace(k, count=1)] += k.count
    rows = (dataclasses.replace(k, count=n) for k, n in counts.items())
    return Work(phase, tuple(rows), collective_s, collective_bytes)


def computed_dtype(dtype: str, precise: bool, kind: DeviceKind) -> str:
    """Returns what a product of this dtype computes in on a device kind.

    Under JAX's default precision a TPU multiplies f32 in bf16, and a GPU that has tf32 uses it.
    """
    if dtype == "f32" and not precise:
        if kind.platform == "tpu":
            return "bf16"
        return "tf32" if "tf32" in dict(kind.peak_flops) else "f32"
    return dtype


def kernel_price(kernel: Kernel, kind: DeviceKind, efficiency: Efficiency | None = None) -> Price:
    """Returns the price of one kernel, its count left aside.

    Raises:
      PlanError: the kind neither has nor emulates the dtype.
    """
    dtype = computed_dtype(kernel.dtype, kernel.precise, kind) if kernel.product else "f32"
    return op_price(
        kind, kernel.flops, kernel.nbytes, dtype, product=kernel.product, efficiency=efficiency
    )


def work_price(work: Work, kind: DeviceKind, efficiency: Efficiency | None = None) -> Price:
    """Returns the analytic price of all kernels; collectives are `Work.collective_s`.

    Raises:
      PlanError: the kind neither has nor emulates a dtype.
    """
    total = FREE
    for k in work.kernels:
        p = kernel_price(k, kind, efficiency)
        n = k.count
        total = total + Price(n * p.seconds, n * p.arithmetic_s, n * p.memory_s, p.emulated)
    return total
