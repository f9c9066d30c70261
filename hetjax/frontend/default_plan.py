"""What `parallelize` does without a plan: takes the one kept for this step, or searches and keeps what it found."""

from __future__ import annotations

import logging
import warnings

from hetjax.frontend.axis import describe
from hetjax.frontend.planning import Options, planned_bundle, warn_of_one_microbatch, with_plan
from hetjax.frontend.step_search import Effort, StepSearch, Wishes, search_step
from hetjax.frontend.tracing import Traced
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import HetjaxError, PlanError
from hetjax.passes.cost.estimate import estimate_program
from hetjax.passes.cost.judge import Judge
from hetjax.passes.plan_stages import batch_size_of
from hetjax.planning.plan_cache import plan_file, read_plan_file, write_plan_file
from hetjax.planning.traced_table import MAX_TENSOR

_log = logging.getLogger("hetjax")
# Topics of the notes that say where a plan comes from.
SEARCHED, KEPT = "plan searched", "plan kept"


def searched_bundle(traced: Traced, analysed: Bundle, options: Options) -> Bundle:
    """Returns the bundle with the best plan found, lowered; from the cache where it is there.

    Args:
      traced: the call.
      analysed: its graph, labelled and with costs, and the cluster.
      options: that leave stages and meshes open.

    Raises:
      PlanError: no plan fits; by how much, where, and what would help.
      MicrobatchError: more microbatches are asked for than can be proved.
    """
    graph, cluster = analysed.graph, analysed.cluster
    if graph is None or cluster is None:
        raise PlanError("nothing was traced")
    effort = Effort(budget_s=options.search_s)
    # A meaning accepted per microbatch is not in the digest of the step at its whole batch.
    file = None if options.per_microbatch else plan_file(traced.graph, cluster, options, effort)
    kept = read_plan_file(file) if file is not None else None
    if kept is not None:
        plan, found = kept
        try:
            bundle = planned_bundle(traced, analysed, with_plan(options, plan, cluster))
        except HetjaxError as error:
            _log.warning("the plan kept in %s does not serve (%s); the step is planned anew", file, error)
        else:
            _log.info("plan of %s taken from %s", plan.name, file)
            return bundle.note(KEPT, f"from {file}; {found}")
    try:
        result = _search(traced, analysed, cluster, options, effort)
    except PlanError as error:
        return _first_planner(traced, analysed, options, error)
    micro = result.best.bundle.microbatching
    if micro is not None and micro.refusal is not None and not micro.accepted and result.best.plan.num_stages > 1:
        warn_of_one_microbatch(graph, micro.refusal)
    _log.info("plan of %s: %s", graph.name, result.words)
    if file is not None:
        write_plan_file(file, result.best.plan, result.words)
    bundle = result.best.bundle
    if options.axis is not None:
        bundle = bundle.note("axis", describe(*options.axis))
    return bundle.note(SEARCHED, result.words)


def _first_planner(traced: Traced, analysed: Bundle, options: Options, error: PlanError) -> Bundle:
    """Returns the first planner's plan where it fits after all; a step may be one that no table can hold.

    Raises:
      PlanError: it does not fit either; the search's reasons.
    """
    try:
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            bundle = planned_bundle(traced, analysed, options)
        over = estimate_program(bundle, judge=Judge.at(options.profiles)).over
    except HetjaxError:
        raise error from None
    if over:
        raise error
    for warning in said:
        warnings.warn(warning.message, stacklevel=2)
    return bundle.note(SEARCHED, f"the first planner's, for the search found none: {error}")


def _search(traced: Traced, analysed: Bundle, cluster: Cluster, options: Options, effort: Effort) -> StepSearch:
    """Searches without tensor parallelism first, where data parallelism has enough examples to go round.

    Splitting layers costs a table per degree and communication in every layer; it is for models that do
    not fit otherwise, and for batches smaller than the devices.
    """
    assert analysed.graph is not None
    if batch_size_of(analysed.graph) >= cluster.num_devices:
        try:
            wishes = Wishes(max_tensor=1)
            return search_step(traced, analysed.graph, cluster, options, effort=effort, wishes=wishes)
        except PlanError as error:
            _log.info("no plan of %s without tensor parallelism: %s", analysed.graph.name, error)
    wishes = Wishes(max_tensor=MAX_TENSOR)
    return search_step(traced, analysed.graph, cluster, options, effort=effort, wishes=wishes)
