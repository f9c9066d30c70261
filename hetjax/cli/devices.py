"""Settings of XLA that must be made before jax is imported: forced CPU devices, rounding as written."""

from __future__ import annotations

import os
import platform
import re
import sys

from hetjax.ir.errors import HetjaxError

DEFAULT_COUNT = 8
_COUNT = re.compile(r"--xla_force_host_platform_device_count=(\d+)")


def force_cpu_devices(count: int = DEFAULT_COUNT, *, only_cpu: bool = False) -> int:
    """Returns how many CPU devices jax will have; asks for `count` unless XLA_FLAGS already says.

    It must run before jax is imported. Accelerators stay visible unless `only_cpu`. NPROC gives the
    collectives of many devices on few cores the threads they wait for: without it, 64 of them in
    flight on two cores starve each other and hang.

    Args:
      count: devices to ask for.
      only_cpu: hide accelerators.
    """
    flags = os.environ.get("XLA_FLAGS", "")
    asked = _COUNT.search(flags)
    if asked is None and "jax" not in sys.modules:
        os.environ["XLA_FLAGS"] = f"{flags} --xla_force_host_platform_device_count={count}".strip()
    os.environ.setdefault("NPROC", "32")
    os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "2")
    if only_cpu:
        os.environ["JAX_PLATFORMS"] = "cpu"
    return int(asked[1]) if asked else count


def round_as_written() -> str:
    """Makes XLA round after every op, as the step is written; returns what was done, in a sentence.

    Left free, XLA keeps bf16 values in f32 between ops of one fusion, and on CPUs fuses multiplications with
    additions, each of which leaves a rounding out; which, depends on what surrounds an op in its program.
    Both are settings of the process: it must run before jax is imported. Without AVX2 an x86 processor has
    no fused multiply-add; other processors keep theirs.

    Raises:
      HetjaxError: jax was imported already, without these settings.
    """
    flags = ["--xla_allow_excess_precision=false"]
    if platform.machine().lower() in ("x86_64", "amd64"):
        flags.append("--xla_cpu_max_isa=AVX")
    given = os.environ.get("XLA_FLAGS", "").split()
    if not set(flags) <= set(given):
        if "jax" in sys.modules:
            raise HetjaxError(
                f"jax has been imported, and takes no flags of XLA any more; set XLA_FLAGS='{' '.join(flags)}' before"
            )
        os.environ["XLA_FLAGS"] = " ".join([*given, *flags])
    return f"every op rounds as it is written, on both sides (XLA_FLAGS {' '.join(flags)})"


def ensure_devices(needed: int) -> str:
    """Returns a sentence when it fell back to forced CPU devices, else "".

    Args:
      needed: how many devices the request takes. Where the default platform has fewer, its backend
        is closed and the forced CPU devices are used, if those suffice.
    """
    import jax
    from jax.extend import backend

    have = jax.devices()
    if len(have) >= needed or have[0].platform == "cpu":
        return ""
    kind = have[0].device_kind
    if len(jax.devices("cpu")) < needed:
        return ""
    backend.clear_backends()
    jax.config.update("jax_platforms", "cpu")
    return f"{needed} devices are needed and there are {len(have)} ({kind}): ran on forced CPU devices"
