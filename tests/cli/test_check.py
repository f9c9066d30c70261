"""`hetjax check`: equal, unequal, refused, and what wrong input is told."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from hetjax.cli.main import main

STEPS = pathlib.Path(__file__).with_name("steps_to_check.py")
TWO = ("--stages", "2", "--microbatches", "2", "--mesh", "2,1", "--steps", "2")


@pytest.fixture
def check(capsys):
    """Runs `hetjax check` here and returns (exit code, stdout, stderr)."""

    def run(target, *args):
        with pytest.raises(SystemExit) as stop:
            main(["check", target, *args])
        out = capsys.readouterr()
        return stop.value.code, out.out, out.err

    return run


def test_equal_linen(check):
    code, out, _ = check(f"{STEPS}:build", *TWO, "--json")
    report = json.loads(out)
    assert code == 0, report
    assert {k: report[k] for k in ("ok", "refused", "rtol", "atol", "stages", "microbatches", "steps")} == {
        "ok": True, "refused": False, "rtol": 1e-6, "atol": 1e-7, "stages": 2, "microbatches": 2, "steps": 2,
    }
    assert report["max_rel"] <= report["rtol"] * 10  # moments have ten times the bound
    # One f32 activation [4, 64] and its cotangent cross per microbatch; beside them a few scalars.
    assert 2 * 2 * 4 * 64 * 4 <= report["bytes_between_stages"] <= 2 * 2 * 4 * 64 * 4 + 16
    assert "state/params" in {g["group"] for g in report["groups"]}


def test_equal_nnx_with_dropout_and_momentum(check):
    code, out, err = check(f"{STEPS}:build_nnx", *TWO)
    assert code == 0, out + err
    assert "step 2: equal" in err
    assert out.splitlines()[-1].startswith("equal: 2 stages, 2 microbatches, ")


def test_refused_with_reason_equation_and_line(check):
    code, out, _ = check(f"{STEPS}:build_batch_statistics", *TWO, "--json")
    report = json.loads(out)
    assert code == 3
    assert (report["ok"], report["refused"], report["max_abs"]) == (False, True, None)
    line = next(i for i, text in enumerate(STEPS.read_text().splitlines(), 1) if "out.std(0)" in text)
    assert report["source"].endswith(f"steps_to_check.py:{line}")
    assert report["equation"]
    assert "per_microbatch" in report["error"]


def test_unequal_names_the_worst_leaves(check):
    """Bounds below what f32 can hold: the rounding of two microbatches on two shards is past them."""
    tight = ("--rtol", "1e-12", "--atol", "0")
    code, out, _ = check(f"{STEPS}:build", *TWO, *tight, "--json")
    report = json.loads(out)
    assert code == 1
    assert (report["ok"], report["refused"], report["rtol"], report["atol"]) == (False, False, 1e-12, 0)
    assert report["max_rel"] > 1e-12
    worst = report["worst"]
    assert worst[0]["max_abs"] > worst[0]["allowed"]
    assert [w["ok"] for w in worst] == [False] * len(worst)
    assert worst[0]["path"].startswith("state/")

    code, out, _ = check(f"{STEPS}:build", *TWO, *tight)
    assert code == 1
    assert "worst leaves" in out
    assert out.splitlines()[-1].startswith("unequal: 2 stages, 2 microbatches, ")


def test_plain_jit_on_two_devices_stands_in_hetjaxs_place(check):
    code, out, _ = check(f"{STEPS}:build_nnx", "--plain-devices", "2", "--steps", "2", "--json")
    report = json.loads(out)
    assert (code, report["ok"], report["stages"]) == (0, True, None), report
    assert report["max_rel"] > 0  # it ran on two devices: sums over examples are rounded otherwise
    assert "plain jit on 2 devices" in report["notes"][0]
    code, out, err = check(f"{STEPS}:build", "--plain-devices", "2", *TWO)
    assert code == 1 and "takes no --stages, --microbatches, --mesh" in out + err


def test_plain_devices_that_cannot_split_the_batch_are_no_equal_verdict(check):
    code, out, _ = check(f"{STEPS}:build", "--plain-devices", "7", "--steps", "1", "--json")
    assert code == 1 and "7 devices divide no array of the batch" in json.loads(out)["error"]


def test_rounding_as_written(check, tmp_path):
    """A sum of three products in bf16: 2 stages give op by op what XLA, left free, gives otherwise in one program."""
    command = [sys.executable, "-c", "from hetjax.cli.main import main; main()", "check", f"{STEPS}:build_half", "--stages", "2",
               "--microbatches", "1", "--mesh", "1,1", "--steps", "1", "--json", "--rtol", "0", "--atol", "0"]  # fmt: skip
    environment = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"}
    free, written = (
        json.loads(subprocess.run([*command, *more], capture_output=True, text=True, env=environment).stdout)
        for more in ([], ["--as-written"])
    )
    assert written["ok"] and "rounds as it is written" in written["notes"][0], written
    assert not free["ok"]  # the control
    code, out, err = check(f"{STEPS}:build", "--as-written", *TWO)
    assert code == 1 and "jax has been imported" in out + err


def test_refused_in_words(check):
    code, out, _ = check(f"{STEPS}:build_batch_statistics", *TWO)
    assert code == 3
    assert out.startswith("refused: ")
    assert "mean" in out or "reduce" in out
    assert "steps_to_check.py:" in out


def test_one_microbatch_needs_no_proof(check):
    code, out, _ = check(
        f"{STEPS}:build_batch_statistics", "--stages", "2", "--microbatches", "1", "--steps", "1", "--json"
    )
    assert code == 0, out


@pytest.mark.parametrize(
    ("target", "said"),
    [
        ("build_three_values", ["must return (step, state, batches, meta)", "a tuple of 3"]),
        ("build_wrong_kinds", ["step is a str", "batches is a int", "'torch'; it is one of linen, nnx, nnx-jaxjit"]),
        ("build_raises", ["build_raises() raised KeyError: 'no such data set'"]),
        ("build_no_state", ["returns (state, out)", "a"]),
        ("build_wrong_shapes", ["fails under plain jax.jit", "steps_to_check.py:"]),
        ("nothing_here", ["defines no function 'nothing_here'", "build_no_state"]),
    ],
)
def test_a_build_that_is_wrong(check, target, said):
    code, out, err = check(f"{STEPS}:{target}")
    assert code == 1, err
    for part in said:
        assert part in err
    assert "fault of hetjax" not in err


def test_too_few_batches(check):
    code, out, _ = check(f"{STEPS}:build_two_batches", "--microbatches", "1", "--json")
    report = json.loads(out)
    assert code == 1
    assert (report["ok"], report["refused"]) == (False, False)
    assert report["error"] == (
        "build() gives 2 batches and 3 steps were asked for; yield more batches or say --steps 2"
    )


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("no_such_file.py:build",), "there is no file"),
        (("pyproject.toml",), "is not a Python file"),
        ((f"{STEPS}:build", "--rtol", "-1"), "--rtol"),
        ((f"{STEPS}:build", "--stages", "0"), "--stages"),
        ((f"{STEPS}:build", "--mesh", "two"), "two"),
        ((f"{STEPS}:build", "--mesh", "9,1", "--microbatches", "1"), "9 "),
        ((f"{STEPS}:build", "--microbatches", "3"), "a batch of 8 examples"),
        ((f"{STEPS}:build", "--cluster", "no_such.toml"), "no_such.toml"),
    ],
)
def test_a_request_that_is_wrong(check, args, said):
    code, out, err = check(*args)
    assert code == (3 if out.startswith("refused") else 1), err
    assert said in out + err
    assert "Traceback" not in err


@pytest.mark.quick
def test_help_states_the_tolerance_and_the_exit_codes(check):
    code, out, _ = check("--help")
    assert code == 0
    for part in ("rtol * max|leaf| + atol * max|tree|", "3 refused", "nnx-jaxjit"):
        assert part in " ".join(out.split())


def test_forces_its_own_devices_in_a_fresh_process(tmp_path):
    """No XLA_FLAGS, no NPROC, another folder: the command brings its devices itself."""
    import os

    env = {k: v for k, v in os.environ.items() if k not in ("XLA_FLAGS", "NPROC")}
    root = pathlib.Path(__file__).resolve().parents[2]
    env["PYTHONPATH"] = os.pathsep.join([str(root), env.get("PYTHONPATH", "")])
    run = subprocess.run(
        [sys.executable, "-m", "hetjax", "check", f"{STEPS}:build", *TWO, "--json"],
        capture_output=True, text=True, cwd=tmp_path, env=env,
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout)["ok"] is True
