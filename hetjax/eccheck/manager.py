"""A checkpoint manager of two tiers: the agents' memory often, a directory on disk seldom.

    manager = ECCheckpointManager(path, options=ocp.CheckpointManagerOptions(
        save_interval_steps=1000, max_to_keep=3), memory_every=10)

The methods are those of orbax's CheckpointManager. A step is in memory as one object, all items of a
Composite under one commit, or it is not there. Trouble with the memory tier is a warning, never the
end of the training: the disk tier stands beneath.
"""

from __future__ import annotations

import contextlib
import logging
import shutil
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import orbax.checkpoint as ocp

from hetjax.eccheck import wishes
from hetjax.eccheck.client import warn
from hetjax.eccheck.config import Config
from hetjax.eccheck.drain import find_drained
from hetjax.eccheck.manifest import parse_manifest, save_of
from hetjax.eccheck.reader import Found, ObjectReader
from hetjax.eccheck.sidecar import is_tree, item_names, restore_files, save_files
from hetjax.eccheck.tier import item_name, tier_of
from hetjax.eccheck.treemeta import ItemMetadata, tree_metadata
from hetjax.eccheck.trees import restore_tree
from hetjax.ir.errors import CheckpointError

DEFAULT_ITEM = "default"
_OBJECT = "__step__"
_log = logging.getLogger("hetjax.eccheck")


