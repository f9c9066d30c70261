"""Rules for ops that hold programs: calls, loops and branches are typed by typing what they hold."""

from __future__ import annotations

from typing import Any

from hetjax.ir.microbatching import BatchType
from hetjax.passes.prover.batch_types import (
    Site,
    Type,
    Untypable,
    join,
    no_powers,
    no_sums,
    rule,
)

# A carry's type can rise from Z over R to S, so three rounds are enough; more means it never settles.
_ROUNDS = 4

_CALLS = {
    "jit": "jaxpr", "pjit": "jaxpr", "closed_call": "call_jaxpr", "core_call": "call_jaxpr",
    "call": "call_jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr", "composite": "jaxpr", "custom_vmap_call": "call",
}  # fmt: skip


@rule(*_CALLS)
def call(site: Site) -> list[Type]:
    name = _CALLS[site.primitive]
    return site.body(site.params[name], site.micro_params[name], list(site.types), 0)


def _settle(carry: list[Type], step: Any) -> list[Type]:
    """The least types that hold before and after every iteration."""
    for _ in range(_ROUNDS):
        after = step(carry)
        widened = [_widen(a, b) for a, b in zip(carry, after)]
        if widened == carry:
            return carry
        carry = widened
    raise Untypable("a value it carries is scaled by the batch size again in every iteration")


def _widen(a: Type, b: Type) -> Type:
    t = join([a, b], "carries from one iteration to the next")
    if "B" in (a.kind, b.kind) and "R" in (a.kind, b.kind):
        raise Untypable("it carries values of single examples over values of none")
    return t


@rule("scan", varies=("length",))
def scan(site: Site) -> list[Type]:
    p = site.params
    if p["length"] != site.micro_params["length"]:
        raise Untypable("it loops over the examples of the batch, one after another")
    consts, carries = p["num_consts"], p["num_carry"]
    xs: list[Type] = []
    for k in range(consts + carries, len(site.types)):
        t = site.resolved(k) if site.types[k].kind == "Z" and site.in_axis(k) == 0 else site.types[k]
        if t.axis is not None:
            if t.axis == 0:
                raise Untypable("it loops over the examples of the batch, one after another")
            t = BatchType("B", t.power, t.axis - 1)
        xs.append(t)

    def step(carry: list[Type]) -> list[Type]:
        return site.body(p["jaxpr"], site.micro_params["jaxpr"], [*site.types[:consts], *carry, *xs], 0)

    carry = _settle(list(site.types[consts : consts + carries]), lambda c: step(c)[:carries])
    ys = [
        BatchType("B", t.power, t.axis + 1) if isinstance(t, BatchType) and t.axis is not None else t
        for t in step(carry)[carries:]
    ]
    return [*carry, *ys]


@rule("while")
def while_(site: Site) -> list[Type]:
    p, q = site.params, site.micro_params
    nc, nb = p["cond_nconsts"], p["body_nconsts"]
    cond_consts, body_consts, init = site.types[:nc], site.types[nc : nc + nb], site.types[nc + nb :]

    def step(carry: list[Type]) -> list[Type]:
        return site.body(p["body_jaxpr"], q["body_jaxpr"], [*body_consts, *carry], 0)

    carry = _settle(list(init), step)
    (go_on,) = site.body(p["cond_jaxpr"], q["cond_jaxpr"], [*cond_consts, *carry], 1)
    if go_on.kind not in "RZ":
        raise Untypable("how often it loops depends on the examples of the batch together")
    return carry


@rule("cond")
def cond(site: Site) -> list[Type]:
    index, operands = site.types[0], list(site.types[1:])
    no_sums([index], "branching on")
    no_powers([index], "branching on")
    results = [
        site.body(a, b, operands, n)
        for n, (a, b) in enumerate(zip(site.params["branches"], site.micro_params["branches"]))
    ]
    return [join(ts, "branches between") for ts in zip(*results)]
