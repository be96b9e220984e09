"""Our node and py-libp2p as it comes: Noise, Yamux, GossipSub and streams in both directions."""

from __future__ import annotations

from contextlib import asynccontextmanager

import pytest
import trio
from libp2p import new_host
from libp2p.crypto.ed25519 import create_new_key_pair
from libp2p.peer.peerinfo import info_from_p2p_addr
from libp2p.pubsub.gossipsub import GossipSub
from libp2p.pubsub.pubsub import Pubsub
from libp2p.tools.anyio_service import background_trio_service
from multiaddr import Multiaddr

from nous_node.node.network import NetworkConfig, Verdict, open_network

TOPIC = "/nous/1/run/rollouts/0"
LISTEN = "/ip4/127.0.0.1/tcp/0"


@asynccontextmanager
async def stock():
    host = new_host(key_pair=create_new_key_pair(b"s" * 32))
    router = GossipSub(["/meshsub/1.2.0", "/meshsub/1.1.0"], 6, 4, 12, heartbeat_interval=1)
    pubsub = Pubsub(host, router)
    async with (
        host.run(listen_addrs=[Multiaddr(LISTEN)]),
        background_trio_service(pubsub),
        background_trio_service(router),
    ):
        try:
            yield host, pubsub
        finally:
            with trio.CancelScope(shield=True):  # its own way out leaves sockets open
                for peer in host.get_connected_peers():
                    await host.disconnect(peer)
    pubsub.seen_messages.stop()


@pytest.mark.parametrize("we_dial", [True, False])
async def test_gossip_and_streams_with_a_stock_peer(we_dial) -> None:
    async with stock() as (host, pubsub), open_network(b"o" * 32, NetworkConfig(listen=(LISTEN,))) as node:
        inbox = node.subscribe(TOPIC, lambda data, peer: Verdict.ACCEPT, capacity=10)
        theirs = await pubsub.subscribe(TOPIC)
        if we_dial:
            address = next(str(a) for a in host.get_addrs() if "127.0.0.1" in str(a))
            await node.connect(address)
        else:
            await host.connect(info_from_p2p_addr(Multiaddr(node.addresses[0])))
        await node.wait_subscriber(TOPIC)
        for size in (5_000, 900_000):
            await node.publish(TOPIC, b"o" * size)
            assert (await theirs.get()).data == b"o" * size
        ours = next(iter(host.get_connected_peers()))
        await pubsub.wait_for_subscription(ours, TOPIC)
        for size in (5_000, 900_000):
            await pubsub.publish(TOPIC, b"s" * size)
            while (message := (await theirs.get()).data)[:1] != b"s":  # its own come back to it
                pass
            assert (await inbox.receive())[0] == message

        async def echo(peer: str, request: bytes) -> bytes:
            return request

        node.serve("/echo/1", echo, max_request=2**20, max_response=2**20)
        stream = await host.new_stream(ours, ["/echo/1"])
        await stream.write(len(b"hello").to_bytes(4, "big") + b"hello")
        answer = b""
        while len(answer) < 9:
            answer += await stream.read(9 - len(answer))
        assert answer == b"\x00\x00\x00\x05hello"
        await stream.close()
        assert not node.stats.faults
