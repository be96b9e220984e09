"""What recomputed log-probs and distances say of a trajectory, a group and a peer. Spec: `specs/08`.

Three questions, from coarse to fine:

    is this trajectory, and this group, what the named checkpoint samples?     check_figures   [VER-4] [VER-5]
    is this peer a little off, group after group?                              Drift           [VER-11]
    does this peer sample with the version before the one it names?            Evidence        [VER-12]

The first compares means with limits that were calibrated on honest rollouts, the second sums up what lies
above the honest mean (a one-sided CUSUM: Page, "Continuous Inspection Schemes", 1954), the third is a matched
filter: where the versions differ, the reported log-probs lean towards one of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.runs import Thresholds

MAX_DEVIATIONS = 4.0
"""What one group may add to a peer's sum: a single odd group is the group's fault, not a drift."""

MAX_EVIDENCE = 20.0
"""Largest log-likelihood ratio of a peer's groups for the version before the one they name. Chance reaches
it with a probability of e^-20 a group."""

SURE = 0.9
"""What a token of probability 1 lacks of the weight of one of probability 0. It keeps a tenth: its log-prob
travels as a float, too."""

NOISE_FLOOR = 1e-7
"""Log-probs travel as float32: two of them never agree better than this."""


@dataclass(frozen=True, slots=True)
class Figures:
    """Means over trained tokens, each counted by how unsure it was. [VER-10]

    A token that the checkpoint is sure of shows next to nothing, whoever sampled it: with a weight of
    1 - SURE p the figures of honest groups spread by half as much, and those of a cheat stand out in a group
    of many sure tokens, too."""

    tokens: float
    """W, the sum of the weights."""
    logprob: float
    """Sum of |reported - recomputed| / W."""
    distance: float
    """Sum of d / W; 0 in a run without seeded sampling."""
    largest: float
    """Largest d of one token."""

    @classmethod
    def of(
        cls,
        reported: NDArray[np.float32],
        recomputed: NDArray[np.float32],
        distances: NDArray[np.float64] | None,
    ) -> Figures:
        """Of N tokens: three arrays [N]; no `distances` in a run without seeded sampling."""
        if not len(reported):
            return cls(0.0, 0.0, 0.0, 0.0)
        q = recomputed.astype(np.float64)
        weight = float(np.nan_to_num(1 - SURE * np.exp(q), nan=1.0).sum())
        logprob = float(np.abs(reported - q).sum()) / weight
        if distances is None:
            return cls(weight, logprob, 0.0, 0.0)
        return cls(weight, logprob, float(distances.sum()) / weight, float(distances.max()))

    @classmethod
    def together(cls, parts: Sequence[Figures]) -> Figures:
        """Of all their tokens."""
        tokens = sum(part.tokens for part in parts)
        if not tokens:
            return cls(0.0, 0.0, 0.0, 0.0)
        logprob = sum(part.tokens * part.logprob for part in parts) / tokens
        distance = sum(part.tokens * part.distance for part in parts) / tokens
        return cls(tokens, logprob, distance, max(part.largest for part in parts))


def check_figures(figures: Figures, thresholds: Thresholds, what: str) -> None:
    """RemoteError(LOGPROB_MISMATCH | SAMPLING_MISMATCH) where a mean or a token is beyond its limit. A value
    that is not a number fails. `what`: `group` or `trajectory`. [VER-4] [VER-5] [VER-10]"""
    reference = thresholds.tokens
    limit = thresholds.logprobs.at(figures.tokens, reference)
    if not figures.logprob <= limit:
        raise RemoteError(
            Code.LOGPROB_MISMATCH,
            f"The reported log-probs of a {what} differ from those of the checkpoint.",
            measured=figures.logprob,
            threshold=limit,
        )
    limit = thresholds.distances.at(figures.tokens, reference)
    for measured, threshold in ((figures.distance, limit), (figures.largest, thresholds.distance_max)):
        if not measured <= threshold:
            raise RemoteError(
                Code.SAMPLING_MISMATCH,
                f"The tokens of a {what} are not what the assigned randomness draws from the checkpoint.",
                measured=measured,
                threshold=threshold,
            )


@dataclass(frozen=True, slots=True)
class Evidence:
    """For one group: how much better another checkpoint explains the reported log-probs. [VER-12]"""

    ratio: float
    """Log-likelihood ratio: positive where the other checkpoint explains them better."""
    apart: float
    """Mean |other - named|: how much the two checkpoints differ."""

    @classmethod
    def of(
        cls, reported: NDArray[np.float32], named: NDArray[np.float32], other: NDArray[np.float32]
    ) -> Evidence:
        """Log-probs [N] as reported, under the named and under the other checkpoint.

        With r = reported - named and e = other - named: T = sum(r e) has the mean 0 if the named checkpoint
        sampled, and M = sum(e^2) if the other one did. Its variance V is sum(r^2 e^2) in the first case and
        sum((r - e)^2 e^2) in the second: the smaller one, that of the likelier case, is taken. So the ratio
        is (T - M / 2) M / V. V comes from the tokens themselves, since both r and e are large for unlikely
        tokens and hardly differ from 0 for sure ones: with the same variance for all of them honest peers
        would look guilty by chance.
        """
        r = reported.astype(np.float64) - named
        e = other.astype(np.float64) - named
        toward, apart = float(np.dot(r, e)), float(np.dot(e, e))
        if not apart:
            return cls(0.0, 0.0)
        variance = min(float(np.sum((r * e) ** 2)), float(np.sum(((r - e) * e) ** 2)))
        ratio = (toward - apart / 2) * apart / max(variance, NOISE_FLOOR**2 * apart)
        return cls(ratio, float(np.abs(e).mean()))

    def tells(self, thresholds: Thresholds) -> bool:
        """Whether the checkpoints differ by more than honest groups differ from theirs. Below that the
        rounding of engine and verifier leans to one side or the other, and an honest peer with it."""
        return self.apart >= thresholds.logprobs.mean


class Drift(msgspec.Struct, frozen=True, array_like=True):
    """Three sums over a peer's groups; all are 0 for a peer that nothing is known of, and fall back to 0
    with honest groups. [VER-11] [VER-12]"""

    logprob: float = 0.0
    distance: float = 0.0
    previous: float = 0.0

    def after(self, figures: Figures, evidence: Evidence | None, thresholds: Thresholds) -> Drift:
        """With one more group. `evidence`: against the version before the one it names, where measured."""
        reference, slack = thresholds.tokens, thresholds.drift_slack

        def added(total: float, deviations: float) -> float:
            return max(0.0, total + min(deviations, MAX_DEVIATIONS) - slack)

        bounds = thresholds.logprobs, thresholds.distances
        ratio = 0.0 if evidence is None or not evidence.tells(thresholds) else evidence.ratio
        return Drift(
            added(self.logprob, bounds[0].deviations(figures.logprob, figures.tokens, reference)),
            added(self.distance, bounds[1].deviations(figures.distance, figures.tokens, reference)),
            max(0.0, self.previous + ratio),
        )

    def check(self, thresholds: Thresholds) -> None:
        """RemoteError(DRIFT | WRONG_CHECKPOINT) where a sum is beyond its limit."""
        for measured in (self.logprob, self.distance):
            if measured > thresholds.drift_limit:
                raise RemoteError(
                    Code.DRIFT,
                    "Group after group of this key differs a little more than honest ones do.",
                    measured=measured,
                    threshold=thresholds.drift_limit,
                )
        if self.previous > MAX_EVIDENCE:
            raise RemoteError(
                Code.WRONG_CHECKPOINT,
                "The groups of this key were sampled with the version before the one that they name.",
                measured=self.previous,
                threshold=MAX_EVIDENCE,
            )
