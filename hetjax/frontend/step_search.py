"""The search for a traced step's plan: table, tree, then the best few lowered and judged in full.

The tree search prices layers; what it finds is then lowered like any plan and judged by its own fragments,
transfers and memory (`hetjax.passes.cost.estimate`), beside the first planner's plan. The best of these that
fits is taken, so that a search is never worse than none by the same judgement.
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Mapping, Sequence

from hetjax.frontend.planning import (
    Options,
    choose_microbatching,
    probe_count,
    retraced_split,
    usual_count,
)
from hetjax.frontend.tracing import Traced
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import HetjaxError, MicrobatchError, PlanError
from hetjax.ir.graph import Graph
from hetjax.ir.microbatching import Microbatching, Refusal
from hetjax.ir.plan import Plan
from hetjax.passes.choose_layer_edges import layer_edges, split_like
from hetjax.passes.cost.estimate import ProgramEstimate, estimate_program
from hetjax.passes.cost.judge import Judge
from hetjax.passes.one_microbatch import one_microbatch
from hetjax.passes.pipeline import lower
from hetjax.passes.plan_stages import Request, batch_size_of, plan_stages
from hetjax.passes.search.evaluator import Evaluator, Improvement, Objective
from hetjax.passes.search.judge import INF, Edges, Groups
from hetjax.passes.search.own_judge import OwnJudge
from hetjax.passes.search.part_tables import USABLE
from hetjax.passes.search.result import SearchResult, search
from hetjax.passes.search.space import Options as SearchOptions
from hetjax.passes.search.space import Outline, Pool, Problem, pools_of
from hetjax.planning.outlines import plan_of_outline
from hetjax.planning.pins import Pins, pin_specs, pinned_pools
from hetjax.planning.traced_table import MAX_TENSOR, TracedTable

# Where the full judgement is worse than the search's by more than this, other plans may be better.
_AGREE = 1.1
# How often the search begins anew because its best number of microbatches cannot be proved.
_ANEW = 3
# By how much less memory counts where no plan fits by the table.
_LOOSER = 0.6
# How replicas may share out their state.
_SHARDED = (SearchOptions(sharding="optimizer"), SearchOptions(sharding="all"))
_SEQUENCED = tuple(SearchOptions(sharding=s, sequence=True) for s in ("none", "optimizer", "all"))


@dataclasses.dataclass(frozen=True)
class Effort:
    """How long to search.

    Attributes:
      evaluations: plans to judge; the same number and seed give the same plan.
      budget_s: a stop by the clock.
      seed: of all that is drawn.
      without: principles switched off.
      forest: uses of a forest learned on the way (`hetjax.passes.search.forest_bonus.WAYS`).
      finalists: the most plans of the search that are lowered and judged in full.
    """

    evaluations: int = 1000
    budget_s: float = 10.0
    seed: int = 0
    without: tuple[str, ...] = ()
    forest: tuple[str, ...] = ()
    finalists: int = 2


@dataclasses.dataclass(frozen=True)
class Wishes:
    """What a plan must be, and what is made small.

    Attributes:
      objective: "time" or "cost".
      prices: per device-hour, by device kind.
      max_devices: the most devices; 0 for all.
      max_tensor: the highest degree of tensor parallelism.
      pins: decisions fixed by hand.
    """

    objective: str = "time"
    prices: Mapping[str, float] = dataclasses.field(default_factory=dict)
    max_devices: int = 0
    max_tensor: int = MAX_TENSOR
    pins: Pins = dataclasses.field(default_factory=Pins)


@dataclasses.dataclass(frozen=True)
class Finalist:
    """One plan judged in full.

    Attributes:
      source: "search" or "first planner".
      bundle: planned and lowered.
      estimate: the judgement.
      value: what is made small: seconds, or the price of a step.
    """

    source: str
    bundle: Bundle
    estimate: ProgramEstimate
    value: float

    @property
    def plan(self) -> Plan:
        assert self.bundle.plan is not None
        return self.bundle.plan


@dataclasses.dataclass(frozen=True)
class StepSearch:
    """What was found for a step.

    Attributes:
      best: the plan taken.
      finalists: all that were judged in full, those that do not fit included.
      result: of the tree search.
      problem: what was searched.
      search_s: altogether, tables and finalists included.
      failures: why others could not be lowered.
    """

    best: Finalist
    finalists: tuple[Finalist, ...]
    result: SearchResult
    problem: Problem
    search_s: float
    failures: tuple[str, ...] = ()

    @property
    def words(self) -> str:
        """Returns how the plan was found, in one sentence."""
        r = self.result
        how = "every better plan is ruled out" if r.proved else f"at most {r.gap:.1%} above the bound"
        won = "" if self.best.source == "search" else f"; {self.best.source}'s plan judged best in full"
        return (
            f"{r.evaluations} plans judged in {self.search_s:.2f} s (seed {r.seed}), {how} by the search's "
            f"own judge; {len(self.finalists)} lowered and judged in full{won}"
        )


class _Proofs:
    """The step at each number of microbatches, proved once."""

    def __init__(self, traced: Traced, graph: Graph, cluster: Cluster, options: Options):
        self._graph, self._cluster, self._options = graph, cluster, options
        self._known: dict[int, tuple[Graph, Microbatching]] = {}
        # Loops over layers are taken apart as the first planner does, so that stages may meet inside them.
        self.edges = layer_edges(graph, cluster, Request())
        self._retrace: Callable[[int], Graph] = traced.retrace
        if self.edges:
            self._graph = split_like(graph, self.edges)
            self._retrace = functools.partial(retraced_split, traced, self.edges)

    def at(self, num: int) -> tuple[Graph, Microbatching]:
        """Returns graph and microbatching.

        Raises:
          MicrobatchError: the number does not divide the batch, or is not proved.
        """
        if num not in self._known:
            asked = dataclasses.replace(self._options, num_microbatches=num)
            self._known[num] = choose_microbatching(
                self._graph, self._retrace, self._cluster, asked, Request()
            )
        return self._known[num]

    def whole(self, refusal: Refusal) -> None:
        """Keeps why the step is not split with the step at one microbatch."""
        self._known[1] = (self._graph, one_microbatch(self._graph, refusal))


def search_step(
    traced: Traced, analysed: Graph, cluster: Cluster, options: Options, *,
    effort: Effort | None = None, wishes: Wishes | None = None,
    on_start: Callable[[Evaluator], None] | None = None,
    on_improvement: Callable[[Improvement], None] | None = None,
) -> StepSearch:
    """Returns the best plan found for a step, lowered.

    Args:
      traced: the call.
      analysed: its graph, labelled and with costs.
      cluster: the devices.
      options: of `parallelize`; those that fix stages or meshes are not looked at.
      effort, wishes: of the search.
      on_start, on_improvement: as in `hetjax.passes.search.result.search`.

    Raises:
      PlanError: no plan fits; by how much, where, and what would help.
      MicrobatchError: more microbatches are asked for than can be proved.
    """
    begin = time.perf_counter()
    effort, wishes = effort or Effort(), wishes or Wishes()
    proofs = _Proofs(traced, analysed, cluster, options)
    counts, first = _counts(proofs, analysed, options)
    graph, micro = proofs.at(first)
    step = Bundle(graph=graph, cluster=cluster, microbatching=micro)
    pins = wishes.pins
    measured = Judge.at(options.profiles)
    table = TracedTable(
        step, cluster, efficiency=measured.store.efficiency if measured is not None else None,
        max_tensor=wishes.max_tensor, least_tensor=2 if pins.splits else 1,
    )  # fmt: skip
    pools = _usable_pools(table, cluster)
    for pool in pools:
        table.tensors(pool.kind)  # the budget is for searching, not for the table
    choices = _SHARDED + _SEQUENCED * _short_of_memory(table, cluster, pools, max(1, batch_size_of(analysed)))
    problem = Problem(
        table, cluster, pools, max(1, batch_size_of(analysed)), mixed=False,
        max_devices=wishes.max_devices, counts=counts, stage_pools=pinned_pools(pins, pools),
        options=choices if options.recompute in ("", "cheap") else (*choices, SearchOptions(recompute=True)),
    )  # fmt: skip
    unfit: PlanError | None = None
    for attempt in range(_ANEW):
        try:
            found = search(
                _PinnedJudge(problem, sync_each=True, schedule=options.schedule or ""), objective=Objective(wishes.objective, wishes.prices),
                seed=effort.seed, max_evaluations=effort.evaluations, budget_s=effort.budget_s,
                without=effort.without, forest=effort.forest, on_start=on_start, on_improvement=on_improvement,
            )  # fmt: skip
        except PlanError as error:
            # Layers counted one by one may hold more than their stage does, which the full judgement knows.
            if unfit is not None or attempt == _ANEW - 1:
                raise unfit or error from None
            unfit = error
            table.hold_more(_LOOSER)
            continue
        judge = _Finals(problem, table, proofs, options, wishes, effort)
        unproved = judge.run(found)
        if unproved is not None:
            legal = problem.counts or _divisors(problem.batch)
            problem = dataclasses.replace(problem, counts=tuple(m for m in legal if m != unproved))
        elif not judge.finalists and problem.max_stages != 1 and not problem.stage_pools:
            problem = dataclasses.replace(problem, max_stages=1)  # where it was cut, it cannot be lowered
        elif judge.finalists and all(f.estimate.over for f in judge.finalists):
            table.hold_more(max(1.1, min(map(_excess, judge.finalists))))
        else:
            break
    best = judge.best()
    return StepSearch(
        best, tuple(judge.finalists), found, problem, time.perf_counter() - begin, tuple(judge.failures)
    )


def _short_of_memory(table: TracedTable, cluster: Cluster, pools: Sequence[Pool], batch: int) -> bool:
    """Returns whether tensor-parallel devices may lack room, so that sequences in parts could gain any.

    The search counts them as no faster; where the whole step fits on the devices of one replica, they gain none.
    """
    for pool in pools:
        room = USABLE * cluster.kind(pool.kind).memory_bytes
        for tensor in table.tensors(pool.kind):
            sizes = table.sizes(tensor) if tensor > 1 else None
            if sizes is not None:
                each = sum(sizes.stored_bytes) + sum(sizes.passing_bytes)
                held = sum(table.state_bytes) * sum(sizes.parameters) + sum(sizes.passing_once_bytes) + sum(sizes.updating_bytes)
                if held + batch * each > room:
                    return True
    return False


class _PinnedJudge(OwnJudge):
    """Finds that a plan whose stages are not where they must be cannot run."""

    def bound_s(self, m: int, groups: Groups, edges: Edges) -> float:
        for s, _ in self.problem.stage_pools:
            if s >= len(groups) or not self.problem.allows(s, groups[s]):
                return INF
        return super().bound_s(m, groups, edges)


def _divisors(batch: int) -> list[int]:
    return [m for m in range(1, batch + 1) if batch % m == 0]


def _counts(proofs: _Proofs, graph: Graph, options: Options) -> tuple[tuple[int, ...], int]:
    """Returns the numbers of microbatches that may be, () for all, and the one to make the table at."""
    batch, asked = batch_size_of(graph), options.num_microbatches
    if asked is not None:
        proofs.at(asked)
        return (asked,), asked
    probe = probe_count(batch)
    if probe == 1:
        return (1,), 1
    try:
        _, micro = proofs.at(probe)
    except MicrobatchError as error:
        if not options.per_microbatch:
            proofs.whole(
                Refusal(error.reason, equation=error.equation, block=error.module_path, source=error.source)
            )
        return (1,), 1
    # Accepted per microbatch, their number is part of what the step means.
    return ((probe,) if micro.accepted else ()), probe


def _usable_pools(table: TracedTable, cluster: Cluster) -> tuple[Pool, ...]:
    """Returns the pools whose kind computes in all the step's dtypes.

    Raises:
      PlanError: none does.
    """
    pools = pools_of(cluster)
    usable = tuple(p for p in pools if table.times(p.kind, 1, 1) is not None)
    if not usable:
        why = dict.fromkeys(f"{p.kind}: {table.why_not(p.kind)}" for p in pools)
        raise PlanError("no device kind of the cluster can compute this step:\n  " + "\n  ".join(why))
    return usable


def _outlines(found: SearchResult) -> list[tuple[float, Outline]]:
    """Returns the outlines a search found with their values, best first; of those that differ in cuts alone, the best."""
    out: dict[tuple, tuple[float, Outline]] = {}
    for improvement in reversed(found.improvements):
        outline = improvement.outline
        out.setdefault((outline.num_microbatches, outline.groups), (improvement.value, outline))
    return list(out.values())


class _Finals:
    """Lowers plans and judges them in full."""

    def __init__(
        self, problem: Problem, table: TracedTable, proofs: _Proofs, options: Options, wishes: Wishes,
        effort: Effort,
    ):
        self.problem, self.table, self.proofs = problem, table, proofs
        self.options, self.wishes, self.effort = options, wishes, effort
        self.finalists: list[Finalist] = []
        self.outlined: dict[int, Plan] = {}  # the plan of each finalist before it was lowered
        self.failures: list[str] = []

    def run(self, found: SearchResult) -> int | None:
        """Judges the best plans of a search, and the first planner's where the two judges disagree.

        Returns:
          The number of microbatches of the best, if it cannot be proved; else None.
        """
        for value, outline in _outlines(found)[: 2 * self.effort.finalists]:
            fitting = [f.value for f in self.finalists if not f.estimate.over]
            if len(self.finalists) == self.effort.finalists or value >= min(fitting, default=value + 1):
                break
            try:
                self._add_outline(outline, found.evaluations)
            except MicrobatchError as error:
                self.failures.append(str(error))
                if not self.finalists and self.options.num_microbatches is None:
                    return outline.num_microbatches
            except HetjaxError as error:
                self.failures.append(str(error))
        fitting = [f.value for f in self.finalists if not f.estimate.over]
        self._add_in_parts()
        free = not self.wishes.max_devices and self.wishes.pins == Pins()
        if free and min(fitting, default=INF) > _AGREE * found.value:
            self._add_first_planner()
        return None

    def _add_outline(self, outline: Outline, evaluations: int) -> None:
        graph, micro = self.proofs.at(outline.num_microbatches)
        plan = plan_of_outline(
            self.problem, outline, self.table.cuts, graph, micro, tensor_specs=self.table.tensor_specs,
            homes=self.table.homes, schedule=self.options.schedule,
            seed=self.effort.seed, evaluations=evaluations,
        )  # fmt: skip
        plan = pin_specs(plan, self.wishes.pins, graph)
        self._add("search", graph, micro, plan)
        if plan.recompute and self.finalists[-1].estimate.over:
            # Fewer bytes for each microbatch in flight, more while one is in its backward.
            self._add("search", graph, micro, dataclasses.replace(plan, recompute="stage"))

    def _add_in_parts(self) -> None:
        """Adds the best plan so far, or the closest, with its sequences in parts: the search counts that as no faster."""
        fitting = [f for f in self.finalists if not f.estimate.over]
        best = min(fitting, key=lambda f: f.value, default=min(self.finalists, key=_excess, default=None))
        if best is None or any(s.sequence for s in best.plan.stages):
            return
        plan = self.outlined[id(best)]
        fixed = {number for number, _ in self.wishes.pins.sequences}
        stages = tuple(
            s if k in fixed else dataclasses.replace(s, sequence=dict(s.axes).get("model", 1) > 1)
            for k, s in enumerate(plan.stages)
        )
        if stages == plan.stages:
            return
        graph, micro = self.proofs.at(plan.num_microbatches)
        try:
            self._add(best.source, graph, micro, dataclasses.replace(plan, stages=stages))
        except HetjaxError as error:
            self.failures.append(str(error))

    def _add_first_planner(self) -> None:
        """Adds the plan that `plan_stages` makes, at the number of microbatches that it would have chosen."""
        request = Request(schedule=self.options.schedule)
        num = usual_count(self.problem.batch, self.problem.cluster, request)
        if self.problem.counts and num not in self.problem.counts:
            num = self.problem.counts[0]
        try:
            graph, micro = self.proofs.at(num)
            plan = plan_stages(graph, micro, self.problem.cluster, request)
            self._add("the first planner", graph, micro, plan)
        except HetjaxError as error:
            self.failures.append(str(error))

    def _add(self, source: str, graph: Graph, micro: Microbatching, plan: Plan) -> None:
        cluster = self.problem.cluster
        plan = dataclasses.replace(plan, layer_edges=self.proofs.edges)
        if self.options.recompute is not None:
            plan = dataclasses.replace(plan, recompute=self.options.recompute, recompute_stages=())
        if self.options.crossing_dtype is not None:
            plan = dataclasses.replace(plan, crossing_dtype=self.options.crossing_dtype)
        if self.options.sums:
            plan = dataclasses.replace(plan, sums=self.options.sums)
        bundle = Bundle(graph=graph, cluster=cluster, microbatching=micro, plan=plan)
        bundle = lower(bundle, donate=self.options.donate, profiles=self.options.profiles)
        estimate = estimate_program(bundle, judge=Judge.at(self.options.profiles))
        value = estimate.iteration_s
        if self.wishes.objective == "cost":
            value *= price_per_s(plan, self.wishes.prices)
        self.finalists.append(Finalist(source, bundle, estimate, value))
        self.outlined[id(self.finalists[-1])] = plan

    def best(self) -> Finalist:
        """Returns the best that fits.

        Raises:
          PlanError: none does.
        """
        fitting = [f for f in self.finalists if not f.estimate.over]
        if fitting:
            return min(fitting, key=lambda f: f.value)
        if not self.finalists:
            raise PlanError("no plan found can be lowered:\n  " + "\n  ".join(dict.fromkeys(self.failures)))
        raise PlanError(_none_fits(self.finalists))


def _none_fits(finalists: Sequence[Finalist]) -> str:
    closest = min(finalists, key=_excess)
    memory = closest.estimate.memory
    kinds = [closest.bundle.cluster.kind(s.kind) for s in closest.plan.stages]  # type: ignore[union-attr]
    s = max(range(len(memory)), key=lambda s: memory[s].peak_bytes - kinds[s].memory_bytes)
    more = memory[s].peak_bytes - kinds[s].memory_bytes
    help_ = "more stages (more devices)"
    if memory[s].activations * memory[s].in_flight >= more:
        help_ = "a smaller microbatch, recomputation (recompute=\"stage\", or jax.checkpoint in the model) or " + help_
    return (
        f"no plan for {closest.plan.name} fits; the closest has {closest.plan.num_stages} stages and "
        f"{closest.plan.num_microbatches} microbatches and lacks {more / 1e9:.3g} GB on stage {s}:\n  "
        + "\n  ".join(closest.estimate.over)
        + f"\nWhat would make it fit: {help_}"
        + ("" if memory[s].update < more else ", or donate=True, which lets the update reuse the old state")
    )


def _excess(finalist: Finalist) -> float:
    cluster = finalist.bundle.cluster
    assert cluster is not None
    return max(
        m.peak_bytes / cluster.kind(s.kind).memory_bytes
        for m, s in zip(finalist.estimate.memory, finalist.plan.stages)
    )


def price_per_s(plan: Plan, prices: Mapping[str, float]) -> float:
    """Returns what a second of the devices a plan uses costs."""
    return sum(len(s.devices) * prices[s.kind] for s in plan.stages) / 3600
