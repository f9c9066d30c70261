"""Compiles a program's fragments: equal ones once, others in parallel."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir.errors import LoweringError
from hetjax.ir.exporter import to_jax_aval
from hetjax.ir.graph import Aval
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.runtime.fragment_function import FragmentFunction, fragment_function
from hetjax.runtime.meshes import jax_mesh, named_sharding

# Called with (fragment names done, total) as compilation goes on.
Progress = Callable[[str, int, int], None]


@dataclasses.dataclass(frozen=True)
class CompiledFragment:
    """A fragment that can be called.

    Attributes:
      fragment: what it runs.
      function: its slots, types and specs.
      executable: takes and returns flat arrays.
      zeros: makes the accumulators, or None.
    """

    fragment: Fragment
    function: FragmentFunction
    executable: Callable[..., Sequence[Any]]
    zeros: Callable[[], Sequence[Any]] | None


def compile_program(
    program: Program, devices: Sequence[Any], progress: Progress | None = None
) -> tuple[dict[str, CompiledFragment], list[Any]]:
    """Returns the compiled fragments by name, and the jax mesh of each stage.

    Lowering runs here, under the caller's JAX configuration; only XLA's compilation runs in threads,
    so that thread-local settings need no copying.

    Args:
      program: complete.
      devices: one jax device per cluster device.
      progress: told of each fragment compiled.

    Raises:
      LoweringError: a fragment cannot be lowered or compiled; names it.
    """
    meshes = [jax_mesh(m, devices) for m in program.meshes]
    functions = [fragment_function(program, f) for f in program.fragments]
    keys = [_signature(program, f, fn) for f, fn in zip(program.fragments, functions)]
    lowered: dict[Any, Any] = {}
    for fragment, function, key in zip(program.fragments, functions, keys):
        if key not in lowered:
            lowered[key] = _lower(function, meshes[fragment.stage])
    compiled: dict[Any, Any] = {}
    total = len(lowered)
    names = {key: f.name for f, key in zip(program.fragments, keys)}
    with concurrent.futures.ThreadPoolExecutor(max_workers=max(1, min(4, os.cpu_count() or 1))) as pool:
        running = {pool.submit(_compile, names[key], low): key for key, low in lowered.items()}
        for done in concurrent.futures.as_completed(running):
            key = running[done]
            compiled[key] = done.result()
            if progress is not None:
                progress(names[key], len(compiled), total)
    out = {}
    for fragment, function, key in zip(program.fragments, functions, keys):
        zeros = _zeros(function, meshes[fragment.stage])
        out[fragment.name] = CompiledFragment(fragment, function, compiled[key], zeros)
    return out, meshes


def _signature(program: Program, fragment: Fragment, function: FragmentFunction) -> Any:
    """Returns what makes two fragments the same to XLA: ops, types, specs, devices."""
    local: dict[int, int] = {}
    name = lambda r: local.setdefault(r, len(local))  # noqa: E731
    slots = lambda xs: tuple((name(ref), str(form), aval, spec) for (ref, form), aval, spec in xs)  # noqa: E731
    inputs = slots(function.inputs)
    ops = tuple(
        (
            op.primitive,
            tuple(name(a) if isinstance(a, int) else a for a in op.inputs),
            tuple((name(r), program.avals[r], program.micro_avals[r]) for r in op.outputs),
            _hashable(op.params), id(op.eqn) if _opaque(op.params) else 0,
        )
        for op in fragment.ops
    )
    scales = tuple((p.form, p.scale, p.axis) for p in fragment.inputs)
    mesh = program.meshes[fragment.stage]
    return mesh.devices, mesh.axes, fragment.per_microbatch, inputs, ops, slots(function.outputs), scales, function.donated


def _hashable(params: Any) -> str:
    return repr(params)


def _opaque(params: Any) -> bool:
    """Returns whether parameters hold what their text does not tell (a callable, a sharding)."""
    return "Handle(" in repr(params)


def _struct(aval: Aval, sharding: Any) -> Any:
    import jax

    full = to_jax_aval(aval)
    return jax.ShapeDtypeStruct(full.shape, full.dtype, sharding=sharding, weak_type=aval.weak_type)


def _lower(function: FragmentFunction, mesh: Any) -> Any:
    import jax

    given = lambda xs: [named_sharding(mesh, _full(aval, spec)) for _, aval, spec in xs]  # noqa: E731
    in_shardings, out_shardings = given(function.inputs), given(function.outputs)
    jitted = jax.jit(
        function.call, in_shardings=tuple(in_shardings), out_shardings=out_shardings,
        donate_argnums=function.donated,
    )
    structs = [_struct(aval, s) for (_, aval, _), s in zip(function.inputs, in_shardings)]
    try:
        with warnings.catch_warnings():
            # A donated buffer that XLA cannot reuse is no fault of the user's.
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return jitted.lower(*structs)
    except LoweringError:
        raise
    except Exception as error:
        raise LoweringError(
            f"{function.name} cannot be lowered for {mesh.devices.size} x "
            f"{mesh.devices.flat[0].device_kind}: {error}"
        ) from error


def _full(aval: Aval, spec: Spec) -> Spec:
    return spec if len(spec) == aval.ndim else ((),) * aval.ndim


def _compile(name: str, lowered: Any) -> Any:
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
            return lowered.compile()
    except Exception as error:
        raise LoweringError(f"{name} cannot be compiled: {error}") from error


def _zeros(function: FragmentFunction, mesh: Any) -> Callable[[], Sequence[Any]] | None:
    """Returns a compiled function that makes the fragment's accumulators."""
    import jax
    import jax.numpy as jnp

    accumulators = function.accumulators
    if not accumulators:
        return None
    structs = [_struct(aval, None) for _, aval, _ in accumulators]
    shardings = [named_sharding(mesh, _full(aval, spec)) for _, aval, spec in accumulators]
    make = jax.jit(
        lambda: [jnp.zeros(s.shape, s.dtype) for s in structs], out_shardings=shardings
    )
    return make.lower().compile()
