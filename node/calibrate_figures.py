"""Thresholds from what honest groups showed. Spec: `specs/08-verification.md`, "Calibration".

    observations -> tokens, then for each statistic mean, deviation and limit
    those of the engine that differs most, drawn again and again -> the sums that an honest peer reaches

In float32 honest figures are rounding at the end of the mantissa: another machine's may be many times larger
and are still a thousand times smaller than any cheat's. So limits are set far above, and the means a tenth of
them. In bfloat16 honest figures and cheap weights lie close together, and margins are as narrow as the data
allow.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec
import numpy as np
from numpy.typing import NDArray

from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Bound, Thresholds

from .statistics import MAX_DEVIATIONS, Figures


class Observation(msgspec.Struct, frozen=True):
    """What one judge measured of one group."""

    kernel: str
    """Of who made it."""
    group: Figures
    trajectories: list[Figures]
    stop: float | None
    """Least recomputed probability of a sampled stop token, where there is one."""


@dataclass(frozen=True, slots=True)
class Margins:
    """How far limits lie above what was seen."""

    logprobs: float
    """Factor on the largest excess over the mean, in float32 on the largest value; likewise below."""
    distances: float
    largest: float
    slack: float
    """Deviations above the mean that a peer may lie for good."""
    relative: bool
    """Whether the mean and the deviation are a tenth of the limit, since what was measured is rounding."""
    room: tuple[float, float] = (0.0, 0.0)
    """Least excess of the two limits as shares of the mean: figures change with the text that is written, and
    that with what a policy learns."""


FLOAT32 = Margins(20, 125, 370, slack=2.0, relative=True)
"""Room for machines and libraries that were not seen. Over 6,000 groups and 48,000 rollouts of the embedded
default the largest was 1.8e-6, so its limit is 3.7e-5; what cheats, with 8-bit weights or a checkpoint of one
small step before, begins above that (at 60 times the largest, one such group in 250 passed). Distances follow
from the same rounding, and honest ones are 0 but for a token in a million."""

BFLOAT16 = Margins(2.0, 1.75, 2.0, slack=2.0, relative=False, room=(0.25, 0.75))
"""Between honest groups and what cheats, as SmolLM2 of 135 million parameters has them. Its log-probs: 0.049
in the mean, 0.061 at most of 96 honest groups, from 0.091 on with 8-bit weights; its distances: 0.0015,
0.0024, and from 0.0037 on at temperature 0.9. Its largest distance was 0.072 of 44,000 tokens, and each 0.01
more is e times rarer."""

SEQUENCE = 200_000
"""Honest groups of one peer that are drawn for its sums: more than one sends to a run."""

UNSEEN = 1.0
"""Deviations that an honest peer may lie above the worst engine seen, by its machine or by what is written:
stories and sums lie one above sorted digits."""

DRIFT_MARGIN = 1.25
"""Factor on the largest sum drawn."""

LEAST_DRIFT = 10.0
"""Floor of the drift limit: four groups of one peer in a row are no trend yet."""

ENOUGH = 8
"""Groups of an engine from which on its mean is one."""

LEAST_STOP = 1e-9
"""Floor of the stop probability: float32 log-probs of a sure model go no further in practice."""

STOP_MARGIN = 0.01
"""Share of the least honest probability of a stop token."""

CHANCE_STOP = 1e-4
"""Largest chance that an honest group of any policy has an end below the stop probability: at each token an
end below p is drawn with p at most."""

REWARD = 1e-6
"""Rewards are recomputed in float64 from the same text."""

SMALLEST = 1e-12
"""Where nothing at all was measured."""

DISTANCE_SHARE, LARGEST_SHARE = 0.01, 1.0
"""In float32, the least limits of mean and largest distance as shares of that of the log-probs. A uniform
falls between two engines' roundings of a boundary once in a million tokens: a calibration may see none. Where
log-probs differ by e, a boundary moves by e / 4 at most, and a uniform lies within that once in 2 / e tokens.
Honest figures would keep these limits with log-probs as far off as their own limit; 8-bit weights behind true
log-probs do not."""

LEAST_DEVIATION = 0.05
"""Of the mean: few groups may agree by chance."""

SEED = 8
"""Of the draw of sequences: the same observations make the same thresholds."""

NOISE_SHARE = 0.5
"""A limit above this share of what strange sampler keys show would let them pass."""


def thresholds(
    honest: Sequence[Observation], strange: Sequence[Observation], groups: int, margins: Margins, said: str
) -> Thresholds:
    """From all observations of `groups` honest groups. `said`: on what they were calibrated, in words.

    Raises LocalError where honest groups cannot be told from others, or show no number at all."""
    reference = max(1, int(np.median([one.group.tokens for one in honest])))
    largest = max(one.group.largest for one in honest)
    logprobs = Measure.of(honest, reference, lambda figures: figures.logprob)
    distances = Measure.of(honest, reference, lambda figures: figures.distance)
    _check_numbers(logprobs, distances)
    floor = margins.logprobs * logprobs.top if margins.relative else SMALLEST
    least = [(1 + room) * one.mean for room, one in zip(margins.room, (logprobs, distances), strict=True)]
    bounds = (
        logprobs.bound(margins.logprobs, margins, max(floor, least[0])),
        distances.bound(margins.distances, margins, max(DISTANCE_SHARE * floor, least[1])),
    )
    _check_noise(bounds[1], strange)
    sums = [
        one.sum_reached(bound, margins.slack)
        for one, bound in zip((logprobs, distances), bounds, strict=True)
    ]
    ends = [one.stop for one in honest if one.stop is not None]
    stop = min(STOP_MARGIN * min(ends, default=1.0), CHANCE_STOP / reference)
    return Thresholds(
        logprobs=bounds[0],
        distances=bounds[1],
        distance_max=rounded_up(max(margins.largest * largest, LARGEST_SHARE * floor)),
        tokens=reference,
        drift_slack=margins.slack,
        drift_limit=max(sums),
        stop_probability=max(LEAST_STOP, float(f"{stop:.0e}")),
        reward=REWARD,
        verifier="float32",
        calibrated=said,
        groups=groups,
        false_refusals=min(1.0, 3 / groups),
    )


@dataclass(frozen=True, slots=True)
class Measure:
    """One statistic over all observations. Values are x - mean, scaled to means over the reference tokens."""

    mean: float
    """Of the engine that differs most."""
    worst: NDArray[np.float64]
    """Of that engine's groups."""
    largest: float
    """Of all groups and trajectories."""

    @classmethod
    def of(cls, honest: Sequence[Observation], reference: int, value: Callable[[Figures], float]) -> Measure:
        def scaled(figures: Figures) -> float:
            return (value(figures) - mean) / math.sqrt(max(1.0, reference / max(1.0, figures.tokens)))

        by_kernel: defaultdict[str, list[Figures]] = defaultdict(list)
        for one in honest:
            by_kernel[one.kernel].append(one.group)
        engines = [those for those in by_kernel.values() if len(those) >= ENOUGH]
        engines = engines or [[one.group for one in honest]]
        mean, place = max(
            (float(np.mean([value(one) for one in those])), place) for place, those in enumerate(engines)
        )
        every = [scaled(part) for one in honest for part in (one.group, *one.trajectories) if part.tokens]
        return cls(mean, np.array([scaled(one) for one in engines[place]]), max(every))

    @property
    def top(self) -> float:
        """Largest value, as a mean over the reference tokens."""
        return max(SMALLEST, self.mean + self.largest)

    def bound(self, margin: float, margins: Margins, floor: float) -> Bound:
        """`floor`: the least limit."""
        if margins.relative:
            limit = rounded_up(max(margin * self.top, floor))
            return Bound(float(f"{limit / 10:.1e}"), float(f"{limit / 10:.1e}"), limit)
        deviation = max(float(self.worst.std()), LEAST_DEVIATION * self.mean)
        limit = rounded_up(max(floor, self.mean + margin * self.largest))
        return Bound(float(f"{self.mean:.2e}"), float(f"{deviation:.2e}"), limit)

    def sum_reached(self, bound: Bound, slack: float) -> float:
        """Largest sum of an honest peer over SEQUENCE groups, with a margin."""
        deviations = (self.mean - bound.mean + self.worst) / bound.deviation + UNSEEN
        drawn = np.random.default_rng(SEED).choice(np.minimum(deviations, MAX_DEVIATIONS), SEQUENCE) - slack
        walk = np.cumsum(drawn)
        sums = walk - np.minimum(np.minimum.accumulate(walk), 0)
        return max(LEAST_DRIFT, float(math.ceil(DRIFT_MARGIN * sums.max())))


def _check_numbers(logprobs: Measure, distances: Measure) -> None:
    found = [logprobs.mean, logprobs.largest, distances.mean, distances.largest]
    if not all(map(math.isfinite, found)):
        raise LocalError(
            "Honest rollouts of this model have log-probs that are no numbers; copy its folder again from "
            "its source, or calibrate in float32 (`--dtype float32`)."
        )


def _check_noise(distances: Bound, strange: Sequence[Observation]) -> None:
    noise = float(np.mean([one.group.distance for one in strange]))
    if distances.limit > NOISE_SHARE * noise:
        raise LocalError(
            "Honest rollouts of this model lie so far from their draw that the limit would be "
            f"{distances.limit:.1e}, and tokens that are drawn with another key lie at {noise:.1e}: they "
            "cannot be told apart. Calibrate in float32 (`--dtype float32`) or with longer answers "
            "(`--max-tokens`), or take another model or environment."
        )


def rounded_up(value: float) -> float:
    """To two significant digits."""
    unit = 10.0 ** (math.floor(math.log10(value)) - 1)
    return float(f"{math.ceil(value / unit - 1e-9) * unit:.1e}")
