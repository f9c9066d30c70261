"""A plain Flax train step on N workers whose parameters differ, each its own slice of one leading axis.

SLAMB lets workers drift between averagings, so their state cannot be one replicated array: it is
stored with a leading worker axis, sharded over the mesh, and averaged when it is read.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from hetjax.ir.errors import HetjaxError
from hetjax.optim._slamb import average_params, slamb_states
from hetjax.optim.mapped_axes import varying


@jax.tree_util.register_pytree_with_keys_class
class PerWorker:
    """State of N workers: floating leaves `[N, ...]`, one slice a worker; all other leaves shared.

    Attributes of the state are read through it, averaged over workers in float32: with a Flax
    `TrainState` inside, `state.params` are the averaged parameters and `state.step` is the step.
    As a pytree it holds every worker's state, so a checkpoint of it resumes bit for bit.
    """

    def __init__(self, value: Any):
        self.value = value

    def tree_flatten_with_keys(self):
        return [(jax.tree_util.GetAttrKey("value"), self.value)], None

    @classmethod
    def tree_unflatten(cls, _, children):
        return cls(children[0])

    @property
    def num_workers(self) -> int:
        """The length of the worker axis."""
        lengths = {a.shape[0] for a in jax.tree.leaves(self.value) if _has_axis(a)}
        if len(lengths) != 1:
            raise HetjaxError(
                f"PerWorker: floating leaves must share one worker axis, found lengths {sorted(lengths)}")
        return lengths.pop()

    def average(self) -> Any:
        """The state of one worker, its floating leaves averaged over all; moments included."""
        return _average(self.value)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or name == "value":
            raise AttributeError(name)
        return _average(getattr(self.value, name))

    def __repr__(self) -> str:
        return f"PerWorker({type(self.value).__name__} of {self.num_workers} workers)"


def data_parallel_step(
    step: Callable[..., Any],
    mesh: Mesh,
    axis: str = "data",
    *,
    params: Callable[[Any], Any] | None = None,
    donate: bool = True,
) -> DataParallelStep:
    """A train step that runs on every worker of a mesh axis, exchanging only what its optimizer sends.

    Two lines of a program change: the optimizer, ``hetjax.slamb(1e-3, axis_name="data")``, and
    ``train_step = hetjax.data_parallel_step(train_step, mesh, "data")``.

    Args:
      step: ``(state, batch, *rest) -> state`` or ``(state, metrics…)``, not jitted; `state` a pytree
        that holds parameters and the state of `hetjax.slamb`, for example a Flax `TrainState`.
      mesh: the devices; other axes of it stay with the compiler.
      axis: the axis of workers, the `axis_name` given to `hetjax.slamb`.
      params: picks what is averaged when an averaging is due out of a state; None takes `params`, and
        `batch_stats` where there is one.
      donate: whether the memory of the state passed in is reused.

    Returns:
      A `DataParallelStep`. Called with `(state, batch, *rest)`: the first time with an ordinary state,
      then with the `PerWorker` it returned. The batch's leaves are cut along their first dimension,
      `rest` goes to all workers whole. Metrics: floating scalars are averaged over workers, integer
      scalars summed, arrays concatenated along their first dimension.

    Raises:
      HetjaxError: the mesh has no such axis; when called: a batch that does not divide, a state
        without SLAMB or of another number of workers, integers that came to differ by worker.
    """
    if axis not in mesh.shape:
        raise HetjaxError(
            f"data_parallel_step: the mesh has no axis {axis!r}; its axes are "
            f"{', '.join(f'{name} of {size}' for name, size in mesh.shape.items())}")
    return DataParallelStep(step, mesh, axis, params or _default_params, donate)


class DataParallelStep:
    """What `data_parallel_step` returns; `lower` shows the program and `spread` places a state."""

    def __init__(self, step, mesh, axis, pick_params, donate):
        self.step, self.mesh, self.axis, self.pick_params = step, mesh, axis, pick_params
        self.num_workers = mesh.shape[axis]
        self._compiled = jax.jit(self._run, donate_argnums=(0,) if donate else ())

    def __call__(self, state: Any, batch: Any, *rest: Any) -> Any:
        return self._compiled(*self._placed(state, batch, rest))

    def lower(self, state: Any, batch: Any, *rest: Any):
        """The lowered program of one step, as `jax.jit(f).lower` gives it."""
        return self._compiled.lower(*self._placed(state, batch, rest))

    def spread(self, state: Any) -> PerWorker:
        """An ordinary state, copied to every worker."""
        copy = jax.jit(
            lambda tree: jax.tree.map(lambda a: self._repeat(a) if _has_axis(a) else a, tree),
            out_shardings=self._shardings(state))
        # Placed first: the state may live on other devices than those of this mesh.
        return PerWorker(copy(jax.device_put(state, NamedSharding(self.mesh, P()))))

    def resize(self, state: Any) -> PerWorker:
        """The state of any number of workers, on this step's workers.

        Parameters, first and second moments become their mean over the old workers, on every new one;
        counts stay. The rule is ours: the published code has none. It is exact where workers agreed
        (right after an averaging, for parameters); compensation not yet sent is averaged, not lost.
        An ordinary state is spread as it is.
        """
        return self.spread(state.average() if isinstance(state, PerWorker) else state)

    def _repeat(self, a):
        return jnp.broadcast_to(a, (self.num_workers, *a.shape))

    def _shardings(self, tree):
        return jax.tree.map(
            lambda a: NamedSharding(self.mesh, P(self.axis) if _has_axis(a) else P()), tree)

    def _placed(self, state, batch, rest):
        if not isinstance(state, PerWorker):
            state = self.spread(state)
        elif state.num_workers != self.num_workers:
            raise HetjaxError(
                f"data_parallel_step: the state holds {state.num_workers} workers and mesh axis "
                f"{self.axis!r} has {self.num_workers}; pass it through resize(state) first.")
        self._check_batch(batch)
        if isinstance(jax.tree.leaves(batch)[0], jax.ShapeDtypeStruct):
            return state, batch, *rest  # only to be lowered
        batch = jax.device_put(batch, NamedSharding(self.mesh, P(self.axis)))
        return state, batch, *rest

    def _check_batch(self, batch):
        if not jax.tree.leaves(batch):
            raise HetjaxError(
                f"data_parallel_step: the batch holds no array ({batch!r}); give one whose leaves cut "
                f"into {self.num_workers} slices along their first dimension.")
        wrong = [
            f"  batch{jax.tree_util.keystr(path)} {list(jnp.shape(a))}"
            for path, a in jax.tree_util.tree_flatten_with_path(batch)[0]
            if not jnp.ndim(a) or jnp.shape(a)[0] % self.num_workers]
        if wrong:
            n = self.num_workers
            sizes = {jnp.shape(a)[0] for a in jax.tree.leaves(batch) if jnp.ndim(a)}
            near = sorted({k for s in sizes for k in (s // n * n, -(-s // n) * n) if k})
            raise HetjaxError(
                f"data_parallel_step: these do not cut into {n} equal slices along their first "
                f"dimension, one for each worker of mesh axis {axis_text(self.mesh)}:\n"
                + "\n".join(wrong) + "\n"
                + (f"Nearest batches that do: {', '.join(map(str, near))}. " if near else "")
                + "Pass what all workers share after the batch.")

    def _run(self, state, batch, *rest):
        leaves, treedef = jax.tree.flatten(state.value)
        has_axis = [_has_axis(a) for a in leaves]
        averaged = self._picked(treedef)
        traced: dict[str, Any] = {}  # what only the trace tells: structure and kinds of the metrics

        def worker(leaves, batch, rest):
            local = treedef.unflatten([a[0] if own else a for a, own in zip(leaves, has_axis)])
            result = self.step(local, batch, *rest)
            new_state, metrics = _split_result(result, treedef)
            new_leaves = self._average_if_due(new_state, averaged)
            _check_shared(new_state, has_axis, self.axis)
            metric_leaves, traced["metrics"] = jax.tree.flatten(metrics)
            traced["scalars"] = [jnp.ndim(a) == 0 for a in metric_leaves]
            return ([a[None] if own else a for a, own in zip(new_leaves, has_axis)],
                    [jnp.asarray(a)[None] if not jnp.ndim(a) else a for a in metric_leaves])

        specs = [P(self.axis) if own else P() for own in has_axis]
        new_leaves, metrics = jax.shard_map(
            worker, mesh=self.mesh, in_specs=(specs, P(self.axis), P()),
            out_specs=(specs, P(self.axis)), axis_names={self.axis})(leaves, batch, rest)
        metrics = [
            _over_workers(a) if scalar else a for a, scalar in zip(metrics, traced["scalars"])]
        new_state = PerWorker(treedef.unflatten(new_leaves))
        extra = jax.tree.unflatten(traced["metrics"], metrics)
        return (new_state, *extra) if extra else new_state

    def _picked(self, treedef) -> list[int]:
        """Which leaves of the state are parameters, by letting the picker pick numbers."""
        return jax.tree.leaves(self.pick_params(treedef.unflatten(range(treedef.num_leaves))))

    def _average_if_due(self, state, averaged: list[int]):
        leaves = jax.tree.leaves(state)
        due = [s.sync_due for s in slamb_states(state)]
        if not due:
            raise HetjaxError(
                "data_parallel_step: the state holds no state of hetjax.slamb, so workers would drift "
                f"apart unchecked; build the optimizer with hetjax.slamb(…, axis_name={self.axis!r}).")
        chosen = [leaves[i] for i in averaged if _has_axis(leaves[i])]
        chosen = jax.lax.cond(
            jnp.any(jnp.stack(due)), lambda x: average_params(x, self.axis), lambda x: x, chosen)
        for i, leaf in zip((i for i in averaged if _has_axis(leaves[i])), chosen):
            leaves[i] = leaf
        return leaves


def axis_text(mesh: Mesh) -> str:
    """The axes of a mesh and their sizes, for messages."""
    return ", ".join(f"{name!r} of {size}" for name, size in mesh.shape.items())


def _has_axis(a) -> bool:
    """Floating leaves differ by worker; counts, flags and keys are the same everywhere."""
    return jnp.issubdtype(a.dtype if hasattr(a, "dtype") else jnp.result_type(a), jnp.floating)


@jax.jit
def _average(tree):
    def mean(a):
        if not _has_axis(a):
            return a
        wide = jnp.promote_types(a.dtype, jnp.float32)
        return jnp.mean(a.astype(wide), axis=0).astype(a.dtype)

    return jax.tree.map(mean, tree)


def _over_workers(a):
    """One number of N workers': the mean, or the sum of counts."""
    return jnp.mean(a, axis=0) if jnp.issubdtype(a.dtype, jnp.inexact) else jnp.sum(a, axis=0)


