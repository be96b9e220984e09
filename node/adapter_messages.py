"""Ops of chapters 01 to 05 and 10: encoding, identities, envelopes, streams, gossip, runs, receipts."""

from __future__ import annotations

import hashlib
from typing import Annotated, Final

from msgspec import Meta

from nous_node.protocol import checkpoints, receipts, runs, streams
from nous_node.protocol.constants import DOMAIN_ENVELOPE, MAX_MANIFEST_VALUES
from nous_node.protocol.encoding import decode, encode, read
from nous_node.protocol.envelope import unseal
from nous_node.protocol.equivocation import open_equivocation
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import (
    MAX_HELLO,
    GossipView,
    Judgement,
    judge_checkpoint,
    judge_receipts,
    judge_rollout,
)
from nous_node.protocol.identity import Identity, peer_id, verify
from nous_node.protocol.introductions import believed, passed_on, vouched

from .adapter_question import ROOM, Answer, Ask, BadQuestion, Ops, Raw, run_manifest, tagged
from .proof_file import Proof, ProofError, open_proofs

LENGTH: Final = 4
"""Bytes in front of a frame, its length. [STR-1]"""


class Encoding(Ask, frozen=True):
    bytes: Raw
    limit: int = ROOM


def encoding(ask: Encoding) -> Answer:
    value = decode(ask.bytes, ask.limit)
    return {"value": tagged(value), "bytes": encode(value).hex()}


class Seed(Ask, frozen=True):
    seed: Raw


def identity(ask: Seed) -> Answer:
    key = Identity.from_seed(ask.seed).key
    return {"key": key.hex(), "peer_id": peer_id(key)}


class Signature(Ask, frozen=True):
    key: Raw
    message: Raw
    signature: Raw


def signature(ask: Signature) -> Answer:
    verify(ask.key, ask.signature, ask.message)
    return {}


class Sealed(Ask, frozen=True):
    envelope: Raw
    now: int


def envelope(ask: Sealed) -> Answer:
    opened = unseal(ask.envelope)
    opened.verify_signature()
    opened.check_time(ask.now)
    content = opened.content()
    return {
        "head": tagged(decode(opened.signed, ROOM)),
        "signed": opened.signed.hex(),
        "preimage": (DOMAIN_ENVELOPE + opened.signed).hex(),
        "sig": opened.sig.hex(),
        "id": opened.id.hex(),
        "content_sha256": hashlib.sha256(content).hexdigest(),
    }


MESSAGES: Final[dict[str, tuple[type[object], int]]] = {
    "head-request": (streams.HeadRequest, streams.MAX_REQUEST),
    "head-reply": (streams.HeadReply, streams.MAX_HEAD_REPLY),
    "blob-request": (streams.BlobRequest, streams.MAX_REQUEST),
    "blob-reply": (streams.BlobReply, streams.MAX_BLOB_REPLY),
    "have-request": (streams.HaveRequest, streams.MAX_HAVE_REQUEST),
    "have-reply": (streams.HaveReply, streams.MAX_HAVE_REPLY),
}


class Frame(Ask, frozen=True):
    message: str
    frame: Raw


def stream(ask: Frame) -> Answer:
    if ask.message not in MESSAGES:
        raise BadQuestion(f"There is no message {ask.message[:64]!r} of a stream.")
    kind, limit = MESSAGES[ask.message]
    data = _framed(ask.frame, limit)
    read(data, kind, limit)
    value = decode(data, limit)
    return {"value": tagged(value), "frame": _frame(encode(value)).hex()}


def _framed(frame: bytes, limit: int) -> bytes:
    """What one frame holds; what comes behind it is not read. [STR-1]"""
    length = int.from_bytes(frame[:LENGTH], "big")
    if length > limit:
        raise RemoteError(Code.OVERSIZE, f"The frame says {length} bytes; at most {limit} are read.")
    if len(frame) < LENGTH + length:
        raise RemoteError(Code.MALFORMED, f"The stream ended before the {length} bytes of its frame.")
    return frame[LENGTH : LENGTH + length]


def _frame(data: bytes) -> bytes:
    return len(data).to_bytes(LENGTH, "big") + data


class Bitmap(Ask, frozen=True):
    have: Raw
    chunks: int


def bitmap(ask: Bitmap) -> Answer:
    held = streams.read_bitmap(ask.have, ask.chunks)
    numbers = [number for number in range(ask.chunks) if held >> number & 1]
    return {"held": numbers, "have": streams.bitmap(held, ask.chunks).hex()}


class Blob(Ask, frozen=True):
    hash: Raw
    reply: Raw


def blob(ask: Blob) -> Answer:
    data = streams.read_blob(_framed(ask.reply, streams.MAX_BLOB_REPLY))
    checkpoints.check_chunk(data, ask.hash)
    return {"request": _frame(encode(streams.BlobRequest(bytes(ask.hash)))).hex(), "data": data.hex()}


class Passed(Ask, frozen=True):
    addresses: list[str]
    asker: str
    dialled: bool
    peer: str
    remote: str


def passed(ask: Passed) -> Answer:
    found = vouched(ask.peer, ask.remote, not ask.dialled, ask.addresses)
    return {"result": passed_on(found, ask.asker)}


class Believed(Ask, frozen=True):
    addresses: list[str]
    remote: str


