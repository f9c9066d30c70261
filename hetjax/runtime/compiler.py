"""Compiles a program's fragments: equal ones once, others in parallel."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.errors import LoweringError
from hetjax.ir.exporter import to_jax_aval
from hetjax.ir.fingerprint import Opaque, digest, plain
from hetjax.ir.graph import Aval, Op
from hetjax.ir.program import Fragment, Program, Spec
from hetjax.runtime.constraints import on_stage
from hetjax.runtime.executable_store import ExecutableStore, count_cache_hits, worth_keeping
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
      kept: whether the store has all of it.
    """

    fragment: Fragment
    function: FragmentFunction
    executable: Callable[..., Sequence[Any]]
    zeros: Callable[[], Sequence[Any]] | None
    kept: bool = False


@dataclasses.dataclass(frozen=True)
class _Job:
    """One executable to have.

    Attributes:
      name: of the first fragment it serves.
      key: what makes two executables the same; text if another process can find it by that.
      num_inputs, num_outputs: of its flat signature.
      mesh: where it runs.
      lower: returns the lowered program.
    """

    name: str
    key: Any
    num_inputs: int
    num_outputs: int
    mesh: Any
    lower: Callable[[], Any]


def compile_program(
    program: Program, devices: Sequence[Any], progress: Progress | None = None,
    store: ExecutableStore | None = None,
) -> tuple[dict[str, CompiledFragment], list[Any]]:
    """Returns the compiled fragments by name, and the jax mesh of each stage.

    Lowering runs here, under the caller's JAX configuration; only XLA's compilation runs in threads,
    so that thread-local settings need no copying.

    Args:
      program: complete.
      devices: one jax device per cluster device.
      progress: told of each fragment compiled.
      store: has executables of earlier processes, and gets the new ones if all took long enough.

    Raises:
      LoweringError: a fragment cannot be lowered or compiled; names it.
    """
    meshes = [jax_mesh(m, devices) for m in program.meshes]
    functions = [fragment_function(program, f, _evaluator(meshes[f.stage])) for f in program.fragments]
    jobs: dict[Any, _Job] = {}
    served: list[tuple[Fragment, FragmentFunction, Any, Any]] = []
    for fragment, function in zip(program.fragments, functions):
        mesh = meshes[fragment.stage]
        _refuse_ordered(fragment, mesh)
        code = _code_job(program, fragment, function, mesh)
        zeros = _zeros_job(program, fragment, function, mesh)
        jobs.setdefault(code.key, code)
        if zeros is not None:
            jobs.setdefault(zeros.key, zeros)
        served.append((fragment, function, code.key, zeros.key if zeros is not None else None))
    compiled, kept = _compile_all(list(jobs.values()), progress, store)
    out = {
        fragment.name: CompiledFragment(
            fragment, function, compiled[code], compiled[zeros] if zeros is not None else None,
            code in kept and (zeros is None or zeros in kept),
        )
        for fragment, function, code, zeros in served
    }
    return out, meshes


def _evaluator(mesh: Any) -> Callable[[Any], Callable[..., list[Any]]]:
    return lambda closed: _jax.jaxpr_function(on_stage(closed, mesh))


def _compile_all(
    jobs: Sequence[_Job], progress: Progress | None, store: ExecutableStore | None
) -> tuple[dict[Any, Any], set[Any]]:
    """Returns the executable of each job's key, and the keys that the store has."""
    begin = time.perf_counter()
    compiled: dict[Any, Any] = {}
    kept: set[Any] = set()
    fresh: list[Any] = []

    def have(job: _Job, executable: Any) -> None:
        compiled[job.key] = executable
        if progress is not None:
            progress(job.name, len(compiled), len(jobs))

    workers = max(1, min(4, os.cpu_count() or 1))
    with (
        warnings.catch_warnings(), count_cache_hits() as hits,
        concurrent.futures.ThreadPoolExecutor(workers) as pool,
    ):
        # A donated buffer that XLA cannot reuse is no fault of the user's.
        warnings.filterwarnings("ignore", message="Some donated buffers were not usable")
        running = {}
        for job in jobs:
            found = None
            if store is not None and isinstance(job.key, str):
                found = store.load(job.key, job.mesh, job.num_inputs, job.num_outputs)
            if found is not None:
                kept.add(job.key)
                have(job, found)
            else:
                # One is lowered while those before it are compiled, which leaves the interpreter free.
                running[pool.submit(_compile, job.name, job.lower(), hits)] = job
        for done in concurrent.futures.as_completed(running):
            executable, is_fresh = done.result()
            have(running[done], executable)
            if is_fresh:
                fresh.append(running[done].key)
    if store is not None and fresh and worth_keeping(time.perf_counter() - begin):
        kept.update(key for key in fresh if isinstance(key, str) and store.save(key, compiled[key]))
    return compiled, kept


