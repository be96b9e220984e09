"""What a trainer has seen and done: counted for the live view and the summary."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Sequence

from nous_node.protocol.errors import Code

from .events import Summary, TrainerStatus, VersionReport
from .following import Following, Head
from .learner_messages import Judged, Updated
from .store import Journal

PRESENT_SECONDS = 60.0
"""A key that was not heard of for this long no longer counts as a volunteer."""

RATE_SECONDS = 10.0

_TIMING = frozenset({Code.DUPLICATE, Code.SEQUENCE_REUSED})
"""What the gossip path turns away without anybody having done anything wrong."""


class Training:
    """Figures of this session; totals of all sessions are in the journal."""

    def __init__(self, following: Following, journal: Journal) -> None:
        self.doing = "starting"
        self.greedy: float | None = None
        self.greedy_base: float | None = None
        self._following, self._journal = following, journal
        self._started = time.monotonic()
        self._present: dict[bytes, float] = {}
        self._recent: deque[tuple[float, int]] = deque()
        self._accepted = self._tokens_verified = self._tokens_trained = self._wire = 0
        self._refused: Counter[str] = Counter()
        self._rollbacks = 0
        self._network: dict[str, int] = {}
        self._last = VersionReport(-1, "")

    # --- what happened ---------------------------------------------------------------------------

    def heard(self, key: bytes) -> None:
        self._present[key] = time.monotonic()

    def received(self, key: bytes, size: int) -> None:
        """A rollout envelope of `size` bytes."""
        self.heard(key)
        self._wire += size

    def turned_away(self, code: Code) -> None:
        """By the gossip path, before the journal."""
        if code not in _TIMING:
            self._refused[code.value] += 1

    def refused(self, code: Code) -> None:
        """By the journal."""
        self._refused[code.value] += 1

    def decided(self, judged: Sequence[Judged]) -> None:
        """By the learner."""
        for one in judged:
            if one.receipt.verdict == "accepted":
                self._accepted += 1
                self._tokens_verified += one.receipt.credit
            else:
                self._refused[one.receipt.code] += 1
        self._recent.append((time.monotonic(), len(judged)))

    def opened(self, greedy: float | None) -> None:
        """The learner measured the held-out accuracy that this session begins with."""
        self.greedy = greedy
        self.greedy_base = greedy

    def published(self, head: Head, updated: Updated) -> VersionReport:
        stats = updated.stats
        self.greedy = updated.eval.get("greedy", self.greedy)
        self._tokens_trained += int(stats.get("tokens", 0))
        self._rollbacks += updated.rolled_back is not None
        self._last = VersionReport(
            version=head.version,
            checkpoint=head.hash.hex(),
            reward=stats.get("reward", 0.0),
            correct=stats.get("correct", 0.0),
            greedy=updated.eval.get("greedy"),
            staleness=stats.get("staleness", 0.0),
            groups=int(stats.get("groups", 0)),
            zero_variance=int(stats.get("zero_variance", 0)),
            tokens=int(stats.get("tokens", 0)),
            loss=stats.get("loss", 0.0),
            kl=stats.get("kl", 0.0),
            grad_norm=stats.get("grad_norm", 0.0),
            rolled_back=updated.rolled_back,
            seconds=time.monotonic() - self._started,
        )
        return self._last

    # --- how things stand ------------------------------------------------------------------------

    def _rate(self) -> float:
        now = time.monotonic()
        while self._recent and self._recent[0][0] < now - RATE_SECONDS:
            self._recent.popleft()
        window = min(RATE_SECONDS, max(1.0, now - self._started))
        return sum(groups for _, groups in self._recent) / window

    def status(self, peers: int, network: dict[str, int] | None = None) -> TrainerStatus:
        """`network`: what the network lost, the last figures where there are none now."""
        self._network = self._network if network is None else network
        now = time.monotonic()
        self._present = {key: at for key, at in self._present.items() if now - at < PRESENT_SECONDS}
        head = self._following.head
        return TrainerStatus(
            run=self._following.run.hex(),
            name=self._following.manifest.name,
            version=self._following.version,
            checkpoint="" if head is None else head.hash.hex(),
            volunteers=len(self._present),
            peers=peers,
            doing=self.doing,
            reward=self._last.reward,
            correct=self._last.correct,
            greedy=self.greedy,
            greedy_base=self.greedy_base,
            staleness=self._last.staleness,
            tokens_verified=self._tokens_verified,
            tokens_trained=self._tokens_trained,
            accepted=self._accepted,
            refused=dict(self._refused),
            waiting=self._journal.count_pending(),
            keys={state: number for state, number in self._journal.states().items() if number},
            rollbacks=self._rollbacks,
            groups_per_second=self._rate(),
            wire_bytes=self._wire,
            network=self._network,
            seconds=now - self._started,
        )

    def summary(self) -> Summary:
        status = self.status(0)
        text = (
            f"Trained {status.name} to version {status.version} on {status.accepted} verified rollout groups "
            f"({status.tokens_trained} trained tokens) in {status.seconds / 60:.1f} minutes; "
            f"{sum(status.refused.values())} groups were refused."
        )
        return Summary(text, status)
