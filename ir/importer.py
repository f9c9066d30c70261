"""From a closed jaxpr to a graph, and call inlining on graphs."""

from __future__ import annotations

import dataclasses
import functools
import os
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.dtypes import short_dtype
from hetjax.ir.errors import LoweringError
from hetjax.ir.graph import Argument, Atom, Aval, Graph, Literal, Op, Ref, Result
from hetjax.ir.params_text import encode_param

Scopes = tuple[tuple[str, str], ...]


def aval_of(aval: Any) -> Aval:
    """Returns the graph's type of a JAX aval; abstract tokens and the like become "token"."""
    dtype = getattr(aval, "dtype", None)
    if dtype is None:
        return Aval("token", ())
    return Aval(_name_of(dtype), tuple(aval.shape), bool(getattr(aval, "weak_type", False)))


@functools.cache
def _name_of(dtype: Any) -> str:
    """Returns a dtype's short name; kept, because NumPy composes its own anew each time it is asked."""
    name = getattr(dtype, "name", None) or str(dtype)
    # float0 is a structured NumPy dtype whose name is void-like.
    if str(dtype) == "[('float0', 'V')]" or name.startswith("void"):
        name = "float0"
    return short_dtype(name)


class _Builder:
    """Collects values, ops and captured arrays in order of definition."""

    def __init__(self) -> None:
        self.avals: list[Aval] = []
        self.inputs: list[Argument] = []
        self.ops: list[Op] = []
        self.consts: dict[Ref, Any] = {}
        self._const_of_id: dict[int, Ref] = {}
        self._sources: dict[int, str] = {}
        self._cwd = os.path.join(os.getcwd(), "")

    def value(self, aval: Aval) -> Ref:
        self.avals.append(aval)
        return len(self.avals) - 1

    def argument(self, aval: Aval, argument: Argument) -> Ref:
        ref = self.value(aval)
        self.inputs.append(dataclasses.replace(argument, ref=ref))
        return ref

    def capture(self, const: Any, aval: Aval) -> None:
        """Makes a captured array an input, once however often it is used."""
        if id(const) not in self._const_of_id:
            ref = self.argument(aval, Argument(0, f"const{len(self.consts)}", "const"))
            self.consts[ref], self._const_of_id[id(const)] = const, ref

    def captured(self, const: Any) -> Ref | None:
        return self._const_of_id.get(id(const))

    def source(self, eqn: Any) -> str:
        key = id(eqn.source_info.traceback)
        if key not in self._sources:
            name, line = _jax.user_source(eqn)
            self._sources[key] = f"{name.removeprefix(self._cwd)}:{line}" if name else ""
        return self._sources[key]


def import_jaxpr(
    closed: Any,
    *,
    name: str,
    arguments: Sequence[Argument] | None = None,
    results: Sequence[Result] | None = None,
) -> Graph:
    """Returns the graph of a jaxpr; calls stay calls (see `inline_calls`).

    Args:
      closed: a ClosedJaxpr; an open Jaxpr is taken as one without consts.
      name: the graph's name.
      arguments: path, role and batch axis of each input, in order; refs are renumbered. Default:
        plain inputs named "0", "1", ….
      results: path and update of each output; atoms are filled in. Default: "0", "1", ….
    """
    jaxpr, consts = _jax.as_jaxpr(closed) or (closed, ())
    builder = _Builder()
    env: dict[Any, Atom] = {}
    given = arguments or [Argument(i, str(i)) for i in range(len(jaxpr.invars))]
    for var, argument in zip(jaxpr.invars, given, strict=True):
        env[var] = builder.argument(aval_of(var.aval), argument)
    if consts:
        for var, const in zip(jaxpr.constvars, consts, strict=True):
            builder.capture(const, aval_of(var.aval))
            env[var] = _known(builder.captured(const))
    else:  # an open jaxpr: its constvars are inputs like the others
        for i, var in enumerate(jaxpr.constvars):
            env[var] = builder.argument(aval_of(var.aval), Argument(0, f"const{i}", "const"))
    _capture_nested(builder, jaxpr, calls=False)
    _emit(builder, jaxpr, env, (), inline=False)
    named = results or [Result(0, str(i)) for i in range(len(jaxpr.outvars))]
    outputs = tuple(
        dataclasses.replace(r, atom=_atom(builder, env, var))
        for var, r in zip(jaxpr.outvars, named, strict=True)
    )
    return _finish(builder, name, outputs)


