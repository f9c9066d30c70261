"""The one door to private JAX names. Checked against jax 0.10; each name carries its reason.

`jax.extend.core` is semi-public: it promises no deprecation window, so it enters here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax._src import (
    config as _config,  # which settings a thread has of its own: contexts only set them
)
from jax._src import (
    core as _core,  # DropVar and effects; jax.extend.core has no constructor for the first
)
from jax._src import (
    distributed as _distributed,  # the key-value store of a job: no public way to it
)
from jax._src import effects as _effects  # which effects keep an order; equations hold them
from jax._src import monitoring as _monitoring  # to take one listener away again
from jax._src import source_info_util as _siu  # user's file:line and the name stack of an equation
from jax._src.interpreters import (
    mlir as _mlir,  # lowering rules: the only table of primitives by name
)
from jax._src.interpreters.batching import (
    BatchTracer as _BatchTracer,  # whether a value differs along a vmapped axis
)
from jax._src.lax.lax import (
    _convert_element_type,  # the public one sets a weak type only where the dtype is the default one
)
from jax._src.literals import (
    TypedNdArray as _TypedNdArray,  # what a jaxpr literal holds since jax 0.8
)
from jax.extend import core as jex
from jax.extend.core.primitives import closed_call_p as _closed_call_p
from jax.interpreters import (
    partial_eval as _pe,  # dce_jaxpr: the only public-ish dead code elimination
)

SUPPORTED = ((0, 10), (0, 11))

_version = tuple(int(p) for p in jax.__version__.split(".")[:2])
if not SUPPORTED[0] <= _version < SUPPORTED[1]:
    raise ImportError(
        f"hetjax reads private names of jax and was checked with jax>=0.10,<0.11; this is jax "
        f"{jax.__version__}. Install a checked version: pip install 'jax>=0.10,<0.11'"
    )

ClosedJaxpr = jex.ClosedJaxpr
Jaxpr = jex.Jaxpr
JaxprEqn = jex.JaxprEqn
JaxLiteral = jex.Literal
Var = jex.Var
DropVar = jex.DropVar

# Primitives that only call a jaxpr, with the name of the parameter that holds it.
CALLS = {
    "jit": "jaxpr",
    "pjit": "jaxpr",
    "closed_call": "call_jaxpr",
    "core_call": "call_jaxpr",
    "core_closed_call": "call_jaxpr",
    "custom_jvp_call": "call_jaxpr",
    "custom_vjp_call": "call_jaxpr",
}


def name_scopes(eqn: Any) -> tuple[tuple[str, str], ...]:
    """Returns an equation's name stack as ("scope" | "transform", name) pairs, outermost first.

    Read from the stack's entries and not from its text: a user's named_scope("transpose(x)") looks
    like a backward region in the text.
    """
    return tuple(
        ("transform" if type(entry).__name__ == "Transform" else "scope", entry.name)
        for entry in eqn.source_info.name_stack.stack
    )


@contextlib.contextmanager
def names_of(eqn: Any) -> Iterator[None]:
    """Within it, what is traced bears the name scopes and the source line of an equation, as in `eval_jaxpr`."""
    stack = _siu.current_name_stack() + eqn.source_info.name_stack
    with _siu.user_context(eqn.source_info.traceback, name_stack=stack):
        yield


def without_names() -> Any:
    """Returns a context within which name scopes start anew, as they do in the body of a loop."""
    return _siu.reset_name_stack()


# Frames of these packages are library code: the user's line is further out.
_LIBRARIES = ("/site-packages/flax/", "/site-packages/optax/", "/site-packages/chex/")


def user_source(eqn: Any) -> tuple[str, int]:
    """Returns (file name, line) of the innermost frame that is the user's, or ("", 0)."""
    traceback = eqn.source_info.traceback
    if traceback is None:
        return "", 0
    first = None
    for frame in _siu.user_frames(traceback):
        first = first or frame
        if not any(part in frame.file_name for part in _LIBRARIES):
            return frame.file_name, frame.start_line
    return (first.file_name, first.start_line) if first else ("", 0)


def new_var(aval: Any) -> Any:
    return Var(aval)


def drop_var(aval: Any) -> Any:
    return _core.DropVar(aval)


def is_drop_var(var: Any) -> bool:
    return isinstance(var, DropVar)


def is_literal(atom: Any) -> bool:
    return isinstance(atom, JaxLiteral)


def literal_array(literal: Any) -> np.ndarray:
    """Returns a jaxpr literal's value as a NumPy array."""
    return np.asarray(literal.val)


