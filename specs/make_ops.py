"""The table of ops in chapter 14, cut from `vectors/ops.toml`. `make_vectors.py` writes it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CHAPTER = FOLDER / "14-conformance.md"
TABLE = re.compile(r"(?s)(?<=<!-- ops: vectors/ops.toml -->\n).*?(?=<!-- end of ops -->)")
HEAD = "| op | file | of the case | of the file | `ok` holds |\n| --- | --- | --- | --- | --- |\n"


def texts() -> dict[Path, str]:
    """What the chapter should hold."""
    return {CHAPTER: TABLE.sub(lambda _: f"\n{table()}\n", CHAPTER.read_text())}


def table() -> str:
    ops = tomllib.loads((FOLDER / "vectors" / "ops.toml").read_text())
    return HEAD + "".join(_row(name, op) for name, op in ops.items())


def _row(name: str, op: dict[str, Any]) -> str:
    file = f"`{op.get('file', name)}`"
    if "has" in op:
        file += f" with {_names(op['has'])}"
    if "for" in op:
        file += f", for {op['for']}"
    cells = [f"`{name}`", file, _names(op["in"]), _names(op.get("also", [])), _names(op.get("out", []))]
    return f"| {' | '.join(cells)} |\n"


def _names(names: list[str]) -> str:
    return " ".join(f"`{name}`" for name in names)
