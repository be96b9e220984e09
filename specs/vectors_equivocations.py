"""Vectors of chapter 09: what proves that a trainer signed two checkpoints of one version, and what does not."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace
from vectors_world import ALICE, BASE, TRAINER, case, forged, sealed

from nous_node.protocol.checkpoints import checkpoint_hash
from nous_node.protocol.encoding import encode


def equivocations() -> list[dict[str, Any]]:
    later = replace(BASE, version=1, parent=checkpoint_hash(BASE.to_bytes()))
    other = replace(later, beacon=bytes(32)).to_bytes()
    newer = replace(later, version=2, parent=checkpoint_hash(later.to_bytes())).to_bytes()
    first = sealed(TRAINER, "checkpoint", later.to_bytes(), 1)
    second = sealed(TRAINER, "checkpoint", other, 2)
    good = [
        ("two beacons for one version", first, second),
        ("the other way round", second, first),
        ("long expired", first, sealed(TRAINER, "checkpoint", other, 2, ts=1_000, exp=2_000)),
    ]
    bad = [
        ("one twice", _proof(first, first), "wrong-type"),
        ("one in two envelopes", _proof(first, sealed(TRAINER, "checkpoint", later.to_bytes(), 3)), "wrong-type"),
        ("two versions", _proof(first, sealed(TRAINER, "checkpoint", newer, 3)), "wrong-type"),
        ("the second is of somebody else", _proof(first, sealed(ALICE, "checkpoint", other, 2)), "wrong-role"),
        ("the second has a forged signature", _proof(first, forged(second)), "bad-signature"),
        ("the first is of another run", _proof(sealed(TRAINER, "checkpoint", other, 2, run=bytes(32)), first), "wrong-run"),
        ("receipts", _proof(first, sealed(TRAINER, "receipts", other, 2)), "wrong-kind"),
        ("one only", encode({"first": first}), "wrong-type"),
        ("a byte behind it", _proof(first, second) + b"\0", "malformed"),
    ]  # fmt: skip
    return [
        case(comment, "CKP-17", "valid", proof=_proof(*both).hex(), key=TRAINER.key.hex(), version=1)
        for comment, *both in good
    ] + [case(comment, "CKP-17", "invalid", proof=proof.hex(), code=code) for comment, proof, code in bad]


def _proof(first: bytes, second: bytes) -> bytes:
    return encode({"first": first, "second": second})
