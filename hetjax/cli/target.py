"""FILE.py:build on the command line: the user's file is run and its function called."""

from __future__ import annotations

import importlib.util
import pathlib
import sys
import traceback
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from hetjax.frontend.parity import Case


def load_case(target: str) -> Case:
    """Returns what FILE.py:build gives: step, state, batches and meta.

    Args:
      target: "FILE.py:NAME"; NAME is "build" when left out. The file's folder comes first on
        `sys.path`, as when it is run as a script.

    Raises:
      click.UsageError: the file, the function or the form of its result is wrong.
    """
    from hetjax.frontend.parity import FRAMEWORKS, Case

    name, colon, attribute = target.rpartition(":")
    if not colon:
        name, attribute = target, "build"
    path = pathlib.Path(name)
    if path.suffix != ".py":
        raise click.UsageError(f"{target!r} is not FILE.py:build; {name!r} is not a Python file")
    if not path.is_file():
        raise click.UsageError(f"there is no file {str(path.absolute())!r}")
    function = getattr(_load(path), attribute, None)
    if not callable(function):
        names = sorted(n for n, v in vars(_load(path)).items() if callable(v) and n[0] != "_")
        raise click.UsageError(
            f"{path} defines no function {attribute!r}; it defines {', '.join(names[:12]) or 'none'}"
        )
    result: Any = _run(function, f"{path}:{attribute}()")
    form = f"{path}:{attribute}() must return (step, state, batches, meta)"
    if not isinstance(result, tuple) or len(result) != 4:
        size = f" of {len(result)}" if isinstance(result, tuple) else ""
        raise click.UsageError(f"{form}; it returned a {type(result).__name__}{size}")
    step, state, batches, meta = result
    problems = []
    if not callable(step):
        problems.append(f"step is a {type(step).__name__}, which cannot be called")
    if not hasattr(batches, "__iter__"):
        problems.append(f"batches is a {type(batches).__name__}, which cannot be iterated")
    if not isinstance(meta, dict):
        problems.append(f"meta is a {type(meta).__name__}, not a dict")
    elif meta.get("framework", "linen") not in FRAMEWORKS:
        problems.append(
            f"meta['framework'] is {meta['framework']!r}; it is one of {', '.join(FRAMEWORKS)}"
        )
    if problems:
        raise click.UsageError(f"{form}:\n  " + "\n  ".join(problems))
    return Case(step, state, batches, meta)


def _load(path: pathlib.Path) -> Any:
    name = f"_hetjax_target_{path.stem}"
    if name in sys.modules and sys.modules[name].__file__ == str(path.absolute()):
        return sys.modules[name]
    folder = str(path.absolute().parent)
    if folder not in sys.path:
        sys.path.insert(0, folder)
    spec = importlib.util.spec_from_file_location(name, path.absolute())
    if spec is None or spec.loader is None:
        raise click.UsageError(f"{path} cannot be loaded as a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    execute = spec.loader.exec_module
    try:
        _run(lambda: execute(module), str(path))
    except click.ClickException:
        del sys.modules[name]
        raise
    return module


def _run(function: Callable[[], Any], what: str) -> Any:
    """Calls the user's code; what it raises is shown with its traceback and is not a fault of ours."""
    try:
        return function()
    except Exception as error:
        traceback.print_exc()
        raise click.ClickException(f"{what} raised {type(error).__name__}: {error}") from error
