"""ECCheck: checkpoints in the hosts' memory that survive the loss of any m hosts.

Usable alone: nothing here imports the parallelizer. Names are imported when first used, so that an
agent, which needs neither JAX nor orbax, starts without them.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

_EXPORTS = {
    "Config": "hetjax.eccheck.config",
    "ECCheckpointManager": "hetjax.eccheck.manager",
    "EccheckWarning": "hetjax.eccheck.client",
    "checkpoint_context": "hetjax.eccheck.checkpointables",
    "handler_registry": "hetjax.eccheck.handler",
    "load_config": "hetjax.eccheck.config",
}

__all__ = [
    "Config",
    "ECCheckpointManager",
    "EccheckWarning",
    "checkpoint_context",
    "handler_registry",
    "load_config",
]

if TYPE_CHECKING:
    from hetjax.eccheck.checkpointables import checkpoint_context as checkpoint_context
    from hetjax.eccheck.client import EccheckWarning as EccheckWarning
    from hetjax.eccheck.config import Config as Config
    from hetjax.eccheck.config import load_config as load_config
    from hetjax.eccheck.handler import handler_registry as handler_registry
    from hetjax.eccheck.manager import ECCheckpointManager as ECCheckpointManager


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module 'hetjax.eccheck' has no attribute {name!r}")
    value = globals()[name] = getattr(importlib.import_module(_EXPORTS[name]), name)
    return value
