"""Real agents as processes of their own, killed with signals, never asked to pretend."""

import dataclasses
import json
import os
import pathlib
import shutil
import signal
import socket
import subprocess
import sys
import tempfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]


@dataclasses.dataclass
class Host:
    """One agent process.

    Attributes:
      process: the process, leader of its own group.
      address: where it listens.
      socket: path of its local socket.
      arguments: command line, to start another like it.
    """

    process: subprocess.Popen
    address: str
    socket: str
    arguments: list[str]


class Fleet:
    """Agents on this machine, each its own process and process group."""

    def __init__(self, folder: pathlib.Path):
        self.folder, self.hosts, self._count = folder, [], 0

    def start(self, count, *, memory="4MiB", versions=2, job="test", port=0, env=None, extra=(),
              socket=""):
        """Starts agents and waits until each answers; returns them."""
        started = []
        for _ in range(count):
            path = socket or str(self.folder / f"s{self._count}")
            self._count += 1
            arguments = [
                sys.executable, "-m", "hetjax", "agent", "--listen", f"127.0.0.1:{port}",
                "--socket", path, "--memory", memory, "--versions", str(versions), "--job", job,
                "--scrub-interval", "0", "--json", "--rpc-timeout", "5", *extra,
            ]
            process = subprocess.Popen(
                arguments, stdout=subprocess.PIPE, text=True, cwd=ROOT, start_new_session=True,
                env={**os.environ, **(env or {})},
            )
            started.append(Host(process, "", path, arguments))
        for host in started:
            line = host.process.stdout.readline()
            assert line, "an agent ended at once"
            host.address = json.loads(line)["address"]
        self.hosts += started
        return started

    def restart(self, host):
        """Starts an empty agent on the address of a killed one, as a replacement host would."""
        fresh = self.start(
            1, port=int(host.address.rpartition(":")[2]), memory=_value(host, "--memory"),
            versions=int(_value(host, "--versions")), job=_value(host, "--job"), socket=host.socket,
        )[0]
        assert fresh.address == host.address
        self.hosts[self.hosts.index(host)] = fresh
        self.hosts.pop()
        return fresh

    def kill(self, host):
        """SIGKILL, to the agent's whole process group."""
        os.killpg(host.process.pid, signal.SIGKILL)
        host.process.wait()
        host.process.stdout.close()

    def config(self, k=2, m=1, hosts=None, home=0, **fields):
        """Returns a configuration for a trainer that lives on the host number `home`."""
        from hetjax.eccheck import Config

        hosts = self.hosts if hosts is None else hosts
        settings = {"rpc_timeout_s": 5.0, "min_rate_bytes_s": 50e6, "job": "test", **fields}
        return Config(
            agents=tuple(h.address for h in hosts),
            socket=hosts[home].socket if home is not None else "", k=k, m=m, **settings,
        )

    def close(self):
        for host in self.hosts:
            if host.process.poll() is None:
                os.kill(host.process.pid, signal.SIGCONT)
                self.kill(host)


def _value(host, name):
    return host.arguments[host.arguments.index(name) + 1]


@pytest.fixture
def fleet():
    """No agents yet; what a test starts is killed at its end."""
    folder = pathlib.Path(tempfile.mkdtemp(prefix="ec"))  # short: a socket's path has 108 bytes
    made = Fleet(folder)
    yield made
    made.close()
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(autouse=True)
def fresh_process():
    """Each test is a new start of its job: no tier, no epoch left from the one before."""
    from hetjax.eccheck import client, tier

    yield
    for made in tier._tiers.values():
        made.client.close()
    tier._tiers.clear()
    client._epochs.clear()


def agent_memory(host, job="test", token=""):
    """Returns the mapped memory of an agent, to damage it."""
    from hetjax.eccheck.client import attach

    return attach(host.socket, job, token, 5.0).bytes


@pytest.fixture
def free_port():
    """Returns a function that gives a port nobody listens on."""

    def find():
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            return probe.getsockname()[1]

    return find


@pytest.fixture
def damage():
    """Returns a function (host) -> its memory as a writable array."""
    return agent_memory


@pytest.fixture
def run_trainer(tmp_path):
    """Returns a function that runs a script in a process of its own, as a trainer is."""

    def run(script, *arguments, config, check=True, wait=True, devices=8, timeout=90, env=None):
        path = tmp_path / f"trainer{len(list(tmp_path.glob('trainer*')))}.py"
        path.write_text(script)
        settings = tmp_path / f"{path.stem}.json"
        fields = dataclasses.asdict(config)
        settings.write_text(json.dumps(fields))
        process = subprocess.Popen(
            [sys.executable, str(path), *map(str, arguments)], stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, cwd=ROOT, start_new_session=True,
            env={**os.environ, "PYTHONPATH": str(ROOT), "EC_CONFIG": str(settings),
                 "XLA_FLAGS": f"--xla_force_host_platform_device_count={devices}", **(env or {})},
        )
        if not wait:
            return process
        try:
            output, _ = process.communicate(timeout=timeout)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
        assert not check or process.returncode == 0, output[-4000:]
        return output

    return run


TRAINER_HEAD = """
import json, os
import numpy as np, jax, jax.numpy as jnp
from hetjax.eccheck import Config
_fields = json.load(open(os.environ["EC_CONFIG"]))
for _name in ("agents", "writer"):
    _fields[_name] = tuple(_fields[_name]) if _fields[_name] is not None else None
config = Config(**_fields)
"""


@pytest.fixture
def trainer_head():
    """The first lines of every trainer script: imports and `config`."""
    return TRAINER_HEAD
