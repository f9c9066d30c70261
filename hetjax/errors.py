"""The exceptions hetjax raises; see `hetjax.ir.errors`."""

from hetjax.ir.errors import (
    CheckpointError,
    ClusterError,
    HetjaxError,
    LoweringError,
    MicrobatchError,
    NanFault,
    ParseError,
    PassError,
    PlanError,
    RuntimeFault,
    VerifyError,
)

__all__ = [
    "CheckpointError",
    "ClusterError",
    "HetjaxError",
    "LoweringError",
    "MicrobatchError",
    "ParseError",
    "PassError",
    "PlanError",
    "NanFault",
    "RuntimeFault",
    "VerifyError",
]
