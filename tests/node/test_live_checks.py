"""The live kit against our relay, against clients that break rules, and against such that do not answer."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import trio
from libp2p.security.insecure.transport import InsecureTransport

from nous_node.node import (
    hardening,
    live,
    live_envelopes,
    live_scene,
    live_streams,
    live_target,
    live_transport,
    live_wire,
    muxer,
    requests,
    uploads,
)
from nous_node.node.conformance_table import Outcome, Sheet
from nous_node.node.live_check import ANY, TRAINER, Check
from nous_node.node.muxer_stream import MuxerStream
from nous_node.node.network import Network
from nous_node.node.offences import MAX_OFFENCES
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.encoding import encode, read
from nous_node.protocol.gossip import Verdict
from nous_node.protocol.identity import Identity
from nous_node.protocol.streams import (
    BLOB_PROTOCOL,
    HAVE_PROTOCOL,
    HEAD_PROTOCOL,
    MAX_BLOB_REPLY,
    MAX_HAVE_REPLY,
    MAX_HAVE_REQUEST,
    MAX_HEAD_REPLY,
    MAX_REQUEST,
    BlobRequest,
    HaveReply,
    HaveRequest,
    HeadReply,
    HeadRequest,
    blob_reply,
)

from .live import Client, failed, notes

TABLE = Path(__file__).parents[2] / "specs" / "live-checks.md"

NOT_OF_A_RELAY = {"http-chunk", "http-refusals", "published-signatures", "published-envelopes"}
"""Ours serves no chunks by HTTP unless it is told to, and publishes nothing."""


@pytest.fixture
def client(tmp_path: Path, base_run: RunFolder, root: Identity) -> Client:
    return Client(tmp_path, base_run, root)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Our deadlines, short; and how long the kit waits for what must not come."""
    monkeypatch.setattr(requests, "READ_REQUEST_S", 0.5)
    monkeypatch.setattr(requests, "LOOK_S", 0.02)
    monkeypatch.setattr(uploads, "GREEDY_SECONDS", 0.1)
    monkeypatch.setattr(hardening, "HANDSHAKE_S", 0.5)
    monkeypatch.setattr(live_scene, "QUIET_S", 0.02)
    monkeypatch.setattr(live_envelopes, "QUIET_S", 0.02)
    monkeypatch.setattr(live_envelopes, "ALONE_S", 0.1)
    monkeypatch.setattr(live_target, "SETTLE_S", 0.05)
    monkeypatch.setattr(live_wire, "DIAL_PAUSE_S", 0.0)


def impatient(patch: pytest.MonkeyPatch, *modules: ModuleType) -> None:
    """The kit waits less for what a broken client never does."""
    for module in modules:
        for name in {"SOON_S", "SLACK_S", "HANDSHAKE_S", "READ_REQUEST_S", "HEAD_S", "HEALTH_S"} & vars(
            module
        ).keys():
            patch.setattr(module, name, 0.4)


# Ours


ESSENCE = (
    "security-other",
    "yamux-window",
    "yamux-streams",
    "ping",
    "head",
    "head-wrong-run",
    "request-oversize",
    "blob-held",
    "blob-not-found",
    "have-bitmap-wrong",
    "publish-without-reading",
    "pubsub-signature",
    "envelope-kind-unknown",
    "duplicate",
    "checkpoint-stale",
)


async def test_our_relay_passes(client: Client) -> None:
    async with client.open() as address:
        sheet = await client.play(address, *ESSENCE)
    assert notes(sheet).keys() == set(ESSENCE)
    assert {row.outcome for row in sheet.rows} == {Outcome.PASS}, notes(sheet)
    assert (sheet.kind, sheet.client) == ("peer", f"relay at {address}")


@pytest.mark.slow
def test_our_relay_passes_all_checks(client: Client) -> None:
    async def played() -> Sheet:
        async with client.open(ping_interval=0.5, ping_deadline=0.5) as address:
            return await client.play(address)

    told = notes(trio.run(played))  # longer than other tests may be
    assert {name for name, note in told.items() if not note.startswith("pass")} == NOT_OF_A_RELAY, told
    assert told["silent"].startswith("pass: pinged")


async def test_the_run_of_an_address_is_learnt_from_what_the_client_reads(client: Client) -> None:
    async with client.open() as address:
        sheet = await live.played([address], None, ["head"])
        assert failed(sheet) == set()
        other = await live.played([address], bytes(32), ["head"])
    assert "wrong-run" in notes(other)["head"]


