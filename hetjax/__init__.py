"""hetjax: an unmodified Flax train step, run across unlike devices that are far apart.

Public names are imported on first use, so that `import hetjax` costs what `import jax` costs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

# name -> module that defines it. No submodule of hetjax bears one of these names.
_EXPORTS = {
    "Cluster": "hetjax.ir.cluster",
    "Plan": "hetjax.ir.plan",
    "gather": "hetjax.frontend.placement",
    "init": "hetjax.frontend.placement",
    "parallelize": "hetjax.frontend.decorator",
    "place": "hetjax.frontend.placement",
}
_MODULES = {"errors": "hetjax.ir.errors"}

__all__ = ["__version__", *sorted([*_EXPORTS, *_MODULES])]

if TYPE_CHECKING:
    from hetjax.frontend.decorator import parallelize as parallelize
    from hetjax.frontend.placement import gather as gather
    from hetjax.frontend.placement import init as init
    from hetjax.frontend.placement import place as place
    from hetjax.ir import errors as errors
    from hetjax.ir.cluster import Cluster as Cluster
    from hetjax.ir.plan import Plan as Plan


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
    elif name in _MODULES:
        value = importlib.import_module(_MODULES[name])
    else:
        raise AttributeError(f"module 'hetjax' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
