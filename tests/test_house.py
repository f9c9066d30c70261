"""The house stands: arrows of import point down, no circles, a lazy front door, one door to private JAX."""

from __future__ import annotations

import ast
import importlib
import json
import pathlib
import pkgutil
import subprocess
import sys
from collections.abc import Iterator

import pytest

import hetjax

PACKAGE = pathlib.Path(hetjax.__file__).resolve().parent

# package -> the packages of ours it may import. A package not named here may import all of them.
TOWER = {
    "hetjax.ir": (),
    "hetjax.kernels": (),
    "hetjax.passes": ("hetjax.ir",),
    "hetjax.runtime": ("hetjax.ir", "hetjax.kernels"),
    "hetjax.optim": ("hetjax.ir", "hetjax.kernels"),
}
# Where planning and pricing live; they never import a module that defines a pass.
SEARCH = ("hetjax.passes.search", "hetjax.passes.cost", "hetjax.passes.simulate")
PRIVATE = ("jax._src", "jax.interpreters", "jaxlib.mlir", "jaxlib._jax", "jaxlib._sdy_mpmd")
HEAVY = ("flax", "optax", "xgboost", "orbax", "grpc", "rich", "pyeclib", "ray", "treescope")

# Optional extras: where one is not installed, the modules that need it cannot be imported.
EXTRAS = {"grpc", "google", "prometheus_client", "xxhash", "pyeclib", "ray", "treescope", "IPython"}


def modules() -> dict[str, pathlib.Path]:
    """Returns every module of the package by dotted name, through the links ir, passes and kernels."""
    out = {"hetjax": PACKAGE / "__init__.py"}
    pending = [("hetjax", PACKAGE)]
    while pending:
        prefix, folder = pending.pop()
        for entry in sorted(folder.iterdir()):
            if entry.is_dir() and (entry / "__init__.py").is_file():
                out[f"{prefix}.{entry.name}"] = entry / "__init__.py"
                pending.append((f"{prefix}.{entry.name}", entry))
            elif entry.suffix == ".py" and entry.name != "__init__.py":
                out[f"{prefix}.{entry.stem}"] = entry
    return out


MODULES = modules()
TREES = {name: ast.parse(path.read_text(), str(path)) for name, path in MODULES.items()}


def imports(name: str, *, at_import_time: bool) -> Iterator[tuple[str, int]]:
    """Yields (dotted name, line) of what a module imports, submodules spelled out.

    Args:
      name: the module.
      at_import_time: leave out what is imported inside functions. TYPE_CHECKING blocks never count.
    """

    def visit(node: ast.AST) -> Iterator[tuple[str, int]]:
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test):
            for child in node.orelse:
                yield from visit(child)
            return
        if at_import_time and isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            return
        if isinstance(node, ast.Import):
            yield from ((alias.name, node.lineno) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                package = name if MODULES[name].name == "__init__.py" else name.rpartition(".")[0]
                parents = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*parents, base] if base else parents)
            for alias in node.names:
                full = f"{base}.{alias.name}"
                if full not in MODULES and base == "hetjax":
                    full = hetjax._EXPORTS.get(alias.name) or hetjax._MODULES.get(alias.name, base)
                yield (full if full in MODULES or base in PRIVATE_PARENTS else base), node.lineno
        for child in ast.iter_child_nodes(node):
            yield from visit(child)

    yield from visit(TREES[name])


# `from jax import interpreters` must read as jax.interpreters, not as jax.
PRIVATE_PARENTS = {p.rpartition(".")[0] for p in PRIVATE}


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


@pytest.mark.quick
def test_arrows_of_import_point_down():
    wrong = []
    for name in MODULES:
        floor = next((p for p in TOWER if within(name, p)), None)
        if floor is None:
            continue
        for target, line in imports(name, at_import_time=False):
            if within(target, "hetjax") and not any(within(target, p) for p in (floor, *TOWER[floor])):
                wrong.append(f"{name}:{line} imports {target}")
    assert not wrong, "\n".join(wrong)


@pytest.mark.quick
def test_search_and_cost_never_import_a_pass():
    passes = {
        name
        for name, tree in TREES.items()
        if within(name, "hetjax.passes")
        and any(
            isinstance(n, ast.ClassDef)
            and any(isinstance(m, ast.FunctionDef) and m.name == "apply" for m in n.body)
            for n in ast.walk(tree)
        )
    }
    wrong = [
        f"{name}:{line} imports {target}"
        for name in MODULES
        if any(within(name, s) for s in SEARCH)
        for target, line in imports(name, at_import_time=False)
        if target in passes - {name}
    ]
    assert not wrong, "\n".join(wrong)


def circle(edges: dict[str, set[str]]) -> list[str]:
    """Returns one circle of a directed graph as a list of nodes, or []."""
    done: set[str] = set()
    for root in edges:
        path: list[str] = []
        stack = [(root, iter(sorted(edges[root])))] if root not in done else []
        if stack:
            path.append(root)
        while stack:
            _, targets = stack[-1]
            target = next(targets, None)
            if target is None:
                stack.pop()
                done.add(path.pop())
            elif target in path:
                return [*path[path.index(target) :], target]
            elif target not in done and target in edges:
                stack.append((target, iter(sorted(edges[target]))))
                path.append(target)
    return []


