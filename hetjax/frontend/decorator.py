"""`hetjax.parallelize`: the decorator, and the function object it returns."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from hetjax.frontend.axis import bind_axis, unbound
from hetjax.frontend.calls import Structure, flatten_call, is_in_place, rebuild_result
from hetjax.frontend.entry import Entry
from hetjax.frontend.planning import (
    SEARCH_S,
    Options,
    build_bundle,
    parse_mesh,
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
from hetjax.ir.plan import CROSSING_DTYPES, Plan
from hetjax.passes.cost.store import store_digest
from hetjax.passes.dumping import ENVIRONMENT as DUMPS_TO
from hetjax.runtime.executable_store import open_store
from hetjax.runtime.start_cache import read_start, start_file

MeshLike = str | Sequence[int] | Sequence[Sequence[int]] | None


@overload
def parallelize(fn: Callable[..., Any], /) -> ParallelFunction: ...


@overload
def parallelize(
    fn: Callable[..., Any] | None = None, /, *, cluster: Cluster | str | Path | None = None,
    num_stages: int | None = None, num_microbatches: int | None = None, mesh: MeshLike = None,
    schedule: str | None = None, plan: Plan | str | Path | None = None,
    batch_argnums: int | Sequence[int] | None = None, donate: bool = False,
    per_microbatch: bool = False, crossing_dtype: str | None = None, axis_name: str | None = None,
    replicas: int = 1, recompute: str = "", rehearse: bool | str = False,
    like: ParallelFunction | None = None, progress: Callable[[str, int, int], None] | None = None,
    profiles: str | Path | None = None, search_s: float = SEARCH_S,
) -> Any: ...


def parallelize(
    fn: Callable[..., Any] | None = None, /, *, cluster: Cluster | str | Path | None = None,
    num_stages: int | None = None, num_microbatches: int | None = None, mesh: MeshLike = None,
    schedule: str | None = None, plan: Plan | str | Path | None = None,
    batch_argnums: int | Sequence[int] | None = None, donate: bool = False,
    per_microbatch: bool = False, crossing_dtype: str | None = None, axis_name: str | None = None,
    replicas: int = 1, recompute: str = "", rehearse: bool | str = False,
    like: ParallelFunction | None = None, progress: Callable[[str, int, int], None] | None = None,
    profiles: str | Path | None = None, search_s: float = SEARCH_S,
) -> Any:
    """Returns the train step, run across the devices of a cluster with the numbers of plain jax.jit.

    Use it bare (`@hetjax.parallelize`) or with options. The step stays as it is: linen
    `step(state, batch) -> (state, aux)`, nnx `step(model, optimizer, batch) -> aux` mutating in place,
    or any function whose value contains new state of the structure of an argument. It may be jitted
    already, a bound method or a partial.

    Args:
      fn: the step.
      cluster: the devices: a `Cluster`, a TOML file, or None for the local devices.
      num_stages: pipeline stages; None lets hetjax search for a plan (a mesh given instead gives each
        group of like devices one stage).
      num_microbatches: parts of a batch; None lets hetjax choose what it can prove exact.
      mesh: (data, model) sizes inside stages: "2,1" for all, "2,1;3,2" one per stage.
      schedule: a schedule's name ("gpipe", "1f1b"); None or "auto" chooses.
      plan: a saved plan (or its file); nothing is searched then.
      batch_argnums: which arguments carry the batch; None finds out.
      donate: lets the new state reuse the old one's buffers, as jit's donate_argnums does.
      per_microbatch: accepts that the step's meaning is per microbatch where it is no sum over examples
        (batch statistics).
      crossing_dtype: rounds activations and their gradients to "bfloat16", "float8_e4m3fn" or
        "float8_e5m2" for the way between stages; the numbers are then no longer plain jit's. None sends
        them as they are.
      axis_name: the axis of a step written for pmap (`lax.pmean(…, "batch")`), to be bound.
      replicas: how many devices that pmap ran on, each with its part of the batch; 1 gives one replica
        the whole batch.
      recompute: "cheap" lets backwards compute elementwise values again instead of keeping them from the
        forward, "stage" a stage's whole forward; "" keeps what the step keeps.
      rehearse: lets CPU devices stand for the cluster's. "timed" also lets stages and links take the
        seconds that the cost model gives the cluster's, in real time; a call then returns when the step
        has ended.
      like: another parallel function whose plan and placement of state this one follows; for
        evaluation, averages, norms, generation.
      progress: called with (fragment, done, total) as fragments are compiled.
      profiles: a profile store of `hetjax calibrate` that prices the plan; None prices by data sheets.
      search_s: the most seconds the search may take before it goes with the best plan it has; 0 gives each
        group of like devices one stage, balanced. Nothing is searched where num_stages, mesh or plan are
        given, nor for the CPU devices of one host, which share its processors. A plan found is kept in the
        user's cache folder (or in $HETJAX_CACHE) for the next start of the same step.

    Raises:
      PlanError: the profiles cannot be read, or no plan fits; from the first call, not from here, for
        anything that needs the arguments.
      ClusterError: the cluster's description is wrong, or it is not the devices at hand.
    """
    if fn is None:
        return functools.partial(
            parallelize, cluster=cluster, num_stages=num_stages, num_microbatches=num_microbatches,
            mesh=mesh, schedule=schedule, plan=plan, batch_argnums=batch_argnums, donate=donate,
            per_microbatch=per_microbatch, crossing_dtype=crossing_dtype, axis_name=axis_name, replicas=replicas,
            recompute=recompute, rehearse=rehearse, like=like, progress=progress, profiles=profiles,
            search_s=search_s,
        )
    if not callable(fn):
        raise PlanError(
            f"parallelize takes a function, not a {type(fn).__name__}; options are given by name, "
            "as in @hetjax.parallelize(cluster='cluster.toml')"
        )
    if isinstance(fn, (ParallelFunction, _Bound)):
        raise PlanError(f"{fn._name()} is parallel already; parallelize the plain function, or its .plain")
    if isinstance(like, _Bound):
        like = like.func  # type: ignore[assignment]
    _check_types(
        cluster, num_stages, num_microbatches, schedule, crossing_dtype, plan, rehearse, like, progress, profiles,
        search_s,
    )
    if recompute not in ("", "cheap", "stage"):
        raise PlanError(f"recompute is {recompute!r}; it may be '', 'cheap' or 'stage'")
    options = Options(
        num_stages=num_stages, num_microbatches=num_microbatches, mesh=parse_mesh(mesh),
        schedule=None if schedule == "auto" else schedule, per_microbatch=per_microbatch,
        crossing_dtype=crossing_dtype, donate=donate,
        plan=Plan.load(plan) if isinstance(plan, (str, Path)) else plan,
        profiles=str(profiles or ""), profiles_digest=store_digest(profiles) if profiles else "",
        axis=None if axis_name is None else (axis_name, replicas), recompute=recompute,
        search_s=search_s,
    )
    if isinstance(batch_argnums, (int, str)):
        batch_argnums = (batch_argnums,)
    return ParallelFunction(fn, cluster, options, batch_argnums, rehearse, like, progress)


def _check_types(
    cluster: Any, num_stages: Any, num_microbatches: Any, schedule: Any, crossing_dtype: Any, plan: Any,
    rehearse: Any, like: Any, progress: Any, profiles: Any, search_s: Any,
) -> None:
    """Refuses options of the wrong type, all at once and before anything runs.

    Raises:
      ClusterError: the cluster is neither a description nor the name of a file.
      PlanError: any other.
    """
    wrong = []
    for name, value in (("num_stages", num_stages), ("num_microbatches", num_microbatches)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, (int, np.integer))):
            wrong.append(f"{name} is {value!r}; it must be a whole number")
    if isinstance(num_stages, (int, np.integer)) and num_stages < 1:
        wrong.append(f"num_stages is {num_stages}; it must be at least 1")
    if schedule is not None and not isinstance(schedule, str):
        wrong.append(f"schedule is {schedule!r}; it must be a name, such as '1f1b'")
    if crossing_dtype is not None and crossing_dtype not in CROSSING_DTYPES:
        wrong.append(f"crossing_dtype is {crossing_dtype!r}; it may be {', '.join(CROSSING_DTYPES)} or None")
    if plan is not None and not isinstance(plan, (Plan, str, Path)):
        wrong.append(f"plan is a {type(plan).__name__}; it must be a Plan or the name of a file that holds one")
    if profiles is not None and not isinstance(profiles, (str, Path)):
        wrong.append(f"profiles is a {type(profiles).__name__}; it must be the name of a file of hetjax calibrate")
    if rehearse not in (False, True, "timed"):
        wrong.append(f"rehearse is {rehearse!r}; it may be False, True or 'timed'")
    if like is not None and not isinstance(like, ParallelFunction):
        wrong.append(f"like is {_named(like)}; it must be a function that hetjax.parallelize has returned")
    if progress is not None and not callable(progress):
        wrong.append(f"progress is a {type(progress).__name__}; it must be callable")
    if isinstance(search_s, bool) or not isinstance(search_s, (int, float)) or not search_s >= 0:
        wrong.append(f"search_s is {search_s!r}; it must be seconds, or 0 for no search")
    if wrong:
        raise PlanError("\n".join(wrong))
    if cluster is not None and not isinstance(cluster, (Cluster, str, Path)):
        raise ClusterError(
            f"cluster is a {type(cluster).__name__}; it must be a Cluster or the name of a TOML file"
        )


def _named(value: Any) -> str:
    return f"the function {value.__name__}" if hasattr(value, "__name__") else f"a {type(value).__name__}"


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
        return self if instance is None else _Bound(self, instance)

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


class _Bound(functools.partial):
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
