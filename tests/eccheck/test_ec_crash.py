"""Trainer and agents killed at random moments of a save: the newest step is A or B, never a mix."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time

import numpy as np
import pytest

from hetjax.eccheck.client import Client
from hetjax.eccheck.mend import mend
from hetjax.eccheck.reader import ObjectReader, survey
from hetjax.eccheck.trees import restore_tree

# A trainer a save costs a JAX import; this one imports once and forks a fresh process for each save,
# before it has made a thread or a connection.
NURSERY = """
import json, os, sys, time
import numpy as np, jax, grpc
from hetjax.eccheck import Config, client, snapshot, writer
import hetjax.eccheck.encode, hetjax.kernels.erasure
for line in sys.stdin:
    job = json.loads(line)
    pid = os.fork()
    if pid == 0:
        fields = job["config"]
        fields["agents"] = tuple(fields["agents"])
        step = job["step"]
        tree = {f"leaf{i}": np.full(size, step, np.int64) for i, size in enumerate((60_000, 7, 90_001, 1))}
        print(json.dumps({"pid": os.getpid()}), flush=True)
        began = time.monotonic()
        try:
            saved = writer.save_object(client.Client(Config(**fields)), snapshot.take(tree),
                                       writer.Request("x", step, live=job["live"], protect=job["live"][:1]))
            print(json.dumps({"done": saved.oid, "seconds": time.monotonic() - began}), flush=True)
        except Exception as error:
            print(json.dumps({"error": str(error)}), flush=True)
        os._exit(0)
    os.waitpid(pid, 0)
    print(json.dumps({"over": pid}), flush=True)
"""


class Nursery:
    def __init__(self, root):
        self.process = subprocess.Popen(
            [sys.executable, "-c", NURSERY], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
            cwd=root, start_new_session=True,
        )

    def save(self, config, step, live, interrupt):
        """Starts a save in a fresh process, calls interrupt(pid), returns what it said."""
        fields = {f: getattr(config, f) for f in
                  ("agents", "socket", "job", "k", "m", "rpc_timeout_s", "min_rate_bytes_s")}
        self.process.stdin.write(json.dumps({"config": fields, "step": step, "live": live}) + "\n")
        self.process.stdin.flush()
        pid = json.loads(self.process.stdout.readline())["pid"]
        interrupt(pid)
        said = {}
        while "over" not in said:
            said.update(json.loads(self.process.stdout.readline()))
        return said

    def close(self):
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.process.stdin.close()
        self.process.stdout.close()


def _check(fleet, config, allowed):
    """Reads the newest recoverable step whole; returns (step, objects newest first, losses it says it survives)."""
    client = Client(config)
    seen = survey(client)
    found = [f for f in seen.found if f.margin() >= 0]
    assert found, "every committed step was lost"
    assert found[0].step in allowed, (found[0].step, allowed)
    for item in found:
        tree = restore_tree(ObjectReader(client, item, seen.silent), None, None)
        for name, leaf in tree.items():
            assert (leaf == item.step).all(), (item.step, name, np.unique(leaf))
    client.close()
    return found[0].step, [f.oid for f in found], min(layout.m for layout in found[0].manifest.layouts)


def _crash(fleet, k, m, points, seed):
    draw = random.Random(seed)
    fleet.start(k + m)
    nursery = Nursery(os.getcwd())
    outcomes = {"A": 0, "B": 0, "reported": 0, "failed": 0, "silent": 0}
    try:
        config = fleet.config(k, m, rpc_timeout_s=2.0)
        usual = nursery.save(config, 0, [], lambda pid: None)["seconds"]
        step, live, survives = _check(fleet, fleet.config(k, m, home=None), {0})
        assert survives == m
        for point in range(points):
            delay = draw.uniform(0, 1.2 * usual)
            kill_trainer = point % 3 != 1
            # A save that lost agents half-way goes to those left, and says how few losses it then survives.
            doomed = draw.sample(range(k + m), survives) if point % 3 else []

            def interrupt(pid, delay=delay, kill_trainer=kill_trainer, doomed=doomed):
                time.sleep(delay)  # the moment of the crash is the point, drawn from the seed
                for i in doomed:
                    fleet.kill(fleet.hosts[i])
                if kill_trainer:
                    with contextlib.suppress(ProcessLookupError):  # it may have finished
                        os.kill(pid, signal.SIGKILL)

            said = nursery.save(config, step + 1, live, interrupt)
            if not doomed and "done" in said:
                usual += 0.3 * (said["seconds"] - usual)
            allowed = {step + 1} if "done" in said else {step, step + 1}
            now, live, survives = _check(fleet, fleet.config(k, m, home=None), allowed)
            outcomes["B" if now == step + 1 else "A"] += 1
            outcomes["reported" if "done" in said else "failed" if "error" in said else "silent"] += 1
            for i in doomed:
                fleet.restart(fleet.hosts[i])
            if doomed:
                client = Client(fleet.config(k, m, home=None))
                report = mend(client)
                before, survives = survives, survey(client).found[0].margin()
                # A step that too few agents took is made again, unless another that stays has its room.
                assert survives == m or (survives == before >= 1 and "needs" in str(report["failed"])), report
                client.close()
            step = now
    finally:
        nursery.close()
    return outcomes


def test_fifty_crashes_during_a_save(fleet):
    outcomes = _crash(fleet, 2, 1, points=51, seed=9)
    # The test is about nothing unless crashes fell on both sides of the commit.
    assert outcomes["A"] >= 5 and outcomes["B"] >= 5, outcomes


@pytest.mark.nightly
@pytest.mark.parametrize("seed", range(3))
def test_many_crashes_with_two_parities(fleet, seed):
    outcomes = _crash(fleet, 2, 2, points=120, seed=seed)
    assert outcomes["A"] >= 10 and outcomes["B"] >= 10, outcomes