@pytest.mark.quick
def test_circle_is_found_where_there_is_one():
    assert circle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert circle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []


@pytest.mark.quick
def test_no_circles_between_modules():
    edges = {
        name: {t for t, _ in imports(name, at_import_time=True) if t in MODULES} - {name}
        for name in MODULES
    }
    assert not circle(edges), " -> ".join(circle(edges))


@pytest.mark.quick
def test_no_circles_between_packages_even_late():
    def package(name: str) -> str:
        return ".".join(name.split(".")[:2])

    edges: dict[str, set[str]] = {package(name): set() for name in MODULES}
    for name in MODULES:
        targets = {package(t) for t, _ in imports(name, at_import_time=False) if t in MODULES}
        edges[package(name)] |= targets - {package(name)}
    # The front door names what stands behind it, as text; nothing of it is imported until asked for.
    edges["hetjax"] = set()
    edges = {name: targets - {"hetjax"} for name, targets in edges.items()}
    assert not circle(edges), " -> ".join(circle(edges))


@pytest.mark.quick
def test_private_jax_has_one_door():
    wrong = [
        f"{name}:{line} imports {target}"
        for name in MODULES
        if name != "hetjax.ir._jax"
        for target, line in imports(name, at_import_time=False)
        if any(within(target, p) for p in PRIVATE)
    ]
    assert not wrong, "\n".join(wrong)


@pytest.mark.quick
def test_our_folders_are_imported_through_hetjax():
    wrong = [
        f"{name}:{line} imports {target}; write hetjax.{target}"
        for name in MODULES
        for target, line in imports(name, at_import_time=False)
        if target.split(".")[0] in ("ir", "passes", "kernels")
    ]
    assert not wrong, "\n".join(wrong)


def fresh(code: str) -> str:
    """Returns what a fresh interpreter prints; a failure shows its error."""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=PACKAGE.parent)
    assert run.returncode == 0, run.stderr
    return run.stdout


@pytest.mark.quick
def test_import_brings_nothing_heavy():
    loaded = json.loads(fresh("import hetjax, sys, json; print(json.dumps(sorted(sys.modules)))"))
    heavy = [m for m in loaded if m.split(".")[0] in HEAVY]
    assert not heavy


@pytest.mark.quick
def test_help_imports_no_jax():
    out = fresh(
        "import sys\nfrom hetjax.cli.main import main\n"
        "try: main(['--help'])\nexcept SystemExit as e: assert e.code == 0, e.code\n"
        "print('\\n', [m for m in ('jax', 'numpy', 'rich', 'flax') if m in sys.modules])"
    )
    assert "Usage: hetjax" in out
    assert out.splitlines()[-1].strip() == "[]"


def submodules() -> list[str]:
    # __main__ runs the command line when it is imported.
    names = [m.name for m in pkgutil.walk_packages(hetjax.__path__, "hetjax.")]
    return [n for n in names if not n.endswith("__main__")]


@pytest.mark.quick
def test_no_submodule_bears_the_name_of_a_public_function():
    taken = {n.rpartition(".")[2] for n in submodules() if n.count(".") == 1}
    assert not taken & set(hetjax._EXPORTS)


@pytest.mark.quick
def test_type_checkers_see_the_names_that_run():
    block = next(n for n in ast.walk(TREES["hetjax"]) if isinstance(n, ast.If))
    seen = {
        alias.asname: f"{node.module}" for node in block.body if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    runs = hetjax._EXPORTS | {name: module.rpartition(".")[0] for name, module in hetjax._MODULES.items()}
    assert seen == runs
    assert set(hetjax.__all__) == {*runs, "__version__"}
@pytest.mark.quick
def test_parallelize_imports_no_optional_library():
    loaded = json.loads(
        fresh("import hetjax, sys, json; hetjax.parallelize; print(json.dumps(sorted(sys.modules)))")
    )
    heavy = sorted({m.split(".")[0] for m in loaded} & set(HEAVY))
    assert not heavy


@pytest.mark.quick
def test_every_public_name_works_after_every_submodule_was_imported():
    assert set(submodules()) == set(MODULES) - {"hetjax", "hetjax.__main__"}
    missing = []
    for name in submodules():
        try:
            importlib.import_module(name)
        except ImportError as error:
            if error.name is None or error.name.split(".")[0] not in EXTRAS:
                raise
            missing.append(error.name)
    for name in hetjax.__all__:
        value = getattr(hetjax, name)
        if name in hetjax._EXPORTS:
            assert callable(value), f"hetjax.{name} is {value!r}"
            assert value.__name__ == name
    assert len(set(missing)) <= len(EXTRAS)


@pytest.mark.quick
def test_every_command_is_registered_once_and_helps():
    from hetjax.cli.main import COMMANDS, cli

    for name in COMMANDS:
        command = cli.get_command(None, name)  # type: ignore[arg-type]
        assert command is not None
        assert command.name == name
        assert command.help, f"hetjax {name} says nothing about itself"
