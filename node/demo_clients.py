"""Volunteers of other implementations in a demo: how they are started, and what the trainer measured of each.

The demo is where a client's author sees first whether rollouts made elsewhere pass token by token: the
figures of every key stand beside each other, under the thresholds of the run.
"""

from __future__ import annotations

import shlex
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec

from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import peer_id

from .wording import printable, refusals

if TYPE_CHECKING:
    from nous_node.envs.access import Access

    from .audit_report import Finding
    from .journal_tables import PeerRecord
    from .runfolder import RunFolder

KEEP = 64
"""Checkpoints that the trainer of such a demo keeps: those whose groups its journal still has."""

INVITE, HOME = "{invite}", "{home}"


class ClientFigures(msgspec.Struct, frozen=True, kw_only=True):
    """What became of one key's groups. Means are over the groups that could be measured again at the end."""

    peer: str
    """Peer id."""
    agent: str
    """What it called itself in its hello."""
    accepted: int
    refused: dict[str, int]
    """Groups by code."""
    versions: int
    """Checkpoints of which recorded groups were accepted."""
    measured: int
    """Groups that were measured again."""
    logprob: float
    """Mean difference of log-probs. [VER-10]"""
    distance: float
    """Mean d. [VER-10]"""
    largest: float
    """Largest d of one token."""


def read_command(text: str, invite: str, home: Path) -> list[str]:
    """The words of a command, with the invite and the home where it wants them. Raises LocalError."""
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise LocalError(f"--client {text!r} is no command line: {error}.") from None
    if not any(INVITE in word for word in words):
        raise LocalError(f"--client {text!r} has no {INVITE}: put it where the client takes the invite.")
    return filled(words, invite, home)


def filled(words: Sequence[str], invite: str, home: Path) -> list[str]:
    """A command with the invite and the home in their places."""
    return [word.replace(INVITE, invite).replace(HOME, str(home)) for word in words]


def figures_of(run: RunFolder, access: Access) -> list[ClientFigures]:
    """Of every key that had a group accepted or refused. Imports torch. Raises StorageError."""
    from .audit import Auditor
    from .recorded import JournalRecords
    from .recorded_checkpoints import RecordedCheckpoints

    if not run.journal.is_file():  # the trainer ended before it had one
        return []
    with JournalRecords(run.journal) as records:
        checkpoints = RecordedCheckpoints(
            run.run, run.manifest, run.path, None, [records.published], lambda _: None
        )
        auditor = Auditor(run.run, run.manifest, checkpoints, access)
        findings = (finding for lot in records.lots() for finding in auditor.audit(lot, records.entries(lot)))
        return _joined(run.journal, findings)


@dataclass(slots=True)
class _Sums:
    """Of one key."""

    versions: set[int] = field(default_factory=set)
    groups: int = 0
    tokens: float = 0.0
    logprob: float = 0.0
    distance: float = 0.0
    largest: float = 0.0

    def add(self, finding: Finding) -> None:
        if finding.version is not None and finding.recorded == "accepted":
            self.versions.add(finding.version)
        if finding.tokens and finding.distance is not None and finding.code == "":
            self.groups += 1
            self.tokens += finding.tokens
            self.logprob += finding.tokens * (finding.measured or 0.0)
            self.distance += finding.tokens * finding.distance
            self.largest = max(self.largest, finding.largest or 0.0)


def _joined(journal: Path, findings: Iterable[Finding]) -> list[ClientFigures]:
    from .store import Journal

    sums: defaultdict[str, _Sums] = defaultdict(_Sums)
    for finding in findings:
        sums[finding.peer].add(finding)
    with Journal.read(journal) as opened:
        return [_figures(peer, sums[peer.key.hex()]) for peer in opened.peers()]


def _figures(peer: PeerRecord, sums: _Sums) -> ClientFigures:
    weight = sums.tokens or 1.0
    return ClientFigures(
        peer=peer_id(peer.key),
        agent=peer.record.agent,
        accepted=peer.record.accepted,
        refused=peer.refused,
        versions=len(sums.versions),
        measured=sums.groups,
        logprob=sums.logprob / weight,
        distance=sums.distance / weight,
        largest=sums.largest,
    )


def table(clients: Sequence[ClientFigures]) -> list[str]:
    """Lines for a person; none where there are no clients."""
    if not clients:
        return []
    lines = ["  of each volunteer, measured again with the trainer's own policy:"]
    lines += [
        f"    {printable(one.agent) or 'unnamed':<20} {one.peer[-8:]}  {one.accepted:,} accepted, "
        f"{refusals(one.refused)}; {one.versions} versions; mean log-prob difference {one.logprob:.1e}, "
        f"mean d {one.distance:.1e}, largest d {one.largest:.1e} ({one.measured:,} groups)"
        for one in clients
    ]
    return lines
