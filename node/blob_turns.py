"""Whose turn it is with /nous/blob/1: chunks that are held have the turns of the uplink, those of groups by
reference a few of their own. [STR-5]

    held      -> waits for an upload -> read, sent
    elsewhere -> fetched -> waits for an upload of its kind -> sent

So neither holds up the other, and no upload is held by what is still to come.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Final

import trio

from nous_node.protocol.encoding import read
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.streams import MAX_REQUEST, BlobRequest, blob_reply, busy_reply

from .blobs import BlobIndex
from .uploads import Turn, Uploads

REFERRED_SLOTS: Final = 4
"""Uploads of chunks of groups by reference at once; 1 where the uplink has only one for all others, too."""

REFERRED_WAITING: Final = 16
"""Of them that wait: each is in memory."""

FETCH_SECONDS: Final = 20.0
"""For which a request waits for a chunk that is fetched for it; then it is told to ask again."""


class BlobTurns:
    """Of one node, whose uplink is limited to `rate` bytes/s."""

    def __init__(self, index: BlobIndex, rate: float | None) -> None:
        self._index = index
        self._held = Uploads.at(rate, busy_reply())
        slots = 1 if rate is not None else REFERRED_SLOTS
        self._referred = Uploads(busy_reply(), slots, REFERRED_WAITING)

    @asynccontextmanager
    async def turn(self, peer: str, request: bytes) -> AsyncIterator[Turn]:
        """Raises RemoteError where it is no request."""
        wanted = read(request, BlobRequest, MAX_REQUEST).hash
        if self._index.elsewhere is None or self._index.holds(wanted):
            async with self._held.turn(peer) as turn:
                yield turn
            return
        try:
            with trio.fail_after(FETCH_SECONDS):
                data = await self._index.elsewhere(peer, wanted)
        except (RemoteError, trio.TooSlowError):
            yield Turn(peer, busy_reply())
            return
        if data is None:
            yield Turn(peer, blob_reply(None))
            return
        async with self._referred.turn(peer) as turn:
            if turn:
                turn.answer = blob_reply(data)
            yield turn
