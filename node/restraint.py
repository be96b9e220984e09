"""Whether a trainer takes groups of our key now: quarantine with its end, or a ban. [RCP-7]

How long a quarantine still lasts is the difference of two times of the trainer's clock: ours may be wrong.
Standings and receipts say so; what was said last is also in the outbox, so that a restart forgets nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import trio

from nous_node.protocol.errors import Code, LocalError
from nous_node.protocol.receipts import Receipt, Standing

from .events import Note, Report
from .following import now_ms
from .outbox import Outbox
from .reputation import MAX_QUARANTINE_SECONDS
from .wording import duration, moment, printable

REASONS = 3
"""Codes named as the reason: the last refusals are mostly of one kind."""

RECENT = 100
"""Groups looked through for the reason."""

LONGEST_MS = 1000 * (MAX_QUARANTINE_SECONDS + 60)
"""For which the word of a trainer holds a node back, a minute for clocks included: a quarantine that is said
to last longer is none that the protocol has, and most likely a lie or a broken clock."""

FOR_EVER = math.inf


class BannedError(LocalError):
    """The key can take no part in the run any more."""


class Restraint:
    """Of one key. Times are Unix milliseconds; `clock` gives them."""

    def __init__(self, key: bytes, outbox: Outbox, report: Report, clock: Callable[[], int] = now_ms) -> None:
        self._key, self._outbox, self._report, self._clock = key, outbox, report, clock
        self.standing: Standing | None = None
        """What a trainer said last of the key."""
        self._until = 0.0
        self._said = 0
        """Time of what a trainer said last, by a standing or a receipt: the latest word holds."""
        self._standing_ts = 0
        self._changed = trio.Event()
        self._told = trio.Event()
        """Set by the next standing."""
        word = outbox.word
        if word is not None and word.standing.peer == key:
            self.standing = word.standing
            self._said = self._standing_ts = word.ts
            if word.standing.state == "quarantine":  # a ban may have been lifted since: the trainer says so
                self._hold(self._bounded(word.standing.until - clock()))

    def note_standing(self, standing: Standing, ts: int, proof: bytes) -> None:
        """A standing of our key in the signed envelope `proof` of time `ts`; older ones change nothing."""
        self._outbox.note_standing(standing, ts, proof)
        if ts >= self._standing_ts:
            self.standing, self._standing_ts = standing, ts
            self._told.set()
            self._told = trio.Event()
        if ts < self._said:
            return
        self._said = ts
        match standing.state:
            case "banned":
                self._hold(FOR_EVER)
            case "quarantine":
                self._hold(self._bounded(standing.until - ts))
            case _:
                self._hold(0)

    def note_receipt(self, receipt: Receipt, ts: int) -> None:
        """A receipt for any group of ours, in an envelope of time `ts`."""
        if ts < self._said:
            return
        match receipt.code:
            case Code.BANNED:
                until = FOR_EVER
            case Code.QUARANTINED if receipt.threshold is not None:
                said = ts if receipt.measured is None else receipt.measured
                until = self._bounded(receipt.threshold - said)
            case _:
                return
        self._said = ts
        self._hold(until)

    @property
    def holds(self) -> bool:
        """Whether nothing of ours would be taken."""
        return self._until > self._clock()

    async def lifted(self) -> None:
        """Until groups of ours are taken again; for ever where the key is banned."""
        while (left := self._until - self._clock()) > 0:
            with trio.move_on_after(left / 1000):
                await self._changed.wait()

    async def told_of(self, accepted: int) -> None:
        """Until the trainer's last word counts so many accepted groups of ours."""
        while self.standing is None or self.standing.accepted < accepted:
            await self._told.wait()

    async def watch(self) -> None:
        """Tells of the end of each quarantine. Raises BannedError. Runs beside the role."""
        while True:
            if not self.holds:
                await self._changed.wait()
                continue
            while self.holds:
                if self._until == FOR_EVER:
                    raise BannedError(
                        f"The trainer has banned this key from the run{self._reasons()}. Nothing more is "
                        "generated; ask the run's owner if that seems wrong."
                    )
                with trio.move_on_after((self._until - self._clock()) / 1000):
                    await self._changed.wait()
            self._report(Note("The quarantine is over: groups are made again."))

    def doing(self) -> str:
        """For the live view."""
        return f"in quarantine until {moment(self._until)}" if self._until < FOR_EVER else "banned"

    def _bounded(self, left: float) -> float:
        """When a quarantine ends that lasts so many milliseconds more."""
        return self._clock() + min(max(left, 0), LONGEST_MS)

    def _hold(self, until: float) -> None:
        fresh = not self.holds
        self._until = until
        if fresh and self._clock() < until < FOR_EVER:
            self._report(
                Note(
                    f"The trainer has put this key in quarantine until {moment(until)} "
                    f"(for {duration((until - self._clock()) / 1000)}){self._reasons()}. Nothing is made "
                    "until then; `nous-node status` says what to mend meanwhile.",
                    "warning",
                )
            )
        self._changed.set()
        self._changed = trio.Event()

    def _reasons(self) -> str:
        """The last refusals that say anything of the groups themselves, in words."""
        told: dict[str, str] = {}
        for group in self._outbox.history(RECENT):
            if group.state == "refused" and group.code not in (Code.QUARANTINED, Code.BANNED):
                figures = ""
                if group.measured is not None and group.threshold is not None:
                    figures = f" ({group.measured:.4g}, limit {group.threshold:.4g})"
                told.setdefault(group.code, f"{printable(group.code, 64)}{figures}")
        named = list(told.values())[:REASONS]
        return f" after refusals with {', '.join(named)}" if named else ""
