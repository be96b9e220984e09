"""What is known of one checkpoint in the swarm: which of its chunks are here, and which others have.

Sets of chunks are the bits of an integer: chunk i of a checkpoint is bit i, as in a have-bitmap. [STR-4]
No clock and no I/O: times are arguments, in seconds.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from nous_node.protocol.checkpoints import CheckpointManifest, FileEntry
from nous_node.protocol.streams import bitmap, read_bitmap

MAX_MEMBERS = 256
"""Participants of one checkpoint that are remembered."""

MEMBER_SECONDS = 120.0
"""For which one is remembered that says no more; one that has everything, as long as it is connected."""

MAX_NEIGHBOURS = 32
"""Peers that are asked what they have of a checkpoint, have not answered yet or have delivered."""

NEWCOMERS = 2
"""Peers that are asked in any case, each time: who only says much fills no place."""

TELLS_PER_S = 4.0
TELLS_BURST = 8.0
"""Messages about one checkpoint that are taken of one peer."""

ASK_AGAIN_S = 5.0
"""Before a peer is asked again that did not know the checkpoint, or did not answer."""


@dataclass(slots=True)
class Member:
    """A peer that takes part."""

    have: int
    heard: float
    http: int | None
    told: int
    """What of ours it was told last."""
    assumed: bool = False
    """It does not say what it has, and is asked for everything."""


@dataclass(slots=True)
class Share:
    """One checkpoint."""

    checkpoint: bytes
    digests: list[bytes]
    """Of its chunks: those of `files`, then those of `deltas`."""
    files: int
    deltas: int
    """The sets of them."""
    positions: dict[bytes, int] = field(default_factory=dict)
    """The first position of each hash."""
    have: int = 0
    members: OrderedDict[str, Member] = field(default_factory=OrderedDict)
    liars: set[str] = field(default_factory=set)
    """Sources that delivered a bad chunk of this checkpoint."""
    no_http: set[str] = field(default_factory=set)
    """Peers at whose port somebody delivered one: they are not asked so again, whatever port they tell."""
    givers: set[str] = field(default_factory=set)
    """Connected peers that delivered a good chunk."""
    ask_at: dict[str, float] = field(default_factory=dict)
    """Neighbours that were asked, and when they may be asked again."""
    _twins: dict[bytes, int] = field(default_factory=dict)
    """Hashes that occur more than once: all their positions."""
    _tells: OrderedDict[str, tuple[float, float]] = field(default_factory=OrderedDict)
    """Of peers: how many messages more were taken, and when that was so."""

    @classmethod
    def of(cls, checkpoint: bytes, manifest: CheckpointManifest) -> Share:
        files, deltas = _digests(manifest.files), _digests(manifest.deltas)
        both = files + deltas
        share = cls(checkpoint, both, (1 << len(files)) - 1, ((1 << len(deltas)) - 1) << len(files))
        for position, digest in enumerate(both):
            first = share.positions.setdefault(digest, position)
            if first != position:
                share._twins[digest] = share._twins.get(digest, 1 << first) | 1 << position
        return share

    @property
    def whole(self) -> int:
        return self.files | self.deltas

    def add(self, digest: bytes) -> None:
        """A chunk has come."""
        self.have |= self._twins.get(digest) or 1 << self.positions[digest]

    # Bitmaps

    def bitmap(self) -> bytes | None:
        """What is here, as it goes to others."""
        return bitmap(self.have, len(self.digests)) if self.have else None

    def heard(self, peer: str, have: bytes | None, http: int | None, told: int, now: float) -> None:
        """What a peer says that it has, while it was told what we have.

        Raises RemoteError where that is no bitmap of this checkpoint.
        """
        claims = 0 if have is None else read_bitmap(have, len(self.digests))
        self._remember(peer, Member(claims, now, http, told))

    def silent(self, peer: str, now: float) -> None:
        """A peer does not speak of what it has."""
        self._remember(peer, Member(self.whole, now, None, self.whole, assumed=True))

    def _remember(self, peer: str, member: Member) -> None:
        self.members[peer] = member
        self.members.move_to_end(peer)
        while len(self.members) > MAX_MEMBERS:
            idle = (one for one in self.members if one not in self.givers)
            del self.members[next(idle, next(iter(self.members)))]

    def takes(self, peer: str, now: float) -> bool:
        """Whether one more message of a peer is taken."""
        level, at = self._tells.pop(peer, (TELLS_BURST, now))
        level = min(TELLS_BURST, level + (now - at) * TELLS_PER_S)
        taken = level >= 1
        self._tells[peer] = level - taken, now
        if len(self._tells) > MAX_MEMBERS:
            self._tells.popitem(last=False)
        return taken

    # Whom to tell and to ask

    def complete(self, member: Member) -> bool:
        """Whether a member needs nothing more: deltas only lead to the files."""
        return member.have & self.files == self.files

    def due(self, connected: Sequence[str], now: float, *, curious: bool) -> list[str]:
        """Neighbours to exchange bitmaps with now; with `curious` also those of whom nothing is known, the
        first of `connected` first."""
        self._forget(connected, now)
        unknown: list[str] = []
        known: list[str] = []
        for peer in connected:
            member = self.members.get(peer)
            if peer in self.liars or self.ask_at.get(peer, 0.0) > now:
                continue
            if member is None:
                unknown.append(peer)
            elif not self.complete(member) and member.told != self.have:
                known.append(peer)
        taken = sum(self.ask_at.get(peer, 0.0) > now or peer in self.givers for peer in connected)
        room = max(NEWCOMERS, MAX_NEIGHBOURS - taken)
        return known[:MAX_NEIGHBOURS] + (unknown[:room] if curious else [])

    def _forget(self, connected: Sequence[str], now: float) -> None:
        here = set(connected)
        self.givers &= here
        for peer, member in list(self.members.items()):
            lasting = peer in here and self.complete(member)
            if now - member.heard > MEMBER_SECONDS and not lasting:
                del self.members[peer]
        for peer in [peer for peer, at in self.ask_at.items() if at <= now]:
            del self.ask_at[peer]

    def takers(self, connected: Sequence[str]) -> Iterator[Member]:
        """Connected members that still download: what they have may grow."""
        for peer in connected:
            member = self.members.get(peer)
            if member is not None and not self.complete(member) and peer not in self.liars:
                yield member


def _digests(entries: Sequence[FileEntry]) -> list[bytes]:
    return [digest for entry in entries for digest in entry.hashes()]