def as_jaxpr(value: Any) -> tuple[Any, Sequence[Any]] | None:
    """Returns (open jaxpr, consts) when `value` is a jaxpr, closed or open, else None."""
    if isinstance(value, ClosedJaxpr):
        return value.jaxpr, value.consts
    if isinstance(value, Jaxpr):
        return value, ()
    return None


def with_inner_jaxprs(eqn: Any, rewrite: Callable[[Any], Any]) -> Any:
    """Returns an equation whose inner jaxprs are rewritten; the same object where `rewrite` returns all as they are.

    Args:
      eqn: of a loop, branch, call or any other.
      rewrite: from an open jaxpr to one of the same type.
    """

    def changed(value: Any) -> Any:
        if isinstance(value, (tuple, list)) and any(as_jaxpr(v) is not None for v in value):
            out = [changed(v) for v in value]
            return value if all(a is b for a, b in zip(out, value)) else type(value)(out)
        held = as_jaxpr(value)
        if held is None:
            return value
        inner = rewrite(held[0])
        if inner is held[0]:
            return value
        return inner if isinstance(value, Jaxpr) else ClosedJaxpr(inner, held[1])

    params = {name: changed(value) for name, value in eqn.params.items()}
    return eqn if all(params[n] is v for n, v in eqn.params.items()) else eqn.replace(params=params)


def static_parameters(fn: Any) -> tuple[frozenset[int], frozenset[str]]:
    """Returns the positions and names that `jax.jit` (or `nnx.jit`) was told are static; jax has no public way to ask."""
    info = getattr(getattr(fn, "jitted_fn", fn), "_jit_info", None)
    if info is None:
        return frozenset(), frozenset()
    return frozenset(info.static_argnums), frozenset(info.static_argnames)


def in_a_trace() -> bool:
    """Returns whether a transformation of JAX is tracing; far cheaper than to look at every argument."""
    return not _core.trace_state_clean()


def build_jaxpr(name: str, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]) -> Any:
    """Returns a closed jaxpr without consts; effects are the union of the equations'."""
    effects = frozenset().union(*(e.effects for e in eqns)) if eqns else frozenset()
    debug = jex.DebugInfo(name, name, None, None)
    jaxpr = Jaxpr(
        constvars=[], invars=list(invars), outvars=list(outvars), eqns=list(eqns),
        effects=set(effects), debug_info=debug,
    )
    return ClosedJaxpr(jaxpr, [])


def call_equation(eqn: Any, body: Any) -> Any:
    """Returns `eqn` turned into a call of a closed jaxpr with as many inputs and results."""
    return eqn.replace(
        primitive=_closed_call_p, params={"call_jaxpr": body}, effects=body.jaxpr.effects
    )


def drop_dead_equations(closed: Any) -> tuple[Any, list[bool]]:
    """Returns the closed jaxpr without unused equations and inputs, and which inputs remain."""
    jaxpr, used = _pe.dce_jaxpr(closed.jaxpr, [True] * len(closed.jaxpr.outvars), instantiate=False)
    return ClosedJaxpr(jaxpr, closed.consts), used


def jaxpr_function(closed: Any) -> Callable[..., list[Any]]:
    """Returns a callable that evaluates the jaxpr on flat arguments."""
    return jex.jaxpr_as_fun(closed)


def first_inside(eqn: Any, name: str) -> Any:
    """Returns the first equation of a primitive in an equation and the programs it holds, or None."""
    if eqn.primitive.name == name:
        return eqn
    for inner in jex.jaxprs_in_params(eqn.params):
        for e in inner.eqns:
            if (found := first_inside(e, name)) is not None:
                return found
    return None


def has_gradient(eqn: Any) -> bool:
    """Returns whether the programs that an equation holds contain a backward: ops of a transposed function."""
    return any(
        ("transform", "transpose") in name_scopes(e) or has_gradient(e)
        for inner in jex.jaxprs_in_params(eqn.params) for e in inner.eqns
    )


def ordered_effects(eqn: Any) -> bool:
    """Returns whether an equation has effects whose order JAX keeps (`ordered=True`)."""
    return any(_effects.ordered_effects.contains(effect) for effect in eqn.effects)


def bind(eqn: Any, values: Sequence[Any]) -> list[Any]:
    """Returns what one equation gives for some values."""
    found = eqn.primitive.bind(*values, **eqn.primitive.get_bind_params(eqn.params))
    return list(found) if eqn.primitive.multiple_results else [found]


