"""Tasks that are assigned to a volunteer's key, as orders for its worker.

The counters 0, 1, 2, ... of a checkpoint name tasks of all environments of the run; those of environments
that are not played here are passed over. A trainer takes no counter that is far from the last one it saw, so
where the environments played here hardly ever come up, a checkpoint may have no task for us.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection

from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.runs import RunManifest
from nous_node.protocol.tasks import assign, task_seed

from .following import Head
from .outbox import Outbox
from .worker_messages import Order

BLOCK = 64
"""Counters reserved at once: one transaction for a batch. A restart skips the rest."""

MAX_PASSED_OVER = MAX_COUNTER_GAP // 4
"""Counters in a row without a task for us before the checkpoint is left: groups that are lost on their way
widen the gap that a trainer sees."""


class Assignments:
    """Of one key in one run; `environments` are those played here."""

    def __init__(
        self,
        run: bytes,
        key: bytes,
        manifest: RunManifest,
        environments: Collection[str],
        outbox: Outbox,
    ) -> None:
        self._run, self._key, self._manifest = run, key, manifest
        self._environments, self._outbox = environments, outbox
        self._checkpoint = b""
        self._reserved: deque[int] = deque()
        self._passed_over = 0

    def has_none(self, head: Head) -> bool:
        """Whether it is known that a checkpoint has no more tasks for us."""
        return head.hash == self._checkpoint and self._passed_over >= MAX_PASSED_OVER

    def take(self, head: Head, size: int) -> list[Order]:
        """The next `size` tasks under a checkpoint; fewer, or none, where `has_none` says so from now on."""
        if head.hash != self._checkpoint:
            self._checkpoint, self._passed_over = head.hash, 0
            self._reserved.clear()
        orders: list[Order] = []
        while len(orders) < size and self._passed_over < MAX_PASSED_OVER:
            if not self._reserved:
                self._reserved.extend(self._outbox.counters(head.hash, BLOCK))
            order = self._order(head, self._reserved.popleft())
            if order is None:
                self._passed_over += 1
            else:
                self._passed_over = 0
                orders.append(order)
        return orders

    def _order(self, head: Head, counter: int) -> Order | None:
        seed = task_seed(self._run, head.hash, head.manifest.beacon, self._key, counter)
        environment = self._manifest.environments[assign(seed, self._manifest.weights, 1).environment].id
        return Order(counter, seed, dict(head.manifest.levels)) if environment in self._environments else None
