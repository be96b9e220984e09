"""Vectors of chapter 10: what verdicts and time make of a key, by the chapter's tables, written down once more."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from vectors_world import NOW, case

MISMATCH = ("logprob-mismatch", "sampling-mismatch")
SOFT = (
    "stale",
    "key-too-new",
    "withheld",
    "repetition",
    "unknown-checkpoint",
    "rate",
    "quarantined",
    "banned",
)
FAR, NEAR = (0.5, 1e-4), (9e-4, 1e-4)


@dataclass
class Key:
    """One key in the eyes of a trainer, and all that happens to it."""

    comment: str
    requires: str
    flags: str = "valid"
    now: int = NOW
    state: str = "probation"
    score: float = 0.0
    versions: list[int] = field(default_factory=list)
    quarantines: int = 0
    since: int = 0
    until: int = 0
    steps: list[dict[str, Any]] = field(default_factory=list)

    def accepted(self, count: int = 1, version: int | None = None) -> Key:
        """Groups of this version; or all but the last of version 0, and the last of version 1."""
        if version is None:
            return (self.accepted(count - 1, 0) if count > 1 else self).accepted(1, 1)
        for _ in range(count):
            if self.state not in ("quarantine", "banned"):
                self.score *= 0.98
                self.since += 1
                if self.since % 1000 == 0 and self.quarantines:
                    self.quarantines -= 1
                if self.state == "probation":
                    self.versions.append(version)
                self._move()
        self._note(count, verdict="accepted", version=version)
        return self

    def refused(self, code: str, measured: float | None = None, threshold: float | None = None) -> Key:
        if code not in SOFT and self.state not in ("quarantine", "banned"):
            unknown = code == "copied" and measured is None
            slight = code in MISMATCH and measured is not None and threshold and measured < 10 * threshold
            self.score += 0.0 if unknown else 0.5 if slight or code == "environment-failed" else 1.0
            if code in ("drift", "wrong-checkpoint"):
                self._quarantine()
            else:
                self._move()
        self._note(1, verdict="refused", code=code, measured=measured, threshold=threshold)
        return self

    def often(self, times: int, code: str, *figures: float) -> Key:
        for _ in range(times):
            self.refused(code, *figures)
        if code in SOFT:
            self.steps[-times:] = [{**self.steps[-1], "times": times}]
        return self

    def waits(self, seconds: float) -> Key:
        self.now += int(1000 * seconds)
        if self.state == "quarantine" and self.now >= self.until:
            self.state, self.score, self.versions, self.until = "probation", 1.0, [], 0
        self._note(1, verdict="none")
        return self

    def _move(self) -> None:
        if self.score >= 4:
            self._quarantine()
        elif self.state == "probation" and len(self.versions) >= 16 and len(set(self.versions)) > 1:
            if self.score < 1:
                self.state = "active"
        elif self.state == "active" and self.score >= 2:
            self.state = "throttled"
        elif self.state == "throttled" and self.score < 0.5:
            self.state = "active"

    def _quarantine(self) -> None:
        if self.quarantines == 6:
            self.state = "banned"
            return
        self.state, self.until = "quarantine", self.now + 1000 * min(60 * 4**self.quarantines, 86_400)
        self.quarantines, self.since = self.quarantines + 1, 0

    def _note(self, times: int, **event: Any) -> None:
        """What happened so many times, and the outcome of all of them."""
        given = {"now": self.now, "times": times, **event}
        outcome = {"state": self.state, "score": self.score, "until": self.until}
        self.steps.append({**{name: value for name, value in given.items() if value is not None}, **outcome})

    def case(self) -> dict[str, Any]:
        return case(self.comment, self.requires, self.flags, steps=self.steps, tolerance=1e-9)


def active(comment: str, requires: str = "REP-1", flags: str = "faults") -> Key:
    return Key(comment, requires, flags).accepted(16)


def states() -> list[dict[str, Any]]:
    rows = [
        Key("sixteen groups of two versions end a probation", "REP-1").accepted(15).accepted(1),
        Key("one version is not enough", "REP-1").accepted(20, 0).accepted(1, 1),
        Key("soft codes change nothing, however many", "REP-1").often(200, "stale").refused("key-too-new").refused("rate").accepted(16),
        Key("a fault at the beginning is lived down", "REP-1", "faults").refused("finish").accepted(16),
        Key("two faults take longer", "REP-1", "faults").often(2, "finish").accepted(16).accepted(19).accepted(1),
        active("one fault does not throttle", flags="faults").refused("prompt-mismatch", 3.0),
        active("two in a row do").often(2, "reward-mismatch", 0.5, 1e-6),
        active("two with honest work between do not").refused("counter-reused", 3.0, 5.0).accepted(1).refused("counter-gap", 5000.0, 4096.0),
        active("throttled until less than half a fault is left").often(2, "finish").accepted(68).accepted(1).accepted(1),
        active("near mismatches count half").often(3, "logprob-mismatch", *NEAR).refused("sampling-mismatch", *NEAR),
        active("far mismatches count whole").refused("logprob-mismatch", *FAR).refused("sampling-mismatch", *FAR),
        active("ten times the threshold is far").often(2, "sampling-mismatch", 1.0, 0.1),
        active("a mismatch without a figure is far").often(2, "logprob-mismatch"),
        active("an environment that failed counts half, of other checkpoints again").often(4, "environment-failed"),
        active("a copy of which nobody knows who made it costs nothing but the group").often(5, "copied"),
        active("tasks withheld and tokens that repeat cost nothing but the group").often(100, "withheld", 40.0, 7.0).often(100, "repetition", 96.0, 64.0),
        active("a code that nobody knows counts whole").refused("too-good"),
        active("four faults: a quarantine of a minute", "REP-2").often(4, "copied", 64.0, 40.0),
        Key("a stranger's four faults", "REP-2", "faults").often(4, "wrong-environment"),
        active("eight near mismatches", "REP-2").often(8, "sampling-mismatch", *NEAR),
        active("drift: at once", "REP-2").refused("drift", 20.5, 20.0),
        active("an older checkpoint: at once", "REP-2").refused("wrong-checkpoint", 21.0, 20.0),
        active("verdicts during a quarantine change nothing", "REP-2").often(4, "finish").often(3, "finish").accepted(3),
        active("its end: probation anew", "REP-2").often(4, "finish").waits(59.999).waits(0.001).accepted(15).accepted(1),
        active("waiting longer washes nothing", "REP-2").often(4, "finish").waits(86_400).accepted(5),
        active("time alone does not change a score", "REP-1").often(2, "finish").waits(1e6),
        active("three more faults behind it lead back, for four minutes", "REP-2").often(4, "finish").waits(60).often(2, "finish").refused("finish"),
        _often_back("the quarantines grow, up to a day of them, then a ban", 6, 0),
        _often_back("a ban has no end", 6, 10_000_000),
        _forgiven("a thousand accepted groups take one quarantine back", 1000),
        _forgiven("999 do not", 999),
    ]  # fmt: skip
    return [row.case() for row in rows]


def _often_back(comment: str, times: int, wait: int) -> Key:
    key = Key(comment, "REP-2", "faults")
    for number in range(times):
        key.refused("drift", 21.0, 20.0).waits(60 * 4**number)
    key.refused("drift", 21.0, 20.0)
    return key.waits(wait).accepted(2) if wait else key


def _forgiven(comment: str, groups: int) -> Key:
    key = active(comment, "REP-2").refused("drift", 21.0, 20.0).waits(60).accepted(groups)
    return key.refused("drift", 21.0, 20.0)
