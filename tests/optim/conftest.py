"""Small programs are compiled once and run a few times here, so XLA's optimizations cost more than they give."""

import jax
import pytest


@pytest.fixture(autouse=True, scope="module")
def quick_compilation(request):
    """All but the trainings, which run their programs for hundreds of steps."""
    if request.path.stem == "test_slamb_accuracy":
        yield
        return
    jax.config.update("jax_disable_most_optimizations", True)
    yield
    jax.config.update("jax_disable_most_optimizations", False)