# Clients that break rules


def false_streams(client: Client, network: Network) -> None:
    """Answers any request: chunks without a look at the hash, heads of any run, any bitmap, long requests."""

    async def blob(peer: str, request: bytes) -> bytes:
        read(request, BlobRequest, 1 << 20)
        return blob_reply(b"whatever is asked for")

    async def head(peer: str, request: bytes) -> bytes:
        read(request, HeadRequest, MAX_REQUEST)
        known = client.following.head
        return encode(HeadReply(run=client.following.envelope, checkpoint=known and known.envelope))

    async def have(peer: str, request: bytes) -> bytes:
        read(request, HaveRequest, MAX_HAVE_REQUEST)
        return encode(HaveReply(have=b"\x0f"))

    network.serve(BLOB_PROTOCOL, blob, max_request=1 << 20, max_response=MAX_BLOB_REPLY, per_peer=40)
    network.serve(HEAD_PROTOCOL, head, max_request=MAX_REQUEST, max_response=MAX_HEAD_REPLY)
    network.serve(HAVE_PROTOCOL, have, max_request=MAX_HAVE_REQUEST, max_response=MAX_HAVE_REPLY)


def forwards_everything(client: Client, network: Network) -> None:
    """Without a look at a message."""
    gossip = network._gossip

    async def push(forwarder: Any, message: Any) -> None:
        mid = message.from_id + message.seqno
        if message.topicIDs and not gossip.seen_messages.has(mid):
            gossip.seen_messages.add(mid)
            await gossip.mesh.forward(forwarder, message, mid, message.topicIDs[0], trio.current_time())

    gossip.push_msg = push  # type: ignore[method-assign]


def takes_offence(client: Client, network: Network) -> None:
    """What it ignores costs the forwarder its connection."""
    gossip = network._gossip
    judge = gossip._judge

    def harsh(subscription: Any, data: bytes, forwarder: Any) -> Any:
        verdict = judge(subscription, data, forwarder)
        if verdict is Verdict.IGNORE:
            for _ in range(MAX_OFFENCES):
                gossip.offences.add(forwarder, "ignored")
        return verdict

    gossip._judge = harsh  # type: ignore[method-assign]


def lax_transport(client: Client, network: Network) -> None:
    """Agrees to plaintext, and counts neither bytes nor streams."""
    selector: Any = network._swarm.upgrader.security_multistream._selector
    selector.add_handler("/plaintext/2.0.0", InsecureTransport.__new__(InsecureTransport))


FALSE_STREAMS = (
    "head-wrong-run",
    "blob-not-found",
    "blob-held",
    "have-bitmap-wrong",
    "request-oversize",
    "requests-at-once",
    "blob-several",
    "have-refusals",
    "reference-passed-on",
)
FORWARDS = (
    "pubsub-signature",
    "envelope-signature",
    "duplicate",
    "checkpoint-stale",
    "pubsub-fields",
    "envelope-run",
    "envelope-kind-unknown",
    "envelope-version",
    "envelope-kind-of-topic",
    "envelope-expired",
    "envelope-future",
    "envelope-lifetime",
    "envelope-oversize",
    "envelope-malformed",
    "shard",
    "sequence-reused",
    "hello-rate",
    "checkpoint-unknown",
    "rejections",
    "trainers-only",
    "checkpoint-forged",
    "reference-passed-on",
    "published-signatures",
)
HARSH = (
    "envelope-kind-unknown",
    "checkpoint-stale",
    "envelope-version",
    "envelope-expired",
    "envelope-future",
    "duplicate",
    "sequence-reused",
    "hello-rate",
    "checkpoint-unknown",
)
LAX = ("security-other", "yamux-window", "yamux-streams", "handshake-slow", "garbage")
SOME = 4
"""Of the checks that fail and of those that pass: all of them take a minute."""


BROKEN = pytest.mark.parametrize(
    ("breaks", "fail"),
    [
        (false_streams, FALSE_STREAMS),
        (forwards_everything, FORWARDS),
        (takes_offence, HARSH),
        (lax_transport, LAX),
    ],
)


