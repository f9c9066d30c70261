"""What the processes of one jax.distributed job say to each other when agents cannot carry it.

Over the job's key-value store: it needs no agent, no device and no collective, so a thread beside the
training may use it. The first process of a save says how it ended; the others ask only when they do
not know.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
from typing import TYPE_CHECKING, Any

from hetjax.ir.errors import CheckpointError

if TYPE_CHECKING:
    from hetjax.eccheck.writer import Saved

_PREFIX = "hetjax-eccheck/"


class ToDisk(CheckpointError):
    """Agents could not take a save, and all its processes know: they write it to disk together.

    Attributes:
      box: name of the save among their messages.
    """

    def __init__(self, message: str, box: str):
        self.box = box
        super().__init__(message)


def _store() -> Any:
    from hetjax.ir import _jax

    store = _jax.coordination()
    if store is None:
        raise CheckpointError("jax.distributed is not running, and several processes save together")
    return store


def post(key: str, value: Any) -> None:
    """Leaves a JSON value for the other processes.

    Raises:
      CheckpointError: the job's coordinator is gone.
    """
    try:
        _store().key_value_set(_PREFIX + key, json.dumps(value), allow_overwrite=True)
    except RuntimeError as error:
        raise CheckpointError(f"the processes of the job cannot talk: {error}") from error


def wait(key: str, wait_s: float) -> Any:
    """Returns what another process left, as soon as it does.

    Raises:
      CheckpointError: it did not within wait_s.
    """
    try:
        return json.loads(_store().blocking_key_value_get(_PREFIX + key, max(1, int(wait_s * 1e3))))
    except RuntimeError as error:
        raise CheckpointError(f"no word of another process within {wait_s:.0f} s: {error}") from error


def forget(key: str) -> None:
    """Removes what nobody will ask for any more."""
    with contextlib.suppress(RuntimeError):  # it stays then, some hundred bytes
        _store().key_value_delete(_PREFIX + key)


def verdict(
    box: str, writer: int, saved: Saved | None, problem: CheckpointError | None, wait_s: float
) -> tuple[Saved | None, CheckpointError | None]:
    """Returns how a save ended for all its processes.

    Args:
      box: name of the save; its last part counts the saves of one item.
      writer: number of this process.
      saved: what it committed, as far as this process knows.
      problem: or why not.
      wait_s: how long to wait for the first process.

    Returns:
      What was committed, or the problem: `ToDisk` where all are to write to disk.
    """
    from hetjax.eccheck.writer import Saved, is_stale

    word: dict[str, Any]
    if writer == 0:
        if saved is not None:
            word = {"saved": {**dataclasses.asdict(saved), "data": ""}}
        elif problem is not None and is_stale(problem):
            word = {"error": str(problem)}
        else:
            word = {"disk": str(problem)}
        post(box + "/end", word)
        name, _, serial = box.rpartition("/")
        if int(serial) > 2:  # the others are past it: each has begun the next save since
            forget(f"{name}/{int(serial) - 2}/end")
    elif saved is None:
        word = wait(box + "/end", wait_s)
    else:
        return saved, None
    if "disk" in word:
        return None, ToDisk(word["disk"], box)
    if "saved" in word and saved is None:
        lists = {k: tuple(v) for k, v in word["saved"].items() if isinstance(v, list)}
        return Saved(**{**word["saved"], **lists, "data": b""}), None
    return saved, problem
