"""The learner process as the trainer sees it: candidates in, verdicts and new checkpoints out.

A learner that dies is started again at the last published checkpoint and is given every journalled group
that went into no version; nothing is used twice and nothing is lost.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import cast

import trio

from nous_node.protocol.errors import LocalError

from .child_log import open_log
from .home import StorageError
from .learner_messages import (
    Broken,
    Candidate,
    FromLearner,
    Open,
    Opened,
    Proceed,
    Published,
    ToLearner,
    Verify,
)
from .pipe import ChildDied, ChildPipe, end_child, start_child

OPEN_SECONDS = 600.0
"""Until a learner has loaded policy and optimizer and measured the held-out accuracy."""


VERDICT_SECONDS = 600.0
"""Until the verdicts on a batch: 64 groups on a model of a billion parameters take minutes on a CPU."""

SILENCE_SECONDS = 1800.0
"""Until a learner that works on a batch is taken for hanging: an update of a model of billions on a CPU."""


class LearnerError(LocalError):
    """The learner cannot go on by being started again."""


class Coach:
    """One learner process."""

    def __init__(self, *, threads: int, log: Path) -> None:
        self._threads, self._log = threads, log
        self._judging = False
        self._pipe: ChildPipe[ToLearner, FromLearner] | None = None

    async def open(self, message: Open) -> Opened:
        """Starts a learner. Raises ChildDied, or LearnerError where it says that it cannot work."""
        await self.close()
        threads = str(self._threads)
        with open_log(self._log) as log:
            self._pipe = await start_child(
                "nous_node.node.learner",
                cast("type[FromLearner]", FromLearner),
                log.fileno(),
                {
                    "OMP_NUM_THREADS": threads,
                    "MKL_NUM_THREADS": threads,
                    "TOKENIZERS_PARALLELISM": "false",
                    "HF_HUB_OFFLINE": "1",
                    "PYTHONHASHSEED": "0",
                },
            )
        await self._running.send(message)
        with trio.move_on_after(OPEN_SECONDS):
            match await self.receive():
                case Opened() as opened:
                    return opened
                case other:
                    raise LearnerError(f"The learner answered with a {type(other).__name__}.")
        raise ChildDied(f"The learner was not ready after {OPEN_SECONDS:.0f} s; its log is {self._log}.")

    async def verify(self, groups: Sequence[Candidate]) -> None:
        """Its next message are the verdicts; then it waits for `proceed`."""
        await self._running.send(Verify(list(groups)))
        self._judging = True

    async def proceed(self, distrusted: Sequence[bytes] = ()) -> None:
        """`distrusted`: keys whose groups that wait for an update are not to be trained on any more."""
        await self._running.send(Proceed(list(distrusted)))

    async def published(self, version: int) -> None:
        await self._running.send(Published(version))

    async def receive(self) -> FromLearner:
        """The learner's next message. Raises ChildDied; LearnerError or StorageError with its own words."""
        message: FromLearner | None = None
        seconds = VERDICT_SECONDS if self._judging else SILENCE_SECONDS
        with trio.move_on_after(seconds):
            message = await self._running.receive()
        if message is None:
            raise ChildDied(f"The learner said nothing for {seconds / 60:.0f} minutes and was ended.")
        self._judging = False
        if isinstance(message, Broken):
            raise StorageError(message.text) if message.storage else LearnerError(message.text)
        return message

    async def close(self) -> None:
        if self._pipe is not None:
            pipe, self._pipe = self._pipe, None
            await end_child(pipe.process)

    @property
    def _running(self) -> ChildPipe[ToLearner, FromLearner]:
        if self._pipe is None:
            raise ChildDied("The learner is not running.")
        return self._pipe
