"""`ParallelFunction`: what `hetjax.parallelize` returns, its plan, and its lowered and compiled forms."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hetjax.frontend.axis import bind_axis, unbound
from hetjax.frontend.calls import Structure, flatten_call, is_in_place, rebuild_result
from hetjax.frontend.entry import Entry
from hetjax.frontend.planning import (
    Options,
    build_bundle,
    priced,
    still_refused,
    warn_of_one_microbatch,
)
from hetjax.frontend.tracing import Traced, leaf_marks, leaf_types, trace_call
from hetjax.ir import _jax
from hetjax.ir.cluster import Cluster
from hetjax.ir.display import Shown
from hetjax.ir.errors import ClusterError, LoweringError, PlanError
from hetjax.ir.graph import Graph
from hetjax.ir.plan import Plan
from hetjax.passes.dumping import ENVIRONMENT as DUMPS_TO
from hetjax.runtime.executable_store import open_store
from hetjax.runtime.start_cache import read_start, start_file


class ParallelFunction(Shown):
    """A function that runs on a plan. Made by `parallelize`.

    Attributes:
      plain: the user's function, untouched; also `__wrapped__`.
      options: what was asked.
    """

    def __init__(
        self, fn: Callable[..., Any], cluster: Cluster | str | Path | None, options: Options,
        batch_argnums: Sequence[int] | None, rehearse: bool | str, like: ParallelFunction | None,
        progress: Callable[[str, int, int], None] | None,
    ):
        functools.update_wrapper(self, fn, updated=())
        self.plain = fn
        self._step = fn
        if options.axis is not None:
            if any(type(fn).__name__ == kind for kind in ("PmapFunction", "PmapCallable")):
                raise PlanError("axis_name binds the axis of the function that pmap was given: pass fn.__wrapped__")
            self._step = bind_axis(fn, *options.axis, None if batch_argnums is None else tuple(batch_argnums))
        self.options = options
        self._cluster = Cluster.from_toml(cluster) if isinstance(cluster, (str, Path)) else cluster
        self._batch_argnums = tuple(batch_argnums) if batch_argnums is not None else None
        self._rehearse, self._like, self._progress = rehearse, like, progress
        self._in_place = is_in_place(fn)
        self._static = _jax.static_parameters(fn)
        self._entries: dict[Any, Entry] = {}
        self._latest: Entry | None = None
        self._last: tuple[Any, list[Any], Entry] | None = None  # the call before, to find its entry fast
        self._devices: tuple[Any, ...] | None = None

    def __get__(self, instance: Any, owner: Any = None) -> Any:
        return self if instance is None else BoundParallelFunction(self, instance)

    # -- calling -----------------------------------------------------------------------------------

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if os.environ.get("HETJAX_DISABLE") == "1":
            return self._plain_jit()(*args, **kwargs)
        entry, leaves = self._ready_entry(args, kwargs)
        results = entry.run(leaves)
        return rebuild_result(entry.structure, entry.returned, results, args, kwargs)

    def _ready_entry(self, args: Sequence[Any], kwargs: dict[str, Any]) -> tuple[Entry, list[Any]]:
        """Returns the compiled entry of a call, and the call's leaves."""
        leaves, structure = flatten_call(args, kwargs, self._in_place, self._static)
        if _jax.in_a_trace():
            self._refuse_tracers(leaves)
        marks = leaf_marks(leaves)
        if self._last is not None and self._last[0] == structure and self._last[1] == marks:
            entry = self._last[2]
        else:
            entry = self._entry((structure, leaf_types(leaves)), leaves, structure, runs=True)
            entry.compile(self.devices, self._progress, self._emulate())
            self._last = (structure, marks, entry)
        self._latest = entry
        return entry, leaves

    def _refuse_tracers(self, leaves: Sequence[Any]) -> None:
        from jax.core import Tracer

        if any(isinstance(x, Tracer) for x in leaves):
            raise PlanError(
                f"{self._name()} is parallel, and it is called inside jax.jit, jax.grad, jax.lax.scan or another "
                "transformation; parallelize must be the outermost: give it the function that is transformed"
            )

    def _emulate(self) -> Callable[[Any], Any] | None:
        if self._rehearse != "timed":
            return None
        from hetjax.frontend.rehearsal import cluster_emulation

        return functools.partial(cluster_emulation, self.cluster)

    @functools.cached_property
    def _jitted(self) -> Any:
        if self._in_place and self._uses_nnx():
            from flax import nnx

            return nnx.jit(self._step)
        import jax

        return jax.jit(self._step)

    def _plain_jit(self) -> Any:
        return self._jitted

    def _uses_nnx(self) -> bool:
        import sys

        return "flax.nnx" in sys.modules and type(self.plain).__name__ != "PjitFunction"

    def _entry(self, key: Any, leaves: Sequence[Any], structure: Any, runs: bool = False) -> Entry:
        """Returns the entry for arguments of these types.

        Args:
          key: of `_entries`.
          leaves, structure: of the call.
          runs: whether the entry is about to be compiled, so that a kept start serves.
        """
        if key in self._entries:
            return self._entries[key]
        known_state = None
        if self._like is not None:
            from hetjax.frontend.following import follow_bundle, state_leaves

            known_state = functools.partial(state_leaves, self._like)
        try:
            traced = trace_call(
                self._step, structure, leaves, name=self._name(), batch_argnums=self._batch_argnums,
                known_state=known_state,
            )
        except NameError as error:
            raise (unbound(error) or error) from error
        start = None
        if self._like is not None:
            bundle = follow_bundle(traced, self._like)
        else:
            if not any(r.updates is not None for r in traced.graph.outputs):
                raise PlanError(
                    f"{self._name()} returns no new state: no part of its value has the structure of an "
                    "argument. Return the state from the step, or, for an evaluation or any other "
                    "function of the state, use hetjax.parallelize(fn, like=train_step)"
                )
            start = self._start_file(traced.graph) if runs else None
            kept = self._started(start, structure, traced) if start is not None else None
            if kept is not None:
                self._warn_of_new_shape(key)
                self._entries[key] = kept
                return kept
            bundle = build_bundle(traced, self.cluster, self.options)
        self._warn_of_new_shape(key)
        entry = Entry(bundle, structure, traced.returned, start)
        self._entries[key] = entry
        return entry

    def _start_file(self, graph: Graph) -> Path | None:
        """Returns where the start of a step is kept between processes; None where none are."""
        # Whoever dumps passes wants them to run.
        if os.environ.get(DUMPS_TO):
            return None
        # Not proved equal to the whole batch, which is what the digest stands for: the step at one
        # microbatch means what the user's code says of it now.
        if self.options.per_microbatch or (self.options.plan and self.options.plan.per_microbatch):
            return None
        try:
            store = open_store(self.devices)
        except ClusterError:
            return None  # what is wrong with the step is said first
        return start_file(store, graph, self.cluster, self.options) if store is not None else None

    def _started(self, file: Path, structure: Structure, traced: Traced) -> Entry | None:
        """Returns the entry that an earlier process has left, ready to run; None if there is none."""
        bundle = read_start(file)
        if bundle is None:
            return None
        micro = bundle.microbatching
        refusal = micro.refusal if micro is not None and not micro.accepted else None
        if refusal is not None and not still_refused(traced, self.cluster, self.options, refusal):
            return None
        bundle = priced(traced, self.cluster, self.options, bundle)
        entry = Entry(bundle, structure, traced.returned)
        try:
            entry.compile(self.devices, self._progress, self._emulate())
        except LoweringError:
            return None  # an executable is gone, and what was kept has no equations to lower
        if refusal is not None:
            warn_of_one_microbatch(entry.graph, refusal)
        for topic, sentence in bundle.notes:
            if topic == "stages":
                warnings.warn(f"{entry.graph.name}: {sentence}", UserWarning, stacklevel=2)
        return entry

    def _warn_of_new_shape(self, key: Any) -> None:
        if not self._entries or self._like is not None:
            return
        before = next(iter(self._entries))
        if before[0] != key[0]:
            change = "the structure of its arguments"
        else:
            pairs = [(i, a, b) for i, (a, b) in enumerate(zip(before[1], key[1])) if a != b]
            if all(a[:2] == b[:2] for _, a, b in pairs):
                return  # a step counter that went through a checkpoint is no longer weakly typed: nothing a user did
            entry = self._entries[before]
            change = "; ".join(
                f"{entry.leaves[i].path} from {_type_text(a)} to {_type_text(b)}"
                for i, a, b in pairs[:4]
            )
        warnings.warn(
            f"hetjax plans and compiles {self._name()} again: what changed is {change}",
            UserWarning, stacklevel=4,
        )

    def _name(self) -> str:
        return getattr(self.plain, "__name__", None) or type(self.plain).__name__

    # -- what it runs on ---------------------------------------------------------------------------

    @functools.cached_property
    def cluster(self) -> Cluster:
        """The devices described."""
        if self._like is not None:
            return self._like.cluster
        return self._cluster if self._cluster is not None else Cluster.local()

    @property
    def devices(self) -> tuple[Any, ...]:
        """One jax device per device of the cluster.

        Raises:
          ClusterError: what is described is not at hand.
        """
        if self._like is not None:
            return self._like.devices
        if self._devices is None:
            from hetjax.ir.accelerator import match_devices

            self._devices = match_devices(self.cluster, rehearse=bool(self._rehearse))
        return self._devices

    # -- looking -----------------------------------------------------------------------------------

    @property
    def plan(self) -> Plan | None:
        """The plan in use; None before the first call."""
        return self._latest.plan if self._latest is not None else None

    def plan_for(self, *args: Any, **kwargs: Any) -> Plan:
        """Returns the plan for arguments that may be ShapeDtypeStructs; no device is needed.

        Raises:
          PlanError, MicrobatchError: as a call would.
        """
        return self._lowered_entry(args, kwargs).plan

    def _lowered_entry(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Entry:
        leaves, structure = flatten_call(args, kwargs, self._in_place, self._static)
        entry = self._entry((structure, leaf_types(leaves)), leaves, structure)
        self._latest = entry
        return entry

    def lower(self, *args: Any, **kwargs: Any) -> Lowered:
        """Returns the lowered step, as jax.jit's `lower` does; arguments may be ShapeDtypeStructs."""
        return Lowered(self, self._lowered_entry(args, kwargs))

    def explain(self) -> str:
        """Returns what is run and why, in words and a table.

        Raises:
          PlanError: nothing was planned yet.
        """
        from hetjax.frontend.explaining import explain

        return explain(self._in_use(), self.cluster)

    def stats(self) -> dict[str, Any]:
        """Returns what was counted since the first call, as a flat dict for any logger; waits for nothing.

        `hetjax.frontend.statistics.statistics_of` lists its keys.

        Raises:
          PlanError: nothing has run yet.
        """
        entry = self._in_use()
        if entry.executor is None:
            raise PlanError(f"{self._name()} has not run yet; call it first")
        from hetjax.frontend.statistics import statistics_of

        return statistics_of(entry, self.cluster, len(self._entries))

    def measure(self, *args: Any, **kwargs: Any) -> Any:
        """Returns what a call returns, having waited for each of its tasks alone.

        `stats()` then has bubble, exposed communication and seconds per stage. On devices that share
        cores, stages slow each other down as they do in any step.

        Raises:
          RuntimeFault: a stage failed.
        """
        from hetjax.frontend.statistics import warn_of_drift

        entry, leaves = self._ready_entry(args, kwargs)
        results = entry.run(leaves, watched=True)
        warn_of_drift(entry)
        return rebuild_result(entry.structure, entry.returned, results, args, kwargs)

    def block_until_ready(self) -> None:
        """Waits for all work that calls have started.

        Raises:
          RuntimeFault: a stage failed; names stage, microbatch and modules.
        """
        for entry in self._entries.values():
            if entry.executor is not None:
                entry.executor.drain()

    def abstract_state(self) -> Any:
        """Returns the arguments that hold state as ShapeDtypeStructs with their shardings (for orbax).

        The state of one argument is returned alone, that of several as a tuple in their order; nnx
        objects give their `nnx.State`.

        Raises:
          PlanError: nothing was planned yet.
        """
        from hetjax.frontend.placement import abstract_state

        return abstract_state(self._in_use(), self.devices)

    def _in_use(self) -> Entry:
        if self._latest is None:
            raise PlanError(
                f"{self._name()} has no plan yet; call it, or plan_for(state, batch) with "
                "ShapeDtypeStructs"
            )
        return self._latest


class BoundParallelFunction(functools.partial):
    """A parallel method of an instance; plan, explain, stats, … are those of the function."""

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.func, name)
        return functools.partial(found, *self.args) if name in ("plan_for", "lower", "measure") else found


