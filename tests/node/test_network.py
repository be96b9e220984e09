"""Two or three real nodes on 127.0.0.1: connections and gossip."""

from __future__ import annotations

from contextlib import AsyncExitStack, asynccontextmanager

import pytest
import trio

from nous_node.node import gossip as gossip_module
from nous_node.node import gossip_memory, liveness
from nous_node.node.gossip_memory import QUEUE_MESSAGES
from nous_node.node.network import MAX_PUBLISH_BYTES, NetworkConfig, Verdict, open_network
from nous_node.node.network_errors import (
    AddressError,
    ListenError,
    NoSubscribersError,
    OversizePublishError,
    TopicTakenError,
    UnreachableError,
)
from nous_node.protocol.identity import key_of, peer_id

TOPIC = "/nous/1/run/rollouts/0"
LISTEN = ("/ip4/127.0.0.1/tcp/0",)
STRANGER = peer_id(b"\x01" * 32)


@asynccontextmanager
async def nodes(count: int, **settings):
    async with AsyncExitStack() as stack:
        yield [
            await stack.enter_async_context(
                open_network(bytes([number + 1]) * 32, NetworkConfig(listen=LISTEN, **settings))
            )
            for number in range(count)
        ]


def accept(data: bytes, forwarder: str) -> Verdict:
    return Verdict.ACCEPT


async def until(condition) -> None:
    while not condition():  # noqa: ASYNC110
        await trio.sleep(0.002)


# Connections


async def test_addresses_carry_the_real_port_and_the_key() -> None:
    async with nodes(1) as (node,):
        (address,) = node.addresses
        assert address.startswith("/ip4/127.0.0.1/tcp/")
        assert not address.startswith("/ip4/127.0.0.1/tcp/0/")
        assert address.endswith(f"/p2p/{node.peer_id}")
        assert len(key_of(node.peer_id)) == 32


async def test_a_wildcard_becomes_addresses_of_interfaces_and_announced_ones_are_added() -> None:
    config = NetworkConfig(listen=("/ip4/0.0.0.0/tcp/0",), announce=("/dns4/relay.example/tcp/4001",))
    async with open_network(b"w" * 32, config) as node:
        assert not any("/0.0.0.0/" in address for address in node.addresses)
        assert f"/dns4/relay.example/tcp/4001/p2p/{node.peer_id}" in node.addresses


async def test_both_sides_list_the_connection() -> None:
    async with nodes(2) as (one, two):
        assert await two.connect(one.addresses[0]) == one.peer_id
        assert await two.connect(one.addresses[0]) == one.peer_id  # again: nothing happens
        await until(lambda: one.peers())
        ((here,), (there,)) = (two.peers(), one.peers())
        assert (here.peer_id, here.inbound) == (one.peer_id, False)
        assert (there.peer_id, there.inbound) == (two.peer_id, True)
        assert f"{here.address}/p2p/{one.peer_id}" == one.addresses[0]
        await two.disconnect(one.peer_id)
        await until(lambda: not one.peers() and not two.peers())


@pytest.mark.parametrize(
    "address",
    [
        "",
        "localhost:4001",
        "/ip4/127.0.0.1/tcp/4001",
        f"/ip4/127.0.0.1/udp/4001/quic-v1/p2p/{STRANGER}",
        f"/ip4/127.0.0.1/tcp/4001/ws/p2p/{STRANGER}",
        f"/ip4/127.0.0.1/tcp/99999/p2p/{STRANGER}",
        "/ip4/127.0.0.1/tcp/4001/p2p/nonsense",
    ],
)
async def test_what_is_no_address_is_said_in_words(address) -> None:
    async with nodes(1) as (node,):
        with pytest.raises(AddressError, match="It looks like /ip4/"):
            await node.connect(address)


async def test_an_unreachable_peer_is_said_in_words() -> None:
    async with nodes(2) as (one, two):
        with pytest.raises(UnreachableError, match=r"127\.0\.0\.1:1"):
            await one.connect(f"/ip4/127.0.0.1/tcp/1/p2p/{STRANGER}")
        elsewhere = two.addresses[0].replace(two.peer_id, STRANGER)
        with pytest.raises(UnreachableError, match="Cannot reach"):
            await one.connect(elsewhere)
        with pytest.raises(AddressError, match="our own"):
            await one.connect(one.addresses[0])


async def test_a_silent_host_does_not_hold_a_dial(monkeypatch) -> None:
    monkeypatch.setattr("nous_node.node.network.DIAL_S", 0.2)
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    async with listener, nodes(1) as (node,):
        port = listener.socket.getsockname()[1]
        with pytest.raises(UnreachableError, match=r"no answer within 0\.2 s"):
            await node.connect(f"/ip4/127.0.0.1/tcp/{port}/p2p/{STRANGER}")


async def test_a_port_in_use_is_said_in_words() -> None:
    async with nodes(1) as (node,):
        taken = node.addresses[0].split("/p2p/")[0]
        with pytest.raises(ListenError, match=r"in use.*Choose another port"):
            async with open_network(b"x" * 32, NetworkConfig(listen=(taken,))):
                pass