def inline_calls(graph: Graph, allow: Callable[[Op], bool] = lambda op: True) -> Graph:
    """Returns the graph with every op that only calls a jaxpr replaced by that jaxpr's ops.

    Name stacks are concatenated, or the regions of a jitted step would be lost. Returns the same
    object when there is nothing to inline.

    Args:
      graph: calls and all.
      allow: asked once for each call op of the graph itself; what it refuses stays.
    """
    allowed = {id(op) for op in graph.ops if _is_call(op) and allow(op)}
    if not allowed:
        return graph
    builder = _Builder()
    env: dict[Ref, Atom] = {}
    for argument in graph.inputs:
        if argument.ref in graph.consts:
            builder.capture(graph.consts[argument.ref], graph.avals[argument.ref])
            env[argument.ref] = _known(builder.captured(graph.consts[argument.ref]))
        else:
            env[argument.ref] = builder.argument(graph.avals[argument.ref], argument)
    lost: dict[int, Ref] = {}
    for op in (op for op in graph.ops if id(op) in allowed):
        if op.eqn is None:
            _capture_text(builder, op.param(_jax.CALLS[op.primitive]), lost)
        else:
            _capture_body(builder, op.eqn.params[_jax.CALLS[op.primitive]])

    def look(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else env[atom]

    for op in graph.ops:
        inputs = tuple(map(look, op.inputs))
        if id(op) in allowed and op.eqn is None:
            env.update(zip(op.outputs, _inline_text(builder, op, inputs, (), "", lost), strict=True))
        elif id(op) in allowed:
            body = op.eqn.params[_jax.CALLS[op.primitive]]
            env.update(zip(op.outputs, _inline(builder, body, inputs, op.scopes, op.source), strict=True))
        else:
            outputs = tuple(builder.value(graph.avals[r]) for r in op.outputs)
            env.update(zip(op.outputs, outputs, strict=True))
            builder.ops.append(dataclasses.replace(op, inputs=inputs, outputs=outputs))
    results = tuple(dataclasses.replace(r, atom=look(r.atom)) for r in graph.outputs)
    return _finish(builder, graph.name, results)


def _finish(builder: _Builder, name: str, outputs: tuple[Result, ...]) -> Graph:
    return Graph(
        name, tuple(builder.inputs), tuple(builder.ops), outputs, tuple(builder.avals),
        builder.consts,
    )


def _is_call(op: Op) -> bool:
    if op.eqn is None:  # from text: the body is a graph
        return isinstance(op.param(_jax.CALLS.get(op.primitive, "")), Graph)
    return _jax.CALLS.get(op.primitive) in op.eqn.params


def _known(ref: Ref | None) -> Ref:
    if ref is None:
        raise LoweringError("a captured array was not collected before it was used")
    return ref


def _capture_body(builder: _Builder, body: Any) -> None:
    jaxpr, consts = _jax.as_jaxpr(body) or (body, ())
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        builder.capture(const, aval_of(var.aval))
    _capture_nested(builder, jaxpr, calls=True)


def _capture_text(builder: _Builder, body: Graph, lost: dict[int, Ref]) -> None:
    """Makes the captured arrays of a body out of text inputs; text does not hold their values."""
    for argument in body.inputs:
        if argument.role == "const":
            path = f"const{len(builder.consts) + len(lost)}"
            lost[id(argument)] = builder.argument(body.avals[argument.ref], Argument(0, path, "const"))
    for op in filter(_is_call, body.ops):
        _capture_text(builder, op.param(_jax.CALLS[op.primitive]), lost)


def _inline_text(
    builder: _Builder, call: Op, inputs: tuple[Atom, ...], prefix: Scopes, source: str, lost: dict[int, Ref]
) -> list[Atom]:
    """Appends the ops of a call out of text; returns what its results became."""
    body: Graph = call.param(_jax.CALLS[call.primitive])
    scopes, source = prefix + call.scopes, call.source or source
    given = [a for a in body.inputs if id(a) not in lost]
    env: dict[Ref, Atom] = {a.ref: lost[id(a)] for a in body.inputs if id(a) in lost}
    env.update(zip((a.ref for a in given), inputs, strict=True))

    def look(atom: Atom) -> Atom:
        return atom if isinstance(atom, Literal) else env[atom]

    for op in body.ops:
        operands = tuple(map(look, op.inputs))
        if _is_call(op):
            results: Sequence[Atom] = _inline_text(builder, op, operands, scopes, source, lost)
        else:
            results = outputs = tuple(builder.value(body.avals[r]) for r in op.outputs)
            builder.ops.append(
                dataclasses.replace(
                    op, inputs=operands, outputs=outputs, scopes=scopes + op.scopes, source=op.source or source
                )
            )
        env.update(zip(op.outputs, results, strict=True))
    return [look(r.atom) for r in body.outputs]


def _capture_nested(builder: _Builder, jaxpr: Any, *, calls: bool) -> None:
    """Captures arrays that JAX left as literals, and with `calls` those of the calls within.

    Inputs are numbered before ops, so all of them are found before the first op is emitted.
    """
    for eqn in jaxpr.eqns:
        for atom in eqn.invars:
            if _jax.is_literal(atom) and getattr(atom.val, "ndim", 0):
                builder.capture(atom.val, aval_of(atom.aval))
        if calls and (body := eqn.params.get(_jax.CALLS.get(eqn.primitive.name))) is not None:
            _capture_body(builder, body)


def _atom(builder: _Builder, env: dict[Any, Atom], atom: Any) -> Atom:
    if not _jax.is_literal(atom):
        return env[atom]
    captured = builder.captured(atom.val)
    if captured is not None:
        return captured
    return Literal(_jax.literal_array(atom).item(), aval_of(atom.aval))


def _emit(
    builder: _Builder, jaxpr: Any, env: dict[Any, Atom], prefix: Scopes, *, inline: bool, source: str = ""
) -> None:
    """Appends the ops of `jaxpr`; `prefix` is the name stack of the calls around it.

    An equation of library code has no line of the user's: it takes `source`, that of the call.
    """
    for eqn in jaxpr.eqns:
        inputs = tuple(_atom(builder, env, a) for a in eqn.invars)
        scopes = prefix + _jax.name_scopes(eqn)
        body = eqn.params.get(_jax.CALLS.get(eqn.primitive.name)) if inline else None
        here = builder.source(eqn) or source
        if body is not None:
            env.update(zip(eqn.outvars, _inline(builder, body, inputs, scopes, here), strict=True))
            continue
        outputs = tuple(builder.value(aval_of(v.aval)) for v in eqn.outvars)
        env.update(zip(eqn.outvars, outputs))
        params = tuple((k, encode_param(k, v, _region)) for k, v in sorted(eqn.params.items()))
        builder.ops.append(
            Op(
                eqn.primitive.name, inputs, outputs, params, source=here,
                scopes=scopes, eqn=eqn,
            )
        )


def encoded_params(params: dict[str, Any]) -> dict[str, Any]:
    """Returns an equation's parameters as `Op.params` holds them, by name."""
    return {k: encode_param(k, v, _region) for k, v in params.items()}


def _inline(
    builder: _Builder, body: Any, inputs: tuple[Atom, ...], scopes: Scopes, source: str
) -> list[Atom]:
    """Appends the ops of a call's body; returns what its results became."""
    jaxpr, consts = _jax.as_jaxpr(body) or (body, ())
    env: dict[Any, Atom] = dict(zip(jaxpr.invars, inputs, strict=True))
    for var, const in zip(jaxpr.constvars, consts, strict=True):
        env[var] = _known(builder.captured(const))
    _emit(builder, jaxpr, env, scopes, inline=True, source=source)
    return [_atom(builder, env, out) for out in jaxpr.outvars]


def _region(value: Any, name: str) -> Graph:
    return import_jaxpr(value, name=name)
