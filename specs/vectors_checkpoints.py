"""Vectors of chapter 09 but for deltas: manifests, chains, files in chunks."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from vectors_encoding import tagged
from vectors_world import ALICE, BASE, BEACON, FILES, ROOT, TRAINER, case, forged, plain, sealed

from nous_node.protocol.checkpoints import (
    CheckpointManifest,
    FileEntry,
    checkpoint_hash,
    file_entry,
    files_hash,
    weights_hash,
)
from nous_node.protocol.encoding import decode, encode

replace = msgspec.structs.replace


def checkpoints() -> list[dict[str, Any]]:
    body = BASE.to_bytes()
    later = replace(
        BASE, version=1, parent=checkpoint_hash(body), levels={"sort-digits": 1}, stats={"loss": 0.5}
    )
    contents = [b"{}", bytes(16_384) + b"tail"]
    good = [
        case(
            comment,
            rule,
            "valid",
            manifest=data.hex(),
            value=tagged(decode(data, 1 << 20)),
            hash=checkpoint_hash(data).hex(),
            files_hash=files_hash(manifest.files).hex(),
            weights_hash=weights_hash(manifest.tensors).hex(),
            contents=[content.hex() for content in contents],
            envelope=sealed(TRAINER, "checkpoint", data).hex(),
        )
        for comment, rule, manifest, more in (
            ("version 0 of the run", "CKP-1 CKP-2 CKP-5 CKP-7 CKP-9 CKP-12", BASE, {}),
            ("version 1", "CKP-8 CKP-9", later, {}),
            ("an empty file has no chunk", "CKP-5", replace(later, files=[FILES[0], FileEntry("z.txt", 0, 16_384, b"")]), {}),
            ("a delta", "CKP-13", _delta(later), {}),
            ("a delta of a checkpoint with the same files", "CKP-13", _delta(later, deltas=[]), {}),
            ("a chain of 64", "CKP-13", _delta(later, version=100, chain=[*_hashes(63), later.parent]), {}),
            ("an empty chain and no deltas of a full", "CKP-13", later, {"chain": [], "deltas": []}),
            ("no deltas of a delta, spelled out", "CKP-13", _delta(later, deltas=[]), {"deltas": []}),
            ("keys that this revision does not know", "ENC-10", later, {"zebra": 1, "files": [{**plain(one), "mode": 420} for one in FILES]}),
            ("mirrors", "CKP-16", replace(later, mirrors=["https://a.example/run", "http://[2001:db8::1]:8080"]), {}),
            ("mirrors that nobody asks", "CKP-16", replace(later, mirrors=["http://a:65536", "https://u:p@a/?q#f", "http://[::1", "http:///a"]), {}),
        )
        for data in [encode({**plain(manifest), **more})]
    ]  # fmt: skip
    good[2]["contents"] = [contents[0].hex(), ""]
    return good + _bad_checkpoints(later) + _bad_deltas(later)


def _hashes(count: int) -> list[bytes]:
    return [hashlib.sha256(b"%d" % number).digest() for number in range(count)]


def _delta(later: CheckpointManifest, **changes: Any) -> CheckpointManifest:
    """`later` as a delta; its blob stands for any."""
    assert later.parent is not None
    fields = {
        "deltas": [file_entry("model.safetensors", [b"delta"], 16_384)],
        "chain": [later.parent],
        **changes,
    }
    return replace(later, kind="delta", **fields)


def _bad_deltas(later: CheckpointManifest) -> list[dict[str, Any]]:
    parent = later.parent
    assert parent is not None
    (blob,) = _delta(later).deltas
    first, second = replace(blob, path="a.safetensors"), replace(blob, path="b.safetensors")
    two = [replace(FILES[1], path=one.path) for one in (first, second)]
    rows: list[tuple[str, str, CheckpointManifest, str]] = [
        ("deltas of a full", "CKP-13", replace(later, deltas=[blob]), "wrong-type"),
        ("a chain of a full", "CKP-13", replace(later, chain=[parent]), "wrong-type"),
        ("a delta without a chain", "CKP-13", _delta(later, chain=[]), "wrong-type"),
        ("version 0 as a delta", "CKP-13", _delta(later, version=0, parent=None), "wrong-type"),
        ("a chain that does not end at the parent", "CKP-13", _delta(later, chain=_hashes(1)), "wrong-type"),
        ("a parent that is not the last of its chain", "CKP-13", _delta(later, version=2, chain=[parent, *_hashes(1)]), "wrong-type"),
        ("a checkpoint twice", "CKP-13", _delta(later, version=3, chain=[parent, *_hashes(1), parent]), "wrong-type"),
        ("a chain longer than its version", "CKP-13", _delta(later, chain=[*_hashes(1), parent]), "wrong-type"),
        ("a chain of 65", "CKP-13", _delta(later, version=100, chain=[*_hashes(64), parent]), "wrong-type"),
        ("a hash of 31 bytes in a chain", "CKP-13", _delta(later, version=2, chain=[bytes(31), parent]), "wrong-type"),
        ("a delta for a file that is not there", "CKP-13", _delta(later, deltas=[replace(blob, path="z.safetensors")]), "path"),
        ("a delta that leaves the folder", "CKP-13", _delta(later, deltas=[replace(blob, path="../model.safetensors")]), "path"),
        ("a delta at an absolute path", "CKP-13", _delta(later, deltas=[replace(blob, path="/model.safetensors")]), "path"),
        ("a delta whose path differs in case", "CKP-13", _delta(later, deltas=[replace(blob, path="Model.safetensors")]), "path"),
        ("a delta for text", "CKP-13", _delta(later, deltas=[replace(blob, path="config.json")]), "path"),
        ("two deltas for a file", "CKP-13", _delta(later, deltas=[blob, blob]), "path"),
        ("deltas out of order", "CKP-13", _delta(later, files=two, deltas=[second, first]), "path"),
        ("a delta with a chunk hash too many", "CKP-13 CKP-5", _delta(later, deltas=[replace(blob, chunks=bytes(64))]), "size-mismatch"),
        ("a delta that is longer than its chunks", "CKP-13 CKP-5", _delta(later, deltas=[replace(blob, size=16_385)]), "size-mismatch"),
        ("17 mirrors", "CKP-16", replace(later, mirrors=["http://a"] * 17), "wrong-type"),
        ("a mirror of 1,025 characters", "CKP-16", replace(later, mirrors=["http://" + "a" * 1018]), "wrong-type"),
        *(
            (f"mirror {mirror!r}", "CKP-16", replace(later, mirrors=[mirror]), "wrong-type")
            for mirror in ("", "https://", "a.example", "ftp://a.example", "file:///etc", "HTTP://a.example", "http://a b", "http://a\n", "https://é.example", " https://a")
        ),
    ]  # fmt: skip
    return [
        case(comment, rule, "invalid", envelope=sealed(TRAINER, "checkpoint", encode(manifest)).hex(), code=code)
        for comment, rule, manifest, code in rows
    ]  # fmt: skip


def _bad_checkpoints(later: CheckpointManifest) -> list[dict[str, Any]]:
    config, model = FILES
    paths = [
        "../model.safetensors", "/model.safetensors", "a/../b.json", "a//b.json", "./a.json", ".hidden.json",
        "a\\b.json", "c:a.json", "a b.json", "a\n.json", "a./b.json", "é.json", "pickle.pkl", "model.bin", "a.py",
        "noext", "json", "", "a/", "-a.json", "~/a.json", "a" * 251 + ".json",
    ]  # fmt: skip
    rows: list[tuple[str, str, dict[str, Any], str]] = [
        *((f"path {path[:40]!r}", "CKP-3", {"files": [replace(config, path=path)]}, "path") for path in paths),
        ("files out of order", "CKP-4", {"files": [model, config]}, "path"),
        ("a file twice", "CKP-4", {"files": [config, config]}, "path"),
        ("two paths that differ only in case", "CKP-4", {"files": [replace(config, path="A.json"), replace(config, path="a.json")]}, "path"),
        ("a file where a folder has to be", "CKP-4", {"files": [replace(config, path="a.json"), replace(config, path="a.json/b.json")]}, "path"),
        ("a file where a folder has to be, but for case", "CKP-4", {"files": [replace(config, path="A.json/b.json"), replace(config, path="a.json")]}, "path"),
        ("a chunk hash too few", "CKP-5", {"files": [replace(model, chunks=model.chunks[:32])]}, "size-mismatch"),
        ("a chunk hash too many", "CKP-5", {"files": [replace(config, chunks=config.chunks * 2)]}, "size-mismatch"),
        ("part of a chunk hash", "CKP-5", {"files": [replace(config, chunks=config.chunks[:31])]}, "size-mismatch"),
        ("an empty file with a chunk", "CKP-5", {"files": [replace(config, size=0)]}, "size-mismatch"),
        ("chunks too small", "CKP-5", {"files": [replace(config, chunk=16_383)]}, "wrong-type"),
        ("chunks too large", "CKP-5", {"files": [replace(config, chunk=4_194_305)]}, "wrong-type"),
        ("a negative size", "CKP-5", {"files": [replace(config, size=-1)]}, "wrong-type"),
        ("no file", "CKP-5", {"files": []}, "wrong-type"),
        ("no tensor", "CKP-10", {"tensors": {}}, "wrong-type"),
        ("a tensor hash of 31 bytes", "CKP-10", {"tensors": {"w": bytes(31)}}, "wrong-type"),
        ("a beacon of 31 bytes", "CKP-10", {"beacon": BEACON[:31]}, "wrong-type"),
        ("an unknown kind of checkpoint", "CKP-6", {"kind": "sketch"}, "unknown-kind"),
        ("version 1 without a parent", "CKP-8", {"parent": None}, "wrong-type"),
        ("version 0 with a parent", "CKP-8", {"version": 0}, "wrong-type"),
        ("version 0 with other files", "CKP-2", {"version": 0, "parent": None, "files": [config]}, "hash-mismatch"),
    ]  # fmt: skip
    bad = [
        case(comment, rule, "invalid", envelope=sealed(TRAINER, "checkpoint", encode(replace(later, **changes))).hex(), code=code)
        for comment, rule, changes, code in rows
    ]  # fmt: skip
    body = later.to_bytes()
    nil = [
        case(
            f"nil for {key}, which is optional",
            "ENC-12",
            "invalid",
            envelope=sealed(TRAINER, "checkpoint", encode({**plain(manifest), key: None})).hex(),
            code="wrong-type",
        )
        for manifest, key in ((BASE, "parent"), (BASE, "levels"), (later, "deltas"), (later, "mirrors"))
    ]
    envelopes = [
        ("signed by a volunteer", "CKP-1", sealed(ALICE, "checkpoint", body), "wrong-role"),
        (
            "signed by the root, which is no trainer here",
            "CKP-1",
            sealed(ROOT, "checkpoint", body),
            "wrong-role",
        ),
        ("a forged signature", "CKP-1", forged(sealed(TRAINER, "checkpoint", body)), "bad-signature"),
        ("of another run", "CKP-1", sealed(TRAINER, "checkpoint", body, run=bytes(32)), "wrong-run"),
        ("another kind of message", "CKP-1", sealed(TRAINER, "receipts", body), "wrong-kind"),
    ]
    later_kinds = [
        case(comment, "CKP-6", "invalid", envelope=sealed(TRAINER, "checkpoint", encode(value)).hex(), code="unknown-kind")
        for comment, value in (
            ("a later kind of another shape", {"kind": "sketch", "outlines": [1, 2]}),
            ("a later kind whose keys are of other types", {**plain(later), "kind": "sketch", "version": "1", "tensors": {"w": None}}),
            ("a kind of 65 characters", {**plain(later), "kind": "k" * 65}),
        )
    ]  # fmt: skip
    bad.append(
        case(
            "a kind that is no text",
            "CKP-6",
            "invalid",
            envelope=sealed(TRAINER, "checkpoint", encode({**plain(later), "kind": 1})).hex(),
            code="wrong-type",
        )
    )
    return [*bad, *nil, *later_kinds] + [
        case(comment, rule, "invalid", envelope=envelope.hex(), code=code)
        for comment, rule, envelope, code in envelopes
    ]


def chunks() -> list[dict[str, Any]]:
    data = bytes(16_384)
    digest = hashlib.sha256(data).hexdigest()
    return [
        case("a chunk", "CKP-7", "valid", data=[["00", 16_384]], hash=digest),
        case("a flipped bit", "CKP-7", "invalid", data=[["00", 16_383], ["01", 1]], hash=digest, code="hash-mismatch"),
        case("a byte short", "CKP-7", "invalid", data=[["00", 16_383]], hash=digest, code="hash-mismatch"),
    ]  # fmt: skip


def trees() -> list[dict[str, Any]]:
    """Files with their entries; each chunk is checked by its hash."""
    size = 16_384
    rows: list[tuple[str, list[list[Any]]]] = [
        ("an empty file", []),
        ("one byte", [["01", 1]]),
        ("one chunk, whole", [["01", size]]),
        ("one byte more", [["01", size], ["02", 1]]),
        ("two chunks that are alike", [["01", 2 * size]]),
        ("three chunks", [["01", size], ["02", size], ["03", 5]]),
    ]
    good = [_tree(comment, "valid", runs, _hashed(runs, size), size) for comment, runs in rows]
    three = rows[-1][1]
    one, two, last = (_hashed(three, size)[start:][:32] for start in (0, 32, 64))
    large = [["01", size], ["02", size]]
    bad: list[tuple[str, list[list[Any]], bytes, int, str]] = [
        ("chunks in another order", three, two + one + last, size, "hash-mismatch"),
        ("a bit of the last chunk", [*three[:2], ["04", 5]], one + two + last, size, "hash-mismatch"),
        ("hashed in larger chunks", large, _hashed(large, 2 * size) * 2, size, "hash-mismatch"),
        ("a hash of the whole file", large, _hashed(large, 2 * size), size, "size-mismatch"),
        ("a chunk too few", three, one + two, size, "size-mismatch"),
        ("a chunk too many", three, one + two + last + last, size, "size-mismatch"),
        ("a chunk of no bytes at the end", [["01", size]], one + hashlib.sha256(b"").digest(), size, "size-mismatch"),
    ]  # fmt: skip
    return good + [
        _tree(comment, "invalid", runs, known, chunk, code=code) for comment, runs, known, chunk, code in bad
    ]


def _bytes(runs: list[list[Any]]) -> bytes:
    return b"".join(bytes.fromhex(piece) * count for piece, count in runs)


def _hashed(runs: list[list[Any]], chunk: int) -> bytes:
    data = _bytes(runs)
    return b"".join(hashlib.sha256(data[at : at + chunk]).digest() for at in range(0, len(data), chunk))


def _tree(
    comment: str, flag: str, runs: list[list[Any]], known: bytes, chunk: int, **more: str
) -> dict[str, Any]:
    entry = {"path": "model.safetensors", "size": len(_bytes(runs)), "chunk": chunk, "chunks": known}
    return case(comment, "CKP-5 CKP-7", flag, data=runs, entry=encode(entry).hex(), **more)


def chains() -> list[dict[str, Any]]:
    """The newest manifest and those that its chain names, in order."""
    base = BASE.to_bytes()
    full = replace(BASE, version=1, parent=checkpoint_hash(base))
    first, again = _next(BASE, []), _next(full, [])
    second = _next(first, [base])
    third = _next(second, [base, first.to_bytes()])
    links = [base, first.to_bytes(), second.to_bytes()]
    foreign = _next(replace(BASE, beacon=bytes(32)), [])
    padded = first.to_bytes() + b"\0"
    escaped = replace(BASE, files=[replace(FILES[0], path="../config.json")]).to_bytes()
    rows: list[tuple[str, CheckpointManifest, list[bytes], str | None]] = [
        ("a full and two deltas", third, links, None),
        ("only a full", first, [base], None),
        ("a full that is not version 0", again, [full.to_bytes()], None),
        ("an element that is another", third, [base, second.to_bytes(), first.to_bytes()], "hash-mismatch"),
        ("a bit of an element", third, [base[:-1] + bytes([base[-1] ^ 1]), *links[1:]], "hash-mismatch"),
        ("an empty element", first, [b""], "hash-mismatch"),
        ("it begins with a delta", _named(second, [links[1]]), [links[1]], "wrong-type"),
        ("a full within", _named(second, [base, full.to_bytes()]), [base, full.to_bytes()], "wrong-type"),
        ("a version is left out", _named(third, [base, links[1]]), [base, links[1]], "wrong-type"),
        ("an element with another chain", _named(second, [base, foreign.to_bytes()]), [base, foreign.to_bytes()], "wrong-type"),
        ("an element with a byte behind it", _named(second, [base, padded]), [base, padded], "malformed"),
        ("an element whose file leaves the folder", _named(first, [escaped]), [escaped], "path"),
    ]  # fmt: skip
    return [
        case(
            comment,
            "CKP-14",
            "valid" if code is None else "invalid",
            manifest=manifest.to_bytes().hex(),
            chain=[one.hex() for one in elements],
            **({} if code is None else {"code": code}),
        )
        for comment, manifest, elements, code in rows
    ]


def _next(parent: CheckpointManifest, before: list[bytes]) -> CheckpointManifest:
    """The delta with the same files that follows `parent`, whose chain has the manifests `before`."""
    chain = [checkpoint_hash(one) for one in (*before, parent.to_bytes())]
    return replace(BASE, version=parent.version + 1, kind="delta", parent=chain[-1], chain=chain)


def _named(checkpoint: CheckpointManifest, elements: list[bytes]) -> CheckpointManifest:
    """`checkpoint` with a chain of these manifests."""
    chain = [checkpoint_hash(one) for one in elements]
    return replace(checkpoint, parent=chain[-1], chain=chain)