async def played_broken(client: Client, breaks: Callable[[Client, Network], None], *only: str) -> Sheet:
    with pytest.MonkeyPatch.context() as patch:
        if breaks is false_streams:
            impatient(patch, live_streams)
        if breaks is lax_transport:
            impatient(patch, live_transport)
            patch.setattr(MuxerStream, "may_receive", lambda stream, size: True)
            patch.setattr(muxer, "MAX_INBOUND_STREAMS", 1000)
            patch.setattr(hardening, "HANDSHAKE_S", 60.0)
            patch.setattr(hardening, "NEGOTIATION_S", 60)
        async with client.open(lambda network: breaks(client, network)) as address:
            return await client.play(address, *only)


@BROKEN
async def test_a_client_fails_the_checks_of_the_rules_that_it_breaks(
    client: Client, breaks: Callable[[Client, Network], None], fail: tuple[str, ...]
) -> None:
    passing = ("ping", "head", "publish-without-reading", "subscriptions")
    sheet = await played_broken(client, breaks, *fail[:SOME], *passing)
    assert failed(sheet) == set(fail[:SOME]), notes(sheet)


@pytest.mark.slow
@BROKEN
def test_a_client_passes_all_checks_of_the_rules_that_it_keeps(
    client: Client, breaks: Callable[[Client, Network], None], fail: tuple[str, ...]
) -> None:
    sheet = trio.run(played_broken, client, breaks)
    assert failed(sheet) == set(fail), {name: notes(sheet)[name] for name in failed(sheet)}


# Clients that do not answer


async def forever(peer: str, request: bytes) -> bytes:
    await trio.sleep_forever()
    return b""


async def raises(peer: str, request: bytes) -> bytes:
    raise RuntimeError("as if it had a fault")


@pytest.mark.parametrize("handler", [forever, raises])
async def test_a_client_that_hangs_or_resets_is_asked_twice_and_then_no_more(
    client: Client, handler: Any
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        impatient(patch, live_target)

        def breaks(network: Network) -> None:
            network.serve(HEAD_PROTOCOL, handler, max_request=MAX_REQUEST, max_response=MAX_HEAD_REPLY)

        async with client.open(breaks) as address:
            sheet = await client.play(address, "ping", "identify", "head", "blob-not-found")
    told = notes(sheet)
    assert next(iter(told.values())).startswith("fail: After it, the client did not answer"), told
    assert {row.note for row in sheet.rows[1:]} == {"The client had stopped answering."}


async def test_a_client_that_floods_is_cut_short(client: Client) -> None:
    async def flood(stream: Any) -> None:
        while True:
            await stream.muxed_stream.write(b"\xff" * 65_536)

    def breaks(network: Network) -> None:
        network._host.set_stream_handler(BLOB_PROTOCOL, flood)

    async with client.open(breaks) as address:
        sheet = await client.play(address, "blob-malformed", "blob-not-found", "ping")
    told = notes(sheet)
    assert failed(sheet) == {"blob-malformed", "blob-not-found"}
    assert "announced an answer of 4294967295 bytes" in told["blob-malformed"]


async def test_a_client_that_exits_is_a_row_and_not_the_end_of_the_kit(client: Client) -> None:
    networks: list[Network] = []

    async def ends(target: Any) -> str:
        for listener in networks[0]._swarm.listeners.values():
            await listener.close()
        await networks[0]._close()
        return "it exits"

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(live_target, "HEALTH_S", 2.0)
        checks = [
            Check("ends", ("NET-1",), ANY, 5.0, False, ends),
            *(one for one in live.CHECKS if one.name in ("ping", "head")),
        ]
        async with client.open(networks.append) as address:
            sheet = await client.play(address, checks=checks)
    assert [row.outcome for row in sheet.rows] == [Outcome.FAIL, Outcome.UNTESTED, Outcome.UNTESTED]


# The list


def rows_of(section: str) -> list[list[str]]:
    """The table of a section, without its head."""
    part = TABLE.read_text().split(f"\n## {section}\n", 1)[1].split("\n## ", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")][2:]
    return [line.strip("| ").split(" | ") for line in lines]


def test_the_table_of_the_specification_is_that_of_the_code() -> None:
    rows = rows_of("A client that is dialled")
    told = {name: (rules.split(), roles) for name, rules, roles, _, _ in rows}
    assert told == {
        one.name: (list(one.requires), "any" if one.towards == ANY else ", ".join(one.towards))
        for one in live.CHECKS
    }
    assert [row[0] for row in rows] == [one.name for one in live.CHECKS]
    assert all(re.fullmatch("[a-z-]+", one.name) for one in live.CHECKS)
    assert sum(TRAINER in one.towards for one in live.CHECKS) > 60
