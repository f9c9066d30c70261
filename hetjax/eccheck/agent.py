"""The checkpoint agent: one process a host, which outlives the trainers and holds their chunks.

It answers three gRPC methods (see `wire`) and, on a unix socket, hands the descriptor of its memory
to trainers of its own host and user. It imports neither JAX nor orbax.
"""

from __future__ import annotations

import json
import math
import os
import pathlib
import socket
import threading
import time
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hetjax.eccheck import wire
from hetjax.eccheck.arena import Arena
from hetjax.eccheck.config import Tls, is_address, is_plain
from hetjax.eccheck.layout import Layout
from hetjax.eccheck.manifest import save_of
from hetjax.eccheck.pace import RateLimit
from hetjax.eccheck.peer import Credentials, Pool
from hetjax.eccheck.store import COMMITTED, OPEN, PREPARED, Entry, Refused, Store
from hetjax.eccheck.wire import split_runs
from hetjax.ir.errors import CheckpointError

MANIFEST_LIMIT_BYTES = 1 << 30
_MAIL_LIMIT, _MAIL_AGE_S = 4096, 900.0


@dataclass(frozen=True)
class AgentOptions:
    """How an agent is started.

    Attributes:
      listen: "host:port" to bind; port 0 picks one. Bind to a private interface.
      memory_bytes: memory of one version of what this host holds.
      versions: how many versions fit; orbax's max_to_keep plus one.
      socket: path of the unix socket for trainers of this host; "" for none.
      job: the job it serves; every other is refused.
      token: the job's secret.
      tls: files for TLS, or None.
      scrub_interval_s: pause between background scrubs; 0 switches them off.
      rpc_timeout_s: deadline of small calls to other agents.
      min_rate_bytes_s: slowest bulk transfer that is waited for.
      rate_limit_bytes_s: ceiling on encoding and repair traffic; 0 means none.
      drain_dir: where SIGTERM writes the newest committed step; "" for nowhere.
      drain_grace_s: how long that may take.
      metrics_port: Prometheus endpoint on this port; 0 for none.
      bulk_port: port of bulk transfers; 0 picks one. Not opened with TLS.
    """

    listen: str = "127.0.0.1:0"
    memory_bytes: int = 1 << 30
    versions: int = 2
    socket: str = ""
    job: str = "default"
    token: str = field(default="", repr=False)
    tls: Tls | None = None
    scrub_interval_s: float = 600.0
    rpc_timeout_s: float = 10.0
    min_rate_bytes_s: float = 20e6
    rate_limit_bytes_s: float = 0.0
    drain_dir: str = ""
    drain_grace_s: float = 25.0
    metrics_port: int = 0
    bulk_port: int = 0

    def __post_init__(self) -> None:
        problems = [] if is_address(self.listen) else [f"'{self.listen}' is not HOST:PORT"]
        for what, value in (
            ("rpc-timeout", self.rpc_timeout_s), ("min-rate", self.min_rate_bytes_s),
            ("drain-grace", self.drain_grace_s), ("memory", self.memory_bytes),
        ):
            if not 0 < value < math.inf:
                problems.append(f"{what} must be above 0 and finite, got {value:g}")
        if not 0 <= self.scrub_interval_s < math.inf:
            problems.append(f"scrub-interval must be 0 or more, got {self.scrub_interval_s:g}")
        problems += [
            f"{what} {port} is not a port" for what, port in
            (("metrics-port", self.metrics_port), ("bulk-port", self.bulk_port))
            if not 0 <= port < 1 << 16
        ]
        problems += [
            f"{what} must be printable ASCII" for what, text in
            (("the job's name", self.job), ("the token", self.token)) if not is_plain(text)
        ]
        if problems:
            raise CheckpointError("agent: " + "; ".join(problems))


