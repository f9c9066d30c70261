"""A fragment as one function of flat arrays, ready for jax.jit."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.exporter import export_jaxpr, numpy_dtype
from hetjax.ir.graph import Aval, Ref
from hetjax.ir.program import Fragment, Port, Program, Spec

# What a slot holds: (ref, "step"), (ref, "sum") or (ref, m) for microbatch m; "each" stands for the current microbatch.
Slot = tuple[Ref, str | int]


@dataclasses.dataclass(frozen=True)
class FragmentFunction:
    """One fragment, flattened.

    Attributes:
      name: the fragment's name.
      call: takes the inputs and then the accumulators; returns the outputs in order of `outputs`.
      inputs: slot, type and spec of each argument.
      outputs: slot, type and spec of each result.
      donated: positions of arguments whose buffers the call may take.
    """

    name: str
    call: Callable[..., Sequence[Any]]
    inputs: tuple[tuple[Slot, Aval, Spec], ...]
    outputs: tuple[tuple[Slot, Aval, Spec], ...]
    donated: tuple[int, ...]

    @property
    def accumulators(self) -> tuple[tuple[Slot, Aval, Spec], ...]:
        """The inputs that must exist, as zeros, before the first microbatch."""
        given = {slot for slot, _, _ in self.outputs}
        return tuple(x for x in self.inputs if x[0][1] == "sum" and x[0] in given)


def accumulator_aval(aval: Aval) -> Aval:
    """Returns the type in which a batch sum is accumulated: half precisions in float32.

    Plain jit adds the whole batch inside one product, in float32; adding M rounded halves would not
    come near its value.
    """
    if aval.dtype in ("bf16", "f16"):
        return Aval("f32", aval.shape)
    return Aval(aval.dtype, aval.shape)


def fragment_function(
    program: Program, fragment: Fragment, evaluator: Callable[[Any], Callable[..., list[Any]]] = _jax.jaxpr_function
) -> FragmentFunction:
    """Returns the function of one fragment.

    Args:
      program: that it belongs to.
      fragment: with the equations of its ops.
      evaluator: makes a function of flat arrays of a closed jaxpr with one equation an op.

    Its `call` raises LoweringError, when it is traced, if an op came from text and cannot be lowered.
    """
    num = program.num_microbatches
    avals = program.micro_avals if fragment.per_microbatch else program.avals
    inputs: list[tuple[Slot, Aval, Spec]] = []
    donated: list[int] = []
    takes: list[int] = []  # how many arguments each port takes
    for i, port in enumerate(fragment.inputs):
        slots = _input_slots(program, port)
        if i in fragment.donated:
            donated += range(len(inputs), len(inputs) + len(slots))
        inputs += slots
        takes.append(len(slots))
    outputs: list[tuple[Slot, Aval, Spec]] = []
    sums: list[Port] = []
    for port in fragment.outputs:
        if port.form == "sum":
            aval = accumulator_aval(program.micro_avals[port.ref])
            donated.append(len(inputs))
            inputs.append(((port.ref, "sum"), aval, port.spec))
            outputs.append(((port.ref, "sum"), aval, port.spec))
            sums.append(port)
        elif port.form == "micro" and not fragment.per_microbatch:
            outputs += [((port.ref, m), program.micro_avals[port.ref], port.spec) for m in range(num)]
        else:
            slot = (port.ref, "each" if port.form == "micro" else "step")
            outputs.append((slot, avals[port.ref], port.spec))
    refs = list(dict.fromkeys(p.ref for p in fragment.inputs))
    wanted = list(dict.fromkeys(p.ref for p in fragment.outputs))
    ports, out_ports, num_sums = fragment.inputs, fragment.outputs, len(sums)

    def call(*arguments: Any) -> list[Any]:
        # Here, not outside: a start that was kept has no equations, and needs none.
        closed = export_jaxpr(fragment.name.replace("/", "_"), fragment.ops, refs, wanted, avals)
        evaluate = evaluator(closed)
        given = list(arguments[: len(arguments) - num_sums])
        accumulators = iter(arguments[len(arguments) - num_sums :])
        env: dict[Ref, Any] = {}
        at = 0
        for port, count in zip(ports, takes):
            env[port.ref] = _complete(port, given[at : at + count], avals[port.ref])
            at += count
        values = dict(zip(wanted, evaluate(*(env[r] for r in refs))))
        results: list[Any] = []
        for port in out_ports:
            value = values[port.ref]
            if port.form == "sum":
                total = next(accumulators)
                results.append(total + value.astype(total.dtype))
            elif port.form == "micro" and not fragment.per_microbatch:
                results += _slices(value, port, num)
            else:
                # What is put together from microbatches, or handed on, has lost its weak type on the way.
                results.append(_jax.with_weak_type(value, avals[port.ref].weak_type))
        return results

    call.__name__ = call.__qualname__ = fragment.name.replace("/", "_")
    return FragmentFunction(fragment.name, call, tuple(inputs), tuple(outputs), tuple(donated))


def _input_slots(program: Program, port: Port) -> list[tuple[Slot, Aval, Spec]]:
    num, full, micro = program.num_microbatches, program.avals[port.ref], program.micro_avals[port.ref]
    if port.form == "concat":
        return [((port.ref, m), micro, port.spec) for m in range(num)]
    if port.form == "last":
        return [((port.ref, num - 1), micro, port.spec)]
    if port.form == "sum":
        return [((port.ref, "sum"), accumulator_aval(micro), port.spec)]
    if port.form == "micro":
        return [((port.ref, "each"), micro, port.spec)]
    return [((port.ref, "step"), full, port.spec)]


def _complete(port: Port, values: Sequence[Any], aval: Aval) -> Any:
    """Returns the step's value from what the microbatches left."""
    import jax.numpy as jnp

    if port.form == "concat":
        value = values[0] if port.axis is None else jnp.concatenate(values, axis=port.axis)
    else:
        value = values[0]
    if port.form in ("sum", "concat", "last"):
        if port.scale != 1.0:
            value = value * port.scale
        value = value.astype(numpy_dtype(aval.dtype))
    return value


def _slices(value: Any, port: Port, num: int) -> list[Any]:
    from jax import lax

    if port.axis is None:
        return [value] * num
    width = value.shape[port.axis] // num
    return [
        lax.slice_in_dim(value, m * width, (m + 1) * width, axis=port.axis) for m in range(num)
    ]