class ECCheckpointManager(ocp.AbstractCheckpointManager):
    """Saves every `memory_every` steps to memory, and to disk as orbax's options say.

    Args:
      directory: of the disk tier.
      options: orbax's options, for the disk tier: save_interval_steps is the N of "every N".
      config: of the memory tier; a Config, the path of a TOML file, or None for the environment.
      memory_every: steps between saves to memory.
      memory_keep: steps kept in memory; the agents need one version more.
      handler_registry: orbax handlers of further items, for both tiers.
      item_names: as orbax's.

    Raises:
      CheckpointError: the configuration is wrong.
    """

    def __init__(
        self, directory: Any, options: ocp.CheckpointManagerOptions | None = None, *,
        config: Config | str | None = None, memory_every: int = 1, memory_keep: int = 1,
        handler_registry: Any = None, item_names: Sequence[str] | None = None,
    ):
        if memory_every < 1 or memory_keep < 1:
            raise CheckpointError(
                f"memory_every and memory_keep must be at least 1, got {memory_every}, {memory_keep}"
            )
        self._tier = tier_of(config)
        self._registry = handler_registry
        self._disk = ocp.CheckpointManager(
            directory, options=options, handler_registry=handler_registry, item_names=item_names
        )
        self._name = item_name(str(self._disk.directory), _OBJECT)
        self._every, self._keep = memory_every, memory_keep
        self._worker = ThreadPoolExecutor(1, thread_name_prefix="eccheck-save")
        self._pending: Future[Any] | None = None
        self._last_started: int | None = None
        self._problems: list[str] = []
        self._lock = threading.Lock()

    # -- orbax's interface -----------------------------------------------------------------------

    @property
    def directory(self) -> Any:
        """The directory of the disk tier."""
        return self._disk.directory

    def all_steps(self, read: bool = False) -> Sequence[int]:
        """Returns the steps that can be restored now, from either tier, ascending."""
        return sorted({*self._memory_steps(), *self._disk.all_steps(read=read)})

    def latest_step(self) -> int | None:
        """Returns the newest step that can be restored now, or None."""
        return max(self.all_steps(), default=None)

    def best_step(self) -> int | None:
        """Returns the best step on disk by orbax's best_fn."""
        return self._disk.best_step()

    def reload(self) -> None:
        """Reads the disk tier's directory again."""
        self._disk.reload()

    def reached_preemption(self, step: int) -> bool:
        """Says whether orbax has seen a preemption notice."""
        return self._disk.reached_preemption(step)

    def should_save(self, step: int) -> bool:
        """Says whether `save` would do something."""
        return self._in_memory(step) or self._disk.should_save(step)

    def delete(self, step: int) -> None:
        """Removes a step from both tiers."""
        self.wait_until_finished()
        for found in self._survey():
            if found.step == step:
                self._drop(found.oid)
        if step in self._disk.all_steps():
            self._disk.delete(step)

    def save(
        self, step: int, *positional: Any, args: Any = None, metrics: Any = None,
        force: bool = False, custom_metadata: Any = None,
    ) -> bool:
        """Saves a step where it is due; returns whether it was due anywhere.

        Returns once the state is held: afterwards it may be donated or mutated.

        Raises:
          CheckpointError: the state has leaves that cannot be saved.
        """
        if positional or args is None:
            raise CheckpointError("call save(step, args=ocp.args.Composite(...) or StandardSave(...))")
        self._report()
        done = False
        if (force or self._in_memory(step)) and step != self._last_started:
            done = self._save_memory(step, args, metrics)
        if force or self._disk.should_save(step):
            done = self._disk.save(
                step, args=args, metrics=metrics, force=force, custom_metadata=custom_metadata
            ) or done
        return done

    def restore(self, step: int | None = None, *positional: Any, args: Any = None, **_: Any) -> Any:
        """Returns the items of a step: from memory where it is there, else from disk.

        Args:
          step: which; None for the newest that can be restored.
          args: as orbax's; None for everything as it was saved.

        Raises:
          CheckpointError: the step is in neither tier, or damaged beyond the code in the one and
            absent from the other.
          FileNotFoundError: there is no step at all.
        """
        if positional:
            raise CheckpointError("call restore(step, args=...)")
        self.wait_until_finished()
        found = [f for f in self._survey() if f.margin() >= 0]
        disk = list(self._disk.all_steps())
        steps = sorted({*(f.step for f in found), *disk}, reverse=True) if step is None else [step]
        steps = [int(s) for s in self._agreed(np.array([*steps[:64], *[-1] * (64 - len(steps))])) if s >= 0]
        if not steps:
            raise FileNotFoundError(f"no step in memory, none in {self.directory}")
        problems = []
        for candidate in steps:
            objects = [f for f in found if f.step == candidate]
            if self._all(bool(objects)):
                try:
                    result, problem = self._restore_memory(objects[0], args), ""
                except CheckpointError as error:
                    result, problem = None, str(error)
                if self._all(not problem):
                    return result
                problems.append(f"memory: {problem or 'another process could not read it'}")
                warn(f"step {candidate} is not restored from memory: {problem}")
            if candidate in disk:
                return self._disk.restore(candidate, args=args)
        raise CheckpointError(
            f"step {step} cannot be restored. "
            + ("; ".join(problems) or "It is in neither tier")
            + f". In memory: {sorted(f.step for f in found)}; on disk: {sorted(disk)}"
        )

    def item_metadata(self, step: int) -> Any:
        """Returns metadata of the items of a step."""
        found = next((f for f in self._survey() if f.step == step), None)
        if found is None or found.manifest is None:
            return self._disk.item_metadata(step)
        whole = tree_metadata(found.manifest, self.directory).tree
        items = {k: ItemMetadata(v) for k, v in whole.items()} if isinstance(whole, dict) else {}
        return items[DEFAULT_ITEM] if list(items) == [DEFAULT_ITEM] else ocp.args.Composite(**items)

    def metadata(self, step: int | None = None) -> Any:
        """Returns orbax's metadata of the disk tier."""
        return self._disk.metadata(step)

    def metrics(self, step: int) -> Any:
        """Returns the metrics given with a step, or None."""
        for found in self._survey():
            if found.step == step and found.manifest is not None:
                return found.manifest.extra.get("metrics")
        return self._disk.metrics(step)

    def wait_until_finished(self) -> None:
        """Waits until nothing is being saved; trouble of the memory tier becomes a warning."""
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()
        self._disk.wait_until_finished()
        self._report()

    def check_for_errors(self) -> None:
        """Raises what the disk tier met in the background; warns of the memory tier's trouble."""
        self._disk.check_for_errors()
        self._report()

    def is_saving_in_progress(self) -> bool:
        """Says whether a save is running in the background."""
        return (self._pending is not None and not self._pending.done()) or (
            self._disk.is_saving_in_progress()
        )

    def close(self) -> None:
        """Waits for what is running and closes the disk tier; the agents keep what they hold."""
        self.wait_until_finished()
        self._worker.shutdown()
        self._disk.close()

    def __enter__(self) -> ECCheckpointManager:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    # -- the memory tier -------------------------------------------------------------------------

    def memory_steps(self) -> list[int]:
        """Returns the steps that can be restored from memory or a drain, ascending."""
        return sorted(self._memory_steps())

    def _in_memory(self, step: int) -> bool:
        return step % self._every == 0 and (
            self._last_started is None or step > self._last_started
        )

    def _survey(self) -> list[Found]:
        if not self._tier.config.agents and not self._tier.config.drain_dir:
            return []
        try:
            return self._tier.survey(self._name).found
        except CheckpointError as error:  # all refuse this job: the disk tier stands beneath
            self._tier.note(f"nothing is looked for in memory: {error}")
            return []

    def _memory_steps(self) -> set[int]:
        return {f.step for f in self._survey() if f.margin() >= 0}

    def _drop(self, oid: str) -> None:
        tier = self._tier
        tier.client.pool.each(tier.config.agents, lambda a: tier.client.pool.peer(a).call(
            "drop", oids=[oid], timeout_s=tier.config.rpc_timeout_s))
        for folder in find_drained(tier.drain_dir(), tier.config.job):
            if save_of(folder.name) == save_of(oid) and tier.writers()[0] == 0:
                shutil.rmtree(folder, ignore_errors=True)

    def _save_memory(self, step: int, args: Any, metrics: Any) -> bool:
        if self._pending is not None:
            self._pending.result()
        if not self._tier.agree():
            return False
        items = _composite(args)
        trees = {
            name: wishes.cast_for_save(a.item, a.save_args) for name, a in items.items() if is_tree(a)
        }
        others = {name: a for name, a in items.items() if not is_tree(a)}
        snapshot = self._tier.snapshot(trees, save_files(others, self._registry))
        extra: dict[str, Any] = {"files": {
            name: "json" if isinstance(a, ocp.args.JsonSave) else type(a).__name__
            for name, a in others.items()
        }}
        if metrics is not None:
            extra["metrics"] = metrics
        self._last_started = step

        def work() -> None:
            try:
                seen = self._survey()
                good = [f.oid for f in seen if f.margin() >= 0 and f.step != step]
                self._tier.save(snapshot, name=self._name, step=step, live=good[: self._keep],
                                protect=good[:1], extra=extra)
                self._prune_drained()
            except CheckpointError as error:
                _log.warning("step %d was not saved to memory: %s", step, error)
                with self._lock:
                    self._problems.append(f"step {step} was not saved to memory: {error}")

        self._pending = self._worker.submit(work)
        return True

    def _prune_drained(self) -> None:
        """Removes drained steps that a step on disk or in memory has made useless."""
        directory = self._tier.config.drain_dir
        newest = max(self._disk.all_steps(), default=-1)
        if not directory or newest < 0 or self._tier.writers()[0] != 0:
            return
        for folder in find_drained(directory, self._tier.config.job):
            with contextlib.suppress(OSError, CheckpointError):
                manifest = parse_manifest((folder / "manifest.json").read_bytes())
                if manifest.name == self._name and manifest.step < newest:
                    shutil.rmtree(folder)

    def _report(self) -> None:
        self._tier.tell()
        with self._lock:
            problems, self._problems = self._problems, []
        for problem in problems:
            warn(problem)

    def _restore_memory(self, found: Found, args: Any) -> Any:
        reader = self._tier.reader(found, self._tier.survey(self._name))
        items = _composite(args) if args is not None else self._all_items(reader)
        trees = {name: a for name, a in items.items() if is_tree(a)}
        others = {name: a for name, a in items.items() if not is_tree(a)}
        missing = sorted(set(items) - set.union(*item_names(reader)))
        if missing:
            raise CheckpointError(f"{reader.manifest.title} has no item {', '.join(missing)}")
        results: dict[str, Any] = dict.fromkeys(items)
        results.update(_restore_trees(reader, trees))
        results.update(restore_files(reader, others, self._registry))
        if args is not None and not isinstance(args, ocp.args.Composite):
            return results[DEFAULT_ITEM]
        if args is None and list(results) == [DEFAULT_ITEM]:
            return results[DEFAULT_ITEM]
        return ocp.args.Composite(**results)

    def _all_items(self, reader: ObjectReader) -> dict[str, Any]:
        trees, files = item_names(reader)
        items: dict[str, Any] = {name: ocp.args.StandardRestore() for name in trees}
        kinds: Mapping[str, str] = reader.manifest.extra.get("files", {})
        for name in files:
            if kinds.get(name) == "json":
                items[name] = ocp.args.JsonRestore()
            else:
                warn(f"item '{name}' ({kinds.get(name)}) is left out; name its restore arguments")
        return items

    # -- several processes -----------------------------------------------------------------------

    def _agreed(self, value: np.ndarray) -> np.ndarray:
        """Returns the first process's value in all of them."""
        _, count, shared = self._tier.writers()
        if count == 1 or not shared:
            return value
        from jax.experimental import multihost_utils

        return np.asarray(multihost_utils.broadcast_one_to_all(value.astype(np.int32)))

    def _all(self, good: bool) -> bool:
        """Says whether it is good in every process."""
        _, count, shared = self._tier.writers()
        if count == 1 or not shared:
            return good
        from jax.experimental import multihost_utils

        return bool(np.asarray(multihost_utils.process_allgather(np.array([good]))).all())


def _composite(args: Any) -> dict[str, Any]:
    if isinstance(args, ocp.args.Composite):
        return dict(args.items())
    return {DEFAULT_ITEM: args}


def _restore_trees(reader: ObjectReader, items: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the trees of items, each read in one go."""
    results = {}
    for name, args in items.items():
        target = args.item
        restore_args = getattr(args, "restore_args", None)
        if target is None and restore_args is not None:
            target = restore_args
        if target is None:
            results[name] = restore_tree(reader, None, None, only=name)
            continue
        if isinstance(args, ocp.args.PyTreeRestore):
            if args.transforms is not None or args.legacy_transform_fn is not None:
                raise CheckpointError("transforms are not supported; transform after the restore")
            base: Any = wishes.as_saved if restore_args is None else wishes.of_restore_args(
                restore_args, wishes.of_target())
        else:
            base = wishes.of_target(args.fallback_sharding, args.strict)
        results[name] = restore_tree(reader, target, base, only=name)
    return results
