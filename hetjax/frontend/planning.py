"""From a traced call to a planned and lowered bundle: which microbatches, which plan."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
import traceback
import warnings
from collections.abc import Callable, Sequence

from hetjax.frontend.axis import describe
from hetjax.frontend.tracing import Traced
from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import MicrobatchError, PlanError
from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import Microbatching, Refusal
from hetjax.ir.plan import Plan, verify_plan
from hetjax.passes.choose_layer_edges import layer_edges, split_like
from hetjax.passes.dumping import environment_instruments
from hetjax.passes.manager import ambient, run_pipeline
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.pipeline import analyse, lower
from hetjax.passes.plan_stages import Request, batch_size_of, plan_stages, stage_devices
from hetjax.passes.prove_microbatching import ProveMicrobatching

# A search ends after this time, unless told otherwise; most end earlier, by their number of evaluations.
SEARCH_S = 10.0
# Frames of hetjax itself are not the user's.
_HOME = os.path.join(os.path.dirname(os.path.dirname(os.path.abspath(__file__))), "")


@dataclasses.dataclass(frozen=True)
class Options:
    """What the user asked of `parallelize`; None leaves a choice to hetjax.

    Attributes:
      num_stages, num_microbatches, mesh, schedule: of the plan.
      per_microbatch: whether a step that is not a sum over examples may run per microbatch.
      crossing_dtype: in which activations cross between stages; None as they are, or as the plan says.
      donate: whether the old state's buffers are reused.
      plan: a plan to use as it is.
      profiles: the profile store that prices; "" prices by data sheets.
      profiles_digest: of its content, so that a kept start rests on the same numbers.
      axis: name of an axis that was bound, and its replicas.
      recompute: "" keeps all residuals, other modes as in recompute-residuals; None leaves it to a search.
      sums: "" in parts, or "whole", as in the plan.
      search_s: the most seconds a search for the plan may take; 0 for none.
    """

    num_stages: int | None = None
    num_microbatches: int | None = None
    mesh: tuple[tuple[int, int], ...] | None = None
    schedule: str | None = None
    per_microbatch: bool = False
    crossing_dtype: str | None = None
    donate: bool = False
    plan: Plan | None = None
    profiles: str = ""
    profiles_digest: str = ""
    axis: tuple[str, int] | None = None
    recompute: str | None = None
    search_s: float = SEARCH_S
    sums: str = ""


def build_bundle(traced: Traced, cluster: Cluster, options: Options) -> Bundle:
    """Returns the bundle with microbatching proved, plan made and program complete.

    Raises:
      MicrobatchError: more microbatches were asked for than can be proved.
      PlanError: no plan fits the request, or the plan given does not fit the step or cluster.
    """
    with ambient(environment_instruments(traced.graph.name)):
        bundle = _build_bundle(traced, cluster, options)
    return priced(traced, cluster, options, bundle)


def priced(traced: Traced, cluster: Cluster, options: Options, bundle: Bundle) -> Bundle:
    """Returns the bundle with its plan bound to the step, so that `Plan.with_` prices what it changes."""
    from hetjax.frontend.whatif import Costing

    return Costing(traced, cluster, options, bundle).bound


def _build_bundle(traced: Traced, cluster: Cluster, options: Options) -> Bundle:
    bundle = analyse(Bundle(graph=traced.graph, cluster=cluster))
    graph = bundle.graph
    if graph is None:
        raise PlanError("nothing was traced")
    if found := manual_parts(graph):
        raise PlanError("\n".join(found))
    if options.plan is not None:
        options = with_plan(options, options.plan, cluster)
    if not why_not_searched(cluster, options):
        from hetjax.frontend.default_plan import searched_bundle

        return searched_bundle(traced, bundle, options)
    return planned_bundle(traced, bundle, options)


def why_not_searched(cluster: Cluster, options: Options) -> str:
    """Returns why a plan is not searched for, "" where it is."""
    if options.plan is not None:
        return "a plan is given"
    if options.num_stages is not None or options.mesh is not None:
        return "the stages or their meshes are given"
    if options.search_s <= 0:
        return "the search is switched off"
    if cluster.num_devices == 1:
        return "there is one device"
    if len(cluster.nodes) == 1 and cluster.kinds[0].platform == "cpu":
        return "the CPU devices of one host share its processors, which no plan makes faster"
    return ""


def with_plan(options: Options, plan: Plan, cluster: Cluster) -> Options:
    """Returns the options with a plan and what it decides.

    Raises:
      VerifyError: the plan cannot run on the cluster.
    """
    verify_plan(plan, cluster)
    return dataclasses.replace(
        options, plan=plan, num_microbatches=plan.num_microbatches,
        per_microbatch=options.per_microbatch or plan.per_microbatch,
    )


def planned_bundle(traced: Traced, bundle: Bundle, options: Options) -> Bundle:
    """Returns an analysed bundle with the plan given, or else the first planner's, lowered."""
    graph, cluster = bundle.graph, bundle.cluster
    if graph is None or cluster is None:
        raise PlanError("nothing was traced")
    request = Request(options.num_stages, options.mesh, options.schedule)
    plan = options.plan
    retrace: Callable[[int], Graph] = traced.retrace
    edges = plan.layer_edges if plan is not None else layer_edges(graph, cluster, request)
    if edges:
        graph = split_like(graph, edges)
        retrace = functools.partial(retraced_split, traced, edges)
    graph, micro = choose_microbatching(graph, retrace, cluster, options, request)
    notes = (("axis", describe(*options.axis)),) if options.axis is not None else ()
    bundle = bundle.replace(graph=graph, microbatching=micro, notes=(*bundle.notes, *notes))
    if plan is None:
        plan = plan_stages(graph, micro, cluster, request).with_(layer_edges=edges, recompute=options.recompute or "")
        asked = options.num_stages or len(options.mesh or ())  # one mesh alone is for as many stages as there are
        if reason := why_fewer_stages(graph, asked, plan.num_stages):
            warnings.warn(f"{graph.name}: {reason}", UserWarning, stacklevel=2)
            bundle = bundle.replace(notes=(*bundle.notes, ("stages", reason)))
    elif plan.batch_size != max(1, batch_size_of(graph)):
        raise PlanError(
            f"the plan is for a batch of {plan.batch_size}, this call has {batch_size_of(graph)}; "
            "plan again for it, or pass batches of the plan's size"
        )
    if options.crossing_dtype is not None:
        plan = dataclasses.replace(plan, crossing_dtype=options.crossing_dtype)
    if options.sums:
        plan = dataclasses.replace(plan, sums=options.sums)
    return lower(bundle.replace(plan=plan), donate=options.donate, profiles=options.profiles)


