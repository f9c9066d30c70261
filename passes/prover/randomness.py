"""Rules for random numbers: what a key alone draws cannot be sliced, what a key per example draws can."""

from __future__ import annotations

from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import (
    REPLICATED,
    Site,
    Type,
    Untypable,
    no_powers,
    no_sums,
    rule,
)


@rule(
    "random_bits", "random_split", "random_fold_in", "random_seed", "random_wrap", "random_unwrap",
    "random_clone", varies=("shape",),
)  # fmt: skip
def per_key(site: Site) -> list[Type]:
    no_sums(site.types, "drawing random numbers from")
    no_powers(site.types, "drawing random numbers from")
    axis = site.out_axis()
    if axis is None:
        if any(site.in_axis(k) is not None for k in range(len(site.types))):
            raise Untypable("it draws from keys of single examples, without a batch axis in the result")
        return [REPLICATED]
    if site.params.get("shape") != site.micro_params.get("shape"):
        raise Untypable("one key draws random numbers for the whole batch, in one order")
    if any(site.in_axis(k) not in (axis, None) for k in range(len(site.types))):
        raise Untypable("it lines up the batch axis with another axis")
    # Where keys have a batch axis, each example's key alone decides its numbers.
    return [site.sliced(0, axis)]


@rule("random_gamma", "threefry2x32", "threefry4x32", "philox2x32", "philox4x32")
def elementwise_draws(site: Site) -> list[Type]:
    no_sums(site.types, "drawing random numbers from")
    no_powers(site.types, "drawing random numbers from")
    axis = site.out_axis()
    axes = {site.in_axis(k) for k in range(len(site.types))}
    if axis is None and axes == {None}:
        return [REPLICATED] * len(site.outs)
    if axes != {axis}:
        raise Untypable("one key draws random numbers for the whole batch, in one order")
    return [BatchType("B", 0, site.out_axis(k)) for k in range(len(site.outs))]


@rule("rng_bit_generator", varies=("shape",))
def generator(site: Site) -> list[Type]:
    no_sums(site.types, "drawing random numbers from")
    if any(site.out_axis(k) is not None for k in range(len(site.outs))):
        raise Untypable("one key draws random numbers for the whole batch, in one order")
    if any(site.in_axis(k) is not None for k in range(len(site.types))):
        raise Untypable("it draws from keys of single examples")
    return [REPLICATED] * len(site.outs)
