"""Hellos: a node makes its key known, and a trainer says from when on it counts. [HEL-1] [HEL-2]

A hello may cross new versions on its way, so what a node knew when it sent one says nothing: only the answer
does. `Greeting` is the node's half, `Answers` the trainer's.

    unanswered -> answered       by a trainer, or by a `key-too-new` receipt that says from when on
    answered   -> unanswered     by one that says that no hello was heard: a journal was lost
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from typing import Final

import trio

from nous_node.protocol.receipts import Known, Receipt

from .following import Following
from .network_errors import NoSubscribersError
from .outbox import Outbox

FIRST_REPEAT_SECONDS: Final = 2.0
"""From the first hello to the second: an answer takes a tenth of a second where nothing is lost."""

REPEAT_SECONDS: Final = 10.0
"""Between hellos after that: within the rate that a key has of them. [GOS-6]"""

NOBODY_SECONDS: Final = 0.2
"""After a hello that nobody could be given."""

SILENT_SECONDS: Final = 30.0
"""After a trainer has published a version and answered none of several hellos: it is of a revision that
does not answer."""

ANSWERED_AT_ONCE: Final = 1_024
"""Answers of one message: 50 KB."""

MAX_DUE: Final = 65_536
"""Answers that wait to be published: keys cost nothing, and a hello that gets none is repeated."""

MAX_AHEAD: Final = 16
"""Versions by which an answer may be ahead of the newest that is known here. What is further ahead is no
answer: hellos are repeated, so one that was true comes again once this node has caught up, and one that was
not would have it wait for ever."""

_STORED: Final = b""
"""Stands for the trainer whose answer was kept over a restart."""


class Counting:
    """From when on a key counts, by what the trainers of a run answer. `kept`: as it was stored."""

    def __init__(self, kept: int | None) -> None:
        self.known_from = kept
        """Later versions count for the key [TSK-6]; None before an answer."""
        self._answers: dict[bytes, int] = {} if kept is None else {_STORED: kept}
        """By trainer: each hears for itself, and a version counts for sure that is later than all say."""

    def answered(self, trainer: bytes, version: int, newest: int) -> None:
        """A trainer says the newest version when it first heard of the key. `newest`: known to this node."""
        if version > newest + MAX_AHEAD:
            return
        self._answers[trainer] = version
        if self._answers.get(_STORED, -1) > newest:  # of a journal that was lost since
            del self._answers[_STORED]
        self.known_from = max(self._answers.values())

    def too_new(self, trainer: bytes, threshold: float | None, newest: int) -> None:
        """The same by a `key-too-new` receipt; None: the trainer never heard of the key."""
        if threshold is None:
            self._answers.clear()
            self.known_from = None
        elif threshold.is_integer() and threshold >= 0:
            self.answered(trainer, int(threshold) - 1, newest)


class Greeting:
    """Of `key`, at the trainers of one run. `say` publishes a hello; it raises NoSubscribersError."""

    def __init__(
        self, key: bytes, following: Following, outbox: Outbox, say: Callable[[], Awaitable[None]]
    ) -> None:
        self._key, self._following, self._outbox, self._say = key, following, outbox, say
        self._counting = Counting(outbox.known_from)
        self._first: int | None = None
        """Newest version when the first hello went out."""
        self._newer_since: float | None = None
        """When a later one than that was known."""
        self._answered, self._forgotten = trio.Event(), trio.Event()

    @property
    def known_from(self) -> int | None:
        """Later versions count for the key; None before the answer."""
        return self._counting.known_from

    def counts(self, version: int) -> bool:
        """Whether that version counts for the key."""
        return self.known_from is not None and version > self.known_from

    async def answered(self) -> None:
        """Until it is known which versions count."""
        while self.known_from is None:
            await self._answered.wait()

    async def loop(self) -> None:
        """Says hello, and again until a version counts for the key: whoever answered may have lost its
        journal since. [HEL-1]"""
        while True:
            pause, version = REPEAT_SECONDS, self._following.version
            if not self.counts(version):
                try:
                    await self._say()
                except NoSubscribersError:
                    await trio.sleep(NOBODY_SECONDS)
                    continue
                if self._first is None:
                    pause, self._first = FIRST_REPEAT_SECONDS, version
            with trio.move_on_after(pause):
                await self._forgotten.wait()
            self._assume()

    def note_known(self, trainer: bytes, known: Sequence[Known]) -> None:
        """What a trainer answers to hellos, among them perhaps ours. [HEL-2]"""
        for answer in known:
            if answer.peer == self._key:
                with self._noted():
                    self._counting.answered(trainer, answer.version, self._following.version)

    def note_too_new(self, trainer: bytes, receipt: Receipt) -> None:
        """A `key-too-new` receipt for a group of ours: from when on the key counts, or that it was never
        heard of, and then it begins again. [TSK-6]"""
        known = self.known_from is not None
        with self._noted():
            self._counting.too_new(trainer, receipt.threshold, self._following.version)
        if known and self.known_from is None:
            self._first = self._newer_since = None
            self._forgotten.set()
            self._forgotten = trio.Event()

    @contextmanager
    def _noted(self) -> Iterator[None]:
        """Stores what changes within, and wakes whoever waits for an answer."""
        before = self.known_from
        yield
        if self.known_from != before:
            self._outbox.note_known(self.known_from)
        if self.known_from is not None:
            self._answered.set()
            self._answered = trio.Event()

    def _assume(self) -> None:
        """Where nobody answers: that the first hello arrived at once. A receipt says so if it did not."""
        if self.known_from is not None or self._first is None or self._following.version <= self._first:
            return
        if self._newer_since is None:
            self._newer_since = trio.current_time()
        elif trio.current_time() - self._newer_since >= SILENT_SECONDS:
            with self._noted():
                self._counting.answered(_STORED, self._first, self._following.version)


class Answers:
    """Of one trainer, until they are published."""

    def __init__(self) -> None:
        self._due: dict[bytes, int] = {}

    def heard(self, keys: Mapping[bytes, int]) -> None:
        """Hellos that were journalled: key -> newest version when it was first heard of."""
        for key, version in keys.items():
            if key in self._due or len(self._due) < MAX_DUE:
                self._due[key] = version

    def due(self) -> list[Known]:
        """What is to be said now, those that have waited longest first."""
        return [Known(key, version) for key, version in islice(self._due.items(), ANSWERED_AT_ONCE)]

    def told(self, known: Sequence[Known]) -> None:
        """They were published."""
        for answer in known:
            self._due.pop(answer.peer, None)
