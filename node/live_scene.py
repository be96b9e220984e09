"""A peer of the kit that speaks on a topic, and what of it the client forwards. Spec: `specs/04-gossip.md`.

A verdict shows in what reaches a second peer of the kit: what is accepted is forwarded, what is ignored or
rejected is not. Behind each message that has to stop, on the same stream, goes one that has to pass: when
that one has come, the other would have. Peers that send are new each time, so that no rejected messages add
up.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any

import trio

from .live_check import RELAY, TRAINER, Checks, Failed, Untested
from .live_forgery import Member
from .live_peer import KitPeer
from .live_target import Target

ROLLOUTS = (TRAINER, RELAY)
"""They read rollout topics, where anybody may speak, so that a message that passes is at hand."""

FORWARD_S = 10.0
"""For what is forwarded: at once in a mesh, within some heartbeats where the client asks first."""
QUIET_S = 0.4
"""Behind the message that passed: implementations may judge messages side by side."""
SECONDS = 40.0


class Scene:
    """A peer of the kit that speaks on a rollout topic of the client, for one check."""

    def __init__(self, target: Target, author: KitPeer, shard: int) -> None:
        self.target, self.author, self.shard = target, author, shard
        self.topic = target.topics.rollouts(shard)

    def member(self, shard: int | None = None) -> Member:
        """A new key of the scene's shard, or of another one."""
        return Member.of_shard(self.target.run, self.target.manifest, self.shard if shard is None else shard)

    def passing(self) -> bytes:
        """A message that every node has to forward: a group of a key that no trainer has heard of, which
        costs a trainer one receipt; a hello where no checkpoint is known."""
        member = self.member()
        return member.hello() if self.target.head is None else member.rollout(self.target.head[0])

    async def stops(self, *messages: bytes | Any, ignored: bool) -> None:
        """Raises Failed where one of these, envelopes or pubsub messages, is forwarded, or where the client
        leaves a peer that sent what has to be ignored."""
        control = self.passing()
        raw = [self._raw(one) for one in messages]
        await self.author.publish_raw(*raw)
        await self.author.publish(self.topic, control)
        if not await self.target.listener.hears(control, FORWARD_S):
            if not self.author.connected:
                raise Failed("It disconnected the peer that sent it, after one.")
            raise Failed("A right message behind it on the same stream is not forwarded.")
        await trio.sleep(QUIET_S)
        for one in raw:
            if self.target.listener.times(one.data):
                raise Failed("It was forwarded.")
        if ignored and not self.author.connected:
            raise Failed("It disconnected the peer that sent it, which has to cost nothing.")

    def _raw(self, message: bytes | Any) -> Any:
        return self.author.signed(self.topic, message) if isinstance(message, bytes) else message

    async def passes(self, *messages: bytes | Any) -> None:
        """Raises Failed where one of these is not forwarded."""
        for message in messages:
            raw = self._raw(message)
            await self.author.publish_raw(raw)
            if not await self.target.listener.hears(raw.data, FORWARD_S):
                raise Failed("A right message is not forwarded to a peer that reads the topic.")


Play = Callable[[Scene], Awaitable[str]]


def scene(check: Checks[Target], name: str, *requires: str) -> Callable[[Play], object]:
    """Enters the function below as a check on a rollout topic."""

    def enter(play: Play) -> object:
        async def played(target: Target) -> str:
            if target.shard is None:
                raise Untested("It reads no rollout topic of the run.")
            await target.refresh()  # where a run makes versions fast, what passes now is soon stale
            async with target.peer() as author:
                return await play(Scene(target, author, target.shard))

        return check(name, *requires, towards=ROLLOUTS, seconds=SECONDS)(played)

    return enter
