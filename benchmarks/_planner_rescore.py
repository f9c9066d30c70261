"""Scores plans with the simulator published with Sailor itself, in a process of its own.

Nothing of that simulator is here: its public repository is given as a folder, its modules are loaded from
there, and it is asked what a plan takes and whether it fits. Run as a program, this file is the process: it
reads one JSON object (checkout, model, plans) from its standard input and prints one.

The simulator's modules import pandas (for reading traces) and torch (for profiling), which scoring a plan uses
neither of. Where one of them is not installed an empty module stands in for it, so that any use would fail.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import io
import json
import os
import subprocess
import sys
import tempfile
import types
from pathlib import Path
from typing import Any

_SIMULATOR = Path("sailor", "Planner", "simulations", "runtime_simulator.py")
_UNUSED = ("pandas", "torch")
_LIMIT_S = 120.0


@dataclasses.dataclass(frozen=True)
class Score:
    """What the published simulator says of a plan.

    Attributes:
      seconds: of an iteration.
      fits: whether every GPU has the memory.
    """

    seconds: float
    fits: bool


@dataclasses.dataclass(frozen=True)
class Scores:
    """The scores of plans, and what stood in for a package (its name) while they were made."""

    scores: tuple[Score, ...]
    stand_ins: tuple[str, ...]


def checkout(given: str | None) -> Path | None:
    """Returns the root of the published repository.

    Args:
      given: that folder, the one above it, or its folder `sailor`; HETJAX_SAILOR when None.

    Returns:
      None where nothing is given.

    Raises:
      FileNotFoundError: the simulator is not in the folder given.
    """
    given = given or os.environ.get("HETJAX_SAILOR")
    if not given:
        return None
    folder = Path(given).expanduser().resolve()
    for root in (folder, folder / "sailor", folder.parent):
        if (root / _SIMULATOR).is_file():
            return root
    raise FileNotFoundError(
        f"HETJAX_SAILOR={given}: {_SIMULATOR} is not there; give a checkout of the public repository of Sailor"
    )


def rescore(root: Path, model: str, plans: list[dict[str, Any]]) -> Scores:
    """Returns what the published simulator says of plans in its own form (`hetjax plan --emit sailor`).

    Args:
      root: from `checkout`.
      model: its name there, as OPT-350.
      plans: with "gbs", the global batch.

    Raises:
      RuntimeError: the simulator failed; holds the end of what it wrote.
    """
    asked = json.dumps({"root": str(root), "model": model, "plans": plans})
    done = subprocess.run(
        [sys.executable, "-P", __file__], input=asked, capture_output=True, text=True, timeout=_LIMIT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"the simulator in {root} failed:\n{done.stderr[-2000:]}")
    answer = json.loads(done.stdout)
    return Scores(tuple(Score(**s) for s in answer["scores"]), tuple(answer["stand_ins"]))


def _config(root: Path, model: str) -> dict[str, Any]:
    """Returns the published training configuration of a model."""
    folder = root / _SIMULATOR.parent / "configs"
    for path in sorted(folder.glob("training_config_*.json")):
        config = json.loads(path.read_text())
        if config.get("model") == model:
            return config
    raise FileNotFoundError(f"{folder} has no training_config_*.json for {model}")


def _scores(root: Path, model: str, plans: list[dict[str, Any]]) -> list[dict[str, Any]]:
    sys.path.insert(0, str(root))
    from sailor.Planner.simulations.runtime_simulator import Simulator  # pyright: ignore[reportMissingImports]

    config = _config(root, model)
    info = json.loads((root / "sailor" / "Planner" / "llm_info.json").read_text())
    profiles = json.loads((root / _SIMULATOR.parent / "profiles_tmp.json").read_text())
    found = []
    with tempfile.TemporaryDirectory() as above:
        # It looks for its data at PATH/sailor/sailor, whatever the checkout's own name.
        (Path(above) / "sailor").symlink_to(root, target_is_directory=True)
        simulators: dict[int, Any] = {}
        for plan in plans:
            batch = plan["gbs"]
            if batch not in simulators:
                simulators[batch] = Simulator(above, {**config, "global_batch_size": batch}, info, False, profiles, "")
            with contextlib.redirect_stdout(io.StringIO()):
                seconds = simulators[batch].simulate_iteration_time(plan)[0]
                fits = simulators[batch].check_config_fits(plan)
            found.append({"seconds": float(seconds), "fits": bool(fits)})
    return found


def _serve() -> None:
    asked = json.load(sys.stdin)
    missing = [name for name in _UNUSED if importlib.util.find_spec(name) is None]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
    scores = _scores(Path(asked["root"]), asked["model"], asked["plans"])
    print(json.dumps({"scores": scores, "stand_ins": missing}))


if __name__ == "__main__":
    _serve()