def taken(ask: Believed) -> Answer:
    return {"result": [one.address for one in believed(ask.addresses, ask.remote)]}


class Shard(Ask, frozen=True):
    key: Raw
    shards: Annotated[int, Meta(ge=1)]


def shard(ask: Shard) -> Answer:
    return {"shard": runs.shard_of(ask.key, ask.shards)}


class Known(Ask, frozen=True):
    checkpoint: Raw
    version: int


class Quarantined(Ask, frozen=True):
    key: Raw
    until: int


class Step(Ask, frozen=True):
    topic: str
    message: Raw
    now: int


class Bounds(Ask, frozen=True):
    """In place of those of chapter 04, which would take many messages to reach."""

    remembered: int
    shares: int
    senders: int


class Scene(Ask, frozen=True):
    run: Raw
    manifest: Raw
    known: list[Known]
    banned: list[Raw]
    quarantined: list[Quarantined]
    throttled: list[Raw]
    steps: list[Step]
    bounds: Bounds | None = None


def gossip(ask: Scene) -> Answer:
    view = GossipView(ask.run, run_manifest(ask.manifest))
    for known in ask.known:
        view.learn(known.checkpoint, known.version)
    view.quarantined |= {held.key: held.until for held in ask.quarantined}
    view.banned |= set(ask.banned)
    view.throttled |= set(ask.throttled)
    if ask.bounds is not None:
        view.memory.room, view.memory.shares = ask.bounds.remembered, ask.bounds.shares
        view.groups.room = view.hellos.room = ask.bounds.senders
    judgements = [_judged(view, step) for step in ask.steps]
    return {
        "steps": [
            {"verdict": one.verdict.value, "code": one.error.code.value if one.error else None}
            for one in judgements
        ]
    }


def _judged(view: GossipView, step: Step) -> Judgement:
    match step.topic.split("/"):
        case ["rollouts", number] if number.isascii() and number.isdigit():
            return judge_rollout(view, int(number), step.message, step.now)
        case ["checkpoints"]:
            return judge_checkpoint(view, step.message, step.now)
        case ["receipts"]:
            return judge_receipts(view, step.message, step.now)
    raise BadQuestion(f"There is no topic {step.topic[:64]!r}.")


class Run(Ask, frozen=True):
    envelope: Raw
    run: Raw


def run(ask: Run) -> Answer:
    opened = unseal(ask.envelope)
    runs.open_manifest(opened, ask.run)
    content, topics = opened.content(), runs.Topics(ask.run)
    named = {
        "rollouts/0": topics.rollouts(0),
        "checkpoints": topics.checkpoints,
        "receipts": topics.receipts,
    }
    return {
        "manifest": content.hex(),
        "value": tagged(decode(content, ROOM, MAX_MANIFEST_VALUES)),
        "topics": named,
    }


class Invite(Ask, frozen=True):
    text: str


def invite(ask: Invite) -> Answer:
    found = runs.Invite.from_text(ask.text)
    return {"run": found.run.hex(), "addresses": found.addresses}


class Signed(Ask, frozen=True):
    run: Raw
    manifest: Raw
    envelope: Raw


def receipt(ask: Signed) -> Answer:
    opened = unseal(ask.envelope)
    receipts.open_receipts(opened, ask.run, run_manifest(ask.manifest))
    return {"body": opened.content().hex()}


class Body(Ask, frozen=True):
    body: Raw


def hello(ask: Body) -> Answer:
    read(ask.body, receipts.Hello, MAX_HELLO)
    return {"body": encode(decode(ask.body, ROOM)).hex()}


class Equivocation(Ask, frozen=True):
    run: Raw
    manifest: Raw
    proof: Raw


def equivocation(ask: Equivocation) -> Answer:
    proven = open_equivocation(ask.proof, ask.run, run_manifest(ask.manifest))
    hashes = sorted(digest.hex() for digest in proven.hashes)
    return {"key": proven.key.hex(), "version": proven.version, "hashes": hashes}


class ProofFile(Ask, frozen=True):
    file: Raw


def proof(ask: ProofFile) -> Answer:
    try:
        found = open_proofs(ask.file)
    except ProofError as error:
        cause = error.__cause__
        # The file's own reader says `duplicate` in words alone: it is read by people.
        raise cause if isinstance(cause, RemoteError) else RemoteError(Code.DUPLICATE, str(error)) from None
    return {
        "key": found.key,
        "run": found.run,
        "name": found.name,
        "made": round(found.made * 1000),
        "messages": found.messages,
        "accepted": found.accepted,
        "refused": found.refused,
        "standing": _standing(found),
    }


def _standing(found: Proof) -> list[object] | None:
    said = found.statement
    if said is None:
        return None
    figures = [said.accepted, said.refused, said.credit, said.debit, said.rank, said.of, said.until]
    return [found.key, said.state, *figures]


OPS: Final[Ops] = {
    "encoding": encoding,
    "identities": identity,
    "signatures": signature,
    "envelopes": envelope,
    "streams": stream,
    "bitmaps": bitmap,
    "blobs": blob,
    "introductions-passed": passed,
    "introductions-believed": taken,
    "shards": shard,
    "gossip": gossip,
    "runs": run,
    "invites": invite,
    "receipts": receipt,
    "hellos": hello,
    "equivocations": equivocation,
    "proofs": proof,
}
