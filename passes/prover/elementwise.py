"""Rules for ops that act on each element alone; they differ in what a factor M^p does to them."""

from __future__ import annotations

import fractions

from hetjax.ir.dtypes import dtype_itemsize
from hetjax.ir.graph import Aval
from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import (
    SUM_WITH_EXAMPLES,
    Index,
    NeedsWhole,
    Site,
    Type,
    Untypable,
    is_integer,
    join,
    no_powers,
    no_sums,
    rule,
)

# f(c*x) is not a power of c times f(x); exact only on values that carry no power of M.
NONLINEAR = (
    "acos", "acosh", "and", "asin", "asinh", "atan", "atanh", "bessel_i0e", "bessel_i1e", "ceil",
    "clz", "cos", "cosh", "digamma", "erf", "erf_inv", "erfc", "exp", "exp2", "expm1", "floor",
    "igamma", "igamma_grad_a", "igammac", "is_finite", "lgamma", "log", "log1p", "logistic",
    "mulhi", "nextafter", "not", "or", "polygamma", "population_count",
    "regularized_incomplete_beta", "rem", "round", "shift_left", "shift_right_arithmetic",
    "shift_right_logical", "sin", "sinh", "tan", "tanh", "xor", "zeta",
)  # fmt: skip


def spread(site: Site, power: int) -> Type:
    """Returns the type of an elementwise result with factor M^`power`: B where an input is, else R."""
    axis = site.out_axis()
    for t in site.types:
        if t.kind == "B" and t.axis != axis:
            raise Untypable("it lines up the batch axis with another axis")
        if t.kind == "S" or t.kind == "I":
            raise Untypable(f"it combines {SUM_WITH_EXAMPLES}")
    if axis is None:
        return BatchType("R", power)
    if not any(t.kind in "BZ" for t in site.types):
        raise Untypable("its shape depends on the batch size though its inputs' do not")
    return BatchType("B", power, axis)


def linear_in_all(site: Site, what: str) -> Type:
    t = join(site.types, what)
    if t.kind == "S":
        return site.like(t)
    return t if t.kind == "Z" else spread(site, t.power)


@rule(*NONLINEAR)
def nonlinear(site: Site) -> list[Type]:
    what = f"'{site.primitive}' of"
    no_sums(site.types, what)
    no_powers(site.types, what)
    return [spread(site, 0)]


@rule(
    "neg", "conj", "real", "imag", "copy", "copy_p", "stop_gradient", "reduce_precision", "name",
    "sharding_constraint", "layout_constraint", "reshard", "optimization_barrier", "device_put",
    "pvary", index_aware=False,
)  # fmt: skip
def identity(site: Site) -> list[Type]:
    if is_integer(site.ins[0]) and site.primitive == "neg":
        no_powers(site.types, "the negative of")
    if len(site.outs) != len(site.types):
        raise Untypable("it has more results than inputs")
    return [
        site.like(t, t.axis, k)
        for k, t in enumerate(site.types)
        if isinstance(t, BatchType)
    ]


@rule("bitcast_convert_type")
def bitcast_convert_type(site: Site) -> list[Type]:
    no_sums(site.types, "reinterpreting")
    no_powers(site.types, "reinterpreting")
    t = site.resolved(0)
    # Another width adds or drops a last axis, which leaves the batch axis where it was.
    return [site.like(t, t.axis)]


@rule("convert_element_type", index_aware=True)
def convert_element_type(site: Site) -> list[Type]:
    (t,), old, new = site.types, site.ins[0], site.outs[0]
    if isinstance(t, Index):
        if is_integer(new) and dtype_itemsize(new.dtype) >= min(4, dtype_itemsize(old.dtype)):
            return [t]
        raise NeedsWhole("it reads positions along the batch as numbers")
    if t.kind == "Z":
        return [t]
    power = t.power
    if new.dtype == "bool":
        no_sums([t], "testing")
        power = 0
    elif not new.is_inexact and old.is_inexact:
        no_sums([t], "rounding")
        no_powers([t], "rounding")
    elif is_integer(old) and t.kind == "S":
        small = old.dtype.startswith("u") or dtype_itemsize(old.dtype) < 4
        if small and (new.is_inexact or _wider(new, old)):
            raise Untypable("a sum of unsigned or small integers may wrap around before it is converted")
    elif is_integer(old) and t.power and not new.is_inexact and not _wider(new, old):
        no_powers([t], "narrowing")
    if t.kind == "S":
        return [site.like(t)]
    return [spread(site, power)]


def _wider(new: Aval, old: Aval) -> bool:
    return dtype_itemsize(new.dtype) > dtype_itemsize(old.dtype)


@rule("add", "sub", "add_any", index_aware=True)
def add(site: Site) -> list[Type]:
    if any(t.kind == "I" for t in site.types):
        return [_shifted_index(site)]
    if is_integer(site.outs[0]) and not any(t.kind == "S" for t in site.types):
        no_powers(site.types, "integer arithmetic on")
    return [linear_in_all(site, "adds")]


