"""A second start without planning: lowered bundles kept beside their executables.

JAX's persistent cache spares XLA's part of a start. What is left is Python: tracing at a microbatch,
proving, planning, lowering. All of it follows from the traced step, the cluster, the options and the
versions; a digest of these names a file with the bundle. The step itself is traced at every start:
the digest is of what the user's code means now.
"""

from __future__ import annotations

import functools
import io
import logging
import pickle
from pathlib import Path
from typing import Any

from hetjax.ir import _jax
from hetjax.ir.bundle import Bundle
from hetjax.ir.cluster import Cluster
from hetjax.ir.fingerprint import digest, graph_digest
from hetjax.ir.graph import Graph, Handle
from hetjax.runtime.executable_store import ExecutableStore, read_file, write_file

_log = logging.getLogger("hetjax")


def start_file(store: ExecutableStore, graph: Graph, cluster: Cluster, options: Any) -> Path | None:
    """Returns where the start of a step is kept; it need not exist.

    Args:
      store: of its executables.
      graph: the traced step.
      cluster: planned for.
      options: asked for; their repr says all of them.

    Returns:
      None if the step holds what has no text form.
    """
    traced = graph_digest(graph)
    if traced is None:
        return None
    key = digest((store.environment, _sources(), traced, cluster.to_toml(), repr(options)))
    return store.folder / f"{key}.start"


@functools.cache
def _sources() -> list[tuple[str, int, int]]:
    """Returns the state of hetjax's own files: a changed pass makes another program."""
    home = Path(__file__).absolute().parents[1]
    stats = (
        (str(path), path.stat())
        for part in ("ir", "passes", "runtime", "frontend")
        for path in (home / part).rglob("*.py")
    )
    return sorted((name, s.st_size, s.st_mtime_ns) for name, s in stats)


class _Pickler(pickle.Pickler):
    """Leaves equations out, and refuses handles: their objects are of this process."""

    def persistent_id(self, obj: Any) -> str | None:
        if isinstance(obj, Handle):
            raise pickle.PicklingError(f"#{obj.name} has no content to keep")
        return "equation" if isinstance(obj, _jax.JaxprEqn) else None


class _Unpickler(pickle.Unpickler):
    def persistent_load(self, pid: str) -> None:
        return None


def read_start(path: Path) -> Bundle | None:
    """Returns the bundle kept in a file, its ops without equations; None if none can be read."""
    content = read_file(path)
    if content is None:
        return None
    try:
        return _Unpickler(io.BytesIO(content)).load()
    except Exception as error:
        _log.warning("%s cannot be read (%s); the step is planned anew", path, error)
        return None


def write_start(path: Path, bundle: Bundle) -> bool:
    """Keeps a lowered bundle; returns whether it could be kept. One that cannot is no error."""
    out = io.BytesIO()
    try:
        _Pickler(out, pickle.HIGHEST_PROTOCOL).dump(bundle)
    except Exception as error:
        _log.debug("the start is not kept: %s", error)
        return False
    return write_file(path, out.getvalue())
