"""What a volunteer has contributed: counted for the live view, the summary and `--rollouts`."""

from __future__ import annotations

import time
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal

import trio

from nous_node.protocol.receipts import Receipt, Standing

from .events import Summary, VolunteerStatus
from .following import Following, Head
from .outbox import Outbox
from .wording import share
from .worker_messages import Group

Phase = Literal["loading", "waiting", "sending"]
"""What a volunteer does while its engine does not work: it loads a version, waits for receipts [RCP-5], hands
groups on."""

RATE_SECONDS = 10.0
"""Window of the tokens-per-second figure."""


class Contribution:
    """Figures of this session; credit and totals of all sessions come from the outbox."""

    def __init__(self, following: Following, outbox: Outbox) -> None:
        self.doing = "starting"
        self.in_hand = 0
        """Groups that are made and not in the outbox yet."""
        self.standing: Standing | None = None
        """What a trainer said last of our key."""
        self._following, self._outbox = following, outbox
        self._head: Head | None = None
        self._started = time.monotonic()
        self._first_batch: float | None = None
        self._worked = 0.0
        self._making = self._environments = 0.0
        self._spent: defaultdict[str, float] = defaultdict(float)
        self._tokens = 0
        self._recent: deque[tuple[float, int]] = deque()
        self._sent = self._given_up = self._accepted = self._credit = 0
        self._refused: Counter[str] = Counter()
        self._network: dict[str, int] = {}
        self._goals: list[tuple[int, trio.Event]] = []
        self._change = trio.Event()

    def generates_with(self, head: Head) -> None:
        self._head = head

    @property
    def loaded(self) -> bool:
        """Whether the engine has a policy."""
        return self._head is not None

    @contextmanager
    def spending(self, phase: Phase) -> Iterator[None]:
        """Around what keeps the engine from its work; counted from the first batch on."""
        started = time.monotonic()
        try:
            yield
        finally:
            if self._first_batch is not None:
                self._spent[phase] += time.monotonic() - started

    @contextmanager
    def working(self) -> Iterator[None]:
        """Around the engine's work on groups."""
        started = time.monotonic()
        if self._first_batch is None:
            self._first_batch = started
        try:
            yield
        finally:
            self._worked += time.monotonic() - started

    def sampled(self, tokens: int) -> None:
        self._tokens += tokens
        self._recent.append((time.monotonic(), tokens))

    def made_in(self, seconds: float, environments: float) -> None:
        """What a batch took in the worker, and what of it environments took."""
        self._making += seconds
        self._environments += environments

    def sent(self, group: Group) -> None:
        self._sent += 1

    def give_up(self, groups: int) -> None:
        self._given_up += groups
        self._settle()

    def note(self, receipt: Receipt) -> None:
        """A receipt of ours that was not known before."""
        if receipt.verdict == "accepted":
            self._accepted += 1
            self._credit += receipt.credit
        else:
            self._refused[receipt.code] += 1
        self._settle()

    def reached(self, groups: int) -> trio.Event:
        """Set once receipts for `groups` groups have come, accepted or refused."""
        event = trio.Event()
        self._goals.append((groups, event))
        return event

    def wanted(self, groups: int) -> int:
        """How many of `groups` more are wanted: those that wait for a receipt count towards a goal."""
        made = self._acknowledged + self._outbox.waiting() + self.in_hand
        return max(0, min(groups, *(goal - made for goal, _ in self._goals))) if self._goals else groups

    @property
    def _acknowledged(self) -> int:
        return self._accepted + self._refused.total()

    async def all_acknowledged(self) -> None:
        """Until every group sent has its receipt."""
        while self._outbox.waiting() + self.in_hand:
            await self.changed()

    async def changed(self) -> None:
        """Until a receipt comes, or a group is given up."""
        await self._change.wait()

    def _settle(self) -> None:
        for groups, event in self._goals:
            if self._acknowledged >= groups:
                event.set()
        self._change.set()
        self._change = trio.Event()

    def _rate(self) -> float:
        horizon = time.monotonic() - RATE_SECONDS
        while self._recent and self._recent[0][0] < horizon:
            self._recent.popleft()
        window = min(RATE_SECONDS, max(1.0, time.monotonic() - (self._first_batch or time.monotonic())))
        return sum(tokens for _, tokens in self._recent) / window

    def status(self, peers: int, network: dict[str, int] | None = None) -> VolunteerStatus:
        """`network`: what the network lost, the last figures where there are none now."""
        self._network = self._network if network is None else network
        now = time.monotonic()
        head = self._head
        since = now - self._first_batch if self._first_batch is not None else 0.0
        standing = self.standing
        return VolunteerStatus(
            run=self._following.run.hex(),
            name=self._following.manifest.name,
            version=-1 if head is None else head.version,
            checkpoint="" if head is None else head.hash.hex(),
            peers=peers,
            doing=self.doing,
            tokens_per_second=self._rate(),
            generated_tokens=self._tokens,
            groups_sent=self._sent,
            groups_waiting=self._outbox.waiting(),
            groups_given_up=self._given_up,
            accepted=self._accepted,
            refused=dict(self._refused),
            credit=self._credit,
            state="" if standing is None else standing.state,
            rank=0 if standing is None else standing.rank,
            of=0 if standing is None else standing.of,
            generating_share=min(1.0, self._worked / since) if since > 0 else 0.0,
            spent={phase: seconds / since for phase, seconds in sorted(self._spent.items()) if since > 0},
            working_seconds=self._making,
            environment_seconds=self._environments,
            network=self._network,
            seconds=now - self._started,
        )

    def summary(self) -> Summary:
        status = self.status(0)
        refused = sum(status.refused.values())
        text = (
            f"Contributed {status.accepted} accepted rollout groups ({status.credit} trained tokens) to "
            f"{status.name} in {status.seconds / 60:.1f} minutes; {refused} were refused"
            + (f", {status.groups_waiting} wait for a receipt" if status.groups_waiting else "")
            + "."
        )
        if self._first_batch is not None:
            text += f" It generated for {share(status.generating_share)} of the time since its first batch."
        return Summary(text, status)
