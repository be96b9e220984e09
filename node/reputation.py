"""How a trainer treats a key: a state machine over verdicts on the content of its groups. Spec: `specs/10`.

The score counts faults: each accepted group multiplies it by DECAY, each refusal adds its weight.

    state        what moves it on                                               to
    probation    PASSED accepted groups of two versions or more, score < 1      active
    active       score >= 2                                                     throttled
    throttled    score < 0.5                                                    active
    any of them  score >= 4, or `drift`, or `wrong-checkpoint`                  quarantine
    any of them  the same after MAX_QUARANTINES quarantines                     banned
    quarantine   its end                                                        probation, with score = 1
    banned       nothing

Refusals with a soft code happen to honest nodes and change nothing, however many they are. The score forgets
by accepted groups and never by time: waiting, restarting or reconnecting washes nothing. [REP-1] [REP-2]
"""

from __future__ import annotations

from typing import Final

import msgspec
from msgspec.structs import replace

from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import State

DECAY: Final = 0.98
"""Of the score, by an accepted group: a fault weighs half after 34 of them."""

PASSED: Final = 16
"""Accepted groups that end a probation: minutes of work, checked to the last token."""

TRUSTED_BELOW: Final = 1.0
"""Score below which a probation may end: one fault at its beginning is lived down by its end."""

THROTTLED_FROM: Final = 2.0
RELIEVED_BELOW: Final = 0.5
QUARANTINED_FROM: Final = 4.0
"""Four faults of full weight at once: no single mistake, and no single bad batch, goes so far."""

RETURN_SCORE: Final = 1.0
"""After a quarantine: three more faults lead back into it."""

QUARANTINE_SECONDS: Final = 60
QUARANTINE_GROWTH: Final = 4
MAX_QUARANTINE_SECONDS: Final = 86_400
MAX_QUARANTINES: Final = 6
"""Quarantines before a ban: 1, 4, 16, 64, 256 and 1,024 minutes, a day of waiting in all."""

FORGIVEN_AFTER: Final = 1_000
"""Accepted groups since the last quarantine that make one quarantine forgotten."""

NEAR: Final = 10.0
"""A mismatch below so many times its threshold may be another engine's arithmetic."""
SLIGHT: Final = 0.5
"""Weight of such a mismatch, and of an environment that failed: whoever made the group ran it on these tokens
before, but time and memory may differ."""

SOFT: Final = frozenset(
    {
        Code.UNSUPPORTED_VERSION,
        Code.UNKNOWN_KIND,
        Code.EXPIRED,
        Code.FUTURE_DATED,
        Code.DUPLICATE,
        Code.SEQUENCE_REUSED,
        Code.RATE,
        Code.QUARANTINED,
        Code.BANNED,
        Code.UNKNOWN_CHECKPOINT,
        Code.STALE,
        Code.BUSY,
        Code.KEY_TOO_NEW,
        Code.WITHHELD,
        Code.REPETITION,
        Code.UNAVAILABLE,
        Code.NOT_FOUND,
    }
)
"""Codes that never count against a sender: `specs/assigned.md`."""

AUDIT_CODES: Final = frozenset(
    {
        Code.FINISH,
        Code.LOGPROB_MISMATCH,
        Code.SAMPLING_MISMATCH,
        Code.DRIFT,
        Code.WRONG_CHECKPOINT,
    }
)
"""What only an audit finds, steps 10 to 13 of a verification: a key's groups without one are in doubt then.
[VER-13]"""

_AT_ONCE: Final = frozenset({Code.DRIFT, Code.WRONG_CHECKPOINT})
"""What many groups together have proven: no score has to grow first."""

_MEASURED: Final = frozenset({Code.LOGPROB_MISMATCH, Code.SAMPLING_MISMATCH})


class Reputation(msgspec.Struct, frozen=True):
    """How one key stands."""

    state: State = "probation"
    score: float = 0.0
    """Content faults, decayed by accepted groups."""
    passed: int = 0
    """Accepted groups of this probation."""
    first_version: int = -1
    """Of the first of them; -1 before it."""
    several: bool = False
    """Whether they are of two versions or more."""
    quarantines: int = 0
    """That it has had and that are not forgotten."""
    since: int = 0
    """Accepted groups since the last one."""
    until_ms: int = 0
    """Unix milliseconds at which a quarantine ends; 0 in another state."""

    @property
    def trusted(self) -> bool:
        """Whether groups of it are taken at all."""
        return self.state not in ("quarantine", "banned")

    def accepted(self, version: int, now: int) -> Reputation:
        """After an accepted group of a checkpoint's version. `now`: Unix milliseconds."""
        if not self.trusted:
            return self  # judged before the key went into quarantine
        passing = self.state == "probation"
        since = self.since + 1
        forgotten = since % FORGIVEN_AFTER == 0 and self.quarantines > 0
        first = self.first_version if self.first_version >= 0 else version
        after = replace(
            self,
            score=self.score * DECAY,
            passed=min(self.passed + passing, PASSED),
            first_version=first if passing else self.first_version,
            several=self.several or (passing and version != first),
            quarantines=self.quarantines - forgotten,
            since=since,
        )
        return after._moved(now)

    def refused(self, code: str, measured: float | None, threshold: float | None, now: int) -> Reputation:
        """After a refused group. `code` and the two figures are those of its receipt."""
        weight = weight_of(code, measured, threshold)
        if weight == 0 or not self.trusted:
            return self
        after = replace(self, score=self.score + weight)
        return after._quarantined(now) if code in _AT_ONCE else after._moved(now)

    def at(self, now: int) -> Reputation:
        """As time passes: a quarantine ends."""
        if self.state != "quarantine" or now < self.until_ms:
            return self
        return Reputation(score=RETURN_SCORE, quarantines=self.quarantines, since=self.since)

    def _moved(self, now: int) -> Reputation:
        """Into the state that the score asks for."""
        if self.score >= QUARANTINED_FROM:
            return self._quarantined(now)
        match self.state:
            case "probation" if self.passed >= PASSED and self.several and self.score < TRUSTED_BELOW:
                return replace(self, state="active")
            case "active" if self.score >= THROTTLED_FROM:
                return replace(self, state="throttled")
            case "throttled" if self.score < RELIEVED_BELOW:
                return replace(self, state="active")
        return self

    def _quarantined(self, now: int) -> Reputation:
        if self.quarantines >= MAX_QUARANTINES:
            return replace(self, state="banned", until_ms=0)
        seconds = min(QUARANTINE_SECONDS * QUARANTINE_GROWTH**self.quarantines, MAX_QUARANTINE_SECONDS)
        return replace(
            self,
            state="quarantine",
            quarantines=self.quarantines + 1,
            since=0,
            until_ms=now + 1000 * seconds,
        )


def weight_of(code: str, measured: float | None, threshold: float | None) -> float:
    """What a refusal adds to the score. Some codes count once a key and checkpoint, which is the caller's to
    see to."""
    if code in SOFT:
        return 0.0
    if code == Code.ENVIRONMENT_FAILED:
        return SLIGHT
    if code == Code.COPIED and measured is None:
        return 0.0  # whoever was first may be the copy [VER-7]
    if code in _MEASURED and measured is not None and threshold is not None and measured < NEAR * threshold:
        return SLIGHT
    return 1.0
