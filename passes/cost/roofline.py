"""The roofline of one op: the slower of arithmetic and memory, and never quite at the peak.

  seconds = launch + max(ramp + flops / (top * peak), bytes / (memory_top * bandwidth))

`top` is the share of the peak that large products reach; `ramp` is what makes small ones slower: a
product of work f reaches half of `top` where f / (top * peak) = ramp. Source of the form: Williams,
Waterman and Patterson, "Roofline" (2009), with the half-performance length of Hockney (1982).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from hetjax.ir.cluster import DeviceKind
from hetjax.ir.errors import PlanError


@dataclasses.dataclass(frozen=True, slots=True)
class Efficiency:
    """How near an op comes to the peaks of its device kind.

    Attributes:
      top: share of peak FLOP/s that large matrix products reach.
      ramp_s: seconds a product takes beyond its share of the peak.
      memory_top: share of the memory bandwidth that large copies reach.
      launch_s: seconds every op takes at least.
      tops: (dtype, share) pairs where a dtype's share is not `top`.
      source: "measured", "imported" or "assumed".
    """

    top: float
    ramp_s: float
    memory_top: float
    launch_s: float
    tops: tuple[tuple[str, float], ...] = ()
    source: str = "assumed"

    def share(self, dtype: str) -> float:
        """Returns the share of the peak that large products in a dtype reach."""
        return dict(self.tops).get(dtype, self.top)


# Until a platform is calibrated: orders of magnitude of vendors' matrix libraries.
ASSUMED: dict[str, Efficiency] = {
    "cpu": Efficiency(0.6, 2e-6, 0.6, 1e-6),
    "cuda": Efficiency(0.7, 4e-6, 0.8, 3e-6),
    "rocm": Efficiency(0.6, 6e-6, 0.75, 5e-6),
    "tpu": Efficiency(0.75, 2e-6, 0.8, 1e-6),
}


@dataclasses.dataclass(frozen=True, slots=True)
class Price:
    """What one op, or several, cost on one device.

    Attributes:
      seconds: the time.
      arithmetic_s, memory_s: the two sides of the roofline; the larger one counted.
      emulated: dtypes computed by means of another, which the price takes into account.
    """

    seconds: float
    arithmetic_s: float
    memory_s: float
    emulated: tuple[str, ...] = ()

    def __add__(self, other: Price) -> Price:
        return Price(
            self.seconds + other.seconds,
            self.arithmetic_s + other.arithmetic_s,
            self.memory_s + other.memory_s,
            tuple(dict.fromkeys((*self.emulated, *other.emulated))),
        )


FREE = Price(0.0, 0.0, 0.0)


def op_price(
    kind: DeviceKind,
    flops: float,
    nbytes: float,
    dtype: str,
    *,
    product: bool = True,
    efficiency: Efficiency | None = None,
) -> Price:
    """Returns the price of one op.

    Args:
      kind: the device kind.
      flops: floating point operations.
      nbytes: bytes read from and written to main memory.
      dtype: what it computes in; "tf32" for f32 products at JAX's default precision.
      product: whether it is a matrix product or convolution, which alone reach a tensor core's
        peak; other arithmetic is priced by its bytes, at the f32 peak at best.
      efficiency: of the kind; the platform's assumed one when not given.

    Raises:
      PlanError: the kind neither has nor emulates the dtype.
    """
    curve = efficiency or ASSUMED[kind.platform]
    memory_s = nbytes / (curve.memory_top * kind.memory_bandwidth_bytes_s)
    emulated = (dtype,) if kind.emulates(dtype) else ()
    table = dict(kind.peak_flops)
    if not product:
        arithmetic_s = flops / (table.get("f32") or max(table.values()))
    else:
        if dtype == "tf32" and "tf32" not in table:
            dtype = "f32"
        if dtype not in table and not kind.emulates(dtype) and not kind.supports(dtype):
            raise PlanError(
                f"kind {kind.name!r} has no {dtype} and does not emulate it; it computes in "
                f"{', '.join(kind.dtypes)}; give this stage another kind or the step another dtype"
            )
        arithmetic_s = curve.ramp_s + flops / (curve.share(dtype) * kind.peak(dtype))
    return Price(curve.launch_s + max(arithmetic_s, memory_s), arithmetic_s, memory_s, emulated)


def fit_efficiency(
    kind: DeviceKind,
    dtype: str,
    products: Sequence[tuple[float, float]],
    copies: Sequence[tuple[float, float]] = (),
    *,
    base: Efficiency | None = None,
    source: str = "measured",
) -> Efficiency:
    """Returns the curve that fits measured ops best, by relative error.

    Args:
      kind: the device kind measured.
      dtype: the products' dtype.
      products: (FLOPs, seconds) of matrix products bound by arithmetic.
      copies: (bytes, seconds) of ops bound by memory; the base's share where there is none.
      base: what is kept of what is not measured; the platform's assumed one when not given.
      source: where the measurements come from.
    """
    base = base or ASSUMED[kind.platform]
    fixed_s, per_flop = _affine(products)
    share = min(1.0, 1 / (per_flop * kind.peak(dtype))) if per_flop > 0 else base.share(dtype)
    launch_s, memory_top = base.launch_s, base.memory_top
    if copies:
        launch_s, per_byte = _affine(copies)
        if per_byte > 0:
            memory_top = min(1.0, 1 / (per_byte * kind.memory_bandwidth_bytes_s))
    return dataclasses.replace(
        base,
        ramp_s=max(0.0, fixed_s - launch_s),
        launch_s=launch_s,
        memory_top=memory_top,
        tops=(*((d, s) for d, s in base.tops if d != dtype), (dtype, share)),
        source=source,
    )


def _affine(samples: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Returns the (intercept, slope), neither negative, with the least squared relative error."""
    size, seconds = np.array(samples, dtype=float).T
    design = np.stack([1 / seconds, size / seconds], axis=1)
    ones = np.ones(len(seconds))
    both = np.linalg.lstsq(design, ones, rcond=None)[0]
    if (both >= 0).all() and len(samples) > 1:
        return float(both[0]), float(both[1])
    alone = [float(column @ ones / (column @ column)) for column in design.T]
    errors = [float(np.sum((column * x - 1) ** 2)) for column, x in zip(design.T, alone)]
    return (0.0, alone[1]) if errors[1] <= errors[0] else (alone[0], 0.0)
