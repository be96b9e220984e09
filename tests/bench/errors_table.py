"""From raw numbers to error rates: thresholds of the calibration set, decisions on all other sets.

Decisions are those of the trainer (`node/statistics.py`): a group is refused by the figures of the group or
of one of its trajectories, a peer by the sums over its groups.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from errors_figures import Case
from errors_store import GROUP

from nous_node.node.calibrate_figures import Observation
from nous_node.node.statistics import Drift, Evidence, Figures, check_figures
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.runs import Thresholds

PEER = 10
"""Groups of one peer: what the table asks of slow checks."""

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Seen:
    """What the trainer measures of one group, and how well another version explains it."""

    observation: Observation
    evidence: Evidence | None


@dataclass
class Row:
    """Decisions on a case. `same`: groups without a token that the honest sampler would not have drawn."""

    label: str
    groups: int = 0
    refused: int = 0
    peers: int = 0
    refused_peers: int = 0
    same: int = 0
    codes: Counter[str] = field(default_factory=Counter)
    peer_codes: Counter[str] = field(default_factory=Counter)

    def told(self) -> dict[str, object]:
        """For JSON."""
        return vars(self) | {"codes": dict(self.codes), "peer_codes": dict(self.peer_codes)}


def groups_of(one: Case, other: Case | None = None) -> list[Seen]:
    """The groups of a case. `other`: the same tokens under the version before the one that they name."""
    ends = np.cumsum([0, *one.lengths]).tolist()
    reported, recomputed = one.reported.astype(np.float32), one.recomputed.astype(np.float32)
    found = []
    for start in range(0, len(one.lengths), GROUP):
        parts, stops = [], []
        for i in range(start, start + GROUP):
            place = slice(ends[i], ends[i + 1])
            parts.append(Figures.of(reported[place], recomputed[place], one.distances[place]))
            if one.stopped[i]:
                stops.append(math.exp(one.recomputed[ends[i + 1] - 1]))
        whole = slice(ends[start], ends[start + GROUP])
        evidence = None
        if other is not None:
            before = other.recomputed[whole].astype(np.float32)
            evidence = Evidence.of(reported[whole], recomputed[whole], before)
        observation = Observation("", Figures.together(parts), parts, min(stops, default=None))
        found.append(Seen(observation, evidence))
    return found


def refusal(seen: Seen, thresholds: Thresholds) -> Code | None:
    """The code that this group is refused with by itself."""
    group = seen.observation
    try:
        if group.stop is not None and group.stop < thresholds.stop_probability:
            return Code.FINISH
        check_figures(group.group, thresholds, "group")
        for one in group.trajectories:
            check_figures(one, thresholds, "trajectory")
    except RemoteError as error:
        return error.code
    return None


def peer_refusal(groups: Sequence[Seen], thresholds: Thresholds) -> Code | None:
    """The first code that one of these groups, all of one peer, is refused with."""
    drift = Drift()
    for group in groups:
        code = refusal(group, thresholds)
        if code is not None:
            return code
        drift = drift.after(group.observation.group, group.evidence, thresholds)
        try:
            drift.check(thresholds)
        except RemoteError as error:
            return error.code
    return None


def decide(label: str, groups: Sequence[Seen], thresholds: Thresholds) -> Row:
    """All groups one by one, and in runs of PEER groups."""
    row = Row(label, len(groups), same=sum(group.observation.group.largest == 0 for group in groups))
    for group in groups:
        code = refusal(group, thresholds)
        row.refused += code is not None
        row.codes.update([] if code is None else [code.value])
    for start in range(0, len(groups) - PEER + 1, PEER):
        code = peer_refusal(groups[start : start + PEER], thresholds)
        row.peers += 1
        row.refused_peers += code is not None
        row.peer_codes.update([] if code is None else [code.value])
    return row


@dataclass(frozen=True)
class Alarms:
    """Honest peers that trip a sum over time, and the largest sums of any: of drift, and for the version
    before."""

    tripped: int
    drift: float
    evidence: float


def false_alarms(groups: Sequence[Seen], thresholds: Thresholds, length: int, peers: int) -> Alarms:
    """Of `peers` honest peers with `length` groups each, drawn with replacement."""
    draw, tripped, drift_top, evidence_top = np.random.default_rng(1), 0, 0.0, 0.0
    for _ in range(peers):
        drift, bad = Drift(), False
        for index in draw.integers(len(groups), size=length).tolist():
            drift = drift.after(groups[index].observation.group, groups[index].evidence, thresholds)
            drift_top = max(drift_top, drift.logprob, drift.distance)
            evidence_top = max(evidence_top, drift.previous)
            try:
                drift.check(thresholds)
            except RemoteError:
                bad, drift = True, Drift()
        tripped += bad
    return Alarms(tripped, drift_top, evidence_top)


def interval(hits: int, tries: int) -> tuple[float, float]:
    """The Clopper-Pearson interval of a share at CONFIDENCE; one-sided at 0 and at all (rule of three)."""
    if not tries:
        return 0.0, 1.0
    tail = (1 - CONFIDENCE) / (1 if hits in (0, tries) else 2)
    low = 0.0 if hits == 0 else _root(lambda p: 1 - _cumulative(hits - 1, tries, p), tail)
    high = 1.0 if hits == tries else _root(lambda p: 1 - _cumulative(hits, tries, p), 1 - tail)
    return low, high


def _root(rising, wanted: float) -> float:  # type: ignore[no-untyped-def]
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if rising(middle) < wanted else (low, middle)
    return (low + high) / 2


def _cumulative(hits: int, tries: int, p: float) -> float:
    """P(at most `hits` of `tries`)."""
    if p <= 0 or p >= 1:
        return float(p <= 0)
    logs = (
        math.lgamma(tries + 1)
        - math.lgamma(k + 1)
        - math.lgamma(tries - k + 1)
        + k * math.log(p)
        + (tries - k) * math.log1p(-p)
        for k in range(hits + 1)
    )
    return math.fsum(math.exp(one) for one in logs)
