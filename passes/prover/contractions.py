"""Rules for matrix products and convolutions: bilinear ops that keep the batch axis or sum over it."""

from __future__ import annotations

from collections.abc import Sequence

from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import SUM_WITH_EXAMPLES, Site, Type, Untypable, rule

PAIRS = (
    "it multiplies every example of the batch with every other (a similarity or attention matrix "
    "over the batch, as contrastive losses use)"
)


@rule("dot_general")
def dot_general(site: Site) -> list[Type]:
    (left_sum, right_sum), (left_batch, right_batch) = site.params["dimension_numbers"]
    a, b = site.types
    if a.kind == "Z" and b.kind == "Z":
        return [a]
    power = a.power + b.power
    if "S" in (a.kind, b.kind):
        return [_with_sum(site, power)]
    left, right = _axis(site, 0), _axis(site, 1)
    if left is None and right is None:
        return [site.like(BatchType("R", power))]
    if left is not None and right is not None:
        if left in left_sum or right in right_sum:
            if (left, right) in zip(left_sum, right_sum):
                return [site.like(BatchType("S", power))]
            raise Untypable("it contracts the batch axis of one operand with another axis of the other")
        if (left, right) in zip(left_batch, right_batch):
            return [site.sliced(power, list(left_batch).index(left))]
        raise Untypable(PAIRS)
    if left is not None:
        axis = _free(left, left_sum, left_batch, len(left_batch))
    else:
        assert right is not None
        left_free = len(site.ins[0].shape) - len(left_sum) - len(left_batch)
        axis = _free(right, right_sum, right_batch, len(left_batch) + left_free)
    return [site.sliced(power, axis)]


def _free(axis: int, summed: Sequence[int], batch: Sequence[int], offset: int) -> int:
    """Position in the result of a free axis of one operand."""
    if axis in summed or axis in batch:
        raise Untypable("it pairs the batch axis with an axis that does not grow with the batch")
    return offset + sum(d < axis and d not in summed and d not in batch for d in range(axis))


def _axis(site: Site, k: int) -> int | None:
    t = site.resolved(k)
    return t.axis


def _with_sum(site: Site, power: int) -> Type:
    kinds = {t.kind for t in site.types}
    if kinds == {"S"}:
        raise Untypable("it multiplies two sums over the batch, and the product of sums is not the sum of products")
    if "B" in kinds or site.out_axis() is not None:
        raise Untypable(f"it multiplies {SUM_WITH_EXAMPLES}")
    return site.like(BatchType("S", power))


@rule("conv_general_dilated", varies=("batch_group_count",))
def conv_general_dilated(site: Site) -> list[Type]:
    dims, p = site.params["dimension_numbers"], site.params
    a, b = site.types
    if a.kind == "Z" and b.kind == "Z":
        return [a]
    if p["batch_group_count"] != site.micro_params["batch_group_count"]:
        raise Untypable("it gives each example of the batch its own kernel")
    power = a.power + b.power
    if "S" in (a.kind, b.kind):
        return [_with_sum(site, power)]
    left, right = _axis(site, 0), _axis(site, 1)
    if left is None and right is None:
        return [site.like(BatchType("R", power))]
    # The spec lists, in this order: batch, features, space for the input and the output; output
    # features, input features, space for the kernel.
    if left == dims.lhs_spec[0] and right is None and p["batch_group_count"] == 1:
        return [site.sliced(power, dims.out_spec[0])]
    # The gradient of a kernel: the batch sits where features are contracted.
    if left == dims.lhs_spec[1] and right == dims.rhs_spec[1] and p["feature_group_count"] == 1:
        return [site.like(BatchType("S", power))]
    raise Untypable("it convolves over the batch axis")
