"""A step under plain `jax.jit` and under hetjax, side by side, from equal states.

Each step starts both from the state that hetjax's step before handed back, so that what one step
rounds, and Adam or a long training amplifies, is not counted against the next. hetjax goes on from
its own state, where it lives; plain jit from a copy of it on one device.
"""

from __future__ import annotations

import dataclasses
import itertools
import traceback
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from hetjax.frontend.compare import (
    Difference,
    Leaf,
    Path,
    Tolerance,
    compare_step,
    host_leaves,
    lowest_precision,
)
from hetjax.frontend.double import in_double
from hetjax.ir.errors import HetjaxError

FRAMEWORKS = ("linen", "nnx", "nnx-jaxjit")


@dataclasses.dataclass(frozen=True)
class Case:
    """What a user's `build()` returns.

    Attributes:
      step: linen: `step(state, batch) -> (state, out)`; nnx: `step(objects, batch) -> out`, which
        mutates the objects; nnx-jaxjit: `step(objects, batch) -> (state, out)`.
      state: a pytree, or a tuple of nnx objects.
      batches: an iterable of batches.
      meta: "framework" (one of `FRAMEWORKS`, linen when absent) and, optionally, "name", "donate".
    """

    step: Callable[..., Any]
    state: Any
    batches: Iterable[Any]
    meta: dict[str, Any]

    @property
    def framework(self) -> str:
        return self.meta.get("framework", "linen")


@dataclasses.dataclass(frozen=True)
class StepParity:
    """How one step compares.

    Attributes:
      step: its number, from 1.
      differences: one per leaf of the new state and the outputs.
      computed_in: the tolerance of the lowest precision the step computes in, None for f32 and wider.
      state: the state hetjax handed back, on the host.
    """

    step: int
    differences: tuple[Difference, ...]
    computed_in: Tolerance | None
    state: dict[Path, Leaf]

    @property
    def ok(self) -> bool:
        return all(d.ok for d in self.differences)


def side_by_side(
    case: Case, parallel: Callable[..., Any], num_steps: int, *, tolerance: Tolerance | None = None
) -> Iterator[StepParity]:
    """Yields how each step of `parallel` compares with `case.step` under plain jit.

    Args:
      case: the step, its state and batches. nnx objects are trained on, as their step would.
      parallel: `case.step` made parallel; called as the step is.
      num_steps: how many steps, at most as many as there are batches.
      tolerance: bounds in place of the defaults.

    Raises:
      HetjaxError: the step does not have the form that `case.framework` says, or no batch is left.
    """
    import jax

    plain = jax.jit(_pure(case), static_argnums=0)
    live, batches = case.state, iter(case.batches)
    computed_in = None
    for number in range(1, num_steps + 1):
        try:
            batch = next(batches)
        except StopIteration:
            raise HetjaxError(
                f"build() gives {number - 1} batches and {num_steps} steps were asked for; "
                "yield more batches" + (f" or say --steps {number - 1}" if number > 1 else "")
            ) from None
        graphdef, state = _split(case.framework, live)
        state = jax.tree.map(_copy, state)
        before = host_leaves(state)
        reference = _call_plain(plain, graphdef, state, batch)
        if number == 1:
            computed_in = lowest_precision(_dtypes(plain.trace(graphdef, state, batch).jaxpr.jaxpr))
            _check_state(state, reference[0])
        live, out = _advance(case.framework, parallel, live, batch)
        result = (host_leaves(_split(case.framework, live)[1]), host_leaves(out))
        differences = compare_step(
            before, (host_leaves(reference[0]), host_leaves(reference[1])), result,
            tolerance=tolerance, computed_in=computed_in,
        )
        yield StepParity(number, differences, computed_in, result[0])


def in_double_precision(case: Case) -> Case:
    """Returns a case in double precision, as a linen-style step on a pytree; for use under `enable_x64`."""
    import jax

    graphdef, state = _split(case.framework, case.state)
    batches = iter(case.batches)
    try:
        first = next(batches)
    except StopIteration:
        raise HetjaxError("build() gives no batches") from None
    pure = _pure(case)
    step, widen = in_double(lambda state, batch: pure(graphdef, state, batch), state, first)
    step.__name__ = getattr(case.step, "__name__", "step")  # type: ignore[attr-defined]
    wide = (widen(1, batch) for batch in itertools.chain([first], batches))
    with jax.enable_x64(True):
        return Case(step, widen(0, state), wide, {**case.meta, "framework": "linen"})


