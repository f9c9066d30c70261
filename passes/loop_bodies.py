"""Nested programs of equations, taken apart and put together again: for passes that change loops."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir import _jax

# Which parameter holds the body of an op that is no mere call.
BODIES = {"scan": "jaxpr", "remat2": "jaxpr", "checkpoint": "jaxpr", "cond": "branches"}


@dataclasses.dataclass
class Body:
    """A nested program, taken apart."""

    invars: list[Any]
    outvars: list[Any]
    eqns: list[Any]


def bodies_of(eqn: Any) -> list[Any]:
    """Returns the nested programs of an equation, calls included."""
    held = eqn.params.get(BODIES.get(eqn.primitive.name) or _jax.CALLS.get(eqn.primitive.name))
    return [] if held is None else list(held) if isinstance(held, (tuple, list)) else [held]


def opened(body: Any) -> tuple[Any, Sequence[Any]]:
    """Returns the open jaxpr and its constants."""
    return _jax.as_jaxpr(body) or (body, ())


def without_names(source_info: Any) -> Any:
    """Returns the source information without name stack, for what is inlined into a named op."""
    return source_info.replace(name_stack=type(source_info.name_stack)())


def flattened(jaxpr: Any, change: Callable[[Any], list[Any]]) -> Body:
    """Returns the program with calls inlined and each other equation replaced by what `change` makes of it."""
    eqns: list[Any] = []
    env: dict[Any, Any] = {}

    def read(atom: Any, scope: dict[Any, Any]) -> Any:
        return atom if _jax.is_literal(atom) else scope.get(atom, atom)

    def walk(inner: Any, scope: dict[Any, Any], prefix: Any) -> None:
        for eqn in inner.eqns:
            stack = eqn.source_info.name_stack
            placed = eqn.replace(
                invars=[read(a, scope) for a in eqn.invars],
                source_info=eqn.source_info.replace(name_stack=stack if prefix is None else prefix + stack),
            )
            body = eqn.params.get(_jax.CALLS.get(eqn.primitive.name))
            called, consts = (None, ()) if body is None else opened(body)
            if called is None or consts or called.constvars:
                fresh = [v if _jax.is_drop_var(v) else _jax.new_var(v.aval) for v in eqn.outvars]
                scope.update(zip(eqn.outvars, fresh))
                eqns.extend(change(placed.replace(outvars=fresh)))
                continue
            within = dict(zip(called.invars, placed.invars))
            walk(called, within, placed.source_info.name_stack)
            scope.update((v, read(a, within)) for v, a in zip(eqn.outvars, called.outvars))

    walk(jaxpr, env, None)
    return Body(list(jaxpr.invars), [read(a, env) for a in jaxpr.outvars], eqns)


def copied(eqns: Sequence[Any], env: dict[Any, Any]) -> list[Any]:
    """Returns the equations over other variables; `env` is extended with those they define."""
    out = []
    for eqn in eqns:
        invars = [a if _jax.is_literal(a) else env[a] for a in eqn.invars]
        fresh = [v if _jax.is_drop_var(v) else _jax.new_var(v.aval) for v in eqn.outvars]
        env.update(zip(eqn.outvars, fresh))
        out.append(eqn.replace(invars=invars, outvars=fresh))
    return out


def without(body: Body, given: dict[Any, Any], new: list[Any]) -> Body:
    """Returns the body that reads `given` variables instead of making them, dead equations dropped."""
    read = lambda a: a if _jax.is_literal(a) else given.get(a, a)  # noqa: E731
    outvars = [read(a) for a in body.outvars]
    live = {a for a in outvars if not _jax.is_literal(a)}
    kept = []
    for eqn in reversed(body.eqns):
        if not eqn.effects and not any(v in live for v in eqn.outvars):
            continue
        replaced = eqn.replace(invars=[read(a) for a in eqn.invars])
        live.update(a for a in replaced.invars if not _jax.is_literal(a))
        kept.append(replaced)
    return Body([*body.invars, *new], outvars, kept[::-1])


def with_bodies(eqn: Any, bodies: Sequence[Body]) -> dict[str, Any]:
    """Returns the equation's parameters with other bodies."""
    name = BODIES[eqn.primitive.name]
    made = [_jax.build_jaxpr("body", b.invars, b.outvars, b.eqns) for b in bodies]
    if eqn.primitive.name == "cond":
        return {**eqn.params, name: tuple(made)}
    closed = isinstance(eqn.params[name], _jax.ClosedJaxpr)
    return {**eqn.params, name: made[0] if closed else made[0].jaxpr}


def as_call(eqn: Any, rewrite: Callable[[Any], list[Any]]) -> Any:
    """Returns a call equation whose body is what `rewrite` makes of `eqn`.

    A call, so that inlining it renumbers refs and keeps name stacks. Its variables are new: after
    inlining, an op's own inputs are others than its equation's.
    """
    inner = eqn.replace(
        invars=[_jax.new_var(v.aval) for v in eqn.invars],
        outvars=[_jax.new_var(v.aval) for v in eqn.outvars],
        source_info=without_names(eqn.source_info),
    )
    body = _jax.build_jaxpr("rewritten", inner.invars, inner.outvars, rewrite(inner))
    return _jax.call_equation(eqn, body)
