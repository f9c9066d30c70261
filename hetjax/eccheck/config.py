"""How a job finds its agents: from code, from a TOML file, or from the environment."""

from __future__ import annotations

import dataclasses
import math
import os
import pathlib
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field

from hetjax.ir.errors import CheckpointError


def is_address(text: str) -> bool:
    """Says whether it is HOST:PORT."""
    host, _, port = text.rpartition(":")
    return bool(host) and port.isdecimal() and int(port) < 1 << 16


def is_plain(text: str) -> bool:
    """Says whether it is printable ASCII."""
    return text.isascii() and (text.isprintable() or not text)


@dataclass(frozen=True)
class Tls:
    """Files of a mutual TLS set-up, PEM.

    Attributes:
      ca: certificate authority that signed both sides.
      cert: own certificate.
      key: own private key.
      name: the name in the peers' certificates, where it is not the host part of their address.
    """

    ca: str
    cert: str
    key: str
    name: str = ""


@dataclass(frozen=True)
class Config:
    """What a trainer, and the command line, need to know of the agents.

    Attributes:
      agents: addresses "host:port" of every agent of the job, the same list in every process.
      socket: path of the unix socket of the agent on this host; "" where there is none.
      job: the job's name; agents refuse every other.
      token: the job's secret.
      k: data chunks of a group of hosts.
      m: hosts of a group that may be lost.
      domains: address -> failure domain (rack, site, power feed).
      tls: files for TLS, or None.
      rpc_timeout_s: deadline of a small call; a stopped agent costs this much.
      min_rate_bytes_s: bulk calls get rpc_timeout_s plus their bytes over this rate.
      rate_limit_bytes_s: ceiling on what a process of the job sends; 0 means none.
      drain_dir: where agents write on SIGTERM, to restore from when they are gone; "" asks them.
      writer: (number, count) of this process among those that save together, where they are not
        the processes of one jax.distributed job; None asks jax.
      run: names this start of the job where `writer` is given: the same in all its processes, new
        at every restart.
    """

    agents: tuple[str, ...] = ()
    socket: str = ""
    job: str = "default"
    token: str = field(default="", repr=False)
    k: int = 2
    m: int = 1
    domains: Mapping[str, str] = field(default_factory=dict)
    tls: Tls | None = None
    rpc_timeout_s: float = 10.0
    min_rate_bytes_s: float = 20e6
    rate_limit_bytes_s: float = 0.0
    drain_dir: str = ""
    writer: tuple[int, int] | None = None
    run: str = ""

    def __post_init__(self) -> None:
        if isinstance(self.agents, str) or not isinstance(self.domains, Mapping):
            raise CheckpointError(
                'checkpoint configuration: agents must be a list, as ["10.0.0.7:7471"], and domains a '
                'table, address = "rack"'
            )
        problems = []
        if self.k < 1 or self.m < 1:
            problems.append(f"k and m must be at least 1, got k={self.k}, m={self.m}")
        if len(set(self.agents)) != len(self.agents):
            problems.append("an agent is listed twice")
        problems += [
            f"agent '{a}' is not HOST:PORT" for a in self.agents if not is_address(a)
        ]
        if not (0 < self.rpc_timeout_s < math.inf and 0 < self.min_rate_bytes_s < math.inf):
            problems.append("rpc_timeout_s and min_rate_bytes_s must be above 0 and finite")
        problems += [  # they travel as gRPC metadata
            f"{what} must be printable ASCII" for what, text in
            (("the job's name", self.job), ("the token", self.token)) if not is_plain(text)
        ]
        if self.writer is not None and not (0 <= self.writer[0] < self.writer[1] and self.run):
            problems.append("writer needs 0 <= number < count, and a `run` shared by all of them")
        if problems:
            raise CheckpointError("checkpoint configuration: " + "; ".join(problems))

    def bulk_timeout_s(self, num_bytes: int) -> float:
        """Returns the deadline of a call that moves this many bytes, in seconds."""
        return self.rpc_timeout_s + num_bytes / self.min_rate_bytes_s


def read_token(token: str, token_file: str) -> str:
    """Returns the secret: as given, or the first line of the file.

    Raises:
      CheckpointError: the file cannot be read.
    """
    if token or not token_file:
        return token
    try:
        return pathlib.Path(token_file).read_text().strip()
    except OSError as error:
        raise CheckpointError(f"cannot read the job token: {error}") from error


def load_config(path: str | os.PathLike[str] | None = None) -> Config:
    """Returns the configuration of a TOML file, overridden by the environment.

    The file is `path`, or what HETJAX_ECCHECK names. Its keys are the fields of `Config`, plus
    `token_file`. Variables that override: HETJAX_AGENTS (addresses, comma-separated),
    HETJAX_AGENT_SOCKET, HETJAX_JOB, HETJAX_JOB_TOKEN, HETJAX_JOB_TOKEN_FILE, HETJAX_EC_K,
    HETJAX_EC_M, HETJAX_RUN, HETJAX_DRAIN_DIR.

    Raises:
      CheckpointError: the file or a variable is wrong; all problems at once.
    """
    path = path or os.environ.get("HETJAX_ECCHECK")
    values: dict[str, object] = {}
    if path:
        try:
            values = tomllib.loads(pathlib.Path(path).read_text())
        except (OSError, tomllib.TOMLDecodeError) as error:
            raise CheckpointError(f"{path}: {error}") from error
        values = values.get("eccheck", values)  # type: ignore[assignment]
        if not isinstance(values, dict):
            raise CheckpointError(f"{path}: eccheck must be a table, [eccheck]")
    names = {f.name for f in dataclasses.fields(Config)}
    unknown = sorted(set(values) - names - {"token_file"})
    if unknown:
        raise CheckpointError(
            f"{path}: unknown keys {', '.join(unknown)}; there are {', '.join(sorted(names))}"
        )
    env = os.environ
    for name, variable in (
        ("socket", "HETJAX_AGENT_SOCKET"), ("job", "HETJAX_JOB"), ("token", "HETJAX_JOB_TOKEN"),
        ("token_file", "HETJAX_JOB_TOKEN_FILE"), ("run", "HETJAX_RUN"),
        ("drain_dir", "HETJAX_DRAIN_DIR"),
    ):
        if env.get(variable):
            values[name] = env[variable]
    if env.get("HETJAX_AGENTS"):
        values["agents"] = [a.strip() for a in env["HETJAX_AGENTS"].split(",") if a.strip()]
    for name, variable in (("k", "HETJAX_EC_K"), ("m", "HETJAX_EC_M")):
        if env.get(variable):
            try:
                values[name] = int(env[variable])
            except ValueError:
                raise CheckpointError(f"{variable}={env[variable]} is not a number") from None
    values["token"] = read_token(str(values.get("token", "")), str(values.pop("token_file", "")))
    for name in ("agents", "writer"):
        if isinstance(values.get(name), list):
            values[name] = tuple(values[name])  # type: ignore[arg-type]
    try:
        if isinstance(values.get("tls"), dict):
            values["tls"] = Tls(**values["tls"])  # type: ignore[arg-type]
        return Config(**values)  # type: ignore[arg-type]
    except (TypeError, ValueError, AttributeError, IndexError) as error:  # of another type than a field's
        raise CheckpointError(f"{path}: {error}") from error