def retraced_split(traced: Traced, edges: tuple[tuple[int, ...], ...], divisor: int) -> Graph:
    """Returns the step at a batch divided by a number, its loops taken apart at the edges given."""
    return split_like(_analysed(traced.retrace(divisor)), edges)


def _analysed(graph: Graph) -> Graph:
    found = analyse(Bundle(graph=graph)).graph
    if found is None:
        raise PlanError("nothing was traced")
    return found


def choose_microbatching(
    graph: Graph, retrace: Callable[[int], Graph], cluster: Cluster, options: Options,
    request: Request,
) -> tuple[Graph, Microbatching]:
    """Returns a proved microbatching of the number asked for, or of one chosen, and its full graph.

    The graph is the one given, or the same with random draws lifted out of loops, where that is what
    the proof takes.

    Raises:
      MicrobatchError: the number asked for does not divide the batch, or cannot be proved.
    """
    batch = batch_size_of(graph)
    asked = options.num_microbatches
    num = asked if asked is not None else usual_count(batch, cluster, request)
    if num < 1:
        raise MicrobatchError(f"num_microbatches is {num}; it must be at least 1")
    if num == 1:
        return graph, one_microbatch(graph)
    if not batch:
        raise MicrobatchError(
            f"{num} microbatches are asked for, but no argument carries a batch; name the one that "
            "does with batch_argnums, or use num_microbatches=1"
        )
    if batch % num:
        near = sorted((m for m in range(1, batch + 1) if batch % m == 0), key=lambda m: abs(m - num))
        raise MicrobatchError(
            f"{num} microbatches do not divide a batch of {batch} examples ({_batch_leaf(graph)}); "
            f"the nearest numbers that do are {', '.join(map(str, sorted(near[:3])))}",
            reason="the batch does not divide",
        )
    proved, micro = _prove(graph, retrace, num, options.per_microbatch)
    if micro.refusal is None or micro.accepted:
        return proved, micro
    if asked is not None:
        raise refused(micro.refusal, num)
    warn_of_one_microbatch(graph, micro.refusal)
    return graph, one_microbatch(graph, micro.refusal)


