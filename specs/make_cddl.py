"""Writes specs/cddl/*.cddl: the `cddl` blocks of each chapter, one file a chapter."""

from __future__ import annotations

import re
from pathlib import Path

FOLDER = Path(__file__).parent
BLOCK = re.compile(r"^```cddl\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def main() -> None:
    for chapter in sorted(FOLDER.glob("[0-9][0-9]-*.md")):
        blocks = BLOCK.findall(chapter.read_text())
        if blocks:
            text = f"; {chapter.name}\n\n" + "\n".join(blocks)
            (FOLDER / "cddl" / f"{chapter.stem}.cddl").write_text(text)


if __name__ == "__main__":
    main()
