"""One search from start to end, and all that it leaves behind: plan, bound, history, tree."""

from __future__ import annotations

import dataclasses
import heapq
import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hetjax.ir.display import Shown
from hetjax.ir.errors import HetjaxError, PlanError
from hetjax.passes.search.evaluator import Evaluator, Improvement, Objective, Stopped
from hetjax.passes.search.forest_bonus import FOREST, make_forest
from hetjax.passes.search.judge import INF, Judge, Report
from hetjax.passes.search.lanes import Offers, Setting
from hetjax.passes.search.moves import with_options
from hetjax.passes.search.refine import Refiner
from hetjax.passes.search.relaxation import lower_bound_of
from hetjax.passes.search.rounds import Rounds
from hetjax.passes.search.space import PLAIN, Outline, Problem, problems_of
from hetjax.passes.search.sweep import Sweep
from hetjax.passes.search.tree import SETTLED as SETTLED
from hetjax.passes.search.tree import Node, TreeSearch
from hetjax.passes.search.view import View

# Where plans may have more stages than these one climb is a matter of luck.
_MANY_STAGES = 8
# Nodes of the tree that are kept for people to look at, the most visited first.
_KEPT_NODES = 2000


@dataclasses.dataclass(frozen=True, slots=True)
class TreeNode:
    """A node of the search tree, as it was at the end.

    Attributes:
      parent: position in `SearchTree.nodes`, -1 for the root.
      label: the decision that leads to it.
      prior: what the principles gave it.
      visits: how often the search passed it.
      value: mean of the rewards below it, from 0 to 1 (a reward is the best value known when it was found over
        the one found); None where it was never passed.
      best: the best value below it; None where no plan was judged.
      bound: no plan below has a smaller value; None where it was never asked.
      pruned: why nothing more is looked for below, or "".
    """

    parent: int
    label: str
    prior: float
    visits: int
    value: float | None
    best: float | None
    bound: float | None
    pruned: str


@dataclasses.dataclass(frozen=True)
class SearchTree(Shown):
    """What a search looked at.

    Attributes:
      nodes: the most visited ones, parents first.
      unit: of values: "s", or "" for the price of a step.
    """

    nodes: tuple[TreeNode, ...]
    unit: str = "s"

    def __len__(self) -> int:
        return len(self.nodes)

    def __iter__(self) -> Iterator[TreeNode]:
        return iter(self.nodes)

    def __getitem__(self, i: int) -> TreeNode:
        return self.nodes[i]

    def children(self) -> list[list[int]]:
        """Returns, per node, the positions of those below it."""
        out: list[list[int]] = [[] for _ in self.nodes]
        for i, n in enumerate(self.nodes):
            if n.parent >= 0:
                out[n.parent].append(i)
        return out

    def line(self, i: int) -> tuple[str, ...]:
        """Returns the decisions that lead to a node, the first of them first."""
        out: list[str] = []
        while self.nodes[i].parent >= 0:
            out.append(self.nodes[i].label)
            i = self.nodes[i].parent
        return tuple(reversed(out))


@dataclasses.dataclass(frozen=True)
class SearchResult(Shown):
    """What a search found.

    Attributes:
      outline: the best plan.
      report: what the judge says of it.
      value: what was made small: seconds, or the price of a step.
      lower_bound: no plan of the problem has a smaller value.
      proved: whether the search ended because nothing better can exist.
      evaluations, simulations: plans judged, and those of them that the bound did not settle.
      seed: of the search.
      search_s: how long it took.
      improvements: every best plan when it was found.
      tree: what was looked at.
      unused: (devices, kind, site, why they are left out).
      stages: of the best plan as plain data, see `describe`.
      stopped: why it ended: "proved", "evaluations", "time", "interrupted", or "idle" where nothing new
        turned up.
    """

    outline: Outline
    report: Report
    value: float
    lower_bound: float
    proved: bool
    evaluations: int
    simulations: int
    seed: int
    search_s: float
    improvements: tuple[Improvement, ...]
    tree: SearchTree
    unused: tuple[tuple[int, str, str, str], ...]
    stages: tuple[dict[str, Any], ...] = ()
    stopped: str = ""

    @property
    def gap(self) -> float:
        """Returns how far above the lower bound the value is, as a share of the value."""
        return 1 - self.lower_bound / self.value


