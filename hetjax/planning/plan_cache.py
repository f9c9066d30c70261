"""Plans kept on disk between processes, by what they were made for: the step, the cluster, the options, the code.

A file holds a plan and how it was found. The key is a digest of the traced step (captured arrays and sources
included), the cluster's description, the options and the content of the modules that search and price, so that a
plan is never taken for another program, another machine or another cost model.
"""

from __future__ import annotations

import functools
import hashlib
import json
import logging
import os
from pathlib import Path
from typing import Any

from hetjax.ir.cluster import Cluster
from hetjax.ir.errors import HetjaxError
from hetjax.ir.fingerprint import digest, graph_digest
from hetjax.ir.graph import Graph
from hetjax.ir.plan import Plan
from hetjax.runtime.executable_store import read_file, write_file

# The folder; "0" or nothing keeps no plans.
ENVIRONMENT = "HETJAX_CACHE"
_VERSION = 1
_log = logging.getLogger("hetjax")


def cache_folder() -> Path | None:
    """Returns where plans are kept: $HETJAX_CACHE/plans, else the user's cache folder; None for nowhere."""
    told = os.environ.get(ENVIRONMENT)
    if told is not None:
        return None if told in ("", "0") else Path(told) / "plans"
    home = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(home) / "hetjax" / "plans"


def plan_file(graph: Graph, cluster: Cluster, *options: Any) -> Path | None:
    """Returns where the plan of a step is kept; it need not exist.

    Args:
      graph: the traced step.
      cluster: planned for.
      options: of the plan and the search; their repr says all of them.

    Returns:
      None where no plans are kept, or the step holds what has no text form.
    """
    folder = cache_folder()
    traced = graph_digest(graph) if folder is not None else None
    if folder is None or traced is None:
        return None
    key = digest((_VERSION, cost_model_version(), traced, cluster.to_toml(), repr(options)))
    return folder / f"{key}.plan"


@functools.cache
def cost_model_version() -> str:
    """Returns a digest of the code that plans are made and priced by."""
    home = Path(__file__).absolute().parents[1]
    out = hashlib.sha256()
    for part in ("ir", "passes", "planning"):
        for path in sorted((home / part).rglob("*.py")):
            out.update(str(path.relative_to(home)).encode() + b"\0" + path.read_bytes())
    return out.hexdigest()


def read_plan_file(path: Path) -> tuple[Plan, str] | None:
    """Returns the plan kept in a file and how it was found; None if none can be read."""
    content = read_file(path)
    if content is None:
        return None
    try:
        kept = json.loads(content)
        return Plan.from_json(json.dumps(kept["plan"]), str(path)), str(kept["found"])
    except (ValueError, KeyError, TypeError, HetjaxError) as error:
        _log.warning("%s cannot be read (%s); the step is planned anew", path, error)
        return None


def write_plan_file(path: Path, plan: Plan, found: str) -> bool:
    """Keeps a plan and how it was found; returns whether it could be kept."""
    content = json.dumps({"found": found, "plan": json.loads(plan.to_json())}, indent=1)
    return write_file(path, content.encode())
