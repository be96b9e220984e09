"""In which interpreter a family's library is: our own, or the virtual environment of its recipe."""

from __future__ import annotations

import sys
from importlib.metadata import Distribution, DistributionFinder, MetadataPathFinder
from pathlib import Path

from .access import Access
from .recipes import Recipe


def interpreter(recipe: Recipe, access: Access) -> Path | None:
    """The one that has a recipe's releases; None where none has. What was installed apart goes first: it may
    hold packages that came with `--with`."""
    python = Path(access.folder) / recipe.name / "bin" / "python" if access.folder else None
    if python is not None and python.is_file():
        return python
    return Path(sys.executable) if recipe.is_here else None


def releases(python: Path, names: tuple[str, ...]) -> dict[str, str]:
    """Releases of distributions in an interpreter, without starting it; those that it lacks are left out."""
    return {name: release for name in names if (release := _release(python, name)) is not None}


def _release(python: Path, name: str) -> str | None:
    if python == Path(sys.executable):
        found = Distribution.discover(name=name)
    else:
        places = [str(place) for place in (python.parent.parent / "lib").glob("python3*/site-packages")]
        context = DistributionFinder.Context(name=name, path=places)
        found = MetadataPathFinder.find_distributions(context)
    return next((one.version for one in found), None)
