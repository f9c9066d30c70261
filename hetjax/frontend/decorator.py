"""`hetjax.parallelize`: the decorator and its options."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, overload

import numpy as np

from hetjax.frontend.parallel_function import BoundParallelFunction, ParallelFunction
from hetjax.frontend.planning import SEARCH_S, Options, parse_mesh
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import ClusterError, PlanError
from hetjax.ir.plan import CROSSING_DTYPES, RECOMPUTE, SUMS, Plan
from hetjax.passes.cost.store import store_digest

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
    replicas: int = 1, recompute: str | None = None, rehearse: bool | str = False,
    like: ParallelFunction | None = None, progress: Callable[[str, int, int], None] | None = None,
    profiles: str | Path | None = None, search_s: float = SEARCH_S, sums: str = "",
) -> Any: ...


def parallelize(
    fn: Callable[..., Any] | None = None, /, *, cluster: Cluster | str | Path | None = None,
    num_stages: int | None = None, num_microbatches: int | None = None, mesh: MeshLike = None,
    schedule: str | None = None, plan: Plan | str | Path | None = None,
    batch_argnums: int | Sequence[int] | None = None, donate: bool = False,
    per_microbatch: bool = False, crossing_dtype: str | None = None, axis_name: str | None = None,
    replicas: int = 1, recompute: str | None = None, rehearse: bool | str = False,
    like: ParallelFunction | None = None, progress: Callable[[str, int, int], None] | None = None,
    profiles: str | Path | None = None, search_s: float = SEARCH_S, sums: str = "",
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
        forward, "layer" all from what each layer was given, "stage" all from what the stage was given;
        "" keeps what the step keeps. None leaves it to the search, stage by stage ("layer" where only that
        fits, or is faster); where nothing is searched it keeps.
      sums: "" lets each device, and each microbatch, add its part of a sum over examples; "whole" adds every
        such sum in plain jit's order, on values gathered from devices and microbatches. That keeps a step's
        activations and moves them; `explain()` tells how many bytes.
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
            search_s=search_s, sums=sums,
        )
    if not callable(fn):
        raise PlanError(
            f"parallelize takes a function, not a {type(fn).__name__}; options are given by name, "
            "as in @hetjax.parallelize(cluster='cluster.toml')"
        )
    if isinstance(fn, (ParallelFunction, BoundParallelFunction)):
        raise PlanError(f"{fn._name()} is parallel already; parallelize the plain function, or its .plain")
    if isinstance(like, BoundParallelFunction):
        like = like.func  # type: ignore[assignment]
    _check_types(
        cluster, num_stages, num_microbatches, schedule, crossing_dtype, plan, rehearse, like, progress, profiles,
        search_s,
    )
    if recompute is not None and recompute not in RECOMPUTE:
        raise PlanError(f"recompute is {recompute!r}; it may be {', '.join(map(repr, RECOMPUTE))} or None")
    if sums not in SUMS:
        raise PlanError(f"sums is {sums!r}; it may be '' or 'whole'")
    options = Options(
        num_stages=num_stages, num_microbatches=num_microbatches, mesh=parse_mesh(mesh),
        schedule=None if schedule == "auto" else schedule, per_microbatch=per_microbatch,
        crossing_dtype=crossing_dtype, donate=donate,
        plan=Plan.load(plan) if isinstance(plan, (str, Path)) else plan,
        profiles=str(profiles or ""), profiles_digest=store_digest(profiles) if profiles else "",
        axis=None if axis_name is None else (axis_name, replicas), recompute=recompute,
        search_s=search_s, sums=sums,
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
