"""WORKSPACE.md, the map of the house, names every module, by itself or by its folder."""

from __future__ import annotations

import pathlib

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[1]
MAP = ROOT / "WORKSPACE.md"


@pytest.mark.skipif(not MAP.is_file(), reason="an installed wheel has no map beside its tests")
def test_the_map_names_every_module():
    text = MAP.read_text()
    links = [ROOT / "hetjax" / name for name in ("ir", "passes", "kernels")]
    missing = []
    for top in ("ir", "passes", "kernels", "hetjax"):
        for path in sorted((ROOT / top).rglob("*.py")):
            if path.name in ("__init__.py", "__main__.py") or any(link in path.parents for link in links):
                continue
            name = path.relative_to(ROOT)
            if not any(f"`{p}`" in text or f"`{p}/`" in text for p in (name, *name.parents)):
                missing.append(str(name))
    assert not missing, f"WORKSPACE.md has no line for {', '.join(missing)}"


@pytest.mark.skipif(not MAP.is_file(), reason="an installed wheel has no map beside its tests")
def test_the_map_has_each_line_once():
    paths = [line.split("`")[1] for line in MAP.read_text().splitlines() if line.startswith("| `")]
    assert sorted(paths) == sorted(set(paths))
