"""The canary: notices that the policy has collapsed, and knows the version to go on from. Spec: [VER-15].

A version is measured every so often and compared with the best one so far. Collapsed is what falls below a
share of that, and further than chance would explain; then the weights of the best version are taken up again,
at half the learning rate. Two things are not taken for what they are not:

- Where tasks became harder since, the policy forgets some of the easy ones, which are what is measured: each
  level may cost the same share once more, and the first measurement at new levels is the new mark.
- A cause that stays (too high a rate, groups that teach what is wrong) brings the next collapse, which halves
  the rate again, and so on until the policy becomes better than it ever was; then the rate doubles, once each
  time. So it does not roll back for ever: at a small enough rate nothing collapses.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import msgspec

from .learner_messages import Updated
from .runfolder import RunFolder

CANARY_FILE = "canary.json"

MIN_ERRORS = 3.0
"""Standard errors of the difference beyond which it is not chance: once in 700 measurements."""

WINDOW = 16
"""Updates whose mean reward is the measure where there are no held-out tasks."""

MAX_HALVINGS = 10
"""A thousandth of the rate hardly changes anything any more."""


class Measure(msgspec.Struct, frozen=True, array_like=True):
    """How good a version is."""

    value: float
    error: float
    """Its standard error."""

    @classmethod
    def of_answers(cls, right: int, asked: int) -> Self:
        """Share of held-out tasks. The error is that of a share with one right and one wrong answer more:
        none right is not certainty."""
        share = (right + 1) / (asked + 2)
        return cls(right / asked, math.sqrt(share * (1 - share) / asked))

    @classmethod
    def of_rewards(cls, rewards: Sequence[float]) -> Self:
        """Mean of at least two."""
        mean = sum(rewards) / len(rewards)
        spread = sum((reward - mean) ** 2 for reward in rewards) / (len(rewards) - 1)
        return cls(mean, math.sqrt(spread / len(rewards)))


class Good(msgspec.Struct, frozen=True):
    """A version to go back to."""

    version: int
    """That its folders are named for."""
    measure: Measure
    levels: dict[str, int]
    """Of the tasks that it was taught."""
    baselines: dict[str, float] = {}
    """Running mean reward of each environment."""


class Canary(msgspec.Struct):
    """What is known of the versions of a run. It is kept beside the optimizer's state of each version: who
    goes on from there goes on with it."""

    good: Good | None = None
    halvings: int = 0
    """Times that the rate is halved."""
    oldest: int = 0
    """Groups of versions before it are not trained on: collapsed weights made them."""
    rewards: list[float] = []
    """Mean rewards of the last updates at the present levels."""
    levels: dict[str, int] = {}
    """Those levels."""

    @classmethod
    def beside(cls, folder: RunFolder, checkpoint: Path) -> Self:
        """What was known at a checkpoint; nothing where that is not to be had, or no longer of use."""
        try:
            data = (folder.optimizer_of(checkpoint) / CANARY_FILE).read_bytes()
            canary = msgspec.json.decode(data, type=cls)
        except (OSError, msgspec.MsgspecError):
            return cls()
        if canary.good is not None and not folder.checkpoint(canary.good.version).is_dir():
            canary.good = None
        return canary

    def to_bytes(self) -> bytes:
        return msgspec.json.encode(self)

    @property
    def rate(self) -> float:
        """What the learning rate is multiplied with."""
        return 0.5**self.halvings

    def trained(self, reward: float, levels: Mapping[str, int]) -> None:
        """An update on groups of this mean reward; `levels` of the tasks from now on."""
        if levels != self.levels:
            self.levels, self.rewards = dict(levels), []
        else:
            self.rewards = [*self.rewards, reward][-WINDOW:]

    def measured_by_rewards(self) -> Measure | None:
        """Where nothing else measures it; None while there are too few updates at the present levels."""
        return Measure.of_rewards(self.rewards) if len(self.rewards) == WINDOW else None

    def collapsed(self, measure: Measure, levels: Mapping[str, int], share: float) -> bool:
        """Whether a version of this measure is to be rolled back. Never where `share` is 0."""
        if self.good is None:
            return False
        best = self.good.measure
        harder = sum(max(0, level - self.good.levels.get(name, 0)) for name, level in levels.items())
        lost = best.value - measure.value
        allowed = (1 - share ** (1 + harder)) * abs(best.value)  # rewards may lie below 0
        return lost > max(allowed, MIN_ERRORS * math.hypot(best.error, measure.error))

    def passed(
        self,
        version: int,
        measure: Measure,
        levels: Mapping[str, int],
        baselines: Mapping[str, float],
    ) -> None:
        """A version that was measured and is well."""
        best = self.good
        if best is None or levels != best.levels or measure.value >= best.measure.value:
            if best is not None and measure.value > best.measure.value:
                self.halvings = max(0, self.halvings - 1)
            self.good = Good(version, measure, dict(levels), dict(baselines))

    def roll_back(self, version: int) -> Good:
        """`version` is to have the weights of the one returned."""
        assert self.good is not None
        self.halvings = min(self.halvings + 1, MAX_HALVINGS)
        self.oldest = version
        self.rewards = []
        self.levels = dict(self.good.levels)
        return self.good


@dataclass(frozen=True, slots=True)
class Health:
    """What was found out about a new version."""

    greedy: float | None = None
    """Held-out accuracy of the weights that it has, where it was measured."""
    good: Good | None = None
    """The version whose weights it has instead of its own."""
    collapsed: float = 0.0
    """What its own were measured at."""

    def stats(self, rate: float) -> dict[str, float]:
        """Figures for people. `rate`: what the learning rate is multiplied with."""
        if self.good is None:
            return {}
        return {
            "rolled_back": float(self.good.version),
            "best": self.good.measure.value,
            "collapsed": self.collapsed,
            "rate": rate,
        }


def rollback_sentence(updated: Updated) -> str:
    """What a person is told about a version that was rolled back."""
    stats = updated.stats
    return (
        f"The policy had collapsed from {stats['best']:.3f} to {stats['collapsed']:.3f}: version "
        f"{updated.version} has the weights of version {updated.rolled_back} again, and learns at "
        f"{stats['rate']:.3g} times the rate in learning.toml until it becomes better than it was. If this "
        "goes on, lower `rate` there, and see with `nous-node peers` whose groups it learnt from."
    )
