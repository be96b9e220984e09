"""Tasks that are assigned to a volunteer's key, as orders for its worker.

The counters 0, 1, 2, ... of a checkpoint name tasks of all environments of the run; those of environments
that are not played here are passed over. A trainer takes no counter far above the first one that it never
saw, so where the environments played here seldom come up, a checkpoint has only some tasks for us.

A task is a function of public values, so one that was lost with a worker or a node is made again before any
new one is begun: a trainer takes nothing of whoever leaves too many out. [TSK-7] One task may be what the
worker dies of: those that were in work when it died are given out alone, and the one over which it dies again
is left.

    new or left over -> in work -> a group (`Outbox.put`)
                           |  ^
                      lost v  | once, alone
                        suspect -> left, where the worker dies again
"""

from __future__ import annotations

import sys
from collections import deque
from collections.abc import Collection, Container

from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.runs import RunManifest
from nous_node.protocol.tasks import assign, task_seed

from .following import Head
from .outbox import Outbox
from .worker_messages import Order

BLOCK = 64
"""Counters reserved at once: one transaction for a batch."""

MAX_PASSED_OVER = MAX_COUNTER_GAP // 4
"""Counters in a row without a task for us before the checkpoint is left: groups that are lost on their way
widen the gap that a trainer sees."""

MAX_SPAN = MAX_COUNTER_GAP
"""Counters behind the first one that makes no group: a trainer never sees that, and takes no counter further
above it. [TSK-5]"""


class Assignments:
    """Of one key in one run; `environments` are those played here at the time."""

    def __init__(
        self,
        run: bytes,
        key: bytes,
        manifest: RunManifest,
        environments: Container[str],
        outbox: Outbox,
    ) -> None:
        self._run, self._key, self._manifest = run, key, manifest
        self._environments, self._outbox = environments, outbox
        self._checkpoint = b""
        self._left: deque[int] = deque()
        """Handed out before this node was started, without a group."""
        self._reserved: deque[int] = deque()
        self._suspects: deque[Order] = deque()
        """Were in work when the worker died, and are tried alone."""
        self._suspected: Order | None = None
        """The one that is in work alone."""
        self._passed_over = 0
        self.given_up = 0
        """Tasks of the checkpoint in work that never become groups, since this node was started: behind too
        many of them no group has a receipt before the checkpoint is stale. [TSK-7]"""
        self._end = sys.maxsize
        """Counters from here on are too far above the first one that made no group."""

    def has_none(self, head: Head) -> bool:
        """Whether it is known that a checkpoint has no more tasks for us."""
        return head.hash == self._checkpoint and not self._suspects and self._exhausted

    @property
    def _exhausted(self) -> bool:
        if self._passed_over >= MAX_PASSED_OVER:
            return True
        return bool(self._reserved) and self._reserved[0] >= self._end

    def take(self, head: Head, size: int) -> list[Order]:
        """The next tasks under a checkpoint, `size` at most; none where `has_none` says so from now on."""
        if head.hash != self._checkpoint:
            self._begin(head)
        self._suspected = None
        if self._suspects:
            self._suspected = self._suspects.popleft()
            return [self._suspected]
        orders: list[Order] = []
        while self._left and len(orders) < size:
            order = self._order(head, self._left.popleft())
            orders += [] if order is None else [order]
        while len(orders) < size and not self._exhausted:
            if not self._reserved:
                self._reserved.extend(self._outbox.counters(head.hash, BLOCK))
                continue
            order = self._order(head, self._reserved.popleft())
            self._passed_over = self._passed_over + 1 if order is None else 0
            orders += [] if order is None else [order]
        return orders

    def lost(self, orders: Collection[Order]) -> Order | None:
        """The worker died over what `take` gave last; the one to give up for it, if any is."""
        guilty, self._suspected = self._suspected, None
        if guilty is None:
            self._suspects.extend(orders)
        return guilty

    def gave_up(self, checkpoint: bytes, counter: int) -> None:
        """A task became no group, and never will."""
        self._outbox.skip(checkpoint, counter)
        if checkpoint == self._checkpoint:
            self.given_up += 1
            self._leave_out(counter)

    def _leave_out(self, counter: int) -> None:
        self._end = min(self._end, counter + MAX_SPAN + 1)

    def _begin(self, head: Head) -> None:
        self._checkpoint, self._passed_over, self._end = head.hash, 0, sys.maxsize
        self.given_up = 0
        self._reserved.clear()
        self._suspects.clear()
        self._left = deque(self._outbox.unfinished(head.hash))

    def _order(self, head: Head, counter: int) -> Order | None:
        seed = task_seed(self._run, head.hash, head.manifest.beacon, self._key, counter)
        environment = self._manifest.environments[assign(seed, self._manifest.weights, 1).environment].id
        if environment not in self._environments or counter >= self._end:
            self._leave_out(counter)
            return None
        return Order(counter, seed, dict(head.manifest.levels))
