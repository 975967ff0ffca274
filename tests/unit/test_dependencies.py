"""What the package imports is what it says it needs: a tool of the tests is no dependency of a run."""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from importlib.metadata import packages_distributions, requires
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
OWN = ("conf", "flows", "infra", "tasks", "tests")
ENGINES = {"vllm", "megatron", "transformer_engine"}
"""Of the extras gpu and engines-cpu; what needs them says so before it starts."""
BROUGHT = {
    "fsspec": "s3fs",
    "httpx": "prefect",
    "huggingface_hub": "transformers",
    "omegaconf": "hydra-core",
    "pydantic_core": "pydantic",
}
"""By a dependency, which cannot be without it."""


def _imported(folder: Path) -> Iterator[tuple[str, Path]]:
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((alias.name.partition(".")[0], path) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                yield node.module.partition(".")[0], path


def test_every_import_is_a_dependency_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    needed = {canonicalize_name(Requirement(text).name) for text in project["dependencies"]}
    known = packages_distributions()
    missing = {
        f"{name} ({path.relative_to(ROOT)})"
        for top in OWN[:-1]
        for name, path in _imported(ROOT / top)
        if name not in {*OWN, *ENGINES, *BROUGHT, *sys.stdlib_module_names}
        and not needed & {canonicalize_name(found) for found in known.get(name, [name])}
    }
    assert missing == set()


def test_what_a_dependency_brings_is_required_by_it() -> None:
    for module, bringer in BROUGHT.items():
        wanted = [Requirement(text) for text in requires(bringer) or ()]
        always = {canonicalize_name(found.name) for found in wanted if not found.marker or found.marker.evaluate()}
        assert canonicalize_name(module) in always, f"{bringer} does not bring {module}"