def _shifted_index(site: Site) -> Type:
    """An index plus a constant: the branch not taken when negative indices are wrapped."""
    index, other = site.types if site.types[0].kind == "I" else site.types[::-1]
    if not isinstance(index, Index) or index.role != "index" or site.primitive != "add":
        raise NeedsWhole("it computes with positions along the batch")
    if other.kind not in "RZ":
        raise NeedsWhole("it computes with positions along the batch")
    # Adding nothing leaves an index an index.
    return index if other.kind == "Z" else Index(index.axis, index.columns, "junk")


@rule("mul")
def mul(site: Site) -> list[Type]:
    a, b = site.types
    if a.kind == "Z" and b.kind == "Z":
        return [a]
    if is_integer(site.outs[0]):
        no_powers([t for t in site.types if t.kind != "S"], "integer arithmetic on")
    power = a.power + b.power
    if "S" in (a.kind, b.kind):
        other = b if a.kind == "S" else a
        if other.kind == "S":
            raise Untypable("it multiplies two sums over the batch, and the product of sums is not the sum of products")
        if other.kind == "B" or site.out_axis() is not None:
            raise Untypable(f"it multiplies {SUM_WITH_EXAMPLES}")
        return [BatchType("S", power)]
    return [spread(site, power)]


@rule("div")
def div(site: Site) -> list[Type]:
    a, b = site.types
    if b.kind == "S":
        raise Untypable("it divides by a sum or mean over the batch that depends on the parameters")
    if is_integer(site.outs[0]):
        no_sums(site.types, "integer division of")
        no_powers(site.types, "integer division of")
    if a.kind == "Z" and b.kind == "Z":
        return [spread(site, 0)]
    power = a.power - b.power
    if a.kind == "S":
        if b.kind != "R":
            raise Untypable("it divides a sum or mean over the batch by values of single examples")
        return [site.like(BatchType("S", power))]
    return [spread(site, power)]


@rule("select_n", index_aware=True)
def select_n(site: Site) -> list[Type]:
    which, cases = site.types[0], site.types[1:]
    if isinstance(which, Index):
        # `index < 0` is false for every example, so the first case is taken.
        if which.role == "false" and len(cases) == 2:
            t = cases[0]
            return [t if t.kind in "ZI" else spread(_without(site, (0, 2)), t.power)]
        raise NeedsWhole("it selects by positions along the batch")
    if any(t.kind == "I" for t in cases):
        raise NeedsWhole("it selects among positions along the batch")
    no_sums([which], "branching on")
    no_powers([which], "branching on")
    t = join(cases, "chooses between")
    if t.kind == "S":
        if which.kind == "B":
            raise Untypable("it gives each example its own choice of a sum over the batch")
        return [site.like(t)]
    return [t if t.kind == "Z" else spread(site, t.power)]


def _without(site: Site, positions: tuple[int, ...]) -> Site:
    keep = [k for k in range(len(site.types)) if k not in positions]
    return Site(
        site.primitive, site.num_microbatches, site.params, site.micro_params,
        [site.types[k] for k in keep], [site.ins[k] for k in keep],
        [site.micro_ins[k] for k in keep], site.outs, site.micro_outs,
        [site.values[k] for k in keep], site.body,
    )  # fmt: skip


@rule("max", "min", "abs", "clamp")
def homogeneous(site: Site) -> list[Type]:
    # f(c*x) = c*f(x) for c > 0, which a power of M is.
    no_sums(site.types, f"'{site.primitive}' of")
    t = join(site.types, "compares")
    return [t if t.kind == "Z" else spread(site, t.power)]


@rule("eq", "ne", "lt", "le", "gt", "ge", "eq_to", "lt_to", "le_to", "sign", "atan2", index_aware=True)
def compare(site: Site) -> list[Type]:
    # f(c*x) = f(x) for c > 0.
    if any(t.kind == "I" for t in site.types):
        first = site.types[0]
        negative = site.primitive == "lt" and site.types[1].kind == "Z"
        if negative and isinstance(first, Index) and first.role == "index" and first.columns is None:
            return [Index(first.axis, None, "false")]
        raise NeedsWhole("it compares positions along the batch")
    no_sums(site.types, "comparing")
    join(site.types, "compares")
    if site.primitive == "sign" and site.types[0].kind == "Z":
        return [site.types[0]]
    return [spread(site, 0)]


_EXPONENTS = {
    "square": 2, "sqrt": fractions.Fraction(1, 2), "rsqrt": fractions.Fraction(-1, 2),
    "cbrt": fractions.Fraction(1, 3),
}  # fmt: skip


@rule("square", "integer_pow", "sqrt", "rsqrt", "cbrt", "pow")
def power(site: Site) -> list[Type]:
    no_sums(site.types, f"'{site.primitive}' of")
    t = site.types[0]
    if site.primitive == "pow":
        no_powers(site.types[1:], "raising to")
        exponent = site.values[1]
        if exponent is None:
            no_powers([t], "raising to an unknown power")
            return [spread(site, 0)]
    else:
        exponent = _EXPONENTS.get(site.primitive) or site.params["y"]
    if not t.power:
        return [spread(site, 0)]
    if is_integer(site.outs[0]):
        no_powers([t], "integer arithmetic on")
    result = t.power * fractions.Fraction(exponent)
    if result.denominator != 1:
        no_powers([t], f"'{site.primitive}' of")
    return [spread(site, int(result))]


@rule("complex")
def complex_(site: Site) -> list[Type]:
    return [linear_in_all(site, "joins")]