def search(
    judge: Judge,
    *,
    objective: Objective | None = None,
    seed: int = 0,
    max_evaluations: int | None = None,
    budget_s: float | None = None,
    without: Sequence[str] = (),
    forest: Sequence[str] = FOREST,
    on_improvement: Callable[[Improvement], None] | None = None,
    on_start: Callable[[Evaluator], None] | None = None,
    processes: int | None = None,
) -> SearchResult:
    """Returns the best plan found.

    The same problem, seed and number of evaluations give the same plan; seconds only stop the search.

    Args:
      judge: the judge, with the problem.
      objective: what is made small; the time of a step when not given.
      seed: of all that is drawn.
      max_evaluations, budget_s: when to stop; without either, when nothing better can exist.
      without: principles switched off.
      forest: uses of a forest that is learned on the way, of `forest_bonus.WAYS`; none where xgboost is not
        installed, or the problem is small enough to be proved plan by plan.
      on_improvement: told of every new best plan.
      on_start: given the evaluator, whose `stop` ends the search with what it has.
      processes: over how many the search is divided; changes nothing in the plan, only how long it takes. Given, or
        where plans may have many stages, the search goes in rounds (`hetjax.passes.search.rounds`); one process then,
        if not given.

    Raises:
      PlanError: no plan fits; says by how much, where, and what would help. Or an unknown principle.
    """
    _check_stages(judge.problem)
    evaluator = Evaluator(
        judge, objective, max_evaluations=max_evaluations, budget_s=budget_s, on_improvement=on_improvement
    )
    view = View(evaluator, without)
    sweep = Sweep(view)
    ways = () if sweep.active else tuple(forest)
    view.forest = make_forest(view, seed, ways)
    rounds: Rounds | None = None
    offers = Offers() if processes is not None or _many_staged(judge.problem) else None
    tree = TreeSearch(view, seed, Refiner(view, seed) if offers is None else offers, sweep)
    if offers is not None:
        setting = Setting(judge, evaluator.objective, tuple(without), seed, (), ways)
        rounds = Rounds(tree, offers, setting, processes or 1)
    # What is open now may be closed later: the bound of the whole problem is the root's, or a better one.
    evaluator.lower_bound = tree.root.bound
    if on_start is not None:
        on_start(evaluator)
    stopped = "idle"
    try:
        if rounds is not None:
            rounds.run(bound=not sweep.active)
        else:
            if not sweep.active:
                evaluator.lower_bound = lower_bound_of(view, tree.root.bound)
            tree.run()
    except Stopped:
        spent = max_evaluations is not None and evaluator.looked_at >= max_evaluations
        stopped = "evaluations" if spent else "interrupted" if evaluator.stop else "time"
    except KeyboardInterrupt:
        stopped = "interrupted"
    finally:
        if rounds is not None:
            rounds.close()
    search_s = evaluator.elapsed_s
    outline = evaluator.outline
    if outline is None:
        if stopped == "interrupted":
            raise PlanError(f"the search was interrupted after {search_s:.2f} s, before it had a plan")
        raise nothing_fits(view, proved=tree.root.closed)
    wrong = list(problems_of(judge.problem, outline))
    report = judge.report(outline)
    if wrong or report.seconds == INF:
        raise HetjaxError("the search returned a plan that is none:\n" + "\n".join([*wrong, *report.problems]))
    proved = tree.root.closed and view.prunes_by_bound
    value = evaluator.best
    return SearchResult(
        outline, report, value, value if proved else min(evaluator.lower_bound, value), proved, evaluator.looked_at,
        evaluator.simulations, seed, search_s, tuple(evaluator.improvements),
        SearchTree(_records(tree), "s" if evaluator.objective.name == "time" else ""), _unused(view, outline),
        tuple(describe(judge.problem, outline)),
        "proved" if proved else stopped,
    )  # fmt: skip


def _check_stages(problem: Problem) -> None:
    """Raises PlanError where a stage must be somewhere that no plan can have."""
    beyond = sorted({s for s, _ in problem.stage_pools if s >= problem.stage_limit})
    if beyond:
        most, layers = problem.stage_limit, problem.num_layers
        limit = f"{layers} layer{'s' * (layers > 1)} and {problem.num_devices} devices"
        if problem.max_stages and most == problem.max_stages:
            limit = f"at most {most} stages were asked for"
        raise PlanError([
            f"stage[{s}] is pinned, but no plan of {problem.table.name} can have {s + 1} stages: {limit}; "
            f"the last stage there can be is stage[{most - 1}]"
            for s in beyond
        ])  # fmt: skip


def _many_staged(problem: Problem) -> bool:
    return not problem.alike and problem.stage_limit > _MANY_STAGES


def _records(tree: TreeSearch) -> tuple[TreeNode, ...]:
    """Returns the most visited nodes, each after its parent."""
    out: list[TreeNode] = []
    number = itertools.count()
    waiting: list[tuple[int, int, int, str, float, Node | None, str]] = []

    def wait(parent: int, label: str, prior: float, node: Node | None, why: str) -> None:
        heapq.heappush(waiting, (-_visits(node), next(number), parent, label, prior, node, why))

    wait(-1, "start", 1.0, tree.root, "")
    while waiting and len(out) < _KEPT_NODES:
        _, _, parent, label, prior, node, why = heapq.heappop(waiting)
        here = len(out)
        if node is None:
            out.append(TreeNode(parent, label, prior, 0, None, None, None, why))
            continue
        best = node.best if node.best < INF else None
        value = node.total / node.visits if node.visits else None
        out.append(TreeNode(parent, label, prior, node.visits, value, best, node.bound, why or node.why))
        children = node.children or []
        # Of those never visited the likeliest ten are enough to see what was passed over.
        fresh = [c for c in children if c.node is None][:10]
        seen = [c for c in children if c.node is not None]
        for c in (*seen, *fresh):
            wait(here, c.label, c.prior, c.node, c.why)
    return tuple(out)


