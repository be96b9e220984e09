"""The relay: forwards a run's gossip and serves its checkpoints. No model, no torch.

A reachable machine that runs a relay lets volunteers meet who cannot reach the trainer directly: rollouts
that they publish to it go on to the trainer, and receipts, checkpoints and chunks come back.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable

import trio

from nous_node.protocol.constants import MAX_ADDRESSES
from nous_node.protocol.gossip import Judgement, Verdict, judge_checkpoint, judge_receipts, judge_rollout
from nous_node.protocol.rollouts import Reference
from nous_node.protocol.runs import Invite

from .config import DEFAULT_NEIGHBOURS, Settings
from .discovery import nearby
from .events import RelayStatus, Report, RunReady, Summary
from .following import INBOX, Following, drain, now_ms
from .holdings import Holdings
from .home import Home
from .http_server import chunks_by_http
from .joined import JoinedFolder, connecting, enter, entered, refuse_disk
from .losses import Losses
from .network import Network, NetworkConfig, open_network
from .passing import Passing
from .swarm import serve_run

MAX_CONNECTIONS = 1024
"""A relay is there to be connected to."""

STATUS_SECONDS = 1.0

KEEP = 8
"""Checkpoints that a relay holds where they fit and nothing else is said: it is there for the slow ones."""


async def relay(settings: Settings, home: Home, invite: Invite, report: Report, stop: trio.Event) -> Summary:
    """Forwards and serves the run of `invite` until `stop`. Raises NousError as `enter` does, where its
    checkpoints do not fit on the disk allowed, and where the run is halted (EquivocationError)."""
    folder = JoinedFolder.of(home, invite.run)
    config = NetworkConfig(
        listen=settings.listen,
        announce=settings.announce,
        upload_limit=settings.upload,
        max_connections=MAX_CONNECTIONS,
    )
    async with (
        open_network(home.identity().seed, config) as network,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(network.stay_connected, list(invite.addresses))
        report(connecting(invite))
        following = await enter(network, invite, folder, report)
        report(entered(following))
        refuse_disk(following.manifest.model.bytes, settings.disk)
        node = _Relay(
            folder, network, following, settings.disk, report, settings.keep or KEEP, settings.neighbours
        )
        found = nearby(invite.run, network.addresses if settings.mdns else ())
        async with found, chunks_by_http(settings, network, node.holdings.swarm):
            await node.run(stop)
        summary = node.summary()
        nursery.cancel_scope.cancel()
    return summary


class _Relay:
    def __init__(
        self,
        folder: JoinedFolder,
        network: Network,
        following: Following,
        disk: int,
        report: Report,
        keep: int = KEEP,
        neighbours: int = DEFAULT_NEIGHBOURS,
    ) -> None:
        self.network, self.following, self.report = network, following, report
        self.holdings = Holdings(network, following, folder, disk, report, keep, neighbours)
        self.passing = Passing(network, following.manifest.trainers)
        self.holdings.index.elsewhere = self.passing.chunk
        self.forwarded = 0
        self.refused: Counter[str] = Counter()
        self.started = time.monotonic()

    async def run(self, stop: trio.Event) -> None:
        network, following = self.network, self.following
        serve_run(network, following, self.holdings.swarm)
        topics = following.topics
        judges: dict[str, Callable[[bytes], Judgement]] = {
            topics.checkpoints: lambda data: judge_checkpoint(following.view, data, now_ms()),
            topics.receipts: lambda data: judge_receipts(following.view, data, now_ms()),
        }
        for shard in range(following.manifest.shards):
            judges[topics.rollouts(shard)] = self._rollouts(shard)
        async with trio.open_nursery() as nursery:
            for topic, judge in judges.items():
                nursery.start_soon(drain, network.subscribe(topic, self._counted(judge), INBOX))
            nursery.start_soon(self.holdings.run)
            nursery.start_soon(self.passing.run)
            nursery.start_soon(self._status_loop)
            addresses = list(network.addresses)[:MAX_ADDRESSES]
            invite = Invite(following.run, addresses).to_text()
            self.report(RunReady(following.run.hex(), following.manifest.name, invite, addresses))
            await stop.wait()
            nursery.cancel_scope.cancel()

    def _rollouts(self, shard: int) -> Callable[[bytes], Judgement]:
        return lambda data: judge_rollout(self.following.view, shard, data, now_ms())

    def _counted(self, judge: Callable[[bytes], Judgement]) -> Callable[[bytes, str], Verdict]:
        def counted(data: bytes, forwarder: str) -> Verdict:
            judgement = judge(data)
            if judgement.error is not None:
                self.refused[judgement.error.code] += 1
            else:
                self.forwarded += 1
                if judgement.envelope is not None and judgement.envelope.head.kind == "checkpoint":
                    self.following.offer(data)
                if judgement.envelope is not None and isinstance(judgement.body, Reference):
                    self.passing.note(judgement.envelope.head.sender, judgement.body, forwarder)
            return judgement.verdict

        return counted

    async def _status_loop(self) -> None:
        losses = Losses(self.report)
        while True:
            losses.report(self.status())
            await trio.sleep(STATUS_SECONDS)

    def status(self) -> RelayStatus:
        return RelayStatus(
            run=self.following.run.hex(),
            name=self.following.manifest.name,
            version=self.following.version,
            peers=len(self.network.peers()),
            forwarded=self.forwarded,
            refused=dict(self.refused),
            chunks=len(self.holdings.index.places),
            network=self.network.stats.losses(),
            seconds=time.monotonic() - self.started,
        )

    def summary(self) -> Summary:
        status = self.status()
        return Summary(
            f"Forwarded {status.forwarded} messages of {status.name} in {status.seconds / 60:.1f} minutes.",
            status,
        )
