"""A checkpoint written under one plan is read under another, in a fresh process."""

import os
import pathlib
import subprocess
import sys
import textwrap

import jax
import numpy as np
import optax
import orbax.checkpoint as ocp

import hetjax
from tests.support import copy_tree, make_batch, make_linen

RESTORE = textwrap.dedent(
    """
    import sys
    import jax, numpy as np, optax
    import orbax.checkpoint as ocp
    import hetjax
    from tests.support import make_batch, make_linen

    step, state, batch = make_linen(tx=optax.adam(1e-3), blocks=4)
    abstract = jax.eval_shape(lambda: state)
    parallel = hetjax.parallelize(step, num_stages=3, num_microbatches=4, mesh="1,1;2,1;1,1")
    parallel.plan_for(abstract, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        state = checkpointer.restore(sys.argv[1], parallel.abstract_state())
    homes = {tuple(sorted(d.id for d in x.devices())) for x in jax.tree.leaves(state.params)}
    assert len(homes) == 3, homes
    state, _ = parallel(state, make_batch(seed=5))
    np.savez(sys.argv[2], *[np.asarray(x) for x in jax.tree.leaves(state)])
    """
)


def test_saved_under_two_stages_restored_under_three(tmp_path):
    step, state, batch = make_linen(tx=optax.adam(1e-3), blocks=4)
    parallel = hetjax.parallelize(step, num_stages=2, num_microbatches=2, mesh="2,1")
    plain, theirs = jax.jit(step), copy_tree(state)
    for _ in range(2):
        state, _ = parallel(state, batch)
        theirs, _ = plain(theirs, batch)
    with ocp.StandardCheckpointer() as checkpointer:
        checkpointer.save(tmp_path / "checkpoint", state)
    theirs, _ = plain(theirs, make_batch(seed=5))
    script = tmp_path / "restore.py"
    script.write_text(RESTORE)
    done = subprocess.run(
        [sys.executable, str(script), str(tmp_path / "checkpoint"), str(tmp_path / "out.npz")],
        capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": str(pathlib.Path(__file__).parents[2])},
    )
    assert done.returncode == 0, done.stderr
    with np.load(tmp_path / "out.npz") as restored:
        moments = [restored[k] for k in restored.files]
    expected = [np.asarray(x) for x in jax.tree.leaves(theirs)]
    largest = max(np.abs(b).max() for b in expected if np.issubdtype(b.dtype, np.inexact))
    paths = [jax.tree_util.keystr(p) for p, _ in jax.tree.leaves_with_path(theirs)]
    for name, a, b in zip(paths, moments, expected, strict=True):
        if "mu" in name or "nu" in name:
            assert np.abs(a - b).max() <= 1e-5 * np.abs(b).max() + 1e-7 * largest, name
        elif not np.issubdtype(b.dtype, np.inexact):
            np.testing.assert_array_equal(a, b)
