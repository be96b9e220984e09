"""Whether environments say the same again: a volunteer's first groups of each, before they are published.

A trainer plays every group again and refuses those that differ, and whoever sent them loses its standing. An
environment that draws from a clock, or that another release of a library makes another, is found out here:
its groups are given up like those of one that raises, and the others go on.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from nous_node.envs.environment import Environment, PolicySettings
from nous_node.envs.errors import EnvError
from nous_node.protocol.errors import RemoteError
from nous_node.protocol.runs import RunManifest
from nous_node.protocol.tasks import assign

from .learner_messages import Candidate
from .verification import Verifier
from .worker_messages import FirstGroups, Group, Order


class Replays:
    """Of one worker. `environment`: by its index in the run."""

    def __init__(
        self,
        first: FirstGroups,
        manifest: RunManifest,
        settings: PolicySettings,
        environment: Callable[[int], Environment],
    ) -> None:
        self._first, self._manifest, self._settings = first, manifest, settings
        self._environment = environment
        self._left = {entry.id: first.groups for entry in manifest.environments}
        """Groups of each environment that have to repeat before it is believed."""

    def renew(self, first: FirstGroups) -> None:
        """Another checkpoint was loaded."""
        self._first = first

    def checked(
        self, checkpoint: bytes, orders: Sequence[Order], made: Sequence[Group], alive: Callable[[], None]
    ) -> list[Group]:
        """The same groups; those that their environment does not make again are failures. `alive` is called
        before each replay."""
        by_counter = {order.counter: order for order in orders}
        checked: list[Group] = []
        for one in made:
            group = one
            if one.body and self._left[one.environment]:
                alive()
                group = self._checked(checkpoint, by_counter[one.counter], one)
            checked.append(group)
        return checked

    def _checked(self, checkpoint: bytes, order: Order, group: Group) -> Group:
        try:
            self._replay(checkpoint, order, group)
        except (RemoteError, EnvError) as error:
            code = f"{error.code.value}: " if isinstance(error, RemoteError) else ""
            failure = (
                f"The environment {group.environment} does not say the same twice of the same tokens, so "
                f"that a trainer would refuse its groups: {code}{error}"
            )
            return Group(group.counter, b"", 0, failure, group.environment)
        self._left[group.environment] -= 1
        return group

    def _replay(self, checkpoint: bytes, order: Order, group: Group) -> None:
        first, manifest = self._first, self._manifest
        index = assign(order.seed, manifest.weights, 1).environment
        environments = [self._environment(index)] * len(manifest.environments)  # others need not be here
        candidate = Candidate(
            bytes(32), group.body, first.key, 0, checkpoint, first.beacon, dict(order.levels), False
        )
        Verifier(first.run, manifest, environments).check(candidate, self._settings)
