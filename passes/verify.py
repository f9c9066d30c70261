"""verify: checks every part of the bundle and lists all that is wrong."""

from __future__ import annotations

import dataclasses
from typing import ClassVar

from hetjax.ir.bundle import Bundle


@dataclasses.dataclass(frozen=True)
class Verify:
    """Raises VerifyError with every violation, or changes nothing.

    It is the last pass of the default pipeline; `hetjax opt --verify=each` runs the same check after
    every pass.
    """

    name: ClassVar[str] = "verify"
    summary: ClassVar[str] = "check every invariant of graph and program"

    def apply(self, bundle: Bundle) -> Bundle:
        from hetjax.ir.verify import verify_bundle

        verify_bundle(bundle)
        return bundle
