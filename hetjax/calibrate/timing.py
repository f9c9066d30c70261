"""What a compiled call takes on the devices it was compiled for."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from hetjax.ir.exporter import to_jax_aval
from hetjax.ir.graph import Aval
from hetjax.passes.cost.store import CallTime
from hetjax.runtime.compiler import CompiledFragment
from hetjax.runtime.meshes import named_sharding

# A row of calls lasts about this long, so that the clock's grain and one interruption do not matter.
_ROW_S = 0.01
# No more calls are in flight than the executor allows on CPU devices, whose collectives may starve.
_MOST_IN_ROW = 16
# Caches keep no more than this; a few small arguments are as warm in a step as in a row.
_CACHED_BYTES, _MOST_COPIES = 2**26, 6
_FEWEST_ROWS, _MOST_ROWS = 5, 15
# JAX's random number generators by the short name of their keys: name, words of a key.
_KEYS = {"key<fry>": ("threefry2x32", 2), "key<rbg>": ("rbg", 4), "key<urbg>": ("unsafe_rbg", 4)}


@dataclasses.dataclass(frozen=True, slots=True)
class Timing:
    """What a call took.

    Attributes:
      seconds: of a call: the lower quartile over rows of calls, as other work only adds to them.
      host_s: processor seconds of the whole process, per call, in the same way.
      spread: (largest - least) / seconds.
      runs: rows.
    """

    seconds: float
    host_s: float
    spread: float
    runs: int


def time_calls(call: Callable[[], Any], *, budget_s: float = 0.3) -> Timing:
    """Returns what a call takes in a row of its like, after two to warm up.

    Args:
      call: launches it and returns arrays of its result; called many times.
      budget_s: about how long to measure; five rows are run in any case.
    """
    import jax

    jax.block_until_ready(call())
    start = time.perf_counter()
    jax.block_until_ready(call())
    once = max(1e-7, time.perf_counter() - start)
    length = max(1, min(_MOST_IN_ROW, round(_ROW_S / once)))
    rows: list[tuple[float, float]] = []
    begin = time.perf_counter()
    while len(rows) < _MOST_ROWS and (
        len(rows) < _FEWEST_ROWS or time.perf_counter() - begin < budget_s
    ):
        results = None
        host, start = time.process_time(), time.perf_counter()
        for _ in range(length):
            results = call()
        jax.block_until_ready(results)
        rows.append(((time.perf_counter() - start) / length, (time.process_time() - host) / length))
    seconds = [s for s, _ in rows]
    quiet, host_s = _lower_quartile(seconds), _lower_quartile([h for _, h in rows])
    return Timing(quiet, host_s, (max(seconds) - min(seconds)) / quiet, len(rows))


def _lower_quartile(values: Sequence[float]) -> float:
    return statistics.quantiles(values, n=4, method="inclusive")[0]


def time_cold(call: Callable[[], Any], runs: int = 15) -> float:
    """Returns the calling thread's processor seconds of a call between other work, the median.

    A step launches each of its calls once in a while, after others: what a call needs is in no cache
    then, and it takes several times what one takes in a row of its like.

    Args:
      call: launches something and returns arrays.
      runs: how often.
    """
    import jax

    other = np.ones(2**20)
    jax.block_until_ready(call())
    took = []
    for _ in range(runs):
        other = np.sin(other)
        start = time.thread_time()
        results = call()
        took.append(time.thread_time() - start)
        jax.block_until_ready(results)
    return statistics.median(took)


def fragment_call(unit: CompiledFragment, mesh: Any) -> tuple[Callable[[], Any], int]:
    """Returns a call of a compiled fragment on made-up arguments, and how many arrays it moves.

    Accumulators are handed on from call to call, as in a step. Arguments that a cache could keep are
    there several times and take turns: in a step, too, others come between two calls.

    Args:
      unit: the fragment.
      mesh: the jax mesh it was compiled for.
    """
    function = unit.function
    nbytes = max(1, sum(aval.nbytes for _, aval, _ in function.inputs))
    turns = itertools.cycle(
        [made_up(aval, mesh, spec) for _, aval, spec in function.inputs]
        for _ in range(min(_MOST_COPIES, math.ceil(_CACHED_BYTES / nbytes)))
    )
    at = {slot: k for k, (slot, _, _) in enumerate(function.inputs) if slot[1] == "sum"}
    # (position of the result, position of the argument) of each accumulator.
    handed = [(k, at[slot]) for k, (slot, _, _) in enumerate(function.outputs) if slot in at]

    def call() -> Any:
        arguments = next(turns)
        results = unit.executable(*arguments)
        for source, target in handed:
            arguments[target] = results[source]
        return results

    return call, len(function.inputs) + len(function.outputs)


def made_up(aval: Aval, mesh: Any, spec: Any) -> Any:
    """Returns an array of a type: small positive numbers, small indices, keys."""
    import jax
    import jax.numpy as jnp

    full = to_jax_aval(aval)
    dtype, shape = full.dtype, full.shape
    if aval.dtype in _KEYS:
        impl, words = _KEYS[aval.dtype]
        value = jax.random.wrap_key_data(jnp.ones((*shape, words), "uint32"), impl=impl)
    elif dtype == jax.dtypes.float0:
        value = jnp.zeros(shape, bool)
    else:
        count = jnp.arange(aval.size)
        if jnp.issubdtype(dtype, jnp.inexact):
            # Neither equal nor huge nor so small that arithmetic on them is slow.
            value = (0.1 + jnp.abs(jnp.cos(count))).astype(dtype).reshape(shape)
        else:
            value = (count % (2 if aval.dtype == "bool" else 7)).astype(dtype).reshape(shape)
    full_spec = spec if len(spec) == aval.ndim else ((),) * aval.ndim
    return jax.device_put(value, named_sharding(mesh, full_spec))


def empty_calls(devices: Sequence[Any], counts: Sequence[int] = (2, 64)) -> CallTime:
    """Returns what calls take that compute next to nothing.

    Args:
      devices: the calls run on all of them.
      counts: how many arrays the two kinds of call measured take and give.
    """
    import jax
    import jax.numpy as jnp
    from jax.sharding import Mesh, NamedSharding, PartitionSpec

    whole = NamedSharding(Mesh(np.array(list(devices)), ("data",)), PartitionSpec())
    times = []
    for count in counts:
        n = count // 2
        arrays = [jax.device_put(jnp.zeros((8,)), whole) for _ in range(n)]
        function = jax.jit(lambda *xs: [x + 1 for x in xs], out_shardings=[whole] * n)
        compiled = function.lower(*arrays).compile()
        call = functools.partial(compiled, *arrays)
        times.append(time_calls(call, budget_s=0.15).seconds)
    per_array = max(0.0, (times[1] - times[0]) / (counts[1] - counts[0]))
    return CallTime(max(0.0, times[0] - per_array * counts[0]), per_array)


def time_copies(device: Any, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Returns (bytes through memory, seconds) of adding one to arrays of f32 on a device."""
    import jax
    import jax.numpy as jnp

    out = []
    for nbytes in sizes:
        x = jax.device_put(jnp.zeros(nbytes // 4, "float32"), device)
        compiled = jax.jit(lambda x: x + 1).lower(x).compile()
        out.append((2 * nbytes, time_calls(functools.partial(compiled, x), budget_s=0.1).seconds))
    return out


def time_transfers(source: Any, target: Any, sizes: Sequence[int]) -> list[tuple[int, float]]:
    """Returns (bytes, seconds) of bringing arrays from one local device to another."""
    import jax
    import jax.numpy as jnp

    out = []
    for nbytes in sizes:
        x = jax.device_put(jnp.zeros(nbytes // 4, "float32"), source)
        out.append((nbytes, time_calls(lambda x=x: jax.device_put(x, target), budget_s=0.1).seconds))
    return out