def is_weak(value: Any) -> bool:
    """Returns whether an array or Python scalar has JAX's weak type."""
    return bool(getattr(value, "weak_type", isinstance(value, (bool, int, float, complex))))


def is_batched(value: Any) -> bool:
    """Returns whether a value inside a vmapped function differs along the innermost vmapped axis."""
    return isinstance(value, _BatchTracer) and value.batch_dim is not None


def is_key(value: Any) -> bool:
    """Returns whether an array holds typed PRNG keys."""
    return jax.numpy.issubdtype(value.dtype, jax.dtypes.prng_key)


def with_weak_type(value: Any, weak_type: bool) -> Any:
    """Returns an array with JAX's weak type flag set or cleared; keys, which have none, as they are."""
    if is_weak(value) == weak_type or jax.numpy.issubdtype(value.dtype, jax.dtypes.extended):
        return value
    return _convert_element_type(value, value.dtype, weak_type=weak_type)


def shaped(aval: Any, sharding: Any = None) -> jax.ShapeDtypeStruct:
    """Returns a ShapeDtypeStruct of an aval or array that keeps its weak type."""
    return jax.ShapeDtypeStruct(
        aval.shape, aval.dtype, sharding=sharding, weak_type=bool(getattr(aval, "weak_type", False))
    )


def make_literal(value: Any, dtype: Any, aval: Any) -> Any:
    """Returns a jaxpr literal of a Python scalar."""
    return JaxLiteral(_TypedNdArray(np.asarray(value, dtype)), aval)


def shaped_array(shape: tuple[int, ...], dtype: Any, weak_type: bool = False) -> Any:
    """Returns the aval of an array."""
    return _core.ShapedArray(shape, dtype, weak_type=weak_type)


def key_aval(dtype: str, shape: tuple[int, ...]) -> Any:
    """Returns the aval of typed PRNG keys, by the short name "key<fry>"."""
    for impl in ("threefry2x32", "rbg", "unsafe_rbg"):
        key = jax.eval_shape(lambda impl=impl: jax.random.key(0, impl=impl))
        if key.dtype.name == dtype:
            return _core.ShapedArray(shape, key.dtype)
    raise TypeError(f"no PRNG implementation of JAX has the key type {dtype!r}")


def primitive_named(name: str) -> Any:
    """Returns the primitive of that name, or None; only primitives that can be lowered have one."""
    # No public table of primitives exists; the lowering rules are keyed by them.
    for rules in (_mlir._lowerings, *_mlir._platform_specific_lowerings.values()):
        for primitive in rules:
            if primitive.name == name:
                return primitive
    return None


def unspecified_sharding() -> Any:
    """Returns JAX's marker for "no sharding given"."""
    from jax._src.named_sharding import (
        UNSPECIFIED,  # the default of jit's in_shardings in equations
    )

    return UNSPECIFIED


def empty_mesh(kind: str) -> Any:
    """Returns the empty `Mesh` or `AbstractMesh`, which equations outside any mesh context hold."""
    from jax._src import mesh  # jit's ctx_mesh; the public constructor refuses an empty mesh

    return mesh.empty_concrete_mesh if kind == "Mesh" else mesh.empty_abstract_mesh


def new_equation(
    invars: Sequence[Any], out_avals: Sequence[Any], primitive: Any, params: dict[str, Any]
) -> Any:
    """Returns a jaxpr equation with new output variables.

    Raises:
      TypeError, ValueError: the primitive does not take these operands and parameters, or gives
        other types than `out_avals`.
    """
    given, effects = primitive.abstract_eval(*(v.aval for v in invars), **params)
    given = list(given) if primitive.multiple_results else [given]
    same = len(given) == len(out_avals) and all(
        a.shape == b.shape and a.dtype == b.dtype for a, b in zip(given, out_avals)
    )
    if not same:
        listed = ", ".join(a.str_short(short_dtypes=True) for a in given)
        expected = ", ".join(a.str_short(short_dtypes=True) for a in out_avals)
        raise TypeError(f"{primitive.name} gives {listed}, the text says {expected}")
    return jex.new_jaxpr_eqn(
        list(invars), [Var(a) for a in out_avals], primitive, params, effects
    )


def constraint_equation(aval: Any, sharding: Any) -> Any:
    """Returns the equation of `with_sharding_constraint` on a value of a type."""
    return jax.make_jaxpr(lambda x: jax.lax.with_sharding_constraint(x, sharding))(shaped(aval)).jaxpr.eqns[-1]


