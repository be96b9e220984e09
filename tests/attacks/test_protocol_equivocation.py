"""A trainer that signs two checkpoints of one version: real nodes hear of both, pass them on, and leave."""

from __future__ import annotations

import random
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec
import pytest
import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.config import Settings
from nous_node.node.create import create_run
from nous_node.node.equivocation import EquivocationError
from nous_node.node.events import Event, RunReady
from nous_node.node.following import Following, Head, now_ms
from nous_node.node.home import Home
from nous_node.node.network import Network, NetworkConfig, Verdict, open_network
from nous_node.node.plan import EnvironmentPlan, RunPlan
from nous_node.node.publishing import Publisher
from nous_node.node.relay import relay
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal
from nous_node.node.swarm import Swarm, serve_run
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.equivocation import open_equivocation
from nous_node.protocol.errors import Code
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import Invite, Topics

from .arena import CREATED, LOCAL

TRAINER = Identity.from_seed(b"two faces".ljust(32))


@dataclass
class Trainer:
    """Its node answers, and it says what a test tells it to."""

    folder: RunFolder
    following: Following
    publisher: Publisher
    network: Network

    @property
    def invite(self) -> Invite:
        return Invite(self.folder.run, list(self.network.addresses))

    def second(self, head: Head) -> bytes:
        """Another checkpoint of the same version."""
        body = msgspec.structs.replace(head.manifest, beacon=b"another".ljust(32)).to_bytes()
        return seal(TRAINER, Kind.CHECKPOINT, self.folder.run, body, seq=1_000_000, ts=now_ms())


@asynccontextmanager
async def trainer(path: Path) -> AsyncIterator[Trainer]:
    plan = RunPlan(environments={"sort-digits": EnvironmentPlan()}, group=2)
    folder = create_run(path / "run", "run", TRAINER, plan, CREATED)
    following, index = Following.of(folder.run, folder.envelope), BlobIndex(lambda file: None)
    with Journal.open(folder.journal) as journal:
        entropy = random.Random(0).randbytes
        publisher = Publisher(TRAINER, folder, journal, following, index, entropy)
        publisher.resume()
        async with open_network(TRAINER.seed, NetworkConfig(listen=(LOCAL,))) as network:
            serve_run(network, following, Swarm(network, folder.run, index))
            yield Trainer(folder, following, publisher, network)


@asynccontextmanager
async def listener(addresses: list[str], topics: Topics) -> AsyncIterator[trio.MemoryReceiveChannel[Any]]:
    """A node that hears checkpoints from the node at these addresses alone."""
    async with open_network(b"listener".ljust(32), NetworkConfig(listen=())) as network:
        inbox = network.subscribe(topics.checkpoints, lambda data, peer: Verdict.ACCEPT, 100)
        await network.connect(addresses[0])
        yield inbox


def halted(error: BaseException) -> EquivocationError:
    """The one reason of a group of errors."""
    while isinstance(error, BaseExceptionGroup):
        (error,) = error.exceptions
    assert isinstance(error, EquivocationError)
    return error


def assert_proven(home: Home, run: RunFolder, first: bytes, second: bytes) -> None:
    (file,) = home.path.glob("joined/*/equivocation-*.proof")
    proven = open_equivocation(file.read_bytes(), run.run, run.manifest)
    assert (proven.key, file.name) == (TRAINER.key, f"equivocation-{proven.version}.proof")
    assert first in file.read_bytes()
    assert second in file.read_bytes()


@pytest.mark.attack("two checkpoints of one version", "equivocation")
async def test_second_checkpoint_of_a_version_is_passed_on_and_halts_a_relay(tmp_path: Path) -> None:
    """Its forwarders are no culprits: the relay goes on hearing from them, and whoever hears from the relay
    has both before it leaves."""
    home = Home.open(tmp_path / "relay")
    settings = Settings(threads=1, memory=1 << 30, listen=(LOCAL,), mdns=False)
    ready, stop = trio.Event(), trio.Event()
    told: list[RunReady] = []

    def report(event: Event) -> None:
        if isinstance(event, RunReady):
            told.append(event)
            ready.set()

    async with trainer(tmp_path) as node:
        topics = Topics(node.folder.run)
        error: list[BaseException] = []

        async def relayed(invite: Invite) -> None:
            try:
                await relay(settings, home, invite, report, stop)
            except BaseExceptionGroup as group:
                error.append(halted(group))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(relayed, node.invite)
            await ready.wait()
            async with listener(told[0].addresses, topics) as inbox:
                await node.network.wait_subscriber(topics.checkpoints)
                head = node.publisher.renew()
                while not await heard(node.network, topics, head.envelope, inbox):
                    head = node.publisher.renew()
                second = node.second(head)
                await node.network.publish(topics.checkpoints, second)
                assert (await inbox.receive())[0] == second
    (found,) = error
    assert isinstance(found, EquivocationError)
    assert found.code == Code.EQUIVOCATION
    assert f"version {head.version}" in str(found)
    assert_proven(home, node.folder, head.envelope, second)


async def heard(network: Network, topics: Topics, data: bytes, inbox: Any) -> bool:
    """Whether a message came through the relay: right after a subscription one may be lost."""
    await network.publish(topics.checkpoints, data)
    with trio.move_on_after(1):
        return bool((await inbox.receive())[0] == data)
    return False


@pytest.mark.attack("two checkpoints of one version", "equivocation")
def test_second_checkpoint_of_a_version_halts_a_volunteer_for_good(tmp_path: Path) -> None:
    """Told in an answer to a head request or gossiped: here it is a stranger who passes it on."""
    from .stage import Stage

    with closing(socket.create_server(("127.0.0.1", 0))) as probe:
        port = probe.getsockname()[1]
    stage = Stage(tmp_path, port)
    head = stage.following.head
    body = msgspec.structs.replace(head.manifest, beacon=b"another".ljust(32)).to_bytes()
    second = stage.sealed(Kind.CHECKPOINT, body)
    stage.whisper(stage.topics.checkpoints, second)
    error = stage.ended()
    assert halted(error).code == Code.EQUIVOCATION
    (file,) = tmp_path.glob("volunteer/joined/*/equivocation-*.proof")
    assert open_equivocation(file.read_bytes(), stage.folder.run, stage.folder.manifest)
    for part in (str(file), "the run's owner", f"version {head.version}"):
        assert part in str(halted(error))