def still_refused(traced: Traced, cluster: Cluster, options: Options, refusal: Refusal) -> bool:
    """Returns whether a step is refused microbatches for the reason that an earlier process was given.

    A refusal also rests on the step at one microbatch, which the trace at the whole batch does not
    show: a batch size that is no longer written into the code leaves the latter as it was.
    """
    graph = analyse(Bundle(graph=traced.graph, cluster=cluster)).graph
    if graph is None:
        return False
    request = Request(options.num_stages, options.mesh, options.schedule)
    num = usual_count(batch_size_of(graph), cluster, request)
    if not why_not_searched(cluster, options):
        num = probe_count(batch_size_of(graph))
    if num <= 1:
        return False
    _, micro = _prove(graph, traced.retrace, num, options.per_microbatch)
    return micro.refusal is not None and micro.refusal.reason == refusal.reason


def manual_parts(graph: Graph) -> list[str]:
    """Returns a sentence for every shard_map of a step: a part written for a mesh that no stage has."""
    out = []
    for op in graph.ops:
        mapped = None if op.eqn is None else _jax.first_inside(op.eqn, "shard_map")
        if mapped is None:
            continue
        axes = ", ".join(map(repr, mapped.params["mesh"].axis_names))
        file, line = _jax.user_source(mapped)
        where = " in ".join(part for part in (f"{file}:{line}" if file else op.source, op.block) if part)
        out.append(
            f"shard_map over the mesh axes {axes} at {where} is written for one mesh of all devices, and every stage has a "
            "mesh of its own; write this part for one device (jnp, lax) and let hetjax shard it"
        )
    return out


def why_fewer_stages(graph: Graph, asked: int, made: int) -> str:
    """Returns why forward and backward of a step are not spread over the stages asked for; "" where they are."""
    if asked < 2:
        return ""
    inside = None
    if not any(op.region in ("forward", "backward") for op in graph.ops):
        inside = next((op for op in graph.ops if op.eqn is not None and _jax.has_gradient(op.eqn)), None)
    if inside is not None:
        where = " in ".join(part for part in (inside.source, inside.block) if part)
        return (
            f"{asked} stages are asked for, but forward and backward lie inside '{inside.primitive}'"
            f"{f' at {where}' if where else ''}, which is not cut: one stage runs them all. Take the gradient outside of "
            "the loop, and let num_microbatches split the batch"
        )
    if made < asked:
        return f"{asked} stages are asked for, and there is room for {made}: it has no forward that could be cut further"
    return ""


def warn_of_one_microbatch(graph: Graph, refusal: Refusal) -> None:
    """Says why stages are idle; once per step planned, kept plans included."""
    warnings.warn(
        f"hetjax runs {graph.name} as one microbatch, which leaves stages idle: {refusal.reason}",
        UserWarning, stacklevel=2,
    )


def probe_count(batch: int) -> int:
    """Returns the number of microbatches that a search proves first: the largest up to 4 that divides."""
    legal = [m for m in range(2, batch + 1) if batch % m == 0]
    return max((m for m in legal if m <= 4), default=legal[0] if legal else 1)