def open_jaxpr(name: str, invars: Sequence[Any], outvars: Sequence[Any], eqns: Sequence[Any]) -> Any:
    """Returns an open jaxpr without constvars."""
    return build_jaxpr(name, invars, outvars, eqns).jaxpr


def lower_to_module(function: Callable[..., Any], structs: Sequence[Any]) -> Any:
    """Returns the StableHLO module of a function of arrays; every argument is kept."""
    return jax.jit(function, keep_unused=True).lower(*structs).compiler_ir("stablehlo")


def rename_functions(module: Any, name: str, attributes: dict[str, str]) -> tuple[str, list[str], list[str]]:
    """Returns the functions of a lowered module as text, its entry renamed, and the entry's types.

    Args:
      module: of `lower_to_module`; changed in place.
      name: of the entry; the other functions are called after it.
      attributes: MLIR text by name, set on the entry.
    """
    from jax.extend.mlir import ir  # the module JAX lowered to is jaxlib's

    with module.context:
        functions = [op for op in module.body.operations if op.operation.name == "func.func"]
        for op in functions:
            old = ir.StringAttr(op.operation.attributes["sym_name"]).value
            new = name if old == "main" else f"{name}.{old}"
            ir.SymbolTable.replace_all_symbol_uses(old, new, module.operation)
            ir.SymbolTable.set_symbol_name(op.operation, new)
            op.operation.attributes["sym_visibility"] = ir.StringAttr.get("private")
        entry = functions[0]
        for key, text in attributes.items():
            entry.operation.attributes[key] = ir.Attribute.parse(text)
        kind = ir.FunctionType(ir.TypeAttr(entry.operation.attributes["function_type"]).value)
        body = "\n".join(str(op) for op in functions)
        return body, [str(t) for t in kind.inputs], [str(t) for t in kind.results]


def parse_module(text: str) -> Any:
    """Returns the verified MLIR module of a text in the dialects jaxlib has, mpmd included.

    Raises:
      ValueError: the text does not parse or breaks a rule of its dialects.
    """
    from jaxlib.mlir.dialects import mpmd  # Shardy's dialect of programs on several meshes

    context = lower_to_module(lambda: (), []).context
    mpmd.register_dialect(context)
    from jax.extend.mlir import ir

    try:
        with context:
            module = ir.Module.parse(text, context)
            module.operation.verify()
            return module
    except ir.MLIRError as error:
        raise ValueError(str(error)) from error


def propagate_shardings(
    module: Any, mesh: str, arguments: Sequence[str], results: Sequence[str]
) -> Any:
    """Returns a lowered module after Shardy's propagation, with what it notes of origins and edges.

    Args:
      module: of `lower_to_module`; changed in place.
      mesh: `["data"=2, "model"=4]`.
      arguments, results: `[{"data"}, {}]` per argument and result of the entry; "" leaves one open.

    Raises:
      ValueError: Shardy refuses the shardings.
    """
    options = "debug-sharding-origins=true debug-propagation-edge-sharding=true"
    # Calls hide what happens inside them, so they are inlined first.
    return _run_shardy(module, mesh, arguments, results, f"inline,sdy-aggressive-propagate{{{options}}}")


def partition_module(module: Any, mesh: str, arguments: Sequence[str], results: Sequence[str]) -> Any:
    """Returns a lowered module with shardings propagated and the collectives that they take, as sdy ops.

    Args and Raises: as `propagate_shardings`.
    """
    passes = (
        "inline", "sdy-propagation-pipeline", "func.func(sdy-insert-explicit-reshards{enable-full-version=true})",
        "func.func(sdy-reshard-to-collectives)", "canonicalize", "cse",  # a sum of which a part is kept is a scatter
    )
    return _run_shardy(module, mesh, arguments, results, ",".join(passes))


def _run_shardy(
    module: Any, mesh: str, arguments: Sequence[str], results: Sequence[str], passes: str
) -> Any:
    from jax.extend.mlir import ir, passmanager

    def attribute(spec: str) -> Any:
        if not spec:
            return ir.DictAttr.get({})
        return ir.DictAttr.get({"sdy.sharding": ir.Attribute.parse(f"#sdy.sharding<@mesh, {spec}>")})

    try:
        with module.context, ir.Location.unknown():
            entry = entry_function(module)
            for name, specs in (("arg_attrs", arguments), ("res_attrs", results)):
                entry.operation.attributes[name] = ir.ArrayAttr.get([attribute(s) for s in specs])
            # Constraints on the stage's own mesh have brought it along.
            if not any(op.operation.name == "sdy.mesh" and mesh in str(op) for op in module.body.operations):
                ir.InsertionPoint.at_block_begin(module.body).insert(ir.Operation.parse(f"sdy.mesh @mesh = <{mesh}>"))
            passmanager.PassManager.parse(f"builtin.module({passes})").run(module.operation)
    except ir.MLIRError as error:
        raise ValueError(str(error)) from error
    return module


