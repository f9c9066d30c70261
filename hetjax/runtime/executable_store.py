"""Executables of fragments, kept beside JAX's compilation cache by what the fragments say.

JAX's cache is asked with a lowered program; this one before lowering, which on a second start is most
of the work. It is on where JAX's is. Files are as trusted as those of JAX's cache: both hold code.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import hashlib
import logging
import os
import platform
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from hetjax.ir import _jax

# Files kept in a folder; the ones not used for longest go first.
MAX_FILES = 4096

# Settings that change where compiled code is kept or what is logged, not what it is.
_IRRELEVANT = ("jax_compilation_cache", "jax_persistent_cache", "jax_enable_compilation_cache", "jax_log", "jax_explain")

_log = logging.getLogger("hetjax")


@dataclasses.dataclass(frozen=True)
class ExecutableStore:
    """A folder of serialised executables.

    Attributes:
      folder: where.
      environment: digest of versions, settings and devices; part of every name.
    """

    folder: Path
    environment: str

    def path(self, key: str) -> Path:
        """Returns the file of a key."""
        name = hashlib.sha256(f"{self.environment} {key}".encode()).hexdigest()
        return self.folder / f"{name}.executable"

    def load(self, key: str, mesh: Any, num_inputs: int, num_outputs: int) -> Any:
        """Returns the executable of a key, ready for the mesh's devices; None if there is none that loads."""
        content = read_file(self.path(key))
        if content is None:
            return None
        import jax
        from jax.experimental import serialize_executable

        in_tree = jax.tree.structure(((0,) * num_inputs, {}))
        out_tree = jax.tree.structure([0] * num_outputs)
        devices = list(mesh.devices.flat)
        try:
            return serialize_executable.deserialize_and_load(
                content, in_tree, out_tree, devices[0].client, devices
            )
        except Exception as error:
            _log.warning("%s does not load (%s); the fragment is compiled anew", self.path(key), error)
            return None

    def save(self, key: str, compiled: Any) -> bool:
        """Keeps an executable; returns whether it could be kept. One that cannot is no error."""
        from jax.experimental import serialize_executable

        try:
            content, _, _ = serialize_executable.serialize(compiled)
            return write_file(self.path(key), content)
        except Exception as error:
            _log.debug("an executable is not kept: %s", error)
            return False


def open_store(devices: Sequence[Any]) -> ExecutableStore | None:
    """Returns the store for code of these devices; None if JAX's persistent cache is off or not a local folder.

    Args:
      devices: one jax device per cluster device.
    """
    import jax

    config: dict[str, Any] = jax.config.values
    folder = config["jax_compilation_cache_dir"]
    if not folder or "://" in folder or not config["jax_enable_compilation_cache"]:
        return None
    settings = sorted((k, str(v)) for k, v in config.items() if not k.startswith(_IRRELEVANT))
    said = (
        settings, _jax.local_settings(), jax.__version__, devices[0].client.platform_version,
        [(d.id, d.platform, d.device_kind, d.process_index) for d in devices],
        os.environ.get("XLA_FLAGS"), os.environ.get("LIBTPU_INIT_ARGS"), _processor(),
    )
    return ExecutableStore(Path(folder) / "hetjax", hashlib.sha256(repr(said).encode()).hexdigest())


def worth_keeping(seconds: float) -> bool:
    """Returns whether compilation took long enough, by JAX's own setting for its cache."""
    import jax

    return seconds >= jax.config.values["jax_persistent_cache_min_compile_time_secs"]


@functools.cache
def _processor() -> str:
    """Returns what code for this processor may use: CPU executables are native code."""
    with contextlib.suppress(OSError), open("/proc/cpuinfo", encoding="utf-8") as info:
        return next((line for line in info if line.startswith(("flags", "Features"))), "")
    return platform.machine() + platform.processor()


# ---------------------------------------------------------------------------- fresh or from JAX's cache

@contextlib.contextmanager
def count_cache_hits() -> Iterator[Callable[[], int]]:
    """Gives a function that tells how many compilations of its thread JAX's cache has served meanwhile.

    An executable from there cannot be serialised once more on the CPU backend: it loads, and then
    misses its functions when it is called.
    """
    seen = threading.local()

    def note(event: str, **_: Any) -> None:
        if event == "/jax/compilation_cache/cache_hits":
            seen.hits = getattr(seen, "hits", 0) + 1

    with _jax.listening(note):
        yield lambda: getattr(seen, "hits", 0)


# ---------------------------------------------------------------------------- files


def read_file(path: Path) -> bytes | None:
    """Returns what `write_file` wrote; None if there is nothing, or (with a warning) it is damaged."""
    try:
        content = path.read_bytes()
    except OSError:
        return None
    if hashlib.sha256(content[32:]).digest() != content[:32]:
        _log.warning("%s is damaged and will be written anew", path)
        return None
    with contextlib.suppress(OSError):
        os.utime(path)
    return content[32:]


def write_file(path: Path, content: bytes) -> bool:
    """Writes content and its checksum; returns whether that worked. Readers see all of it or nothing."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(dir=path.parent, prefix=".new-")
        try:
            with os.fdopen(handle, "wb") as file:
                file.write(hashlib.sha256(content).digest() + content)
            os.replace(name, path)
        except BaseException:
            os.unlink(name)
            raise
        _forget_old(path.parent)
    except OSError as error:
        _log.debug("%s is not kept: %s", path, error)
        return False
    return True


def _forget_old(folder: Path) -> None:
    files = [p for p in folder.iterdir() if not p.name.startswith(".")]
    if len(files) > MAX_FILES:
        for path in sorted(files, key=lambda p: p.stat().st_mtime)[: len(files) - MAX_FILES]:
            path.unlink(missing_ok=True)
