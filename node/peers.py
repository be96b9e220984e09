"""`nous-node peers`: who takes part in a run that is trained here, also while the trainer runs.

Everything is read from the run's journal; nothing is written and nobody is asked.
"""

from __future__ import annotations

import time
from bisect import bisect_right
from collections.abc import Sequence
from pathlib import Path

import msgspec

from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import peer_id
from nous_node.protocol.receipts import State

from .cli_commands import home_hint, home_path
from .network_stats import Offender
from .runfolder import RunFolder, check_name
from .store import Journal, PeerRecord
from .wording import count, duration, moment, printable, refusals

KEY_CHARACTERS = 16
"""Of a key in hexadecimal that are shown: enough to tell a million keys apart."""

AGENT_CHARACTERS = 24

NAMED_PEERS = 10
"""Connection peers without a key that are named one by one; --json has all."""

_TITLES = [
    "key",
    "state",
    "accepted",
    "refused",
    "credit",
    "debit",
    "rank",
    "score",
    "faults",
    "seen",
    "agent",
]
_RIGHT = frozenset({"accepted", "credit", "debit", "rank", "score", "faults"})


class KeyStatus(msgspec.Struct, frozen=True, tag="key", tag_field="kind"):
    """A key that greeted the trainer."""

    key: str
    """Hexadecimal."""
    peer: str
    """Its peer id, under which its node connects."""
    state: State
    until: float | None
    """Unix seconds at which its quarantine ends."""
    score: float
    quarantines: int
    accepted: int
    refused: dict[str, int]
    """By code, the most frequent first."""
    credit: int
    debit: int
    rank: int
    """1 for the most credit less debit; 0 without any."""
    of: int
    """Keys with a rank."""
    faults: int
    """Of its node in the transport."""
    refused_until: float | None
    """Unix seconds to which its node was refused a connection, where it ever was."""
    heard: float
    """Unix seconds of its first greeting."""
    seen: float
    """Unix seconds, to some seconds."""
    agent: str


class ConnectionStatus(msgspec.Struct, frozen=True, tag="connection", tag_field="kind"):
    """A connection peer with faults of the transport that never greeted: a relay, or a stranger."""

    peer: str
    faults: int
    refused_until: float | None


def print_peers(run: str | None, home: Path | None, *, json: bool) -> None:
    """To stdout; one JSON line a peer with `json`. Raises LocalError where it is not clear which run."""
    folder = chosen(home_path(home), run, home_hint(home))
    now = time.time()
    keys, others = participants(folder, now)
    if json:
        for one in (*keys, *others):
            print(msgspec.json.encode(one).decode())
        return
    print("\n".join(lines(folder.manifest.name, keys, others, now)))


def chosen(home: Path, run: str | None, hint: str = "") -> RunFolder:
    """The run of that name, else the only one. `hint`: what a proposed command ends with."""
    if run is not None:
        check_name(run)
        if not (home / "runs" / run).is_dir():
            raise LocalError(f"There is no run in {home / 'runs' / run}; `nous-node status{hint}` names all.")
        return RunFolder.open(home / "runs" / run)
    names = sorted(folder.parent.name for folder in home.glob("runs/*/run.envelope"))
    if not names:
        raise LocalError(
            f"No run is trained in {home}. Make one with `nous-node init NAME{hint}`, or name the trainer's "
            "home with --home."
        )
    if len(names) > 1:
        told = ", ".join(printable(name, 64) for name in names)
        raise LocalError(
            f"Several runs are trained in {home}: {told}. Say which one: `nous-node peers RUN{hint}`."
        )
    return RunFolder.open(home / "runs" / names[0])


def participants(folder: RunFolder, now: float) -> tuple[list[KeyStatus], list[ConnectionStatus]]:
    """Keys, those with most credit first, and connection peers without one. `now`: Unix seconds. Raises
    StorageError."""
    if not folder.journal.is_file():
        return [], []
    with Journal.read(folder.journal) as journal:
        records, offenders = journal.peers(), {one.peer: one for one in journal.offenders()}
    nets = sorted(net for one in records if (net := one.record.credit - one.record.debit) > 0)
    keys = [_key(one, offenders.pop(peer_id(one.key), None), nets, now) for one in records]
    rest = sorted(offenders.values(), key=lambda one: (-one.faults, one.peer))
    return keys, [ConnectionStatus(one.peer, one.faults, _seconds(one.refused_until_ms)) for one in rest]


def lines(name: str, keys: Sequence[KeyStatus], others: Sequence[ConnectionStatus], now: float) -> list[str]:
    """A table for a person. `now`: Unix seconds."""
    if not keys and not others:
        return [f"Nobody has taken part in {printable(name, 64)} yet."]
    told = _table([_row(one, now) for one in keys]) if keys else []
    if others:
        named = ", ".join(f"{printable(one.peer, 64)} {one.faults:,}" for one in others[:NAMED_PEERS])
        more = ", ..." if len(others) > NAMED_PEERS else ""
        told.append(f"faults of peers without a key here: {named}{more}")
    return told


def _key(one: PeerRecord, offender: Offender | None, nets: Sequence[int], now: float) -> KeyStatus:
    record, reputation = one.record, one.record.reputation.at(int(1000 * now))
    net = record.credit - record.debit
    return KeyStatus(
        key=one.key.hex(),
        peer=peer_id(one.key),
        state=reputation.state,
        until=_seconds(reputation.until_ms) if reputation.state == "quarantine" else None,
        score=reputation.score,
        quarantines=reputation.quarantines,
        accepted=record.accepted,
        refused=one.refused,
        credit=record.credit,
        debit=record.debit,
        rank=1 + len(nets) - bisect_right(nets, net) if net > 0 else 0,
        of=len(nets),
        faults=0 if offender is None else offender.faults,
        refused_until=None if offender is None else _seconds(offender.refused_until_ms),
        heard=record.heard_ms / 1000,
        seen=record.seen_ms / 1000,
        agent=record.agent,
    )


def _row(one: KeyStatus, now: float) -> dict[str, str]:
    refused_now = one.refused_until is not None and one.refused_until > now
    return {
        "key": one.key[:KEY_CHARACTERS],
        "state": one.state if one.until is None else f"{one.state} until {moment(1000 * one.until)}",
        "accepted": f"{one.accepted:,}",
        "refused": refusals(one.refused).replace(" refused", ""),
        "credit": count(one.credit),
        "debit": count(one.debit),
        "rank": f"{one.rank:,} of {one.of:,}" if one.rank else "-",
        "score": f"{one.score:.2f}",
        "faults": f"{one.faults:,}{' (refused)' if refused_now else ''}",
        "seen": f"{duration(max(0.0, now - one.seen))} ago",
        "agent": printable(one.agent, AGENT_CHARACTERS),
    }


def _table(rows: Sequence[dict[str, str]]) -> list[str]:
    widths = {title: max(len(title), *(len(row[title]) for row in rows)) for title in _TITLES}

    def line(row: dict[str, str]) -> str:
        cells = [
            row[title].rjust(width) if title in _RIGHT else row[title].ljust(width)
            for title, width in widths.items()
        ]
        return "  ".join(cells).rstrip()

    return [line({title: title for title in _TITLES}), *map(line, rows)]


def _seconds(milliseconds: int) -> float | None:
    return milliseconds / 1000 if milliseconds else None
