"""What is judged of rollout groups before anything is learnt from them: a batch in, its verdicts out.

    candidates -> checkpoint held -> structure, assignment, replay           each by itself
    audited ones -> prefill under their version, and the one before it       one a version
    in order of arrival -> copies -> repetition -> figures -> the key over time -> verdicts

Spec: `specs/08-verification.md`, "Order". Verdicts are settled in order of arrival, since a copy is one of an
earlier group that was not refused, and a key's sums are over its groups one after the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from random import SystemRandom

import numpy as np

from nous_node.envs.environment import PolicySettings
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import accepted, refused
from nous_node.trainer.prefill import Recomputed

from .copies import Copies
from .journal_intake import MAX_FAILED, not_run
from .learner_messages import Candidate, Judged
from .reputation import AUDIT_CODES
from .statistics import Drift, Evidence
from .verification import CheckedGroup, Measured, Verifier
from .versions import Versions

COMPARED = 0.25
"""Share of an active key's audited groups that are also compared with the version before. It is drawn, so
that nobody knows which; who samples with an old version throughout is found by any few, and a second prefill
costs as much as the first."""

FAR = 4.0
"""Versions whose log-probs differ by more than so many times the limit need no comparison: who samples with
the wrong one is refused for each group by itself."""

MAX_VERSIONS = 32
"""Of which it is known whether a comparison tells anything: more than are held."""

_draw = SystemRandom().random

MAX_KEYS = 1 << 16
"""Keys whose sums are kept here; those of all are in the journal, and come with its candidates."""


@dataclass(slots=True)
class Examined:
    """What became of some candidates."""

    judged: list[Judged] = field(default_factory=list)
    """In their order."""
    accepted: list[CheckedGroup] = field(default_factory=list)
    """To be trained on, in their order."""
    aged: list[bytes] = field(default_factory=list)
    """Groups accepted before whose checkpoint is no longer held: too old to train on."""
    distrusted: set[bytes] = field(default_factory=set)
    """Keys of which an audit failed: what waits of theirs without an audit is not trained on. [VER-13]"""


class Examiner:
    """The verifier of a run, the versions that rollouts may belong to, and what is known of earlier groups.

    `draw`: a number in [0, 1) that nobody can foresee."""

    def __init__(
        self,
        verifier: Verifier,
        versions: Versions,
        settings: PolicySettings,
        draw: Callable[[], float] = _draw,
    ) -> None:
        self.versions = versions
        self._verifier, self._settings = verifier, settings
        self._copies = Copies(free=verifier.manifest.sampling.mode == "free")
        self._drifts: dict[bytes, Drift] = {}
        self._draw = draw
        self._telling: dict[int, bool] = {}
        """Version -> whether a comparison with the one before it tells anything, by the first group."""

    def verify(self, candidates: Sequence[Candidate]) -> Examined:
        """A verdict for each."""
        examined = Examined()
        failed: Counter[tuple[bytes, bytes]] = Counter()
        found = [self._run(candidate, failed) for candidate in candidates]
        recomputed = self._recomputed(one for one in found if isinstance(one, CheckedGroup))
        for candidate, one in zip(candidates, found, strict=True):
            match one:
                case CheckedGroup():
                    judged = self._settled(one, recomputed.get(id(one)), examined)
                case RemoteError():
                    judged = _refused(candidate, one)
                case None:
                    examined.aged.append(candidate.id)
                    judged = Judged(accepted(candidate.id, candidate.key, 0))
            examined.judged.append(judged)
        return examined

    def forget(self, keys: Iterable[bytes]) -> None:
        """Keys that go into quarantine: after it their sums begin anew. [REP-2]"""
        self._drifts |= {key: Drift() for key in keys if key in self._drifts}

    def _run(
        self, candidate: Candidate, failed: Counter[tuple[bytes, bytes]]
    ) -> CheckedGroup | RemoteError | None:
        """As `_checked`, but no more groups of a key and checkpoint than may fail: each may take a minute.
        The journal refuses those that come later. [VER-3]"""
        place = candidate.key, candidate.checkpoint
        if failed[place] >= MAX_FAILED and not candidate.accepted:
            return not_run()
        checked = self._checked(candidate)
        failed[place] += isinstance(checked, RemoteError) and checked.code == Code.ENVIRONMENT_FAILED
        return checked

    def _checked(self, candidate: Candidate) -> CheckedGroup | RemoteError | None:
        """All that looks at this group alone and needs no model; None where it was accepted before and is too
        old now."""
        if candidate.version not in self.versions:
            if candidate.accepted:
                return None
            return RemoteError(
                Code.STALE,
                "The checkpoint of this group is no longer held for verification.",
                measured=self.versions.newest - candidate.version,
                threshold=self._verifier.manifest.staleness,
            )
        try:
            return self._verifier.check(candidate, self._settings)
        except RemoteError as error:
            return error

    def _recomputed(self, groups: Iterable[CheckedGroup]) -> dict[int, _Prefills]:
        """Of each group that is audited, by its `id()`: one prefill a version for all that need it."""
        needed: defaultdict[int, list[CheckedGroup]] = defaultdict(list)
        made: dict[int, _Prefills] = {}
        for group in groups:
            candidate = group.candidate
            if candidate.accepted or not candidate.audit:
                continue
            other = self._compared_with(candidate)
            made[id(group)] = _Prefills(other)
            for version in (candidate.version,) if other is None else (candidate.version, other):
                needed[version].append(group)
        for version, those in sorted(needed.items()):
            for group, one in zip(
                those, self._verifier.recompute(self.versions.policy(version), those), strict=True
            ):
                made[id(group)].of[version] = one
        return made

    def _compared_with(self, candidate: Candidate) -> int | None:
        """The version that a group's log-probs are compared with, besides the one it names. [VER-12]"""
        version = candidate.version
        if version not in self._telling:  # one group finds out
            self._telling = dict(sorted(self._telling.items())[-MAX_VERSIONS:]) | {version: False}
        elif not self._telling[version] or (candidate.state == "active" and self._draw() >= COMPARED):
            return None
        return self.versions.before(version)

    def _settled(self, group: CheckedGroup, prefills: _Prefills | None, examined: Examined) -> Judged:
        """The verdict on a group that passed its replay; those before it have theirs."""
        candidate = group.candidate
        drift: Drift | None = None
        try:
            copied = None if candidate.accepted else self._copied(group)
            if not candidate.accepted:
                self._verifier.check_sampled(group)
            if copied is not None:
                self._check_drawn(group, prefills, copied)
            if prefills is not None:
                drift = self._audited(group, prefills)
                drift.check(self._verifier.manifest.thresholds)
        except RemoteError as error:
            if prefills is not None and error.code in AUDIT_CODES:
                examined.distrusted.add(candidate.key)
            if error.code in (Code.DRIFT, Code.WRONG_CHECKPOINT):
                self._drifts[candidate.key] = drift = Drift()  # said once; later it begins anew
            return _refused(candidate, error, drift)
        self._copies.add(group.owner, [one.sampled for one in group.trajectories])
        examined.accepted.append(group)
        receipt = accepted(candidate.id, candidate.key, group.credit)
        return Judged(receipt, reward=float(np.mean(group.rewards)), drift=drift)

    def _copied(self, group: CheckedGroup) -> RemoteError | None:
        """What speaks for a copy. Raises it where nothing else can tell who copied whom. [VER-7]"""
        try:
            self._copies.check(group.owner, [(one.sampled, one.logprobs) for one in group.trajectories])
        except RemoteError as error:
            if self._verifier.manifest.sampling.mode == "free":
                raise
            return error
        return None

    def _check_drawn(self, group: CheckedGroup, prefills: _Prefills | None, copied: RemoteError) -> None:
        """Raises `copied` unless the seeded draw gives these very tokens: then the group that came before is
        the copy, of somebody who heard this one and was faster."""
        version = group.candidate.version
        if prefills is None:
            (recomputed,) = self._verifier.recompute(self.versions.policy(version), [group])
        else:
            recomputed = prefills.of[version]
        if self._verifier.measure(group, recomputed).error is not None:
            raise copied

    def _audited(self, group: CheckedGroup, prefills: _Prefills) -> Drift:
        """The key's sums with this group. RemoteError where the group itself fails."""
        candidate = group.candidate
        measured = self._verifier.measure(group, prefills.of[candidate.version])
        if measured.error is not None:
            if prefills.other is not None:
                self._telling.pop(candidate.version, None)  # another group finds out
            raise measured.error
        before = self._drifts.get(candidate.key, candidate.drift)
        evidence = None if prefills.other is None else _evidence(group, measured, prefills.of[prefills.other])
        thresholds = self._verifier.manifest.thresholds
        if evidence is not None:
            far = evidence.apart > FAR * thresholds.logprobs.limit
            self._telling[candidate.version] = evidence.tells(thresholds) and not far
        drift = before.after(measured.figures, evidence, thresholds)
        if len(self._drifts) > MAX_KEYS:
            self._drifts.clear()
        self._drifts[candidate.key] = drift
        return drift


@dataclass(slots=True)
class _Prefills:
    """What versions give for a group: the one it names, and `other` where it is compared with that."""

    other: int | None
    of: dict[int, list[Recomputed]] = field(default_factory=dict)


def _evidence(group: CheckedGroup, measured: Measured, other: Sequence[Recomputed]) -> Evidence:
    return Evidence.of(
        np.concatenate([one.logprobs for one in group.trajectories]),
        np.concatenate([one.logprobs for one in measured.recomputed]),
        np.concatenate([one.logprobs for one in other]),
    )


def _refused(candidate: Candidate, error: RemoteError, drift: Drift | None = None) -> Judged:
    return Judged(refused(candidate.id, candidate.key, error), str(error), drift=drift)