@pytest.mark.parametrize(
    "address", ["/ip4/127.0.0.1", "4001", "/dns4/localhost/tcp/1", "/ip4/127.0.0.1/tcp/x"]
)
async def test_what_cannot_be_listened_on_is_said_in_words(address) -> None:
    with pytest.raises(AddressError):
        async with open_network(b"x" * 32, NetworkConfig(listen=(address,))):
            pass


async def test_an_error_of_the_block_comes_out_unwrapped() -> None:
    with pytest.raises(KeyError):
        async with nodes(1):
            raise KeyError("as it is")


async def test_a_lost_peer_is_dialled_again(monkeypatch) -> None:
    monkeypatch.setattr(liveness, "FIRST_RETRY_S", 0.01)
    async with nodes(1) as (node,), trio.open_nursery() as nursery:
        port = node.addresses[0].split("/")[4]
        async with open_network(b"t" * 32, NetworkConfig(listen=LISTEN)) as other:
            address = other.addresses[0]
            nursery.start_soon(node.stay_connected, [address, "no address", node.addresses[0]])
            await until(lambda: node.peers())
            assert port
        await until(lambda: not node.peers())
        again = NetworkConfig(listen=(address.split("/p2p/")[0],))
        async with open_network(b"t" * 32, again):
            await until(lambda: node.peers())
        nursery.cancel_scope.cancel()


# Gossip


async def test_a_publisher_needs_no_subscription_and_hears_nothing() -> None:
    async with nodes(3) as (reader, one, two):
        inbox = reader.subscribe(TOPIC, accept, capacity=10)
        for node in (one, two):
            await node.connect(reader.addresses[0])
            await node.wait_subscriber(TOPIC)
            await node.publish(TOPIC, node.peer_id.encode())
        received = {await inbox.receive() for _ in range(2)}
        assert received == {(node.peer_id.encode(), node.peer_id) for node in (one, two)}
        assert one.stats.topics[TOPIC].accepted == 0
        assert one.stats.bytes_in < 2000


async def test_a_relay_forwards_what_it_accepts_and_nothing_else() -> None:
    def judge(data: bytes, forwarder: str) -> Verdict:
        return Verdict(data.decode())

    async with nodes(3) as (relay, reader, volunteer):
        relay.subscribe(TOPIC, judge, capacity=10)
        inbox = reader.subscribe(TOPIC, accept, capacity=10)
        await reader.connect(relay.addresses[0])
        await volunteer.connect(relay.addresses[0])
        await volunteer.wait_subscriber(TOPIC)
        await until(lambda: relay._gossip.mesh.mesh[TOPIC])
        for verdict in (b"reject", b"ignore", b"accept"):
            await volunteer.publish(TOPIC, verdict)
        assert await inbox.receive() == (b"accept", relay.peer_id)
        counters = relay.stats.topics[TOPIC]
        assert (counters.accepted, counters.ignored, counters.rejected) == (1, 1, 1)
        assert counters.forwarded == 1
        assert len(relay.peers()) == 2  # one rejected message is forgiven


async def test_subscribers_do_not_get_their_own_messages() -> None:
    async with nodes(2) as (one, two):
        inboxes = [node.subscribe(TOPIC, accept, capacity=10) for node in (one, two)]
        await two.connect(one.addresses[0])
        for node in (one, two):
            await node.wait_subscriber(TOPIC)
            await node.publish(TOPIC, node.peer_id.encode())
        assert await inboxes[0].receive() == (two.peer_id.encode(), two.peer_id)
        assert await inboxes[1].receive() == (one.peer_id.encode(), one.peer_id)
        with pytest.raises(trio.WouldBlock):
            inboxes[0].receive_nowait()


async def test_what_was_published_is_sent_before_the_network_closes() -> None:
    async with nodes(1) as (reader,):
        inbox = reader.subscribe(TOPIC, accept, capacity=10)
        for number in range(5):
            async with open_network(b"p" * 32, NetworkConfig(listen=())) as publisher:
                await publisher.connect(reader.addresses[0])
                await publisher.wait_subscriber(TOPIC)
                for _ in range(10):
                    await publisher.publish(TOPIC, bytes([number]) * 50_000)
            for _ in range(10):
                assert (await inbox.receive())[0][0] == number


async def test_a_late_subscriber_gets_what_was_just_published() -> None:
    async with nodes(3) as (first, late, publisher):
        inbox = first.subscribe(TOPIC, accept, capacity=10)
        await publisher.connect(first.addresses[0])
        await publisher.wait_subscriber(TOPIC)
        await publisher.publish(TOPIC, b"just now")
        await inbox.receive()
        await late.connect(first.addresses[0])
        inbox = late.subscribe(TOPIC, accept, capacity=10)
        assert await inbox.receive() == (b"just now", first.peer_id)


