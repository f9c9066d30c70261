"""The examples, run as a user runs them."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples"
# An installed wheel is tested outside the source tree, where there are no examples.
pytestmark = pytest.mark.skipif(not EXAMPLES.is_dir(), reason="no examples beside these tests")
SMALL = ("--layers", "2", "--width", "32", "--length", "32", "--batch", "12")
TWO_SITES = str(ROOT / "hetjax" / "demo" / "two_sites.toml")


def run(script, *args, cwd, **changes):
    env = os.environ | {
        "PYTHONPATH": str(ROOT), "JAX_COMPILATION_CACHE_DIR": str(cwd / "compiled"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0", **changes,
    }
    done = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", str(script), *args], capture_output=True, text=True, env=env, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(folder):
    """Returns what the log says, as (step, name, value)."""
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], name, value) for line in lines for name, value in line.items() if name != "step"]


def test_two_added_lines_make_a_script_parallel(tmp_path):
    text = (EXAMPLES / "gpt_nnx.py").read_text().splitlines(keepends=True)
    added = [line for line in text if "# added: " in line]
    assert len(added) == 2
    plain = tmp_path / "plain.py"
    plain.write_text("".join(line for line in text if line not in added))
    assert "hetjax." not in plain.read_text().partition('"""')[2].partition('"""')[2]

    out = run(EXAMPLES / "gpt_nnx.py", *SMALL, "--steps", "4", "--out", "parallel", cwd=tmp_path, HETJAX_CLUSTER=TWO_SITES)
    assert "step 4: loss" in out
    run(plain, *SMALL, "--steps", "6", "--out", "plain", cwd=tmp_path)

    # On from the checkpoint, in a fresh process: the numbers are those of the plain script that never stopped.
    out = run(EXAMPLES / "gpt_nnx.py", *SMALL, "--steps", "6", "--out", "parallel", cwd=tmp_path, HETJAX_CLUSTER=TWO_SITES)
    assert "resumed at step 4" in out
    ours = {(step, name): value for step, name, value in metrics(tmp_path / "parallel")}
    theirs = {(step, name): value for step, name, value in metrics(tmp_path / "plain")}
    assert {name for _, name in theirs} == {"loss", "grad_norm", "learning_rate", "held_out_loss"}
    for key, value in theirs.items():
        assert ours[key] == pytest.approx(value, rel=2e-5), key


def test_state_is_created_averaged_and_restored_on_its_plan(tmp_path):
    """Saved on two stages, restored in a fresh process onto one, and onto none at all: plain jax."""
    script = EXAMPLES / "gpt_linen.py"
    first = run(script, *SMALL, "--steps", "3", "--out", "out", "--cluster", TWO_SITES, "--stages", "2", cwd=tmp_path)
    assert "s1" in first
    assert "near" in first
    onto_one = run(
        script, *SMALL, "--steps", "5", "--out", "out", "--cluster", TWO_SITES, "--stages", "1", cwd=tmp_path
    )
    assert "restored step 3 onto 1 stages" in onto_one
    unbroken = run(script, *SMALL, "--steps", "5", "--out", "other", "--stages", "2", cwd=tmp_path)

    def losses(out):
        last = out.splitlines()[-1].replace(",", "").split()
        step = next(line for line in out.splitlines() if line.startswith("step 5"))
        return float(step.split()[-1]), float(last[2])

    assert losses(onto_one) == pytest.approx(losses(unbroken), rel=2e-5)