def _type_text(leaf_type: tuple[Any, ...]) -> str:
    shape, dtype, weak_type = leaf_type
    return f"{'weakly typed ' * weak_type}{dtype}{list(shape)}"


class Lowered:
    """A planned and lowered step; `compile` makes it callable."""

    def __init__(self, function: ParallelFunction, entry: Entry):
        self._function, self._entry = function, entry

    @property
    def plan(self) -> Plan:
        return self._entry.plan

    def as_text(self) -> str:
        """Returns the MPMD program as text."""
        return str(self._entry.program)

    def compile(self) -> Compiled:
        """Compiles every fragment.

        Raises:
          ClusterError: the devices described are not at hand.
          LoweringError: a fragment cannot be compiled.
        """
        function = self._function
        self._entry.compile(function.devices, function._progress, function._emulate())
        return Compiled(self._function, self._entry)


class Compiled:
    """A compiled step; takes arguments of the types it was lowered for."""

    def __init__(self, function: ParallelFunction, entry: Entry):
        self._function, self._entry = function, entry

    @property
    def plan(self) -> Plan:
        return self._entry.plan

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        leaves, structure = flatten_call(args, kwargs, self._function._in_place, self._function._static)
        if structure != self._entry.structure:
            raise PlanError("the arguments do not have the structure the step was lowered for")
        results = self._entry.run(leaves)
        return rebuild_result(structure, self._entry.returned, results, args, kwargs)
