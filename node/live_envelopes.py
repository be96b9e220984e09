"""Live checks of envelopes: which messages a client forwards. Spec: `specs/04-gossip.md`."""

from __future__ import annotations

import os
from contextlib import suppress

import trio

from nous_node.protocol.constants import MAX_LIFETIME_MS, MAX_MANIFEST, MAX_SKEW_MS
from nous_node.protocol.envelope import Kind, unseal
from nous_node.protocol.receipts import Receipts
from nous_node.protocol.rollouts import Engine

from .following import now_ms
from .gossip import MAX_PUBLISH_BYTES
from .live_check import RELAY, VOLUNTEER, Checks, Failed, Untested
from .live_chunks import blob
from .live_forgery import Member
from .live_scene import FORWARD_S, QUIET_S, ROLLOUTS, SECONDS, Scene, scene
from .live_target import Target
from .offences import MAX_OFFENCES

check: Checks[Target] = Checks()

TRAINERS_TOPICS = (RELAY, VOLUNTEER)
MORE_OFFENCES = 4
"""Beyond those that a forwarder is refused for: some may be forgiven on the way."""
HELLO_BURST = 4
HELLOS = 7
"""Of one key at once: the burst, the one that a refill may allow meanwhile, and two that it does not."""
ALONE_S = 1.5
"""Where no message is at hand that would pass."""

# Envelopes


@scene(check, "envelope-signature", "ENV-5", "GOS-2")
async def envelope_signature(scene: Scene) -> str:
    member = scene.member()
    signed = member.signed(Kind.HELLO, os.urandom(8))
    await scene.stops(member.sealed(signed, bytes(64)), ignored=False)
    return "not forwarded"


@scene(check, "envelope-run", "GOS-3")
async def envelope_run(scene: Scene) -> str:
    await scene.stops(scene.member().hello(run=os.urandom(32)), ignored=False)
    return "not forwarded"


@scene(check, "envelope-kind-unknown", "ENV-4", "GOS-2")
async def envelope_kind_unknown(scene: Scene) -> str:
    await scene.stops(scene.member().seal("gossip-of-tomorrow", b"\x80"), ignored=True)
    return "ignored"


@scene(check, "envelope-version", "ENV-3", "GOS-2")
async def envelope_version(scene: Scene) -> str:
    """Of a protocol that is not there yet, with a shape of its own."""
    await scene.stops(scene.member().hello(v=2), scene.member().hello(v=3, kind=7), ignored=True)
    return "ignored"


@scene(check, "envelope-kind-of-topic", "GOS-3")
async def envelope_kind_of_topic(scene: Scene) -> str:
    body = Receipts([]).to_bytes()
    await scene.stops(scene.member().seal(Kind.RECEIPTS, body), ignored=False)
    return "not forwarded"


@scene(check, "envelope-expired", "ENV-7", "GOS-2")
async def envelope_expired(scene: Scene) -> str:
    now = now_ms()
    await scene.stops(scene.member().hello(ts=now - 120_000, exp=now - 60_000), ignored=True)
    return "ignored"


@scene(check, "envelope-future", "ENV-7", "GOS-2")
async def envelope_future(scene: Scene) -> str:
    ahead = now_ms() + 4 * MAX_SKEW_MS
    await scene.stops(scene.member().hello(ts=ahead, exp=ahead + 60_000), ignored=True)
    return "ignored"


@scene(check, "envelope-lifetime", "ENV-7")
async def envelope_lifetime(scene: Scene) -> str:
    now = now_ms()
    long = scene.member().hello(ts=now, exp=now + MAX_LIFETIME_MS + 1)
    await scene.stops(long, scene.member().hello(ts=now, exp=now), ignored=False)
    return "not forwarded: longer than ten minutes, and none"


@scene(check, "envelope-oversize", "ROL-14", "GOS-1")
async def envelope_oversize(scene: Scene) -> str:
    limit = scene.target.manifest.rollout_envelope_limit
    await scene.stops(scene.member().seal(Kind.HELLO, bytes(limit)), ignored=False)
    return f"not forwarded: more than {limit} bytes"


