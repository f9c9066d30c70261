"""The main job as a user starts it: one command, in a process of its own."""

import json
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


def hetjax(*args, cache, **changes):
    """Runs the command in a fresh process without the devices that pytest's own process has."""
    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC", "JAX_PLATFORMS")}
    env |= {"XDG_CACHE_HOME": str(cache), "PYTHONPATH": str(ROOT), **changes}
    return subprocess.run([sys.executable, "-m", "hetjax", *args], capture_output=True, text=True, env=env, cwd=cache)


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.mark.parametrize("framework", ["linen", "nnx"])
def test_trains_across_two_unlike_sites_and_equals_plain_jit(cache, framework):
    run = hetjax("demo", "--framework", framework, "--layers", "2", "--steps", "20", "--json", cache=cache)
    assert run.returncode == 0, run.stderr
    report = json.loads(run.stdout)
    assert report["ok"]
    assert [(s["site"], s["kind"], s["devices"], s["mesh"]["data"]) for s in report["plan"]] == [
        ("near", "fast", 2, 2), ("far", "slow", 6, 6),
    ]
    assert (report["stages"], report["microbatches"]) == (2, 4)
    assert report["loss_fell"]
    assert report["losses"][-1] < report["losses"][0] - 1
    assert report["held_out_loss"] < report["losses"][0] - 1
    # What must cross is one activation and one cotangent per microbatch; the rest are scalars.
    assert report["minimum_bytes"] == 2 * 48 * 64 * 64 * 4
    assert 0 <= report["bytes_between_stages"] - report["minimum_bytes"] < 1024
    rows = {r["what"]: r for r in report["parity"]}
    assert set(rows) == {"SGD parameters", "AdamW first moments", "AdamW second moments"}
    for row in rows.values():
        assert row["of_bound"] <= 1, row
        assert row["ratio"] <= 3, row
        assert 0 < row["plain_error"] < 1e-4, "a float64 run that equals the float32 run proves nothing"


def test_a_person_sees_stages_progress_and_parity(cache):
    """In the cache the test above filled: the second start compiles next to nothing."""
    run = hetjax("demo", "--layers", "2", "--steps", "3", "--no-parity", cache=cache, COLUMNS="120")
    assert run.returncode == 0, run.stderr
    for part in (
        "across 2 fast devices in 'near', 6 slow devices in 'far' (near - far: 10 Gbit/s, 2 ms)",
        "2 stages, 4 microbatches of 12", "data 6 x model 1", "embed, block_0", "norm, head", "characters/s",
        "computed where the state lives", "bytes between stages a step",
    ):
        assert part in run.stdout
    assert re.search(r"first step done \d+\.\d s after the start", run.stdout)


def test_plain_is_the_same_training_on_one_device(cache):
    arms = [
        json.loads(hetjax("demo", "--layers", "2", "--steps", "3", "--no-parity", "--json", *args, cache=cache).stdout)
        for args in ((), ("--plain",))
    ]
    assert arms[0]["losses"] == pytest.approx(arms[1]["losses"], rel=1e-5)
    assert "plan" not in arms[1]


def test_too_few_forced_devices_are_an_error_that_says_so(cache):
    run = hetjax("demo", cache=cache, XLA_FLAGS="--xla_force_host_platform_device_count=4")
    assert run.returncode == 1
    assert "fewer than the 8 devices" in run.stderr
    assert "Traceback" not in run.stderr
