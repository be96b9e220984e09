"""The messages that a node remembers, to recognise replays. Spec: `specs/04-gossip.md`."""

from __future__ import annotations

from dataclasses import dataclass, field

from .constants import MAX_REMEMBERED
from .envelope import Envelope
from .errors import Code, RemoteError

MEMORY_SHARES = 64
"""Once half of the memory is in use, a key of which more than one share of it is remembered waits. Below
that one volunteer may use all of it, which is 218 groups a second; the other half takes 32 keys to fill."""

_MINUTE_MS = 60_000


@dataclass(slots=True)
class Memory:
    """Digests and sequence numbers of signed messages that have not expired."""

    ids: dict[bytes, tuple[bytes, int]] = field(default_factory=dict)
    """Envelope id -> (sender, seq)."""
    numbers: dict[tuple[bytes, int], bytes] = field(default_factory=dict)
    """(sender, seq) -> envelope id."""
    held: dict[bytes, int] = field(default_factory=dict)
    """Sender -> its messages here."""
    minutes: dict[int, list[bytes]] = field(default_factory=dict)
    """Minute of expiry -> ids, so that forgetting costs nothing for what stays."""
    room: int = MAX_REMEMBERED
    """Messages that are remembered at most."""
    shares: int = MEMORY_SHARES
    """Of the room; a key has one of them once half of it is in use."""

    def check(self, envelope: Envelope) -> None:
        """RemoteError(DUPLICATE | SEQUENCE_REUSED). [GOS-5]"""
        if envelope.id in self.ids:
            raise RemoteError(Code.DUPLICATE, "The message was seen before.")
        if (envelope.head.sender, envelope.head.seq) in self.numbers:
            raise RemoteError(
                Code.SEQUENCE_REUSED,
                f"Another message of this sender has the sequence number {envelope.head.seq}.",
                measured=envelope.head.seq,
            )

    def check_room(self) -> None:
        """RemoteError(BUSY) where as much is remembered as may be. [GOS-9]"""
        if len(self.ids) >= self.room:
            raise RemoteError(
                Code.BUSY,
                "Too many messages are remembered; new ones wait.",
                measured=len(self.ids),
                threshold=self.room,
            )

    def check_share(self, sender: bytes) -> None:
        """RemoteError(RATE) where this sender has its share of what may be remembered. [GOS-9]"""
        share = self.room // self.shares
        held = self.held.get(sender, 0)
        if held >= share and len(self.ids) >= self.room // 2:
            raise RemoteError(
                Code.RATE,
                f"{held} messages of this sender are remembered, which is its share.",
                measured=held,
                threshold=share,
            )

    def add(self, envelope: Envelope) -> None:
        sender = envelope.head.sender
        number = (sender, envelope.head.seq)
        self.ids[envelope.id] = number
        self.numbers[number] = envelope.id
        self.held[sender] = self.held.get(sender, 0) + 1
        self.minutes.setdefault(envelope.head.exp // _MINUTE_MS, []).append(envelope.id)

    def forget(self, now: int) -> None:
        """Drops the minutes that are over: a replay of what expired in them fails its expiry check."""
        for minute in [minute for minute in self.minutes if (minute + 1) * _MINUTE_MS <= now]:
            for digest in self.minutes.pop(minute):
                self.remove(digest)

    def remove(self, digest: bytes) -> None:
        """Forgets a message: for who could not take it after all, and takes it when it comes again."""
        number = self.ids.pop(digest, None)
        if number is None:
            return
        self.numbers.pop(number, None)
        self.held[number[0]] -= 1
        if not self.held[number[0]]:
            del self.held[number[0]]