def on_plain_devices(case: Case, num_devices: int) -> Callable[..., Any]:
    """Returns `case.step` under plain jit on several devices, to be called as the step is.

    Arrays of the batch whose first dimension divides are split over the devices, as a user's own data
    parallelism does; all else is on each of them. How far that is from plain jit on one device is what
    rounding alone does.

    Args:
      case: the step.
      num_devices: how many of the local devices.

    Raises:
      HetjaxError: there are fewer, or (when called) no array of the batch divides over them.
    """
    import jax
    import numpy as np

    devices = jax.devices()
    if num_devices > len(devices):
        raise HetjaxError(f"plain jit is to run on {num_devices} devices, and there are {len(devices)}")
    mesh = jax.sharding.Mesh(np.array(devices[:num_devices]), ("data",))
    plain = jax.jit(_pure(case), static_argnums=0)

    def place(leaf: Any, split: bool) -> Any:
        shape = np.shape(leaf)
        spec = ("data",) if split and shape and shape[0] % num_devices == 0 else ()
        return jax.device_put(leaf, jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(*spec)))

    def call(live: Any, batch: Any) -> Any:
        sizes = sorted({np.shape(x)[0] for x in jax.tree.leaves(batch) if np.shape(x)})
        if all(size % num_devices for size in sizes):
            raise HetjaxError(
                f"{num_devices} devices divide no array of the batch (sizes {sizes}); nothing would be split. "
                "Name a number that divides the batch size"
            )
        graphdef, state = _split(case.framework, live)
        state = jax.tree.map(lambda x: place(_copy(x), False), state)
        new, out = plain(graphdef, state, jax.tree.map(lambda x: place(x, True), batch))
        if case.framework != "nnx":
            return new, out
        from flax import nnx

        nnx.update(live, new)
        return out

    return call


def run_plain(case: Case, num_steps: int, *, x64: bool = False) -> dict[Path, Leaf]:
    """Returns the state after some steps of `case.step` under plain jit, on the host.

    Args:
      case: the step, its state and batches; nnx objects are left as they are.
      num_steps: how many steps.
      x64: compute in float64, from the same state: what the steps give almost without rounding.
    """
    import jax

    def widen(leaf: Any) -> Any:
        wide = hasattr(leaf, "dtype") and leaf.dtype == jax.numpy.float32
        return jax.numpy.asarray(leaf, jax.numpy.float64) if wide else leaf

    with jax.enable_x64(x64):
        plain = jax.jit(_pure(case), static_argnums=0)
        graphdef, state = _split(case.framework, case.state)
        state = jax.tree.map(_copy, state)
        if x64:
            state = jax.tree.map(widen, state)
        for _, batch in zip(range(num_steps), case.batches, strict=False):
            state, _ = plain(graphdef, state, batch)
        return host_leaves(state)


def _call_plain(plain: Callable[..., Any], *args: Any) -> Any:
    """Calls the plain step; what it raises is the user's, told with their own line."""
    try:
        return plain(*args)
    except HetjaxError:
        raise
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        own = [f for f in frames if "site-packages" not in f.filename and f.filename != __file__]
        where = f" at {own[-1].filename}:{own[-1].lineno}" if own else ""
        raise HetjaxError(
            f"the step fails under plain jax.jit, before hetjax has a part in it{where}: "
            f"{type(error).__name__}: {error}"
        ) from error


def _split(framework: str, state: Any) -> tuple[Any, Any]:
    if framework == "linen":
        return None, state
    from flax import nnx

    return nnx.split(state)


def _pure(case: Case) -> Callable[..., Any]:
    """Returns the step as a pure function (graphdef, state, batch) -> (state, out)."""
    step = case.step

    def linen(_: Any, state: Any, batch: Any) -> Any:
        result = step(state, batch)
        if not (isinstance(result, tuple) and len(result) == 2):
            raise HetjaxError(
                f"a linen step returns (state, out); this one returns {_describe(result)}. "
                "Return the new state first, or say meta['framework'] = 'nnx' for a step that mutates"
            )
        return result

    def in_place(graphdef: Any, state: Any, batch: Any) -> Any:
        from flax import nnx

        objects = nnx.merge(graphdef, state)
        out = step(objects, batch)
        if case.framework == "nnx-jaxjit":
            new, out = out
            nnx.update(objects, new)
        return nnx.split(objects)[1], out

    return linen if case.framework == "linen" else in_place


def _advance(framework: str, parallel: Callable[..., Any], live: Any, batch: Any) -> tuple[Any, Any]:
    if framework == "nnx":
        return live, parallel(live, batch)
    state, out = parallel(live, batch)
    if framework == "linen":
        return state, out
    from flax import nnx

    nnx.update(live, state)
    return live, out


def _check_state(before: Any, after: Any) -> None:
    import jax

    old, new = jax.tree.structure(before), jax.tree.structure(after)
    if old != new:
        raise HetjaxError(
            "the step returns something else than the state it was given, so a second step cannot "
            f"run on it:\n  given    {old}\n  returned {new}\nReturn (state, out) with a state of the same tree"
        )


def _describe(result: Any) -> str:
    if isinstance(result, tuple):
        return f"a tuple of {len(result)}"
    return f"a {type(result).__name__}"


def _copy(leaf: Any) -> Any:
    """Returns a copy on the default device that keeps weak type; Python scalars stay what they are."""
    import jax
    import numpy as np

    if isinstance(leaf, jax.Array):
        return jax.device_put(leaf, jax.devices()[0], may_alias=False)
    return np.array(leaf) if isinstance(leaf, np.ndarray) else leaf


def _dtypes(jaxpr: Any) -> set[Any]:
    """Returns the dtypes of everything a jaxpr computes, nested ones included."""
    from jax.extend import core

    found = set()
    for eqn in jaxpr.eqns:
        found |= {v.aval.dtype for v in eqn.outvars if hasattr(v.aval, "dtype")}
        for inner in core.jaxprs_in_params(eqn.params):
            found |= _dtypes(inner)
    return found