def usual_count(batch: int, cluster: Cluster, request: Request) -> int:
    """Returns a number of microbatches: about four per stage, each still divisible over its devices."""
    devices = stage_devices(cluster, request)
    if len(devices) == 1 or not batch:
        return 1
    if request.mesh:
        widths = [data for data, _ in request.mesh]
    else:
        widths = [len(d) for d in devices]
    legal = [m for m in range(1, 4 * len(devices) + 1) if batch % m == 0]
    width = math.lcm(*widths)
    fitting = [m for m in legal if (batch // m) % width == 0]
    return max(fitting or legal)


def _batch_leaf(graph: Graph) -> str:
    leaf = next((a for a in graph.inputs if a.role == "batch"), None)
    return f"axis 0 of {leaf.path}" if leaf else "no leaf"


def _prove(
    graph: Graph, retrace: Callable[[int], Graph], num: int, accept: bool
) -> tuple[Graph, Microbatching]:
    try:
        small = _analysed(retrace(num))
    except Exception as error:
        lines = str(error).strip().splitlines()
        refusal = Refusal(
            f"it cannot be traced with {num} times fewer examples ({type(error).__name__}: "
            f"{lines[0] if lines else 'no message'}); a batch size may be written into it",
            source=_raised_at(error),
        )
        return graph, Microbatching(num, graph, one_microbatch(graph).types, refusal=refusal)
    untyped = Microbatching(num, small, ())
    proof = ProveMicrobatching(accept=accept)
    proved = run_pipeline(Bundle(graph=graph, microbatching=untyped), [proof])
    if proved.graph is None or proved.microbatching is None:
        raise PlanError("nothing was proved")
    return proved.graph, proved.microbatching


def _raised_at(error: Exception) -> str:
    """Returns "file:line" of the user's innermost frame in an error's traceback, or ""."""
    found = ""
    for frame in traceback.extract_tb(error.__traceback__):
        name = frame.filename
        if "site-packages" not in name and not name.startswith((_HOME, "<")):
            found = f"{name.removeprefix(os.path.join(os.getcwd(), ''))}:{frame.lineno}"
    return found


def refused(refusal: Refusal, num: int) -> MicrobatchError:
    """Returns the error that says why a step cannot be split."""
    where = ", ".join(
        part for part in (
            f"equation {refusal.equation}" if refusal.equation else "",
            f"module {refusal.block}" if refusal.block else "",
            refusal.source,
        ) if part
    )
    return MicrobatchError(
        f"{num} microbatches would not give the numbers of the whole batch: {refusal.reason}"
        + (f" ({where})" if where else "")
        + "\nUse num_microbatches=1, or per_microbatch=True to accept the step's meaning per microbatch.",
        reason=refusal.reason, equation=refusal.equation, module_path=refusal.block, source=refusal.source,
    )


def parse_mesh(mesh: str | Sequence[int] | Sequence[Sequence[int]] | None) -> tuple[tuple[int, int], ...] | None:
    """Returns (data, model) pairs from "2,1", "2,1;3,2", (2, 1) or ((2, 1), (3, 2)).

    Raises:
      PlanError: it is none of these.
    """
    if mesh is None:
        return None
    try:
        if isinstance(mesh, str):
            rows: list[list[int]] = [[int(n) for n in part.split(",")] for part in mesh.split(";")]
        elif all(isinstance(n, int) for n in mesh):
            rows = [list(mesh)]  # type: ignore[arg-type]
        else:
            rows = [list(row) for row in mesh]  # type: ignore[union-attr]
        rows = [row if len(row) == 2 else [row[0], 1] if len(row) == 1 else [] for row in rows]
        if not rows or any(len(row) != 2 or min(row) < 1 for row in rows):
            raise ValueError
    except (TypeError, ValueError):
        raise PlanError(
            f"mesh {mesh!r} is not understood; write data,model sizes such as '2,1' for all stages or "
            "'2,1;3,2' for one stage each"
        ) from None
    return tuple((row[0], row[1]) for row in rows)
