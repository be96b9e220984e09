"""Which stage each chapter has reached, by the sheets of two clients (chapter 14, Stages).

.venv/bin/python specs/stages.py [--check|--write] SHEET.json SHEET.json [SHEET.json ...]

A sheet is what `nous-node conformance adapter|peer --json FILE` writes. `--check` fails where the header of a
chapter claims more than the sheets show; `--write` writes into headers and index what they show.
"""

from __future__ import annotations

import json
import re
import sys
import tomllib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent
CHAPTERS = [*sorted(FOLDER.glob("[0-9][0-9]-*.md")), *sorted(FOLDER.glob("*s/*.md"))]
CASE = re.compile(r"(.+?)-([0-9]+) ")
"""What the name of an adapter's row begins with: its file of vectors, and its number there."""
OPS: dict[str, dict[str, Any]] = tomllib.loads((FOLDER / "vectors" / "ops.toml").read_text())
ADAPTER = "adapter"
MEANING = {
    1: "working draft: one implementation",
    2: "candidate: a second implementation has a part of it",
    3: "two implementations work together",
}
"""What a header says beside the number."""


@dataclass(frozen=True)
class Chapter:
    """What a chapter claims, and by what it is tested."""

    path: Path
    stage: int
    ids: frozenset[str]
    files: tuple[str, ...]

    @classmethod
    def read(cls, path: Path) -> Chapter:
        text = path.read_text()
        stage = re.search(r"^\| Stage \| (\d)", text, re.MULTILINE)
        assert stage is not None, path
        named = text.split("\n## Vectors\n", 1)[-1].split("\n## ", 1)[0]
        ids = re.findall(r"\*\*\[([A-Z]{3}-[0-9]+)\]\*\*", text)
        files = dict.fromkeys(re.findall(r"vectors/([\w-]+)\.json", named))
        return cls(path, int(stage[1]), frozenset(ids), tuple(files))


Row = dict[str, Any]
Sheet = dict[str, Any]


def reached(chapter: Chapter, sheets: Sequence[Sheet]) -> int:
    """The stage that the sheets show. Clients are told apart by their names."""
    asked = [one for one in sheets if one["kind"] == ADAPTER]
    broken = any(chapter.ids & set(row["requires"]) for row in _failed(sheets))
    if broken or not chapter.files or len({one["client"] for one in asked}) < 2:
        return 1
    complete = [{file for file in chapter.files if _passes(one, file)} for one in asked]
    both = set.intersection(*complete)
    return 3 if both == set(chapter.files) else 2 if both else 1


def _failed(sheets: Sequence[Sheet]) -> Iterator[Row]:
    return (row for sheet in sheets for row in sheet["rows"] if row["outcome"] == "fail")


def _passes(sheet: Sheet, file: str) -> bool:
    """Whether all cases of a file, but for those of trainers, were asked and passed."""
    named = [(CASE.match(row["check"]), row["outcome"]) for row in sheet["rows"]]
    outcomes = {int(found[2]): outcome for found, outcome in named if found and found[1] == file}
    return all(outcomes.get(number) == "pass" for number in _asked(file))


@cache
def _asked(file: str) -> list[int]:
    """Numbers of the cases of a file that are not for trainers alone."""
    cases = json.loads((FOLDER / "vectors" / f"{file}.json").read_text())["cases"]
    own = [op for name, op in OPS.items() if op.get("file", name) == file]

    def wanted(case: dict[str, Any]) -> bool:
        op = next(one for one in own if all(field in case for field in one.get("has", [])))
        return "for" not in op

    return [number for number, case in enumerate(cases) if wanted(case)]


def write(chapter: Chapter, stage: int) -> None:
    """Sets the stage in the header of a chapter and in the index."""
    text = chapter.path.read_text()
    told = f"| Stage | {stage}, {MEANING[stage]} |"
    chapter.path.write_text(re.sub(r"^\| Stage \| .*$", told, text, count=1, flags=re.MULTILINE))
    index = FOLDER / "README.md"
    row = rf"(\({re.escape(chapter.path.relative_to(FOLDER).as_posix())}\) \| [^|]+ \| )\d( \|)"
    index.write_text(re.sub(row, rf"\g<1>{stage}\g<2>", index.read_text()))


def main(arguments: Sequence[str]) -> int:
    sheets = [json.loads(Path(name).read_text()) for name in arguments if not name.startswith("--")]
    wrong = 0
    for chapter in map(Chapter.read, CHAPTERS):
        stage = reached(chapter, sheets)
        if "--write" in arguments:
            write(chapter, stage)
        more = chapter.stage > stage
        wrong += more
        note = f"  claims {chapter.stage}: the sheets do not show it" if more else ""
        print(f"{chapter.path.relative_to(FOLDER)!s:36} {stage}{note}")
    return 1 if wrong and "--check" in arguments else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
