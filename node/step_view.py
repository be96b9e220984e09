"""Steps of a long command: the latest beside a spinner on a terminal, a line each elsewhere.

Under `--json` each is a `note` event. Steps go to stderr, so that stdout has the answer alone.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from .wording import printable

MAX_STEP = 400
"""Characters of a step: it may name a long path."""


@contextmanager
def steps(*, as_json: bool) -> Iterator[Callable[[str], None]]:
    """What is told to the function is shown; on a terminal only while the block runs."""
    if as_json:
        yield _note
    elif sys.stderr.isatty():
        from rich.console import Console
        from rich.text import Text

        with Console(stderr=True).status(Text("Starting")) as status:
            yield lambda text: status.update(Text(printable(text, MAX_STEP)))
    else:
        yield lambda text: print(printable(text, MAX_STEP), file=sys.stderr, flush=True)


def _note(text: str) -> None:
    import msgspec

    from .events import Note

    print(msgspec.json.encode(Note(printable(text, MAX_STEP))).decode(), file=sys.stderr, flush=True)
