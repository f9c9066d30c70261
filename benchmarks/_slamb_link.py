"""Two jax.distributed CPU processes in two network namespaces, joined by a veth pair limited by tc.

Needs root, `ip` and `tc` (iproute2). Everything made is taken down, whatever happens.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys
import tempfile

PREFIX = "hjslamb"
WORKER = pathlib.Path(__file__).with_name("_slamb_link_worker.py")


def missing() -> str | None:
    """Why the link cannot be set up here, or None."""
    if os.geteuid() != 0:
        return "needs root to make network namespaces"
    for tool in ("ip", "tc"):
        if not shutil.which(tool):
            return f"needs {tool} (iproute2)"
    return None


@contextlib.contextmanager
def link(rate_gbit: float):
    """Two namespaces that reach each other at 10.77.0.1 and 10.77.0.2, at a rate each way."""
    names = [f"{PREFIX}{os.getpid()}{side}" for side in "ab"]

    def sh(*words):
        subprocess.run(words, check=True, capture_output=True)

    try:
        for host, name in enumerate(names, start=1):
            sh("ip", "netns", "add", name)
            # The CPU collectives listen where the host's own name leads; `ip netns exec` puts what
            # lies here over /etc, so inside the namespace it leads to the link.
            folder = pathlib.Path("/etc/netns") / name
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(
                f"127.0.0.1 localhost\n10.77.0.{host} {socket.gethostname()}\n")
        sh("ip", "link", "add", "hjsa", "netns", names[0], "type", "veth", "peer", "name", "hjsb",
           "netns", names[1])
        for name, device, host in zip(names, ("hjsa", "hjsb"), (1, 2)):
            inside = ("ip", "netns", "exec", name)
            sh(*inside, "ip", "addr", "add", f"10.77.0.{host}/24", "dev", device)
            sh(*inside, "ip", "link", "set", device, "up")
            sh(*inside, "ip", "link", "set", "lo", "up")
            # A burst of about a millisecond of the rate, and room for a megabyte to wait.
            sh(*inside, "tc", "qdisc", "add", "dev", device, "root", "tbf", "rate",
               f"{rate_gbit}gbit", "burst", f"{int(rate_gbit * 125_000)}", "limit", "4mb")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "delete", name], capture_output=True)
            shutil.rmtree(pathlib.Path("/etc/netns") / name, ignore_errors=True)


def measure(rate_gbit: float, steps: int, width: int, timeout_s: float) -> dict:
    """Step times of dense and sparse exchange over the link, as process 0 saw them."""
    with (link(rate_gbit) as names, tempfile.TemporaryDirectory() as folder,
          contextlib.ExitStack() as logs):
        processes = []
        for rank, name in enumerate(names):
            env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": str(WORKER.parents[1]),
                   "XLA_FLAGS": "--xla_force_host_platform_device_count=1"}
            log = logs.enter_context(open(f"{folder}/{rank}", "w"))
            processes.append(subprocess.Popen(
                ["ip", "netns", "exec", name, sys.executable, str(WORKER), str(rank),
                 f"{folder}/out.json", str(steps), str(width)],
                env=env, stdout=log, stderr=subprocess.STDOUT))
        try:
            codes = [p.wait(timeout=timeout_s) for p in processes]
        finally:
            for process in processes:
                if process.poll() is None:
                    process.kill()
                    process.wait()
        if any(codes):
            tail = pathlib.Path(f"{folder}/0").read_text()[-4000:]
            raise RuntimeError(f"a worker on the limited link ended with {codes}:\n{tail}")
        return json.loads(pathlib.Path(f"{folder}/out.json").read_text())