def _refuse_ordered(fragment: Fragment, mesh: Any) -> None:
    """Raises where XLA cannot keep an order that the step asks for: on several devices."""
    lost = [op for op in fragment.ops if op.eqn is not None and _jax.ordered_effects(op.eqn)]
    if lost and mesh.devices.size > 1:
        listed = "; ".join(dict.fromkeys(f"'{op.primitive}' at {op.source or 'an unknown line'}" for op in lost))
        raise LoweringError(
            f"{fragment.name} runs on {mesh.devices.size} devices, and JAX keeps the order of callbacks on one alone: "
            f"{listed}. Drop ordered=True there, or give stage {fragment.stage} one device (mesh='1,1')"
        )


def _code_job(program: Program, fragment: Fragment, function: FragmentFunction, mesh: Any) -> _Job:
    return _Job(
        fragment.name, _signature(program, fragment, function, mesh), len(function.inputs),
        len(function.outputs), mesh, lambda: _lower(function, mesh),
    )


def _signature(program: Program, fragment: Fragment, function: FragmentFunction, mesh: Any) -> Any:
    """Returns what makes two fragments the same to XLA: ops, types, specs, devices; text if plain."""
    local: dict[int, int] = {}
    name = lambda r: local.setdefault(r, len(local))  # noqa: E731
    types = lambda r: (str(program.avals[r]), str(program.micro_avals[r]))  # noqa: E731
    slots = lambda xs: [(name(ref), str(form), str(aval), spec) for (ref, form), aval, spec in xs]  # noqa: E731
    ports = lambda xs: [(p.form, p.scale, p.axis) for p in xs]  # noqa: E731
    head = (
        _place(mesh), fragment.per_microbatch, slots(function.inputs), ports(fragment.inputs),
        function.donated,
    )

    def ops(value: Callable[[Op, Any], Any]) -> list[Any]:
        return [
            (
                op.primitive, [name(a) if isinstance(a, int) else plain(a) for a in op.inputs],
                [(name(r), types(r)) for r in op.outputs], [(k, value(op, v)) for k, v in op.params],
            )
            for op in fragment.ops
        ]

    tail = lambda: (slots(function.outputs), ports(fragment.outputs))  # noqa: E731
    try:
        if any(op.eqn is not None and op.eqn.effects for op in fragment.ops):
            raise Opaque("an executable that calls back into this process is of no use to another")
        return digest((head, ops(lambda _, value: plain(value)), tail()))
    except Opaque:
        # A callable or a sharding: the same only where it is the same object of this process.
        local.clear()
        return repr((head, ops(lambda op, value: (repr(value), id(op.eqn))), tail())), mesh


def _place(mesh: Any) -> Any:
    return [d.id for d in mesh.devices.flat], mesh.devices.shape, mesh.axis_names


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


def _compile(name: str, lowered: Any, hits: Callable[[], int]) -> tuple[Any, bool]:
    """Returns an executable, and whether it was compiled now, not found in JAX's cache."""
    before = hits()
    try:
        executable = lowered.compile()
        return executable, hits() == before
    except Exception as error:
        raise LoweringError(f"{name} cannot be compiled: {error}") from error


def _zeros_job(
    program: Program, fragment: Fragment, function: FragmentFunction, mesh: Any
) -> _Job | None:
    """Returns the job of what makes the fragment's accumulators."""
    accumulators = function.accumulators
    if not accumulators:
        return None

    def lower() -> Any:
        import jax
        import jax.numpy as jnp

        structs = [_struct(aval, None) for _, aval, _ in accumulators]
        shardings = [named_sharding(mesh, _full(aval, spec)) for _, aval, spec in accumulators]
        make = jax.jit(
            lambda: [jnp.zeros(s.shape, s.dtype) for s in structs], out_shardings=shardings
        )
        return make.lower()

    key = digest(("zeros", _place(mesh), [(str(aval), spec) for _, aval, spec in accumulators]))
    return _Job(f"{fragment.name}/zeros", key, 0, len(accumulators), mesh, lower)