async def test_a_message_above_the_limit_is_an_error_with_both_numbers() -> None:
    async with nodes(2) as (one, two):
        inbox = one.subscribe(TOPIC, accept, capacity=10)
        await two.connect(one.addresses[0])
        await two.wait_subscriber(TOPIC)
        with pytest.raises(OversizePublishError, match=f"{MAX_PUBLISH_BYTES + 1} .* {MAX_PUBLISH_BYTES}"):
            await two.publish(TOPIC, bytes(MAX_PUBLISH_BYTES + 1))
        await two.publish(TOPIC, bytes(MAX_PUBLISH_BYTES))
        assert len((await inbox.receive())[0]) == MAX_PUBLISH_BYTES


async def test_publishing_to_nobody_is_an_error() -> None:
    async with nodes(2) as (one, two):
        with pytest.raises(NoSubscribersError, match=TOPIC):
            await two.publish(TOPIC, b"x")
        one.subscribe(TOPIC, accept, capacity=10)
        await two.connect(one.addresses[0])
        await two.wait_subscriber(TOPIC)
        assert two.subscribers(TOPIC) == (one.peer_id,)
        await one.unsubscribe(TOPIC)
        await until(lambda: not two.subscribers(TOPIC))
        with pytest.raises(NoSubscribersError):
            await two.publish(TOPIC, b"x")


async def test_a_topic_is_subscribed_once_at_a_time() -> None:
    async with nodes(1) as (node,):
        inbox = node.subscribe(TOPIC, accept, capacity=10)
        with pytest.raises(TopicTakenError, match=TOPIC):
            node.subscribe(TOPIC, accept, capacity=10)
        await node.unsubscribe(TOPIC)
        with pytest.raises(trio.EndOfChannel):
            await inbox.receive()
        node.subscribe(TOPIC, accept, capacity=10)


async def test_a_publisher_waits_for_a_slow_consumer(monkeypatch) -> None:
    monkeypatch.setattr(gossip_module, "CONSUMER_PATIENCE_S", 60.0)
    async with nodes(2) as (reader, publisher):
        inbox = reader.subscribe(TOPIC, accept, capacity=1)
        await publisher.connect(reader.addresses[0])
        await publisher.wait_subscriber(TOPIC)
        published = 0

        async def publish() -> None:
            nonlocal published
            while published < 500:
                await publisher.publish(TOPIC, published.to_bytes(4, "big") + bytes(50_000))
                published += 1

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            (queue,) = publisher._gossip.peer_queues.values()
            await until(lambda: not queue.has_room)
            stuck = published
            assert QUEUE_MESSAGES <= stuck < 500
            numbers = [int.from_bytes((await inbox.receive())[0][:4], "big") for _ in range(500)]
        assert numbers == list(range(500))
        assert reader.stats.topics[TOPIC].consumer_slow == 0


async def test_a_consumer_that_never_reads_costs_counted_messages(monkeypatch) -> None:
    monkeypatch.setattr(gossip_module, "CONSUMER_PATIENCE_S", 0.01)
    async with nodes(2) as (reader, publisher):
        lost: list[bytes] = []
        reader.subscribe(TOPIC, accept, 2, lost.append)
        await publisher.connect(reader.addresses[0])
        await publisher.wait_subscriber(TOPIC)
        for number in range(12):
            await publisher.publish(TOPIC, bytes([number]))
        await until(lambda: reader.stats.topics[TOPIC].consumer_slow == 10)
        assert lost == [bytes([number]) for number in range(2, 12)]


async def test_a_message_that_waits_for_the_consumer_is_lost_with_its_reader(monkeypatch) -> None:
    monkeypatch.setattr(gossip_module, "CONSUMER_PATIENCE_S", 60.0)
    async with nodes(2) as (reader, publisher):
        lost: list[bytes] = []
        reader.subscribe(TOPIC, accept, 1, lost.append)
        await publisher.connect(reader.addresses[0])
        await publisher.wait_subscriber(TOPIC)
        await publisher.publish(TOPIC, b"taken")
        await publisher.publish(TOPIC, b"waits")
        await until(lambda: reader.stats.topics[TOPIC].accepted == 2)
        (scope,) = reader._gossip._readers.values()
        scope.cancel()  # as a newer stream of the peer does
        await until(lambda: lost == [b"waits"])


async def test_one_stuck_peer_does_not_hold_the_others(monkeypatch) -> None:
    monkeypatch.setattr(gossip_module, "CONSUMER_PATIENCE_S", 60.0)
    monkeypatch.setattr(gossip_memory, "PATIENCE_S", 0.1)
    async with nodes(3) as (stuck, reader, publisher):
        stuck.subscribe(TOPIC, accept, capacity=1)
        inbox = reader.subscribe(TOPIC, accept, capacity=10)
        for node in (stuck, reader):
            await publisher.connect(node.addresses[0])
        await until(lambda: len(publisher.subscribers(TOPIC)) == 2)
        total = 200

        async def publish() -> None:
            for number in range(total):
                await publisher.publish(TOPIC, number.to_bytes(4, "big") + bytes(50_000))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(publish)
            numbers = [int.from_bytes((await inbox.receive())[0][:4], "big") for _ in range(total)]
        assert numbers == list(range(total))
        assert publisher.stats.publish_skipped_slow_peer > 0
