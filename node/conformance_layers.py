"""What stands inside what, so that a mutation of the inside gets past the checks of the outside.

A layer opens bytes of a vector, and closes them again around other content: with a signature by the key of
the vectors that made the first one, with lengths, hashes and checks that fit. Some change the question, too:
another run manifest has another run id.
"""

from __future__ import annotations

import base64
import hashlib
import struct
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, TypeAlias

import zstandard

from nous_node.protocol.constants import DOMAIN_ENVELOPE, INVITE_PREFIX
from nous_node.protocol.deltas import LENGTH_BYTES, MAGIC, apply_payload, pieces, read_delta_header
from nous_node.protocol.encoding import Value, decode, encode
from nous_node.protocol.errors import LocalError, NousError
from nous_node.protocol.identity import Identity
from nous_node.protocol.layout import LENGTH_BYTES as SIZE_BYTES
from nous_node.protocol.layout import header_length, read_layout

from .conformance_cases import Json
from .conformance_compare import raw
from .proof_file import DOMAIN as DOMAIN_PROOF

ROOM: Final = 1 << 24
"""Bytes of a vector that are taken apart."""
BLOCK: Final = 131_072
"""Bytes of a zstd block, at most (RFC 8878)."""
FRAME_BYTES: Final = 4
CHECK_BYTES: Final = 4

Map: TypeAlias = dict[str, Value]


@dataclass(frozen=True, slots=True)
class Scene:
    """One question under way, and the keys that may sign."""

    question: dict[str, Json]
    identities: Mapping[bytes, Identity]
    """By public key."""

    def sign(self, key: Value, message: bytes) -> bytes:
        """By this key, by any other where it is none of the vectors': the reader will say so."""
        found = self.identities.get(key) if isinstance(key, bytes) else None
        return (found or next(iter(self.identities.values()))).sign(message)


@dataclass(frozen=True, slots=True)
class Layer:
    """`close(scene, outer, inner)`: what `outer` is around `inner` instead of what it held."""

    name: str
    open: Callable[[bytes], bytes]
    close: Callable[[Scene, bytes, bytes], bytes]


def frame(content: bytes) -> bytes:
    """A zstd frame of raw blocks: no compressor, whose output would change with its version, takes part."""
    blocks = [content[at : at + BLOCK] for at in range(0, len(content), BLOCK)] or [b""]
    parts = [bytes.fromhex("28b52ffda0"), struct.pack("<I", len(content))]
    for number, block in enumerate(blocks):
        last = number == len(blocks) - 1
        parts += [(len(block) << 3 | last).to_bytes(3, "little"), block]
    return b"".join(parts)


def unframed(data: bytes) -> bytes:
    """The content of a zstd frame of the vectors. Raises LocalError where it is none."""
    try:
        return zstandard.ZstdDecompressor().decompress(data, max_output_size=ROOM)
    except zstandard.ZstdError as error:
        raise LocalError(f"no zstd frame: {error}") from error


def _map(data: bytes) -> Map:
    value = decode(data, ROOM)
    if not isinstance(value, dict):
        raise LocalError("no map")
    return value


def _bytes(fields: Map, name: str) -> bytes:
    value = fields.get(name)
    if not isinstance(value, bytes):
        raise LocalError(f"no bytes at {name}")
    return value


def _at(name: str) -> Layer:
    """The bytes at a key of a map."""
    return Layer(
        name,
        lambda outer: _bytes(_map(outer), name),
        lambda scene, outer, inner: encode({**_map(outer), name: inner}),
    )


def _signed(domain: bytes, key: str) -> Callable[[Scene, bytes, bytes], bytes]:
    def close(scene: Scene, outer: bytes, inner: bytes) -> bytes:
        signer = _map(_bytes(_map(outer), "signed"))[key]
        return encode({"sig": scene.sign(signer, domain + inner), "signed": inner})

    return close


def _content(outer: bytes) -> bytes:
    head = _map(outer)
    body = _bytes(head, "body")
    return unframed(body) if "enc" in head else body


def _packed(outer: bytes) -> bytes:
    """The body as a compressor makes it, with a checksum."""
    return zstandard.ZstdCompressor(write_checksum=True).compress(_content(outer))


