"""A process's view of the agents: connections, the memory of the own host's agent, who is alive."""

from __future__ import annotations

import json
import logging
import mmap
import os
import socket
import threading
import uuid
import warnings
from concurrent.futures import as_completed
from dataclasses import dataclass
from typing import Any

import numpy as np

from hetjax.eccheck.config import Config
from hetjax.eccheck.pace import Pacer, RateLimit
from hetjax.eccheck.peer import pool_of
from hetjax.eccheck.wire import AgentError
from hetjax.ir.errors import CheckpointError

# job -> epoch of this process. All managers of a process are one start of the job: they must not
# fence each other off.
_epochs: dict[str, int] = {}
_epochs_lock = threading.Lock()
_log = logging.getLogger("hetjax.eccheck")


class EccheckWarning(UserWarning):
    """The in-memory tier works with less than was asked for, or not at all."""


def warn(message: str) -> None:
    """Warns the user of a degraded state."""
    warnings.warn(message, EccheckWarning, stacklevel=3)


@dataclass(frozen=True)
class LocalMemory:
    """The memory of the own host's agent, mapped here.

    Attributes:
      agent_id: which agent.
      bytes: the whole arena, uint8, writable.
    """

    agent_id: str
    bytes: np.ndarray


def attach(path: str, job: str, token: str, timeout_s: float) -> LocalMemory:
    """Returns the mapped memory of the agent that listens on a unix socket.

    Raises:
      CheckpointError: nobody listens there, or it refuses.
    """
    with socket.socket(socket.AF_UNIX) as connection:
        connection.settimeout(timeout_s)
        try:
            connection.connect(path)
            connection.sendall(json.dumps({"job": job, "token": token}).encode())
            message, fds, _, _ = socket.recv_fds(connection, 65536, 1)
            reply = json.loads(message)
        except (OSError, ValueError) as error:
            raise CheckpointError(
                f"no checkpoint agent on {path} ({error}); start `hetjax agent --socket {path}`"
            ) from error
    if "error" in reply or not fds:
        raise CheckpointError(f"the agent on {path} refused: {reply.get('error', 'no memory')}")
    try:
        # Populated here, at start-up, so that the first save does not pay for page faults.
        memory = mmap.mmap(
            fds[0], int(reply["capacity_bytes"]), mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        )
    finally:
        os.close(fds[0])
    return LocalMemory(str(reply["id"]), np.frombuffer(memory, np.uint8))


class Client:
    """Connections of one process to the agents of its job.

    Args:
      config: how to find them.
    """

    def __init__(self, config: Config):
        self.config = config
        self.pool = pool_of(config)
        self.pace: Pacer = RateLimit(config.rate_limit_bytes_s)
        self.sent_bytes = 0
        self.local_bytes = 0
        self.notes: list[str] = []
        self._local: LocalMemory | None = None
        self._unattached = False  # tried since the last probe, in vain
        self._lock = threading.Lock()
        self._id_of: dict[str, str] = {}

    def close(self) -> None:
        """Closes the connections; the agent's memory stays mapped while arrays refer to it."""
        self.pool.close()
        self._local = None

    def set_pacer(self, pacer: Pacer) -> None:
        """Replaces the rate limit: a callable that gets the bytes about to be sent, and waits."""
        self.pace = pacer

    def local(self) -> LocalMemory | None:
        """Returns the own agent's memory, or None where there is no agent on this host."""
        if not self.config.socket:
            return None
        with self._lock:
            if self._local is None and not self._unattached:
                try:
                    self._local = attach(
                        self.config.socket, self.config.job, self.config.token,
                        self.config.rpc_timeout_s,
                    )
                except CheckpointError as error:
                    # Often in a background thread, so noted here and told by the tier later.
                    self._unattached = True
                    note = f"{error}; this process sends everything over the network"
                    if note not in self.notes:
                        self.notes.append(note)
                        _log.warning("%s", note)
            return self._local

    def probe(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Asks every agent for a sign of life.

        Returns:
          address -> its answer, and address -> why there is none.
        """

        def hello(address: str) -> dict[str, Any]:
            return self.pool.peer(address).call("hello", timeout_s=self.config.rpc_timeout_s)[0]

        alive: dict[str, dict[str, Any]] = {}
        silent: dict[str, str] = {}
        self._unattached = False
        for address, reply in self.pool.each(self.config.agents, hello):
            if isinstance(reply, AgentError):
                silent[address] = reply.detail
            elif isinstance(reply, CheckpointError):
                silent[address] = str(reply)
            else:
                alive[address] = reply
        local = self._local
        if local is not None and alive and local.agent_id not in {r["id"] for r in alive.values()}:
            # The agent of this host was replaced or is gone: its old memory is of no use.
            with self._lock:
                self._local = None
            if os.path.exists(self.config.socket):
                self.local()
        return alive, silent

    def first_answer(self) -> tuple[dict[str, dict[str, Any]], dict[str, str]]:
        """Asks every agent for a sign of life, and returns as `probe` does with the first that answers."""
        silent: dict[str, str] = {}
        calls = {
            self.pool.submit(self.pool.peer(a).call, "hello", timeout_s=self.config.rpc_timeout_s): a
            for a in self.config.agents
        }
        for call in as_completed(calls):
            try:
                return {calls[call]: call.result()[0]}, {}
            except CheckpointError as error:
                silent[calls[call]] = getattr(error, "detail", str(error))
        return {}, silent

    def home(self, alive: dict[str, dict[str, Any]]) -> str:
        """Returns the address of the own host's agent, or "" where it is not among the living."""
        local = self.local()
        if local is None:
            return ""
        return next((a for a, reply in alive.items() if reply["id"] == local.agent_id), "")

    def epoch(self, alive: dict[str, dict[str, Any]]) -> int:
        """Returns this start's number, above every one the agents have seen."""
        with _epochs_lock:
            if self.config.job not in _epochs:
                _epochs[self.config.job] = 1 + max((int(r["epoch"]) for r in alive.values()), default=0)
            return _epochs[self.config.job]


def new_oid() -> str:
    """Returns a name for a new object."""
    return uuid.uuid4().hex
