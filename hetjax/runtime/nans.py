"""jax_debug_nans and jax_debug_infs: a step whose results are not finite is told by the op that made them so.

As under plain jit, results decide: a NaN between stages that a `jnp.where` masks is none. What every
fragment was given is kept until the step's results have been looked at; only where one of them is not
finite are the fragments run again, op by op, down to the first op that gave what it was not given.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.errors import NanFault
from hetjax.ir.graph import Op
from hetjax.ir.program import Fragment, Program, Task
from hetjax.runtime.fragment_function import FragmentFunction, fragment_function

# Primitives that hold one program and run it once, beside plain calls.
_ONCE = _jax.CALLS | {"remat2": "jaxpr", "checkpoint": "jaxpr"}


@dataclasses.dataclass(frozen=True)
class Launch:
    """One run of a fragment: its task, and what it was given."""

    task: Task
    given: Sequence[Any]


def looked_for() -> tuple[str, ...]:
    """Returns "nan" and "inf", those that this thread's jax_debug_nans and jax_debug_infs ask for."""
    import jax

    return tuple(kind for kind in ("nan", "inf") if getattr(jax.config, f"jax_debug_{kind}s"))


@contextlib.contextmanager
def unchecked() -> Iterator[None]:
    """Within it JAX itself looks for neither."""
    import jax

    with jax.debug_nans(False), jax.debug_infs(False):
        yield


def holds(kinds: Sequence[str], values: Sequence[Any]) -> str:
    """Returns the first of `kinds` that some of the arrays hold, or ""."""
    import jax.numpy as jnp

    tests = {"nan": jnp.isnan, "inf": jnp.isinf}
    floats = [v for v in values if jnp.issubdtype(getattr(v, "dtype", None) or jnp.result_type(v), jnp.inexact)]
    return next((kind for kind in kinds if any(bool(tests[kind](v).any()) for v in floats)), "")


def spared(function: FragmentFunction, given: Sequence[Any]) -> list[Any]:
    """Returns a call's arguments, those that it may overwrite copied."""
    return [x.copy() if k in function.donated else x for k, x in enumerate(given)]


def fault(program: Program, launches: Sequence[Launch], kinds: Sequence[str]) -> NanFault:
    """Returns the error that names the op which first gave a NaN or an infinity, and where it ran.

    Args:
      program: what ran.
      launches: in the order they ran.
      kinds: what is looked for.
    """
    fragments = {f.name: f for f in program.fragments}
    named = f"jax_debug_{'s, jax_debug_'.join(kinds)}s"
    for launch in launches:
        fragment = fragments[launch.task.work]
        if any(op.eqn is None for op in fragment.ops):
            continue  # a kept start has no equations to run one by one
        found = _first(program, fragment, launch.given, kinds)
        if found is not None:
            op, primitive, source = found
            task = launch.task
            at = f"stage {task.stage}" + ("" if task.microbatch is None else f", microbatch {task.microbatch}")
            kind = "inf" if "nan" not in kinds else "nan or inf" if len(kinds) > 1 else "nan"
            return NanFault(
                f"'{primitive}'{f' in {op.block}' if op.block else ''} gave {kind} ({source or op.source}): "
                f"{op.region or 'step'}, {at}, fragment {fragment.name}. It is the first op of the step that did; what "
                f"it was given was finite. ({named} is on.)"
            )
    return NanFault(
        f"a result of the step is not finite ({named} is on), and no op gave that when run one by one: a compiled "
        "fragment, or values given to the step, did"
    )


def _first(
    program: Program, fragment: Fragment, given: Sequence[Any], kinds: Sequence[str]
) -> tuple[Op, str, str] | None:
    found: list[tuple[Op, str, str]] = []

    def one_by_one(closed: Any) -> Callable[..., list[Any]]:
        def run(*values: Any) -> list[Any]:
            culprit, results = _walk(closed.jaxpr, closed.consts, values, kinds, fragment.ops)
            if culprit is not None:
                found.append(culprit)
                raise _Found
            return results

        return run

    try:
        fragment_function(program, fragment, one_by_one).call(*given)
    except _Found:
        return found[0]
    return None


class _Found(Exception):
    """Ends a run in the middle: the rest of it does not matter."""


def _walk(
    jaxpr: Any, consts: Sequence[Any], given: Sequence[Any], kinds: Sequence[str], ops: Sequence[Op] | None = None
) -> tuple[Any, list[Any]]:
    """Returns the first equation that gives what it is not given (with its op, where ops are known), and the results."""
    env = dict(zip((*jaxpr.constvars, *jaxpr.invars), (*consts, *given), strict=True))

    def read(atom: Any) -> Any:
        return atom.val if _jax.is_literal(atom) else env[atom]

    for k, eqn in enumerate(jaxpr.eqns):
        inputs = [read(a) for a in eqn.invars]
        outputs = _jax.bind(eqn, inputs)
        if holds(kinds, outputs) and not holds(kinds, inputs):
            inner = _within(eqn, inputs, kinds) or eqn
            if ops is None:
                return inner, []
            file, line = _jax.user_source(inner)
            return (ops[k], inner.primitive.name, f"{file}:{line}" if file else ""), []
        env.update(zip(eqn.outvars, outputs, strict=True))
    return None, [read(a) for a in jaxpr.outvars]


def _within(eqn: Any, inputs: Sequence[Any], kinds: Sequence[str]) -> Any:
    """Returns the equation inside a call or a loop that is to blame, None where it cannot be told."""
    body = eqn.params.get(_ONCE.get(eqn.primitive.name, ""))
    if body is not None:
        jaxpr, consts = _jax.as_jaxpr(body) or (body, ())
        return _walk(jaxpr, consts, inputs, kinds)[0]
    if eqn.primitive.name != "scan":
        return None
    body, length = eqn.params["jaxpr"], eqn.params["length"]
    jaxpr, consts = _jax.as_jaxpr(body) or (body, ())
    fixed, carries = eqn.params["num_consts"], eqn.params["num_carry"]
    carry, xs = list(inputs[fixed : fixed + carries]), inputs[fixed + carries :]
    for i in reversed(range(length)) if eqn.params["reverse"] else range(length):
        culprit, results = _walk(jaxpr, consts, [*inputs[:fixed], *carry, *(x[i] for x in xs)], kinds)
        if culprit is not None:
            return culprit
        carry = results[:carries]
    return None