class Agent:
    """The state of an agent and its operations; `server.serve` puts it on the network.

    Args:
      options: how it was started.

    Raises:
      CheckpointError: the memory cannot be had.
    """

    def __init__(self, options: AgentOptions):
        self.options = options
        self.id = uuid.uuid4().hex
        self.address = options.listen
        self.arena = Arena(options.memory_bytes * options.versions)
        self.store = Store(self.arena)
        self.pool = Pool(Credentials(options.job, options.token, options.tls))
        self.counters: Counter[str] = Counter()
        self.started_s = time.time()
        self.last_scrub: dict[str, Any] = {}
        self.pace = RateLimit(options.rate_limit_bytes_s)
        self._mail: dict[str, tuple[float, dict[int, bytes]]] = {}
        self._mail_ready = threading.Condition()
        self._stop = threading.Event()
        self.listeners: list[socket.socket] = []
        self.bulk_port = 0  # until it listens

    # -- helpers -------------------------------------------------------------------------------

    def timeout_of(self, num_bytes: int) -> float:
        """Returns the deadline of a transfer of this many bytes, in seconds."""
        return self.options.rpc_timeout_s + num_bytes / self.options.min_rate_bytes_s

    def count(self, what: str, num_bytes: int) -> None:
        """Adds bytes to a counter."""
        self.counters[what] += num_bytes

    # -- Call ----------------------------------------------------------------------------------

    def handle(self, header: dict[str, Any], payload: memoryview) -> tuple[dict[str, Any], bytes]:
        """Returns the answer to a small call.

        Raises:
          Refused: the request does not fit the state.
        """
        op = str(header.get("op"))
        method: Callable[..., Any] | None = getattr(self, f"_op_{op}", None)
        if method is None:
            raise Refused("unimplemented", f"no operation '{op}' (protocol {wire.PROTOCOL})")
        reply = method(header, payload)
        return reply if isinstance(reply, tuple) else (reply, b"")

    def hello(self) -> dict[str, Any]:
        """Returns who this agent is and what room it has."""
        return {
            "protocol": wire.PROTOCOL, "id": self.id, "job": self.options.job,
            "epoch": self.store.epoch, "address": self.address, "pid": os.getpid(),
            "host": socket.gethostname(), "capacity_bytes": self.arena.capacity_bytes,
            "free_bytes": self.arena.free_bytes, "versions": self.options.versions,
            "drain_dir": self.options.drain_dir, "bulk_port": self.bulk_port,
        }

    def _op_hello(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        return self.hello()

    def _op_status(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        return {
            **self._op_list(header, payload),
            "uptime_s": time.time() - self.started_s, "counters": dict(self.counters),
            "evictions": self.store.evictions, "last_scrub": self.last_scrub,
            "rss_bytes": _rss_bytes(),
        }

    def _op_list(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        with self.store.lock:
            entries = [e.summary() for e in self.store.entries.values()]
        return {**self.hello(), "objects": entries}

    def _op_fence(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        self.store.fence(int(header["epoch"]))
        return {"epoch": self.store.epoch}

    def _op_begin(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        entry, evicted = self.store.begin(
            oid=str(header["oid"]), name=str(header["name"]), step=int(header["step"]),
            epoch=int(header["epoch"]), group=int(header["group"]),
            position=int(header["position"]), layout=Layout.from_json(header["layout"]),
            live=set(map(str, header["live"])), protect=set(map(str, header["protect"])),
            keep_all=bool(header.get("keep_all")),
        )
        return {"chunk_offsets": entry.chunk_offsets, "evicted": evicted, "id": self.id}

    def _op_where(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        entry = self.store.get(str(header["oid"]))
        return {"chunk_offsets": entry.chunk_offsets, "position": entry.position,
                "group": entry.group}

    def _op_seal(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        """Records the sums of blocks a trainer of this host wrote through its mapping."""
        entry = self.writable(header)
        sums, at = np.frombuffer(payload, np.uint64), 0
        for stripe, block, count in header["runs"]:
            self.store.mark(entry, int(stripe), int(block), sums[at : at + int(count)])
            at += int(count)
            self.count("local", int(count) * entry.layout.block_bytes)
        return {}

    def _op_encode(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        from hetjax.eccheck.encode import encode_own_stripe

        entry = self.writable(header)
        encode_own_stripe(
            self.store, self.pool, entry, timeout_of=self.timeout_of, pace=self.pace,
            count=self.count,
        )
        return {}

    def _op_digest(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        entry = self.writable(header)
        missing = entry.missing_blocks()
        if missing:
            raise Refused(
                "failed_precondition",
                f"object {entry.name}@{entry.step} lacks {missing} blocks at position "
                f"{entry.position}; it cannot be committed",
            )
        return {"digest": entry.sums_digest()}

    def _op_commit(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        if "epoch" in header:
            self.store.fence(int(header["epoch"]))
        entry = self.store.get(str(header["oid"]), PREPARED, COMMITTED)
        entry.state = COMMITTED
        return {}

    def _op_abort(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        with self.store.lock:
            entry = self.store.entries.get(str(header["oid"]))
            if entry is not None and entry.state != COMMITTED:
                self.store.drop(entry.oid)
        return {}

    def _op_drop(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        return {"dropped": sum(self.store.drop(str(oid)) for oid in header["oids"])}

    def _op_retain(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        """Frees the committed objects of a name that are not live."""
        live, name = {save_of(str(o)) for o in header["live"]}, str(header["name"])
        with self.store.lock:
            dead = [
                e.oid for e in self.store.entries.values()
                if e.name == name and e.state == COMMITTED and save_of(e.oid) not in live
            ]
            return {"dropped": sum(self.store.drop(oid) for oid in dead)}

    def _op_post(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        """Leaves a message of one writer for the others."""
        with self._mail_ready:
            now = time.monotonic()
            self._mail = {k: v for k, v in self._mail.items() if now - v[0] < _MAIL_AGE_S}
            if len(self._mail) >= _MAIL_LIMIT:
                raise Refused("resource_exhausted", "too many messages wait here")
            box = self._mail.setdefault(str(header["box"]), (now, {}))
            box[1][int(header["writer"])] = bytes(payload)
            self._mail_ready.notify_all()
        return {}

    def _op_collect(self, header: dict[str, Any], payload: memoryview) -> tuple[dict[str, Any], bytes]:
        """Waits for the messages of `count` writers, at most wait_s."""
        name, count = str(header["box"]), int(header["count"])
        wait_s = min(float(header["wait_s"]), 600.0)

        def full() -> bool:
            return self._stop.is_set() or len(self._mail.get(name, (0, {}))[1]) >= count

        with self._mail_ready:
            if not self._mail_ready.wait_for(full, wait_s) or self._stop.is_set():
                there = sorted(self._mail.get(name, (0, {}))[1])
                raise Refused(
                    "deadline_exceeded",
                    f"{len(there)} of {count} processes of the save answered within {wait_s:.0f} s "
                    f"(here: {there})",
                )
            mail = dict(sorted(self._mail[name][1].items()))
        return {"writers": list(mail), "lengths": [len(b) for b in mail.values()]}, b"".join(
            mail.values()
        )

    def _op_scrub(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        return self.scrub()

    def _op_repair(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        from hetjax.eccheck.repair import repair_here

        return repair_here(self, header)

    def _op_drain(self, header: dict[str, Any], payload: memoryview) -> dict[str, Any]:
        from hetjax.eccheck.drain import drain_agent

        return drain_agent(self, str(header.get("dir") or self.options.drain_dir))

    def writable(self, header: dict[str, Any]) -> Entry:
        """Returns the object a stream writes into; it must be open."""
        if "epoch" in header:
            self.store.fence(int(header["epoch"]))
        return self.store.get(str(header["oid"]), OPEN)

    def scrub(self) -> dict[str, Any]:
        """Checks every block of every committed object; returns what is damaged, by place."""
        started, report, checked = time.monotonic(), [], 0
        with self.store.lock:
            entries = [e for e in self.store.entries.values() if e.state == COMMITTED]
        for entry in entries:
            bad = self.store.scrub(entry, self.pace)
            checked += entry.num_bytes
            report += [
                {"oid": entry.oid, "name": entry.name, "step": entry.step, "group": entry.group,
                 "position": entry.position, "stripe": s, "block": b,
                 "role": entry.layout.role(entry.position, s), "k": entry.layout.k}
                for s, b in bad
            ]
        self.last_scrub = {
            "damaged": report, "checked_bytes": checked, "objects": len(entries),
            "seconds": time.monotonic() - started, "finished_s": time.time(),
        }
        self.count("scrubbed", checked)
        return self.last_scrub

    # -- Put and Get ---------------------------------------------------------------------------

    def receive(self, messages: Iterator[bytes]) -> dict[str, Any]:
        """Takes a stream of blocks, or a manifest.

        Raises:
          Refused: the stream does not fit the state.
        """
        header, _ = wire.unpack(next(messages))
        if header.get("op") == "prepare":
            return self._prepare(header, messages)
        if header.get("op") != "put":
            raise Refused("unimplemented", f"no stream '{header.get('op')}'")
        entry, total = self.writable(header), 0
        for message in messages:
            head, payload = wire.unpack(message)
            count = int(head["n"])
            if not 0 < count <= len(payload) // 8:
                raise Refused("invalid_argument", f"{count} sums in {len(payload)} bytes")
            sums = np.frombuffer(payload[: 8 * count], np.uint64)
            self.store.write(entry, int(head["s"]), int(head["b"]), sums, payload[8 * count :])
            total += len(payload) - 8 * count
        self.count("received", total)
        return {"bytes": total}

    def _prepare(self, header: dict[str, Any], messages: Iterator[bytes]) -> dict[str, Any]:
        entry, parts, total = self.writable(header), [], 0
        for message in messages:
            _, payload = wire.unpack(message)
            total += len(payload)
            if total > MANIFEST_LIMIT_BYTES:
                raise Refused("resource_exhausted", f"a manifest above {MANIFEST_LIMIT_BYTES} bytes")
            parts.append(payload)
        manifest = b"".join(parts)
        digests = json.loads(manifest)["groups"][entry.group]["digests"]
        if digests[entry.position] != entry.sums_digest():
            raise Refused("data_loss", "the manifest was made for other bytes than are here")
        entry.manifest, entry.state = manifest, PREPARED
        return {"prepared": True}

    def send(self, header: dict[str, Any]) -> Iterator[bytes]:
        """Yields the messages of a bulk answer.

        Raises:
          Refused: the object or the blocks are not here.
        """
        op, entry = header.get("op"), self.store.get(str(header["oid"]))
        if op == "read":
            block_bytes = entry.layout.block_bytes
            runs = [(int(s), int(b), int(n)) for s, b, n in header["runs"]]
            for run in runs:
                entry.span(*run)
            for stripe, block, count in split_runs(runs, block_bytes):
                start, stop = entry.span(stripe, block, count)
                yield wire.pack({"s": stripe, "b": block}, self.arena.bytes[start:stop].data)
                self.counters["sent"] += stop - start
        elif op in ("manifest", "sums"):
            data = entry.manifest if op == "manifest" else b"".join(
                s.tobytes() for s in entry.sums[slice(*header["stripes"])]
            )
            for start in range(0, len(data), wire.PAYLOAD_BYTES):
                yield wire.pack({}, data[start : start + wire.PAYLOAD_BYTES])
        else:
            raise Refused("unimplemented", f"no stream '{op}'")

    # -- life ----------------------------------------------------------------------------------

    def stop(self) -> None:
        """Wakes every waiting call; they end with an error."""
        self._stop.set()
        with self._mail_ready:
            self._mail_ready.notify_all()
        for listener in self.listeners:
            listener.close()

    @property
    def stopping(self) -> threading.Event:
        """Set once the agent is to end."""
        return self._stop


def _rss_bytes() -> int:
    try:
        return int(pathlib.Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGESIZE")
    except OSError:
        return 0
