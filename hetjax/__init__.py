"""hetjax: an unmodified Flax train step, run across unlike devices that are far apart.

Public names are imported on first use, so that `import hetjax` costs what `import jax` costs.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from hetjax.ir.display import register_drawer

__version__ = "0.1.0"

# Values show themselves in notebooks; what draws them is imported when one is first shown.
register_drawer("hetjax.notebook.reprs:picture_of")

# name -> module that defines it. No submodule of hetjax bears one of these names.
_EXPORTS = {
    "Cluster": "hetjax.ir.cluster",
    "Plan": "hetjax.ir.plan",
    "PerWorker": "hetjax.optim.worker_axis",
    "check": "hetjax.frontend.check_report",
    "average_params": "hetjax.optim._slamb",
    "data_parallel_step": "hetjax.optim.worker_axis",
    "gather": "hetjax.frontend.placement",
    "init": "hetjax.frontend.placement",
    "parallelize": "hetjax.frontend.decorator",
    "place": "hetjax.frontend.placement",
    "rehearse": "hetjax.frontend.dry_run",
    "scale_by_slamb": "hetjax.optim._slamb",
    "slamb": "hetjax.optim._slamb",
    "slamb_average": "hetjax.optim._slamb",
    "slamb_bytes": "hetjax.optim.exchange_bytes",
}
_MODULES = {"errors": "hetjax.errors"}

__all__ = ["__version__", *sorted([*_EXPORTS, *_MODULES])]

if TYPE_CHECKING:
    from hetjax import errors as errors
    from hetjax.frontend.check_report import check as check
    from hetjax.frontend.decorator import parallelize as parallelize
    from hetjax.frontend.dry_run import rehearse as rehearse
    from hetjax.frontend.placement import gather as gather
    from hetjax.frontend.placement import init as init
    from hetjax.frontend.placement import place as place
    from hetjax.ir.cluster import Cluster as Cluster
    from hetjax.ir.plan import Plan as Plan
    from hetjax.optim._slamb import average_params as average_params
    from hetjax.optim._slamb import scale_by_slamb as scale_by_slamb
    from hetjax.optim._slamb import slamb as slamb
    from hetjax.optim._slamb import slamb_average as slamb_average
    from hetjax.optim.exchange_bytes import slamb_bytes as slamb_bytes
    from hetjax.optim.worker_axis import PerWorker as PerWorker
    from hetjax.optim.worker_axis import data_parallel_step as data_parallel_step


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
