"""The in-memory tier as one process sees it; the orbax handlers and the manager stand on it."""

from __future__ import annotations

import dataclasses
import hashlib
import logging
import secrets
import threading
from collections import Counter
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np

from hetjax.eccheck import together
from hetjax.eccheck.client import Client, warn
from hetjax.eccheck.config import Config, load_config
from hetjax.eccheck.manifest import save_of
from hetjax.eccheck.reader import Found, ObjectReader, Survey, survey
from hetjax.eccheck.snapshot import Snapshot, take
from hetjax.eccheck.writer import Request, Saved, is_stale, save_object
from hetjax.ir.errors import CheckpointError

_PATIENCE = 10
_log = logging.getLogger("hetjax.eccheck")
_tiers: dict[Any, Tier] = {}
_tiers_lock = threading.Lock()


def item_name(root: str, item: str) -> str:
    """Returns the name under which agents know an item of a checkpoint directory."""
    root = root.rstrip("/")
    digest = hashlib.sha256(root.encode()).hexdigest()[:10]
    return f"{root.rpartition('/')[2]}-{digest}/{item}"


class Tier:
    """Saves trees to the agents of a job, and finds them again.

    Args:
      config: how to find the agents.
    """

    def __init__(self, config: Config):
        self.config = config
        self.client = Client(config)
        self.last: Saved | None = None
        self._run = config.run
        self._healthy: bool | None = None
        self._met = False
        self._notes: list[str] = []
        self._told: set[str] = set()
        self._serials: Counter[str] = Counter()
        self._crowded: set[str] = set()
        self._lock = threading.Lock()

    # -- who saves ------------------------------------------------------------------------------

    def writers(self) -> tuple[int, int, bool]:
        """Returns this process's number, how many save together, and whether they are one JAX job."""
        import jax

        if self.config.writer is not None:
            return (*self.config.writer, False)
        return jax.process_index(), jax.process_count(), True

    def agree(self) -> bool:
        """Returns whether the tier can be used for the next save, the same in all processes.

        Asks the agents only at the first save and after trouble. In a jax.distributed job the first
        process decides, and tells the others with the name of this run.
        """
        self.tell()
        number, count, shared = self.writers()
        if number == 0 and not self._healthy:
            # Once they have been met, one answer is enough: the training must not wait for a stopped one.
            probe = self.client.probe if not self._met else self.client.first_answer
            alive, silent = probe() if self.config.agents else ({}, {})
            self._healthy, self._met = bool(alive), self._met or bool(alive)
            if not alive:
                why = "; ".join(f"{a}: {w}" for a, w in silent.items()) or "none is configured"
                warn(f"no checkpoint agent answers ({why}); saving to disk only")
            for reply in alive.values():
                self._check_agent(reply)
        if count == 1 or not shared:
            self._run = self._run or secrets.token_hex(8)
            return bool(self._healthy) if number == 0 else True
        from jax.experimental import multihost_utils

        mine = np.array([int(bool(self._healthy)), *secrets.token_bytes(8)], np.int32)
        decided = np.asarray(multihost_utils.broadcast_one_to_all(mine))
        self._run = self._run or bytes(decided[1:].astype(np.uint8)).hex()
        return bool(decided[0])

    def _check_agent(self, reply: Mapping[str, Any]) -> None:
        from hetjax.eccheck.wire import PROTOCOL

        if reply["protocol"] != PROTOCOL:
            raise CheckpointError(
                f"agent {reply['address']} speaks protocol {reply['protocol']}, this process "
                f"{PROTOCOL}; run the same hetjax on both"
            )

    def tell(self) -> None:
        """Warns, in the calling thread, of what background saves noted; each thing once."""
        with self._lock:
            notes = [note for note in dict.fromkeys([*self.client.notes, *self._notes]) if note not in self._told]
            self._notes = []
        if notes:
            self._told.update(notes)
            warn("; ".join(notes))  # one warning: where warnings are errors, the second would be lost

    def may_go_to_disk(self, error: CheckpointError) -> bool:
        """Says whether a save that the agents did not take may be written to disk instead.

        Not by a process that was replaced: a newer one writes there. And not here where several
        processes save together: they write what is `ToDisk` together.
        """
        return self.writers()[1] == 1 and not is_stale(error)

    def note(self, text: str) -> None:
        """Keeps a warning until somebody calls from the training."""
        _log.warning("%s", text)
        with self._lock:
            self._notes.append(text)

    # -- saving ---------------------------------------------------------------------------------

    def snapshot(self, tree: Any, files: Mapping[Any, bytes] | None = None) -> Snapshot:
        """Returns the state of a tree now; afterwards the caller may donate and mutate it."""
        number, count, shared = self.writers()
        return take(tree, writer=number, count=count, shared=shared, files=files)

    def save(
        self, snapshot: Snapshot, *, name: str, step: int, live: Collection[str] = (),
        protect: Collection[str] = (), extra: Mapping[str, Any] | None = None,
    ) -> Saved:
        """Writes and commits a snapshot; runs for as long as that takes.

        Raises:
          CheckpointError: it could not be committed; older steps are untouched.
        """
        number, count, _ = self.writers()
        self._serials[name] += 1
        request = Request(name, step, list(live), list(protect), dict(extra or {}), number, count,
                          self._run or secrets.token_hex(8), self._serials[name])
        saved = self._agreed(snapshot, request)
        self.last = saved
        notes = list(saved.notes)
        if saved.evicted and name not in self._crowded:
            self._crowded.add(name)  # said once, not at every save
            notes.append(
                f"the agents' memory does not hold all steps that {name} keeps: step "
                f"{', '.join(map(str, saved.evicted))} had to make room; start the agents with "
                "more --versions (max_to_keep + 1)"
            )
        for note in notes:
            _log.warning("checkpoint step %d of %s: %s", step, name, note)
        with self._lock:
            self._notes += notes
        if saved.notes:
            self._healthy = None
        return saved

    def _agreed(self, snapshot: Snapshot, request: Request) -> Saved:
        """Saves; in a jax.distributed job all processes end alike, by what the first one says.

        Raises:
          ToDisk: it could not be committed, and all processes know.
          CheckpointError: it could not be committed.
        """
        problem: CheckpointError | None = None
        saved: Saved | None = None
        try:
            saved = save_object(self.client, snapshot, request)
        except CheckpointError as error:
            self._healthy, problem = None, error
        if request.count > 1 and self.writers()[2]:
            saved, problem = together.verdict(
                f"{request.run}/{request.name}/{request.serial}", request.writer, saved, problem,
                # Longer than the first process can take for all its attempts.
                self.config.bulk_timeout_s(snapshot.total_bytes * request.count) * _PATIENCE,
            )
        if problem is not None:
            raise problem
        assert saved is not None
        return saved

    # -- finding --------------------------------------------------------------------------------

    def survey(self, name: str | None = None) -> Survey:
        """Returns what the agents and the drain directory hold."""
        return survey(self.client, self.config.drain_dir, name=name)

    def drain_dir(self) -> str:
        """Returns where drained steps lie: as configured, or as the agents say."""
        if self.config.drain_dir or not self.config.agents:
            return self.config.drain_dir
        for _, reply in self.client.pool.each(
            self.config.agents, lambda a: self.client.pool.peer(a).call(
                "hello", timeout_s=self.config.rpc_timeout_s)[0]
        ):
            if isinstance(reply, dict) and reply["drain_dir"]:
                return str(reply["drain_dir"])
        return ""

    def open(self, oid: str, name: str, step: int) -> ObjectReader:
        """Returns a reader for an object.

        Raises:
          CheckpointError: nobody holds it, or too little of it is left; says what is missing.
        """
        seen = self.survey(name)
        same = [f for f in seen.found if save_of(f.oid) == save_of(oid)]
        found = max(same, key=lambda f: (not f.missing(), f.margin()), default=None)
        if found is None:
            silent = "; ".join(f"{a}: {why}" for a, why in seen.silent.items())
            raise CheckpointError(
                f"step {step} of {name} is not in the agents' memory"
                + (f" ({silent})" if silent else " (overwritten, or the agents were restarted)")
                + "; restore another step, or from the persistent tier"
            )
        return self.reader(found, seen)

    def reader(self, found: Found, seen: Survey) -> ObjectReader:
        """Returns a reader for a found object.

        Raises:
          CheckpointError: too little of it is left.
        """
        missing = found.missing()
        if missing:
            raise CheckpointError(
                f"step {found.step} of {found.name} cannot be rebuilt: {'; '.join(missing)}. "
                "Restore an older step from the persistent tier, or bring an agent back"
            )
        return ObjectReader(self.client, found, seen.silent)

    def retain(self, name: str, live: Collection[str]) -> None:
        """Frees objects of a name that are not wanted any more; unreachable agents are left out."""
        self.client.pool.each(
            self.config.agents, lambda a: self.client.pool.peer(a).call(
                "retain", name=name, live=list(live), timeout_s=self.config.rpc_timeout_s))


def tier_of(config: Config | str | None = None) -> Tier:
    """Returns the tier of a configuration; equal configurations share one in a process.

    Args:
      config: a Config, the path of a TOML file, or None for the environment.
    """
    if not isinstance(config, Config):
        config = load_config(config)
    key = repr([
        sorted(v.items()) if isinstance(v, Mapping) else v
        for v in (getattr(config, f.name) for f in dataclasses.fields(config))
    ])
    with _tiers_lock:
        if key not in _tiers:
            _tiers[key] = Tier(config)
        return _tiers[key]


