"""How each file of vectors is driven through the installed package. No generator takes part."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

from nous_node.envs import sort_digits
from nous_node.protocol import checkpoints, receipts, runs, sampling, streams, tasks
from nous_node.protocol.encoding import decode, encode, read
from nous_node.protocol.envelope import unseal
from nous_node.protocol.equivocation import open_equivocation
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import (
    GossipView,
    Judgement,
    judge_checkpoint,
    judge_receipts,
    judge_rollout,
)
from nous_node.protocol.identity import Identity, peer_id, verify
from nous_node.protocol.introductions import believed, passed_on, vouched
from nous_node.protocol.references import chunks, cut, open_group, read_reference, unpack
from nous_node.protocol.rollouts import (
    RolloutGroup,
    pack_floats,
    pack_tokens,
    unpack_floats,
    unpack_tokens,
)
from nous_node.protocol.structure import check_structure
from nous_node.trainer.tokenizer import Tokenizer

from .chat_driver import drive_chat
from .env_drivers import (
    drive_atropos,
    drive_facts,
    drive_game,
    drive_handout,
    drive_openenv,
    drive_package,
    drive_question,
    drive_seed,
    drive_version,
)
from .textarena_driver import drive_textarena

DEFAULT_MODEL = Path(str(files("nous_node.trainer"))) / "default"
VECTORS = Path(__file__).parents[2] / "specs" / "vectors"
ROOM = 1 << 24
Case = dict[str, Any]


def loaded(name: str) -> dict[str, Any]:
    return json.loads((VECTORS / f"{name}.json").read_text())  # type: ignore[no-any-return]


OF_THE_NODE = {
    "copies",
    "deltas",
    "drift",
    "ends",
    "evidence",
    "holes",
    "limits",
    "proofs",
    "repetition",
    "states",
    "verification",
}
"""Driven by `tests/node/test_verification_vectors.py`, deltas by `tests/node/test_delta_files.py`."""
FILES = {
    path.stem: loaded(path.stem) for path in sorted(VECTORS.glob("*.json")) if path.stem not in OF_THE_NODE
}
RUN = bytes.fromhex(FILES["gossip"]["run"])
MANIFEST = read(bytes.fromhex(FILES["gossip"]["manifest"]), runs.RunManifest, ROOM)


def raw(data: str | list[list[Any]]) -> bytes:
    """Hex, or runs of it: [hex, count]."""
    if isinstance(data, str):
        return bytes.fromhex(data)
    return b"".join(bytes.fromhex(piece) * count for piece, count in data)


def untagged(value: Any) -> Any:
    match value:
        case None | bool():
            return value
        case {"int": str() as digits}:
            return int(digits)
        case {"float": str() as digits}:
            return float(digits)
        case {"text": str() as text}:
            return text
        case {"bin": str() as digits}:
            return bytes.fromhex(digits)
        case {"array": list() as items}:
            return [untagged(item) for item in items]
        case {"map": list() as pairs}:
            return {key: untagged(item) for key, item in pairs}
    raise ValueError(value)


def drive_encoding(case: Case) -> None:
    data = raw(case["bytes"])
    value = decode(data, case.get("limit", ROOM))
    assert repr(value) == repr(untagged(case["value"]))
    assert encode(value) == data


def drive_identity(case: Case) -> None:
    identity = Identity.from_seed(raw(case["seed"]))
    assert identity.key.hex() == case["key"]
    assert peer_id(identity.key) == case["peer_id"]


def drive_signature(case: Case) -> None:
    verify(raw(case["key"]), raw(case["signature"]), raw(case["message"]))


def drive_envelope(case: Case) -> None:
    envelope = unseal(raw(case["envelope"]))
    envelope.verify_signature()
    envelope.check_time(case["now"])
    content = envelope.content()
    assert envelope.id.hex() == case["id"]
    assert envelope.signed.hex() == case["signed"]
    assert encode(untagged(case["head"])).hex() == case["signed"]
    assert case["preimage"] == (b"nous/envelope/1\0" + envelope.signed).hex()
    assert envelope.sig.hex() == case["sig"]
    assert hashlib.sha256(content).hexdigest() == case["content_sha256"]


MESSAGES: dict[str, tuple[type[Any], int]] = {
    "head-request": (streams.HeadRequest, streams.MAX_REQUEST),
    "head-reply": (streams.HeadReply, streams.MAX_HEAD_REPLY),
    "blob-request": (streams.BlobRequest, streams.MAX_REQUEST),
    "blob-reply": (streams.BlobReply, streams.MAX_BLOB_REPLY),
    "have-request": (streams.HaveRequest, streams.MAX_HAVE_REQUEST),
    "have-reply": (streams.HaveReply, streams.MAX_HAVE_REPLY),
}


def drive_stream(case: Case) -> None:
    frame = raw(case["frame"])
    length, data = int.from_bytes(frame[:4], "big"), frame[4:]
    assert length == len(data)
    struct, limit = MESSAGES[case["message"]]
    assert encode(read(data, struct, limit)) == data
    assert encode(untagged(case["value"])) == data


def drive_bitmap(case: Case) -> None:
    chunks = streams.read_bitmap(raw(case["have"]), case["chunks"])
    assert [number for number in range(case["chunks"]) if chunks >> number & 1] == case["held"]
    assert streams.bitmap(chunks, case["chunks"]).hex() == case["have"]


def drive_blob(case: Case) -> None:
    request, reply = raw(case["request"]), raw(case["reply"])
    assert request[4:] == encode(streams.BlobRequest(raw(case["hash"])))
    if int.from_bytes(reply[:4], "big") > streams.MAX_BLOB_REPLY:
        raise RemoteError(Code.OVERSIZE, "nothing of it is read")
    data = streams.read_blob(reply[4:])
    checkpoints.check_chunk(data, raw(case["hash"]))
    assert data == raw(case["data"])


def drive_shard(case: Case) -> None:
    assert runs.shard_of(raw(case["key"]), case["shards"]) == case["shard"]


def drive_introduction(case: Case) -> None:
    if "peer" in case:
        found = vouched(case["peer"], case["remote"], not case["dialled"], case["addresses"])
        assert passed_on(found, case["asker"]) == case["result"]
    else:
        assert [one.address for one in believed(case["addresses"], case["remote"])] == case["result"]


def drive_gossip(case: Case) -> None:
    view = GossipView(RUN, MANIFEST)
    for known in case["known"]:
        view.learn(raw(known["checkpoint"]), known["version"])
    for held in case["quarantined"]:
        view.quarantined[raw(held["key"])] = held["until"]
    view.banned |= {raw(key) for key in case["banned"]}
    view.throttled |= {raw(key) for key in case["throttled"]}
    for step in case["steps"]:
        judgement = judged(view, step["topic"], raw(step["message"]), step["now"])
        code = judgement.error.code.value if judgement.error else None
        assert (judgement.verdict.value, code) == (step["verdict"], step.get("code"))


def judged(view: GossipView, topic: str, message: bytes, now: int) -> Judgement:
    match topic.split("/"):
        case ["rollouts", shard]:
            return judge_rollout(view, int(shard), message, now)
        case ["checkpoints"]:
            return judge_checkpoint(view, message, now)
        case ["receipts"]:
            return judge_receipts(view, message, now)
    raise ValueError(topic)


def drive_run(case: Case) -> None:
    run = raw(case["run"])
    manifest = runs.open_manifest(unseal(raw(case["envelope"])), run)
    assert manifest == read(raw(case["manifest"]), runs.RunManifest, ROOM)
    assert encode(untagged(case["value"])).hex() == case["manifest"]
    topics = runs.Topics(run)
    assert case["topics"] == {
        "rollouts/0": topics.rollouts(0),
        "checkpoints": topics.checkpoints,
        "receipts": topics.receipts,
    }


def drive_invite(case: Case) -> None:
    invite = runs.Invite.from_text(case["text"])
    assert (invite.run.hex(), invite.addresses) == (case["run"], case["addresses"])


def drive_task(case: Case) -> None:
    seed = tasks.task_seed(
        raw(case["run"]), raw(case["checkpoint"]), raw(case["beacon"]), raw(case["key"]), case["counter"]
    )
    keys = case["sampler_keys"]
    assignment = tasks.assign(seed, case["weights"], len(keys))
    assert seed.hex() == case["seed"]
    assert hashlib.shake_256(b"nous/draw/1\0" + seed).hexdigest(72) == case["stream"]
    assert assignment.environment == case["environment"]
    assert assignment.task_seed.hex() == case["task_seed"]
    assert [assignment.sampler_key(number).hex() for number in range(len(keys))] == keys


def drive_uniforms(case: Case) -> None:
    key, start, count = raw(case["key"]), case["start"], case["count"]
    assert sampling.keystream(key, start, count).hex() == case["keystream"]
    assert sampling.uniforms(key, start, count) == case["uniforms"]


def logits_of(case: Case) -> list[float]:
    return [-math.inf if logit is None else logit for logit in case["logits"]]


def drive_choice(case: Case) -> None:
    assert sampling.choose(logits_of(case), case["temperature"], case["uniform"]) == case["token"]


def drive_distance(case: Case) -> None:
    measured = sampling.distance(logits_of(case), case["temperature"], case["token"], case["uniform"])
    assert abs(measured - case["distance"]) <= case["tolerance"]


def drive_array(case: Case) -> None:
    data, form = raw(case["planes"]), case["form"]
    values = unpack_tokens(data) if form == "u32" else unpack_floats(data, form)
    assert repr(values) == repr(case["values"])
    assert data == (pack_tokens(case["values"]) if form == "u32" else pack_floats(case["values"], form))


def drive_rollout(case: Case) -> None:
    group = RolloutGroup.from_bytes(raw(case["body"]))
    check_structure(group, MANIFEST)
    assert encode(untagged(case["value"])).hex() == case["body"]


def drive_reference(case: Case) -> None:
    reference = read_reference(raw(case["body"]), MANIFEST.referenced_limit)
    frame = raw(case["frame"])
    if len(frame) == reference.packed:  # chunk by chunk, as they come
        for (digest, length), (_, piece) in zip(chunks(reference), cut(reference, frame), strict=True):
            assert len(piece) == length
            checkpoints.check_chunk(piece, digest)
    body = unpack(reference, frame)
    assert open_group(reference, body).to_bytes().hex() == case["group"]
    assert encode(untagged(case["value"])).hex() == case["body"]


def drive_checkpoint(case: Case) -> None:
    envelope = unseal(raw(case["envelope"]))
    checkpoint = checkpoints.open_checkpoint(envelope, RUN, MANIFEST)
    manifest = raw(case["manifest"])
    assert encode(untagged(case["value"])) == manifest == envelope.content()
    assert checkpoints.checkpoint_hash(manifest).hex() == case["hash"]
    assert checkpoints.files_hash(checkpoint.files).hex() == case["files_hash"]
    assert checkpoints.weights_hash(checkpoint.tensors).hex() == case["weights_hash"]
    for entry, content in zip(checkpoint.files, map(raw, case["contents"]), strict=True):
        pieces = [content[start : start + entry.chunk] for start in range(0, len(content), entry.chunk)]
        assert checkpoints.file_entry(entry.path, pieces, entry.chunk) == entry


def drive_chunk(case: Case) -> None:
    checkpoints.check_chunk(raw(case["data"]), raw(case["hash"]))


def drive_tree(case: Case) -> None:
    entry, content = read(raw(case["entry"]), checkpoints.FileEntry, ROOM), raw(case["data"])
    checkpoints.check_chunks(entry)
    pieces = [content[start : start + entry.chunk] for start in range(0, len(content), entry.chunk)]
    assert [len(piece) for piece in pieces] == [entry.length(number) for number in range(len(pieces))]
    for piece, digest in zip(pieces, entry.hashes(), strict=True):
        checkpoints.check_chunk(piece, digest)
    assert checkpoints.file_entry(entry.path, pieces, entry.chunk) == entry


def drive_chain(case: Case) -> None:
    data = raw(case["manifest"])
    checkpoint = checkpoints.read_manifest(data, checkpoints.checkpoint_hash(data))
    links = zip(checkpoint.chain, map(raw, case["chain"]), strict=True)
    for index, (digest, link) in enumerate(links):
        checkpoints.check_link(checkpoint, index, checkpoints.read_manifest(link, digest))


def drive_receipts(case: Case) -> None:
    opened = receipts.open_receipts(unseal(raw(case["envelope"])), RUN, MANIFEST)
    assert read(raw(case["body"]), receipts.Receipts, ROOM) == opened


def drive_hello(case: Case) -> None:
    read(raw(case["body"]), receipts.Hello, ROOM)


def drive_sort_digits(case: Case) -> None:
    if "text" in case:
        assert Tokenizer(DEFAULT_MODEL, 258, 256, 259).decode(case["tokens"]) == case["text"]
        return
    environment = sort_digits.SortDigits({"length": case["length"]})
    task = environment.task(raw(case["seed"]), case["level"])
    if "answer" in case:
        assert environment.score(task, case["answer"], case["ended"]).reward == case["reward"]
        return
    assert environment.prompt(task) == case["prompt"]
    assert Tokenizer(DEFAULT_MODEL, 258, 256, 259).encode(case["prompt"]) == case["tokens"]
    assert environment.score(task, case["solution"], True).reward == 1.0


def drive_model(case: Case) -> None:
    """The tokens; the logits need the model: `tests/trainer` compares them."""
    assert list(case["text"].encode()) == case["tokens"]
    assert len(case["logits"]) == 259


def drive_equivocation(case: Case) -> None:
    proven = open_equivocation(raw(case["proof"]), RUN, MANIFEST)
    assert (proven.key.hex(), proven.version) == (case["key"], case["version"])
    assert len(set(proven.hashes)) == 2


DRIVERS: dict[str, Callable[[Case], None]] = {
    "encoding": drive_encoding,
    "identities": drive_identity,
    "signatures": drive_signature,
    "envelopes": drive_envelope,
    "streams": drive_stream,
    "bitmaps": drive_bitmap,
    "blobs": drive_blob,
    "introductions": drive_introduction,
    "shards": drive_shard,
    "gossip": drive_gossip,
    "runs": drive_run,
    "invites": drive_invite,
    "tasks": drive_task,
    "versions": drive_version,
    "facts": drive_facts,
    "seeds": drive_seed,
    "handouts": drive_handout,
    "uniforms": drive_uniforms,
    "choices": drive_choice,
    "distances": drive_distance,
    "arrays": drive_array,
    "rollouts": drive_rollout,
    "references": drive_reference,
    "checkpoints": drive_checkpoint,
    "chunks": drive_chunk,
    "trees": drive_tree,
    "chains": drive_chain,
    "equivocations": drive_equivocation,
    "receipts": drive_receipts,
    "hellos": drive_hello,
    "nous-default": drive_model,
    "chat": drive_chat,
    "sort-digits": drive_sort_digits,
    "atropos": drive_atropos,
    "openenv": drive_openenv,
    "packages": drive_package,
    "reasoning-gym": drive_question,
    "gymnasium": drive_game,
    "textarena": drive_textarena,
}
