"""Set before jax is imported: eight CPU devices, and threads enough that collectives never starve."""

import os
import pathlib

# On a machine with few cores, collectives of many forced CPU devices wait for threads that never come; NPROC gives them theirs.
os.environ["NPROC"] = "32"
os.environ["XLA_FLAGS"] = (
    "--xla_force_host_platform_device_count=8"
    # Tests compile hundreds of small programs once each: a third of the time without LLVM's expensive passes.
    " --xla_llvm_disable_expensive_passes=true"
)
os.environ["JAX_PLATFORMS"] = "cpu"
os.environ.setdefault("TF_CPP_MIN_LOG_LEVEL", "3")
# Plans found by tests are not kept: every test searches for its own.
os.environ["HETJAX_CACHE"] = "0"

import pytest


@pytest.fixture(scope="session")
def shared_dir() -> pathlib.Path:
    """The folder of shared cases and data; a test that needs it says so when it is absent."""
    root = pathlib.Path(__file__).resolve().parents[1]
    path = pathlib.Path(os.environ.get("HETJAX_SHARED", root.parent / "shared"))
    if not path.is_dir():
        pytest.skip(f"the shared cases are not at {path}; set HETJAX_SHARED")
    return path
