"""A node of `bench_swarm.py`: network, swarm and HTTP as in any role, without a model.

    python swarm_node.py '{"number": 1, "folder": "...", "manifests": [...], "listen": "/ip4/...", ...}'

It says where it is, fetches the first manifest's files at once, if it holds none, so that those who take part
meet as they would have at an earlier version; then the second's at `go`. At `stop` it says what it sent.
"""

from __future__ import annotations

import json
import sys
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import msgspec
import trio

from nous_node.node.blobs import BlobIndex
from nous_node.node.http_server import serve_chunks
from nous_node.node.memory import settle
from nous_node.node.neighbours import Neighbours
from nous_node.node.network import Network, NetworkConfig, open_network
from nous_node.node.swarm import Swarm, serve_run
from nous_node.node.upload_limit import UploadLimit
from nous_node.protocol.checkpoints import CheckpointManifest, checkpoint_hash
from nous_node.protocol.encoding import read
from nous_node.protocol.streams import MAX_HEAD_REPLY

RUN = b"b" * 32
MEET_SECONDS = 20.0


class Plan(msgspec.Struct):
    number: int
    folder: str
    """Where its checkpoints lie, by their index."""
    manifests: list[str]
    listen: str
    peers: list[str] = []
    """Addresses that it dials; none: it holds everything."""
    http: bool = False
    members: int = 0
    """Peers to be connected to before it is ready."""


class Counted(UploadLimit):
    """No limit; what went by HTTP."""

    def __init__(self) -> None:
        super().__init__(None)
        self.bytes = 0

    async def take(self, size: int) -> None:
        self.bytes += size


def say(**what: object) -> None:
    print(json.dumps(what), flush=True)


async def told() -> str:
    return (await trio.to_thread.run_sync(sys.stdin.readline, abandon_on_cancel=True)).strip()


async def answer_head(peer: str, request: bytes) -> bytes:
    return b""


def known_of(data: bytes) -> tuple[bytes, CheckpointManifest]:
    return checkpoint_hash(data), read(data, CheckpointManifest, MAX_HEAD_REPLY)


async def take_part(plan: Plan, network: Network, swarm: Swarm, counted: Counted) -> None:
    known = [known_of(Path(path).read_bytes()) for path in plan.manifests]  # noqa: ASYNC240
    if not plan.peers:
        for number, (checkpoint, manifest) in enumerate(known):
            swarm.index.add(Path(plan.folder) / str(number), manifest.files)
            swarm.hold(checkpoint, manifest)
        say(address=network.addresses[0])
    else:
        for peer in plan.peers:
            await network.connect(peer)
        (first, small), (second, large) = known
        await swarm.fetch(first, small, small.files, Path(plan.folder) / "0")
        swarm.hold(first, small)
        say(address=network.addresses[0])
        with trio.move_on_after(MEET_SECONDS):
            while len(network.peers()) < plan.members:  # noqa: ASYNC110
                await trio.sleep(0.1)
        say(peers=len(network.peers()))
        await told()
        fetched = await swarm.fetch(second, large, large.files, Path(plan.folder) / "1")
        swarm.hold(second, large)
        say(fetched=fetched)
    await told()
    say(streams=network.stats.bytes_out, http=counted.bytes, faults=dict(network.stats.faults))


async def main() -> None:
    plan = msgspec.json.decode(sys.argv[1], type=Plan)
    counted = Counted()
    async with (
        open_network(bytes([plan.number]) * 32, NetworkConfig(listen=(plan.listen,))) as network,
        trio.open_nursery() as nursery,
    ):
        swarm = Swarm(network, RUN, BlobIndex(lambda file: None), introductions=Neighbours(network))
        serve_run(network, SimpleNamespace(answer_head=answer_head), swarm)
        if plan.http:
            serve = partial(serve_chunks, hosts=(plan.listen.split("/")[2],), fault=network.stats.fault)
            swarm.http_port = await nursery.start(serve, swarm.index, 0, counted)
        nursery.start_soon(swarm.run)
        await take_part(plan, network, swarm, counted)
        nursery.cancel_scope.cancel()


if __name__ == "__main__":
    settle()
    trio.run(main)