def _split_result(result, treedef):
    """(state, metrics) out of what a step returned: a state, or a tuple that begins with one."""
    if jax.tree.structure(result) == treedef:
        return result, ()
    if isinstance(result, tuple) and result and jax.tree.structure(result[0]) == treedef:
        return result[0], tuple(result[1:])
    raise HetjaxError(
        "data_parallel_step: the step must return a state of the structure it was given, alone or as "
        f"the first of a tuple.\n  given:    {treedef}\n  returned: {jax.tree.structure(result)}")


def _check_shared(state, has_axis, axis):
    wrong = [
        f"  state{jax.tree_util.keystr(path)} {a.dtype}{list(a.shape)}"
        for (path, a), own in zip(jax.tree_util.tree_flatten_with_path(state)[0], has_axis)
        if not own and axis in varying(a)]
    if wrong and any(
            isinstance(node, optax.ApplyIfFiniteState) for node in jax.tree.leaves(
                state, is_leaf=lambda x: isinstance(x, optax.ApplyIfFiniteState))):
        raise HetjaxError(
            "data_parallel_step: the optimizer is wrapped in optax.apply_if_finite, by which a worker with "
            "a bad gradient leaves the step alone and the others wait for it in the exchange. Leave the "
            "wrapper out: hetjax.slamb votes (finite_vote=True), and all workers skip the step alike.")
    if wrong:
        raise HetjaxError(
            "data_parallel_step: only floating leaves of the state have a worker axis, but these came "
            "to differ by worker:\n" + "\n".join(wrong) + "\n"
            f"If they are the counts of hetjax.slamb, give it axis_name={axis!r}. Otherwise: "
            f"make them equal on all workers (jax.lax.psum or pmax over {axis!r}), or keep them out of "
            "the state.")


def _default_params(state):
    params = state.get("params") if isinstance(state, dict) else getattr(state, "params", None)
    if params is None:
        raise HetjaxError(
            f"data_parallel_step: a state of type {type(state).__name__} has no `params`; say what is "
            "averaged, as in data_parallel_step(step, mesh, params=lambda state: state.model).")
    stats = state.get("batch_stats") if isinstance(state, dict) else getattr(
        state, "batch_stats", None)
    return params, stats