def _visits(node: Node | None) -> int:
    return 0 if node is None else node.visits


def _unused(view: View, outline: Outline) -> tuple[tuple[int, str, str, str], ...]:
    """Returns the devices left out, each with the reason that comparing speeds and links gives."""
    problem = view.problem
    used = outline.used(len(problem.pools))
    out = []
    for i, pool in enumerate(problem.pools):
        left = pool.devices - used[i]
        if not left:
            continue
        inside = [j for j, n in enumerate(used) if n]
        slow = [j for j in inside if j != i and view.is_slow(i, j)]
        if problem.max_devices and sum(used) >= problem.device_limit:
            why = f"no more than {problem.max_devices} devices may be used"
        elif not used[i] and slow and len(slow) == len([j for j in inside if j != i]):
            why = "every link to the sites in use is slow: what it would take there costs more than it saves"
        elif not used[i]:
            why = "no plan found that uses it is faster"
        else:
            why = "not enough for another equal replica or stage; a plan with uneven ones was not faster"
        out.append((left, pool.kind, pool.site, why))
    return tuple(out)


def nothing_fits(view: View, *, proved: bool = True) -> PlanError:
    """Returns the error that says by how much no plan fits, where, and what would make one fit.

    Asked is the device that holds most of the best spread there may be: the mean stage, or the largest layer
    alone where that is more.

    Args:
      view: the problem.
      proved: whether every plan was ruled out; else the search only ended before it had one.
    """
    problem, judge = view.problem, view.judge
    choices = (PLAIN, *problem.options)
    closest: tuple[float, str, float, float] | None = None
    for micro in view.moves.micros:
        for plain in view.moves.groups(micro, (), False):
            stages = min(problem.stage_limit, max(1, view.moves.counts((), plain)))
            held = judge.in_flight(0, stages, micro.num_microbatches) if judge.fixed_memory else 1
            for group in dict.fromkeys(with_options(problem, plain, o) for o in choices):
                for need, free in judge.rooms(group, held) if judge.known(group) else ():
                    least = max(need[-1] / stages, *(b - a for a, b in itertools.pairwise(need)))
                    if closest is None or least / max(free, 1.0) < closest[0]:
                        kind = problem.pools[group.parts[0].pool].kind
                        where = f"{stages} stage{'s' * (stages > 1)} on {kind}"
                        closest = (least / max(free, 1.0), where, least, free)
    if closest is None:
        return PlanError(
            f"no number of microbatches divides a batch of {problem.batch} into sizes that "
            f"{problem.table.name} has numbers for on these devices; choose another batch"
        )
    _, where, need, free = closest
    tried = "with every choice of recomputation and sharding" if problem.options else "as it is"
    numbers = f"a device needs at least {need / 1e9:.4g} GB and {free / 1e9:.4g} GB can be used"
    if need > free:
        return PlanError(
            f"no plan for {problem.table.name} fits, {tried}. Closest: {where}, where {numbers} "
            f"({(need - free) / 1e9:.4g} GB too much). {_REMEDIES}"
        )
    if proved:
        return PlanError(
            f"no plan for {problem.table.name} fits, {tried}. Closest: {where}, where {numbers} if all layers "
            f"were spread evenly; they cannot be, and what is in flight comes on top. {_REMEDIES}"
        )
    return PlanError(
        f"the search ended after {view.evaluator.looked_at} evaluations without a plan for {problem.table.name} that "
        f"fits, and without showing that there is none: with {where}, {numbers}. Give it more evaluations or seconds; "
        f"if that finds none: {_REMEDIES}"
    )


_REMEDIES = (
    "More stages (more devices), recomputation, sharded optimizer state or a smaller microbatch would make it fit"
)


def describe(problem: Problem, outline: Outline) -> list[dict[str, Any]]:
    """Returns a plan's stages as plain data."""
    names = problem.table.layers
    return [
        {
            "layers": [names[outline.edges[s]], names[outline.edges[s + 1] - 1]],
            "num_layers": outline.edges[s + 1] - outline.edges[s],
            "parts": [
                {
                    "site": problem.pools[p.pool].site, "kind": problem.pools[p.pool].kind,
                    "replicas": p.replicas, "tensor": p.tensor, "examples": p.share,
                }
                for p in group.parts
            ],
            "options": dataclasses.asdict(group.options),
        }
        for s, group in enumerate(outline.groups)
    ]  # fmt: skip