def _with_packed(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    return encode({**_map(outer), "body": inner, "enc": "zstd", "size": len(_content(outer))})


def _with_content(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    return encode(_head(outer, inner))


def _head(outer: bytes, inner: bytes) -> Map:
    head = _map(outer)
    if "enc" in head:
        return {**head, "body": frame(inner), "size": len(inner)}
    return {**head, "body": inner}


def _with_manifest(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    run = hashlib.sha256(inner).digest()
    scene.question["run"] = run.hex()
    return encode({**_head(outer, inner), "run": run})


def _without_contents(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    """A checkpoint's files are compared with its manifest: without them the manifest alone decides."""
    scene.question.pop("contents", None)
    return inner


def _framed(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    return len(inner).to_bytes(FRAME_BYTES, "big") + inner


def _invited(outer: bytes) -> bytes:
    encoded = outer[len(INVITE_PREFIX) :]
    return base64.urlsafe_b64decode(encoded + b"=" * (-len(encoded) % 4))[:-CHECK_BYTES]


def _with_check(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    checked = inner + hashlib.sha256(inner).digest()[:CHECK_BYTES]
    return INVITE_PREFIX.encode() + base64.urlsafe_b64encode(checked).rstrip(b"=")


def _with_group(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    """The frame of another group: the question's reference is another one, too."""
    packed, reference = frame(inner), _map(raw(scene.question["body"]) or b"")
    size = reference["chunk"]
    assert isinstance(size, int)
    hashes = [hashlib.sha256(packed[at : at + size]).digest() for at in range(0, len(packed), size)]
    digest = hashlib.sha256(inner).digest()
    changed: Map = {"hash": digest, "size": len(inner), "packed": len(packed), "chunks": b"".join(hashes)}
    scene.question["body"] = encode({**reference, **changed}).hex()
    return packed


def _with_link(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    """A manifest of a chain: the last one names it by its hash."""
    last = _map(raw(scene.question["manifest"]) or b"")
    chain = last.get("chain")
    assert isinstance(chain, list)
    old, new = hashlib.sha256(outer).digest(), hashlib.sha256(inner).digest()
    last["chain"] = [new if digest == old else digest for digest in chain]
    scene.question["manifest"] = encode(last).hex()
    return inner


def _with_result(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    """A delta: the tensors that it makes are the wanted ones."""
    return _hashed(scene, raw(scene.question["parent"]) or b"", inner, inner)


def _with_parent(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    return _hashed(scene, inner, raw(scene.question["delta"]) or b"", inner)


def _hashed(scene: Scene, parent: bytes, delta: bytes, changed: bytes) -> bytes:
    with suppress(NousError):  # it makes none: the reader finds that, too
        scene.question["tensors"] = {name: digest.hex() for name, digest in result(parent, delta).items()}
    return changed


def result(parent: bytes, delta: bytes) -> dict[str, bytes]:
    """Hashes of the tensors that a delta makes. Raises RemoteError where it makes none."""
    start = SIZE_BYTES + header_length(parent[:SIZE_BYTES])
    places = read_layout(parent[SIZE_BYTES:start], len(parent))
    header, payloads = _delta_header(delta), _payloads(delta)
    records = read_delta_header(header, len(payloads), places)
    hashes = {place.name: hashlib.sha256() for place in places}
    for place in places:
        for number, offset, length in pieces(place):
            data = parent[offset : offset + length]
            if (found := records.get((place.name, number))) is not None:
                record, at = found
                data = apply_payload(data, record.encoding, payloads[at : at + record.size], place.dtype)
            hashes[place.name].update(data)
    return {name: digest.digest() for name, digest in hashes.items()}


def _parent_header(outer: bytes) -> bytes:
    return outer[SIZE_BYTES : SIZE_BYTES + header_length(outer[:SIZE_BYTES])]


def _with_parent_header(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    data = outer[SIZE_BYTES + header_length(outer[:SIZE_BYTES]) :]
    return len(inner).to_bytes(SIZE_BYTES, "little") + inner + data


_LENGTH: Final = slice(len(MAGIC), len(MAGIC) + LENGTH_BYTES)


def _delta_header(outer: bytes) -> bytes:
    return outer[_LENGTH.stop : _LENGTH.stop + int.from_bytes(outer[_LENGTH], "big")]


def _payloads(outer: bytes) -> bytes:
    return outer[_LENGTH.stop + int.from_bytes(outer[_LENGTH], "big") :]


def _with_header(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    return MAGIC + len(inner).to_bytes(LENGTH_BYTES, "big") + inner + _payloads(outer)


def _payload(outer: bytes) -> bytes:
    """What the only payload of a delta unfolds to."""
    return unframed(_payloads(outer))


def _with_payload(scene: Scene, outer: bytes, inner: bytes) -> bytes:
    """The only record of the header gets the size of another payload."""
    packed, header = frame(inner), _map(_delta_header(outer))
    match header:
        case {"tensors": {**tensors}} if len(tensors) == 1:
            ((name, records),) = tensors.items()
        case _:
            raise LocalError("no delta of one tensor")
    match records:
        case [[segment, encoding, int()]]:
            changed = {"tensors": {name: [[segment, encoding, len(packed)]]}}
        case _:
            raise LocalError("no delta of one record")
    head = encode(changed)
    return MAGIC + len(head).to_bytes(LENGTH_BYTES, "big") + head + packed


def _same(outer: bytes) -> bytes:
    return outer


SEALED: Final = Layer("signed", _at("signed").open, _signed(DOMAIN_ENVELOPE, "from"))
CONTENT: Final = Layer("body", _content, _with_content)
PACKED: Final = Layer("frame", _packed, _with_packed)
MANIFEST: Final = Layer("manifest", _content, _with_manifest)
ALONE: Final = Layer("alone", _same, _without_contents)
FRAMED: Final = Layer("frame", lambda outer: outer[FRAME_BYTES:], _framed)
INVITED: Final = Layer("payload", _invited, _with_check)
GROUP: Final = Layer("group", unframed, _with_group)
LINK: Final = Layer("link", _same, _with_link)
RESULT: Final = Layer("result", _same, _with_result)
PARENT: Final = Layer("parent", _same, _with_parent)
PARENT_HEADER: Final = Layer("header", _parent_header, _with_parent_header)
HEADER: Final = Layer("header", _delta_header, _with_header)
PAYLOAD: Final = Layer("payload", _payload, _with_payload)
PROOF: Final = Layer("signed", _at("signed").open, _signed(DOMAIN_PROOF, "key"))
FIRST: Final = _at("first")
SECOND: Final = _at("second")
RUN: Final = _at("run")
STANDING: Final = _at("standing")

Chain: TypeAlias = tuple[Layer, ...]
_ENVELOPE: Final[tuple[Chain, ...]] = ((), (SEALED,), (SEALED, CONTENT), (SEALED, PACKED))

INPUTS: Final[Mapping[str, Mapping[str, tuple[Chain, ...]]]] = {
    "encoding": {"bytes": ((),)},
    "signatures": {"key": ((),), "message": ((),), "signature": ((),)},
    "envelopes": {"envelope": _ENVELOPE},
    "streams": {"frame": ((), (FRAMED,))},
    "bitmaps": {"have": ((),)},
    "blobs": {"reply": ((), (FRAMED,))},
    "gossip": {"steps.message": _ENVELOPE},
    "runs": {"envelope": ((), (SEALED,), (SEALED, MANIFEST), (SEALED, MANIFEST))},
    "invites": {"text": ((), (INVITED,))},
    "arrays": {"planes": ((),)},
    "rollouts": {"body": ((),)},
    "references": {"body": ((),)},
    "replays": {"body": ((),)},
    "references-fetched": {"body": ((),), "frame": ((), (GROUP,))},
    "checkpoints": {"envelope": ((), (ALONE, SEALED), (ALONE, SEALED, CONTENT), (ALONE, SEALED, CONTENT))},
    "chunks": {"data": ((),)},
    "trees": {"entry": ((),), "data": ((),)},
    "chains": {"manifest": ((),), "chain": ((LINK,),)},
    "equivocations": {
        "proof": ((), (FIRST, SEALED), (SECOND, SEALED), (FIRST, SEALED, CONTENT), (SECOND, SEALED, CONTENT))
    },
    "deltas": {
        "parent": ((), (PARENT,), (PARENT, PARENT_HEADER), (PARENT, PARENT_HEADER)),
        "delta": ((), (RESULT,), (RESULT, HEADER), (RESULT, PAYLOAD), (RESULT, PAYLOAD)),
    },
    "receipts": {"envelope": _ENVELOPE},
    "hellos": {"body": ((),)},
    "proofs": {"file": ((), (PROOF,), (PROOF, RUN, SEALED), (PROOF, STANDING, SEALED, CONTENT))},
}
"""The bytes of each op's questions, and how deep they are opened."""
