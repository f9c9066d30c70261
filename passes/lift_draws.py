"""lift-draws: draws the random numbers of loops and rematerialised blocks before them.

One key draws for the whole batch in one order, so a microbatch's numbers are a slice of the whole
draw. At the top of a step such a draw is computed once at full batch and sliced; inside a scan or a
checkpointed block nobody can slice it. Moving it out is exact whatever the batch: a draw depends on
keys and counters, and those on nothing else in the loop.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any, ClassVar

from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.graph import Graph
from hetjax.ir.importer import aval_of, inline_calls
from hetjax.passes.loop_bodies import (
    BODIES,
    Body,
    as_call,
    bodies_of,
    copied,
    flattened,
    opened,
    with_bodies,
    without,
)

DRAWS = frozenset({"random_bits", "random_gamma", "rng_bit_generator"})


@dataclasses.dataclass(frozen=True)
class LiftDraws:
    """Moves random draws out of scan, checkpoint and cond.

    Before: `%4 = scan %keys %x { … %b = random_bits %key … }`
    After:  `%4 = scan %keys { … %b = random_bits %key … }` that returns all draws, stacked, and
    `%5 = scan %keys %x %4 { … }` that reads them. Where a draw only serves a comparison (dropout), the
    comparison is moved along: it is a quarter of the bytes.
    """

    name: ClassVar[str] = "lift-draws"
    summary: ClassVar[str] = "draw the random numbers of loops and checkpointed blocks before them"

    def apply(self, bundle: Bundle) -> Bundle:
        if bundle.graph is None:
            return bundle
        graph = lift_draws(bundle.graph)
        return bundle if graph is bundle.graph else bundle.replace(graph=graph)


def lift_draws(graph: Graph) -> Graph:
    """Returns the graph with draws moved to its top level; the same object when there are none below."""
    ops, changed = [], False
    for op in graph.ops:
        if op.eqn is not None and op.primitive in BODIES and _hides_draws(op.eqn):
            lifted = as_call(op.eqn, _lift_equation)
            op, changed = dataclasses.replace(op, primitive="closed_call", eqn=lifted), True
        ops.append(op)
    return inline_calls(graph.replace(ops=tuple(ops))) if changed else graph


def _hides_draws(eqn: Any) -> bool:
    return any(
        inner.primitive.name in DRAWS or _hides_draws(inner)
        for body in bodies_of(eqn)
        for inner in (_jax.as_jaxpr(body) or (body, ()))[0].eqns
    )


def _lift_equation(eqn: Any) -> list[Any]:
    """Returns the equations that replace `eqn`: its draws, then the rest."""
    if eqn.primitive.name not in BODIES or not _hides_draws(eqn):
        return [eqn]
    taken = [opened(body) for body in bodies_of(eqn)]
    if any(consts for _, consts in taken):
        return [eqn]
    bodies = [flattened(jaxpr, _lift_equation) for jaxpr, _ in taken]
    if eqn.primitive.name == "scan":
        return _lift_scan(eqn, bodies[0])
    return _lift_blocks(eqn, bodies)


def _counts_or_draws(eqn: Any) -> bool:
    """Whether an equation makes keys, counters or random numbers, and nothing dearer."""
    return eqn.primitive.name in DRAWS or not any(aval_of(v.aval).is_inexact for v in eqn.outvars)


def _reach(body: Body, movable: set[Any]) -> tuple[set[Any], dict[Any, Any]]:
    """Returns the variables that follow from `movable` inputs alone, and the equation of each."""
    known, constant, made = set(movable), set(), {}
    for eqn in body.eqns:
        if bodies_of(eqn) or eqn.effects:
            continue
        if all(_jax.is_literal(a) or a in constant for a in eqn.invars):
            constant.update(eqn.outvars)
        elif not _counts_or_draws(eqn) or not all(_jax.is_literal(a) or a in known for a in eqn.invars):
            continue
        known.update(eqn.outvars)
        made.update((v, eqn) for v in eqn.outvars)
    return known, made


def _targets(body: Body, known: set[Any], made: dict[Any, Any]) -> tuple[list[Any], dict[Any, Any]]:
    """Returns the draws to lift, each as the smallest value computed from it alone."""
    readers: dict[Any, list[Any]] = {}
    for eqn in body.eqns:
        for a in eqn.invars:
            if not _jax.is_literal(a):
                readers.setdefault(a, []).append(eqn)
    returned = {a for a in body.outvars if not _jax.is_literal(a)}
    made = dict(made)
    out = []
    for var in [v for e in body.eqns if e.primitive.name in DRAWS for v in e.outvars if v in made]:
        best = var
        while True:
            (reader, *others) = readers.get(var, [None])
            if reader is None or others or var in returned or len(reader.outvars) != 1:
                break
            if reader.effects or bodies_of(reader) or reader.primitive.name in DRAWS:
                break
            if not all(_jax.is_literal(a) or a is var or a in known for a in reader.invars):
                break
            var = reader.outvars[0]
            if aval_of(var.aval).nbytes > aval_of(best.aval).nbytes:
                break
            made[var] = reader
            if aval_of(var.aval).nbytes <= aval_of(best.aval).nbytes:
                best = var
        if best not in out and not _jax.is_drop_var(best):
            out.append(best)
    return out, made


def _needed(targets: Sequence[Any], made: dict[Any, Any], body: Body) -> tuple[list[Any], set[Any]]:
    """Returns the equations that make `targets`, in order, and the variables they start from."""
    ids, start, stack = set(), set(), list(targets)
    while stack:
        var = stack.pop()
        if var not in made:
            start.add(var)
        elif id(made[var]) not in ids:
            ids.add(id(made[var]))
            stack.extend(a for a in made[var].invars if not _jax.is_literal(a))
    return [e for e in body.eqns if id(e) in ids], start


def _lift_blocks(eqn: Any, bodies: list[Body]) -> list[Any]:
    """Lifts draws out of a checkpointed block or the branches of a cond."""
    skip = 1 if eqn.primitive.name == "cond" else 0
    before, extra = [], []
    plans = []
    for body in bodies:
        targets, made = _targets(body, *_reach(body, set(body.invars)))
        eqns, _ = _needed(targets, made, body)
        env = dict(zip(body.invars, eqn.invars[skip:]))
        before += copied(eqns, env)
        plans.append((body, targets))
        extra += [env[t] for t in targets]
    if not extra:
        return [eqn.replace(params=with_bodies(eqn, bodies))]
    out = []
    for i, (body, targets) in enumerate(plans):
        new = [_jax.new_var(v.aval) for v in extra]
        first = sum(len(t) for _, t in plans[:i])
        mine = dict(zip(targets, new[first : first + len(targets)]))
        out.append(without(body, mine, new))
    return [*before, eqn.replace(invars=[*eqn.invars, *extra], params=with_bodies(eqn, out))]


def _lift_scan(eqn: Any, body: Body) -> list[Any]:
    """Lifts draws out of a scan into one before it, with the keys and counters it carries."""
    consts, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    carry = body.invars[consts : consts + carries]
    free = {c for c in carry if not aval_of(c.aval).is_inexact}
    fixed = {*body.invars[:consts], *body.invars[consts + carries :]}
    while True:
        known, made = _reach(body, fixed | free)
        still = {c for c, new in zip(carry, body.outvars) if c in free and (_jax.is_literal(new) or new in known)}
        if still == free:
            break
        free = still
    targets, made = _targets(body, known, made)
    if not targets:
        return [eqn.replace(params=with_bodies(eqn, [body]))]
    kept: list[int] = []  # carries that the draws need, and those that these need
    while True:
        roots = [*targets, *(body.outvars[k] for k in kept)]
        _, start = _needed([r for r in roots if not _jax.is_literal(r)], made, body)
        more = [k for k, c in enumerate(carry) if c in start]
        if more == kept:
            break
        kept = more
    roots = [*(body.outvars[k] for k in kept), *targets]
    eqns, start = _needed([r for r in roots if not _jax.is_literal(r)], made, body)
    wanted_consts = [k for k in range(consts) if body.invars[k] in start]
    wanted_xs = [k for k in range(consts + carries, len(body.invars)) if body.invars[k] in start]
    picked = [*wanted_consts, *(consts + k for k in kept), *wanted_xs]
    invars = [_jax.new_var(body.invars[k].aval) for k in picked]
    env = dict(zip((body.invars[k] for k in picked), invars))
    copies = copied(eqns, env)
    results = [a if _jax.is_literal(a) else env.get(a, a) for a in roots]
    length = eqn.params["length"]
    stacked = [_jax.new_var(_stacked(t.aval, length)) for t in targets]
    early = eqn.replace(
        invars=[eqn.invars[k] for k in picked],
        outvars=[*(_jax.drop_var(body.invars[consts + k].aval) for k in kept), *stacked],
        params={
            **eqn.params, "jaxpr": _jax.build_jaxpr("draws", invars, results, copies),
            "num_consts": len(wanted_consts), "num_carry": len(kept),
        },
        effects=frozenset(),
    )  # fmt: skip
    new = [_jax.new_var(t.aval) for t in targets]
    rest = without(body, dict(zip(targets, new)), new)
    return [early, eqn.replace(invars=[*eqn.invars, *stacked], params=with_bodies(eqn, [rest]))]


def _stacked(aval: Any, length: int) -> Any:
    return aval.update(shape=(length, *aval.shape))
