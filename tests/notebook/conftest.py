"""One small step, planned and run, that the tests of views share."""

from __future__ import annotations

import warnings

import pytest

import hetjax
from hetjax.demo.session import CLUSTER
from tests.support import make_linen

OPTIONS = {"num_microbatches": 4, "mesh": "2,1;2,2"}


@pytest.fixture(scope="session")
def small_step():
    """Returns (step, state, batch)."""
    return make_linen()


@pytest.fixture(scope="session")
def rehearsal(small_step):
    return hetjax.rehearse(
        *small_step[:1],
        str(CLUSTER),
        *small_step[1:],
        options=OPTIONS,
        prices={"fast": 2.0, "slow": 0.5},
        currency="EUR",
    )


@pytest.fixture(scope="session")
def ran(small_step):
    """Returns the step made parallel, run once and measured, in the time its cluster would take."""
    step, state, batch = small_step
    parallel = hetjax.parallelize(step, cluster=str(CLUSTER), rehearse="timed", **OPTIONS)
    state, _ = parallel(state, batch)
    with warnings.catch_warnings():
        # On a busy machine stages take longer than the model says, and it warns of that.
        warnings.filterwarnings("ignore", "stage . on .* took", UserWarning)
        parallel.measure(state, batch)
    return parallel


@pytest.fixture(scope="session")
def dump(tmp_path_factory, small_step):
    """Returns the folder of a dumped run of planning."""
    folder = tmp_path_factory.mktemp("dump")
    step, state, batch = small_step
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HETJAX_DUMP", str(folder))
        hetjax.rehearse(step, str(CLUSTER), state, batch, options=OPTIONS)
    return folder


@pytest.fixture(scope="session")
def found():
    """Returns a search that ended unproved, with more nodes than a picture shows, closed ones among them."""
    from hetjax.passes.search.own_judge import OwnJudge
    from hetjax.passes.search.result import search
    from hetjax.passes.search.samples import random_problem

    return search(OwnJudge(random_problem(6, devices=16, layers=10)), max_evaluations=300)
