"""What is judged of rollout groups before anything is learnt from them: a batch in, its verdicts out.

candidates -> version held -> structure, assignment, replay -> one prefill a version -> verdicts
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from nous_node.envs.environment import PolicySettings
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import accepted, refused

from .learner_messages import Candidate, Judged
from .verification import CheckedGroup, Verifier
from .versions import Versions


@dataclass(slots=True)
class Examined:
    """What became of some candidates."""

    judged: list[Judged]
    """In their order."""
    accepted: list[CheckedGroup] = field(default_factory=list)
    """To be trained on, in the order in which they were judged."""
    aged: list[bytes] = field(default_factory=list)
    """Groups accepted before whose checkpoint is no longer held: too old to train on."""
    distrusted: set[bytes] = field(default_factory=set)
    """Keys of which an audited group failed: what waits of theirs without an audit is dropped. [VER-13]"""


class Examiner:
    """The verifier of a run, with the versions that rollouts may belong to."""

    def __init__(self, verifier: Verifier, versions: Versions, settings: PolicySettings) -> None:
        self.versions = versions
        self._verifier, self._settings = verifier, settings

    def verify(self, candidates: Sequence[Candidate]) -> Examined:
        """A verdict for each."""
        judged: dict[bytes, Judged] = {}
        examined = Examined([])
        checked: dict[int, list[CheckedGroup]] = {}
        for candidate in candidates:
            if candidate.accepted and candidate.version not in self.versions:
                examined.aged.append(candidate.id)
                judged[candidate.id] = Judged(accepted(candidate.id, candidate.key, 0))
                continue
            try:
                group = self._checked(candidate)
            except RemoteError as error:
                judged[candidate.id] = _refused(candidate, error)
                continue
            checked.setdefault(candidate.version, []).append(group)
        for version, groups in checked.items():
            for group, outcome in zip(groups, self._outcomes(version, groups), strict=True):
                if outcome is not None:
                    judged[group.candidate.id] = _refused(group.candidate, outcome)
                else:
                    judged[group.candidate.id] = _accepted(group)
                    examined.accepted.append(group)
        examined.judged = [judged[candidate.id] for candidate in candidates]
        return examined

    def _checked(self, candidate: Candidate) -> CheckedGroup:
        """All that needs no model."""
        if candidate.version not in self.versions:
            raise RemoteError(
                Code.STALE,
                "The checkpoint of this group is no longer held for verification.",
                measured=self.versions.newest - candidate.version,
                threshold=self._verifier.manifest.staleness,
            )
        return self._verifier.check(candidate, self._settings)

    def _outcomes(self, version: int, groups: Sequence[CheckedGroup]) -> list[RemoteError | None]:
        """One prefill for all that were not judged before."""
        fresh = [group for group in groups if not group.candidate.accepted]
        if not fresh:
            return [None] * len(groups)
        outcomes = iter(self._verifier.check_sampling(self.versions.policy(version), fresh))
        return [None if group.candidate.accepted else next(outcomes) for group in groups]


def _accepted(group: CheckedGroup) -> Judged:
    candidate = group.candidate
    receipt = accepted(candidate.id, candidate.key, group.credit)
    return Judged(receipt, reward=float(np.mean(group.rewards)))


def _refused(candidate: Candidate, error: RemoteError) -> Judged:
    return Judged(refused(candidate.id, candidate.key, error), str(error))