@scene(check, "envelope-malformed", "ENV-1", "ENV-2", "GOS-1")
async def envelope_malformed(scene: Scene) -> str:
    right = scene.passing()
    member = scene.member()
    for wrong in (os.urandom(64), right + b"\x00", right[:-1], member.hello(seq=-1)):
        await scene.stops(wrong, ignored=False)
    return "not forwarded: noise, a byte too many, a byte too few, a negative number"


@scene(check, "shard", "GOS-4")
async def shard(scene: Scene) -> str:
    shards = scene.target.manifest.shards
    if shards == 1:
        raise Untested("The run has one shard.")
    stranger = scene.member((scene.shard + 1) % shards)
    await scene.stops(stranger.hello(), ignored=False)
    return "not forwarded"


@scene(check, "duplicate", "GOS-5", "GOS-11")
async def duplicate_stopped(scene: Scene) -> str:
    """The same envelope in a new pubsub message; a forgery under its number does not keep it out."""
    member = scene.member()
    signed = member.signed(Kind.ROLLOUT, member.group(_head(scene), 0))
    envelope = member.sealed(signed)
    await scene.stops(member.sealed(signed, bytes(64)), ignored=False)
    await scene.passes(envelope)
    before = scene.target.listener.times(envelope)
    control = scene.passing()
    await scene.author.publish(scene.topic, envelope, control)
    if not await scene.target.listener.hears(control, FORWARD_S):
        raise Failed("A right message behind a repeated one is not forwarded.")
    await trio.sleep(QUIET_S)
    if scene.target.listener.times(envelope) != before:
        raise Failed("An envelope was forwarded twice.")
    if not scene.author.connected:
        raise Failed("It disconnected the peer that sent an envelope twice, which has to cost nothing.")
    return "forwarded once"


def _head(scene: Scene) -> bytes:
    if scene.target.head is None:
        raise Untested("It told no checkpoint.")
    return scene.target.head[0]


@scene(check, "sequence-reused", "GOS-5", "GOS-2")
async def sequence_reused(scene: Scene) -> str:
    member, head = scene.member(), _head(scene)
    first, second = (member.rollout(head, counter, seq=7) for counter in (0, 1))
    await scene.passes(first)
    await scene.stops(second, ignored=True)
    return "ignored"


@scene(check, "hello-rate", "GOS-6", "GOS-2")
async def hello_rate(scene: Scene) -> str:
    member = scene.member()
    hellos = [member.hello() for _ in range(HELLOS)]
    control = scene.passing()
    await scene.author.publish(scene.topic, *hellos, control)
    if not await scene.target.listener.hears(control, FORWARD_S):
        raise Failed("A right message behind too many hellos of one key is not forwarded.")
    await trio.sleep(QUIET_S)
    passed = sum(scene.target.listener.times(one) > 0 for one in hellos)
    if not HELLO_BURST <= passed <= HELLO_BURST + 1:
        raise Failed(f"Of {HELLOS} hellos of one key at once {passed} were forwarded; {HELLO_BURST} may be.")
    if not scene.author.connected:
        raise Failed("It disconnected the peer that sent them, which has to cost nothing.")
    return f"{passed} of {HELLOS} hellos of one key"


@scene(check, "checkpoint-unknown", "GOS-7", "GOS-2")
async def checkpoint_unknown(scene: Scene) -> str:
    await scene.stops(scene.member().rollout(os.urandom(32)), ignored=True)
    return "ignored"


@scene(check, "sealed-again", "GOS-12")
async def sealed_again(scene: Scene) -> str:
    member, head = scene.member(), _head(scene)
    await scene.passes(member.rollout(head), member.rollout(head))
    return "a group that is sealed anew is forwarded again"


@check("reference-passed-on", "ROL-18", towards=(RELAY,), seconds=2 * SECONDS)
async def reference_passed_on(target: Target) -> str:
    """Who forwards a reference brings its chunks, if they are right."""
    if target.shard is None or target.head is None:
        raise Untested("It reads no rollout topic, or told no checkpoint.")
    await target.refresh()
    for lie in (False, True):
        member = Member.of_shard(target.run, target.manifest, target.shard)
        new = Engine(os.urandom(16).hex(), "1", "float32", "cpu")  # so that nobody has its chunk yet
        envelope, chunks = member.reference(target.head[0], member.group(target.head[0], 0, engine=new))
        (digest,) = chunks
        async with target.peer() as author:
            author.serve_blobs({digest: b"other bytes"} if lie else chunks)
            await author.publish(member.topic, envelope)
            if not await target.listener.hears(envelope, FORWARD_S):
                raise Failed("A right reference is not forwarded.")
            reply = await blob(target.listener, digest)
        if lie and reply.data is not None:
            raise Failed("It passes on a chunk that has not its hash.")
        if not lie and reply.data != chunks[digest]:
            raise Failed(f"It does not bring the chunk of a reference that it forwarded ({reply.error}).")
    return "its chunk is brought, a false one is not"


