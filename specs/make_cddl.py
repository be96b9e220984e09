"""The CDDL files: the `cddl` blocks of each chapter, one file a chapter. `make_vectors.py` writes them."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"^```cddl\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def texts() -> dict[Path, str]:
    """What every file should hold."""
    made = {}
    for chapter in sorted(FOLDER.glob("[0-9][0-9]-*.md")):
        blocks = BLOCK.findall(chapter.read_text())
        if blocks:
            made[FOLDER / "cddl" / f"{chapter.stem}.cddl"] = f"; {chapter.name}\n\n" + "\n".join(blocks)
    return made
