"""Installed distributions: their names as versions are made of, and where a host process finds them."""

from __future__ import annotations

import json
import re
import site
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
    return Path(unquote(url.path)) if editable and url.scheme == "file" else None