def result_shardings(module: Any) -> list[str]:
    """Returns Shardy's attribute of every result of a module's entry, as text; "" where it has none."""
    listed = entry_function(module).operation.attributes["res_attrs"]
    return [next((str(n.attr) for n in one if n.name == "sdy.sharding"), "") for one in listed]


def partitioned_ops(module: Any) -> list[tuple[str, tuple[int, ...], int, str, int, tuple[str, ...]]]:
    """Returns what a partitioned module exchanges and multiplies.

    Returns:
      (op, global shape of the result, bits of an element, text, contracted elements, ops that read the result)
      of every collective and every product; contracted elements are 0 for collectives. A product's text holds
      its attributes, and that of its first reader where this is an all-reduce.
    """
    import re

    from jax.extend.mlir import ir

    out = []

    def walk(op: Any) -> None:
        for region in op.regions:
            for block in region.blocks:
                for inner in block.operations:
                    found = inner.operation
                    product = found.name == "stablehlo.dot_general"
                    if product or re.fullmatch(r"sdy\.(all_\w+|reduce_scatter|collective_permute)", found.name):
                        out.append(describe(found, product))
                    walk(found)

    def describe(found: Any, product: bool) -> tuple[str, tuple[int, ...], int, str, int, tuple[str, ...]]:
        kind = ir.RankedTensorType(found.results[0].type)
        bits = re.search(r"\d+", str(kind.element_type))
        contracted = 0
        readers = [use.owner.operation for use in found.results[0].uses]
        if product:
            left = ir.RankedTensorType(found.operands[0].type).shape
            dims = re.search(r"contracting_dims = \[([\d, ]*)\]", str(found)) or re.search(
                r"lhs_contracting_dimensions = \[([\d, ]*)\]", str(found)
            )
            contracted = 1
            for d in re.findall(r"\d+", dims[1]) if dims else ():
                contracted *= left[int(d)]
        return (
            found.name, tuple(kind.shape), int(bits[0]) if bits else 32, str(found), contracted,
            tuple(str(r) for r in readers if r.name == "sdy.all_reduce"),
        )

    walk(module.operation)
    return out


def module_from(text: str, like: Any) -> Any:
    """Returns the module of a text, in the context of another."""
    from jax.extend.mlir import ir

    return ir.Module.parse(text, like.context)


def entry_function(module: Any) -> Any:
    """Returns the entry of a lowered module."""
    return next(
        op for op in module.body.operations
        if op.operation.name == "func.func" and "main" in str(op.operation.attributes["sym_name"])
    )


@contextlib.contextmanager
def listening(note: Callable[..., None]) -> Iterator[None]:
    """Calls `note` with each event that JAX counts, in the thread it happens in, for as long as this is open."""
    # Listeners can be registered publicly, but only be taken away all together, by anyone.
    jax.monitoring.register_event_listener(note)
    try:
        yield
    finally:
        if note in _monitoring.get_event_listeners():
            _monitoring.unregister_event_listener(note)


def local_settings() -> list[tuple[str, str]]:
    """Returns the settings that `local_config` finds as names and text, sorted."""
    return sorted((state._name, str(value)) for state, value in local_config())


def local_config() -> list[tuple[Any, Any]]:
    """Returns the settings that context managers of this thread hold (enable_x64, debug_nans, …)."""
    # Context managers act on one thread; no public call lists what they have set.
    found = ((state, state.get_local()) for state in _config.config_states.values())
    return [(state, value) for state, value in found if value is not _config.config_ext.unset]


@contextlib.contextmanager
def with_local_config(settings: Sequence[tuple[Any, Any]]) -> Iterator[None]:
    """Sets in this thread what `local_config` found in another."""
    with contextlib.ExitStack() as stack:
        for state, value in settings:
            stack.enter_context(_config.StateContextManager(state, value))
        yield


def coordination() -> Any:
    """Returns the client of the key-value store that jax.distributed started, or None.

    Its calls need no device and no collective, so a thread beside the training may make them.
    """
    return _distributed.global_state.client