@check("rejections", "REP-3", "GOS-2", towards=ROLLOUTS, seconds=2 * SECONDS)
async def rejections(target: Target) -> str:
    """A peer of the kit forwards what no correct node does until it is refused; the key that signed all of it
    is none the worse."""
    if target.shard is None:
        raise Untested("It reads no rollout topic of the run.")
    member = Member.of_shard(target.run, target.manifest, target.shard)
    async with target.peer() as author:
        wrong = [member.hello(run=os.urandom(32)) for _ in range(MAX_OFFENCES + MORE_OFFENCES)]
        with suppress(Failed):
            await author.publish(member.topic, *wrong)
        if not await author.lost(FORWARD_S):
            raise Failed(f"After {len(wrong)} messages that have to be rejected it keeps their forwarder.")
    async with target.peer() as other:
        hello = member.hello()
        await other.publish(member.topic, hello)
        if not await target.listener.hears(hello, FORWARD_S):
            raise Failed("The key that had signed them is not heard any more through another peer.")
    return f"disconnected after {MAX_OFFENCES}; the key is still heard"


# Topics where only trainers speak


async def _stops_on(target: Target, topic: str, messages: list[bytes], *, ignored: bool) -> None:
    if topic not in target.listener.topics:
        raise Untested("It does not read this topic.")
    if any(len(one) > MAX_PUBLISH_BYTES for one in messages):
        raise Untested("The manifest is larger than what goes by gossip.")
    async with target.peer() as author:
        await author.publish(topic, *messages)
        await trio.sleep(ALONE_S)
        if any(target.listener.times(one) for one in messages):
            raise Failed("It was forwarded.")
        if ignored and not author.connected:
            raise Failed("It disconnected the peer that sent it, which has to cost nothing.")


@check("trainers-only", "GOS-8", "GOS-3", towards=TRAINERS_TOPICS, seconds=SECONDS)
async def trainers_only(target: Target) -> str:
    member = Member(target.run, target.manifest)
    receipts = member.seal(Kind.RECEIPTS, Receipts([]).to_bytes())
    await _stops_on(target, target.topics.receipts, [receipts, member.hello()], ignored=False)
    return "not forwarded: receipts of a key that is no trainer's, a hello"


@check("checkpoint-stale", "ENV-7", "GOS-2", towards=TRAINERS_TOPICS, seconds=SECONDS)
async def checkpoint_stale(target: Target) -> str:
    """The newest manifest, whose envelope has expired since it was gossiped."""
    if target.head_envelope is None:
        raise Untested("It told no checkpoint.")
    if unseal(target.head_envelope, MAX_MANIFEST).head.exp > now_ms():
        raise Untested("Its newest checkpoint is not older than its envelope's lifetime; try again later.")
    await _stops_on(target, target.topics.checkpoints, [target.head_envelope], ignored=True)
    return "ignored"


@check("checkpoint-forged", "ENV-5", "GOS-8", towards=TRAINERS_TOPICS, seconds=SECONDS)
async def checkpoint_forged(target: Target) -> str:
    """The newest manifest under another signature, and under another key."""
    if target.head_envelope is None:
        raise Untested("It told no checkpoint.")
    envelope = unseal(target.head_envelope, MAX_MANIFEST)
    member = Member(target.run, target.manifest)
    content = envelope.content(MAX_MANIFEST)
    trainer = {"from": target.manifest.trainers[0]}
    forged = [member.seal(Kind.CHECKPOINT, content), member.seal(Kind.CHECKPOINT, content, **trainer)]
    await _stops_on(target, target.topics.checkpoints, forged, ignored=False)
    return "not forwarded"
