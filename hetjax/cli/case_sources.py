"""The source distribution that cases take other projects' train steps from, kept in a cache."""

from __future__ import annotations

import importlib.metadata
import os
import pathlib
import subprocess
import sys
import tarfile

from hetjax.ir.errors import HetjaxError

# Where unpacked source distributions are kept: never in a repository.
CACHE = pathlib.Path(os.environ.get("XDG_CACHE_HOME", "~/.cache")).expanduser() / "hetjax" / "cases"


def flax_examples(cache: pathlib.Path = CACHE, *, offline: bool = False) -> pathlib.Path:
    """Returns the folder that holds `flax/`, the unpacked source distribution of the installed flax.

    Args:
      cache: looked in first, and filled by pip where it has none. A folder named by the environment
        variable HETJAX_CASE_PEERS is taken as it is.
      offline: never download.

    Raises:
      HetjaxError: it is not there and cannot be had.
    """
    given = os.environ.get("HETJAX_CASE_PEERS")
    if given:
        if not (pathlib.Path(given) / "flax" / "examples").is_dir():
            raise HetjaxError(f"HETJAX_CASE_PEERS is {given}, which holds no flax/examples")
        return pathlib.Path(given)
    version = importlib.metadata.version("flax")
    home = cache / f"flax-{version}"
    if (home / "flax" / "examples").is_dir():
        return home
    if offline:
        raise HetjaxError(f"flax's source distribution is not in {cache}, and offline was asked for; run once without")
    home.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--no-binary", ":all:", f"flax=={version}", "-d", str(home)]
    done = subprocess.run(command, capture_output=True, text=True)
    archive = home / f"flax-{version}.tar.gz"
    if done.returncode or not archive.is_file():
        raise HetjaxError(
            f"flax's source distribution {version}, which the cases import, could not be fetched "
            f"({' '.join(command[2:])}):\n{done.stderr.strip()[-800:]}\n"
            "Fetch it where there is a network, set HETJAX_CASE_PEERS, or ask for --offline to leave these cases out"
        )
    with tarfile.open(archive) as tar:
        tar.extractall(home, filter="data")
    (home / f"flax-{version}").rename(home / "flax")
    return home
