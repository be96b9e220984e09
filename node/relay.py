"""The relay: forwards a run's gossip and serves its checkpoints. No model, no torch.

A reachable machine that runs a relay lets volunteers meet who cannot reach the trainer directly: rollouts
that they publish to it go on to the trainer, and receipts, checkpoints and chunks come back.
"""

from __future__ import annotations

import random
import shutil
import time
from collections import Counter
from collections.abc import Callable

import trio

from nous_node.protocol.errors import NousError
from nous_node.protocol.gossip import Judgement, Verdict, judge_checkpoint, judge_receipts, judge_rollout
from nous_node.protocol.runs import Invite
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
)

from .blobs import BlobIndex, FetchError, fetch_checkpoint, verify_folder
from .config import Settings
from .events import Note, RelayStatus, Report, RunReady, Summary
from .following import INBOX, Following, ask_head, drain, now_ms
from .home import Home
from .joined import JoinedFolder, enter
from .network import Network, NetworkConfig, open_network

MAX_CONNECTIONS = 1024
"""A relay is there to be connected to."""

HEAD_SECONDS = 15.0
"""Between questions for a newer head, in case gossip lost one."""

STATUS_SECONDS = 1.0

KEEP_CHECKPOINTS = 2
"""Held for others: the newest, and the one before for who is still fetching it."""


async def relay(settings: Settings, home: Home, invite: Invite, report: Report, stop: trio.Event) -> Summary:
    """Forwards and serves the run of `invite` until `stop`. Raises NousError as `enter` does."""
    folder = JoinedFolder.of(home, invite.run)
    config = NetworkConfig(
        listen=settings.listen, upload_limit=settings.upload, max_connections=MAX_CONNECTIONS
    )
    async with (
        open_network(home.identity().seed, config) as network,
        trio.open_nursery() as nursery,
    ):
        nursery.start_soon(network.stay_connected, list(invite.addresses))
        following = await enter(network, invite, folder, report)
        node = _Relay(folder, network, following, report)
        await node.run(stop)
        summary = node.summary()
        nursery.cancel_scope.cancel()
    return summary


class _Relay:
    def __init__(self, folder: JoinedFolder, network: Network, following: Following, report: Report) -> None:
        self.folder, self.network, self.following, self.report = folder, network, following, report
        self.index = BlobIndex()
        self.forwarded = 0
        self.refused: Counter[str] = Counter()
        self.started = time.monotonic()

    async def run(self, stop: trio.Event) -> None:
        network, following = self.network, self.following
        network.serve(
            HEAD_PROTOCOL, following.answer_head, max_request=MAX_REQUEST, max_response=MAX_HEAD_REPLY
        )
        network.serve(BLOB_PROTOCOL, self.index.answer, max_request=MAX_REQUEST, max_response=MAX_BLOB_REPLY)
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
            nursery.start_soon(self._head_loop)
            nursery.start_soon(self._fetch_loop)
            nursery.start_soon(self._status_loop)
            addresses = list(network.addresses)[:16]
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
            return judgement.verdict

        return counted

    async def _head_loop(self) -> None:
        while True:
            await trio.sleep(HEAD_SECONDS)
            for peer in self.network.peers():
                try:
                    reply = await ask_head(self.network, peer.peer_id, self.following.run)
                    if reply.checkpoint is not None:
                        self.following.offer(reply.checkpoint)
                except NousError:
                    continue  # another peer is asked

    async def _fetch_loop(self) -> None:
        version = -1
        while True:
            head = await self.following.newer_than(version)
            folder = self.folder.checkpoint(head.hash)
            try:
                if folder.is_dir():
                    await trio.to_thread.run_sync(verify_folder, folder, head.manifest.files)
                    self.index.add(folder, head.manifest.files)
                else:
                    peers = [peer.peer_id for peer in self.network.peers()]
                    await fetch_checkpoint(
                        self.network, peers, head.manifest, folder, self.index, random.Random()
                    )
            except FetchError as error:
                self.report(Note(str(error), "warning"))
                await trio.sleep(1.0)
                continue
            except NousError:
                shutil.rmtree(folder, ignore_errors=True)  # damaged: it is fetched again
                continue
            version = head.version
            self._drop_old()

    def _drop_old(self) -> None:
        held = [path for path in self.folder.checkpoints.iterdir() if not path.name.endswith(".part")]
        for folder in sorted(held, key=lambda path: path.stat().st_mtime)[:-KEEP_CHECKPOINTS]:
            self.index.drop(folder)
            shutil.rmtree(folder, ignore_errors=True)

    async def _status_loop(self) -> None:
        while True:
            self.report(self.status())
            await trio.sleep(STATUS_SECONDS)

    def status(self) -> RelayStatus:
        return RelayStatus(
            run=self.following.run.hex(),
            name=self.following.manifest.name,
            version=self.following.version,
            peers=len(self.network.peers()),
            forwarded=self.forwarded,
            refused=dict(self.refused),
            chunks=len(self.index.places),
            seconds=time.monotonic() - self.started,
        )

    def summary(self) -> Summary:
        status = self.status()
        return Summary(
            f"Forwarded {status.forwarded} messages of {status.name} in {status.seconds / 60:.1f} minutes.",
            status,
        )
