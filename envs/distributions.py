"""Installed distributions: their names as versions are made of, and where a host process finds them."""

from __future__ import annotations

import json
import re
import site
import tomllib
from importlib.metadata import Distribution
from pathlib import Path
from urllib.parse import unquote, urlsplit


def normal(name: str) -> str:
    """A distribution's name in its one spelling: lower case, `-` for each run of `-`, `_` and `.`."""
    return re.sub(r"[-_.]+", "-", name).lower()


def places(distribution: Distribution) -> tuple[Path, ...]:
    """Folders outside of the interpreter's own where its modules are: of an editable install, or on
    PYTHONPATH."""
    root = Path(str(distribution.locate_file(""))).resolve()
    own = {Path(one).resolve() for one in (*site.getsitepackages(), site.getusersitepackages())}
    found = [] if root in own else [root]
    checkout = _checkout(distribution)
    if checkout is not None:
        found.append(checkout)
    return tuple(found)


def _checkout(distribution: Distribution) -> Path | None:
    """Where an editable install was made from."""
    text = distribution.read_text("direct_url.json")
    if text is None:
        return None
    try:
        said = json.loads(text)
        url = urlsplit(said["url"])
        editable = bool(said.get("dir_info", {}).get("editable"))
    except (ValueError, KeyError, TypeError, AttributeError):
        return None
    if not editable or url.scheme != "file":
        return None
    folder = Path(unquote(url.path))
    return folder if _is_of(folder, normal(distribution.name)) else None


def _is_of(folder: Path, name: str) -> bool:
    """Whether a folder is a project of this name. A package may bring a `direct_url.json` that no installer
    wrote, which names the user's home: its own name is in none of the files there."""
    built = [one.stem for place in ("", "src") for one in (folder / place).glob("*.egg-info")]
    return name in {normal(one) for one in (*_declared(folder), *built) if isinstance(one, str)}


def _declared(folder: Path) -> list[object]:
    """The names that a project's files give it."""
    try:
        said = tomllib.loads((folder / "pyproject.toml").read_text("utf-8"))
    except (OSError, ValueError):
        return []
    tool = said.get("tool")
    tables = [said.get("project"), tool.get("poetry") if isinstance(tool, dict) else None]
    return [table.get("name") for table in tables if isinstance(table, dict)]
