"""Vectors of chapter 10: proof files, whole and tampered with."""

from __future__ import annotations

from typing import Any

from vectors_world import ALICE, BASE, BOB, MANIFEST, NOW, ROOT, RUN, TRAINER, case, forged, sealed

from nous_node.protocol.encoding import encode
from nous_node.protocol.identity import Identity

DOMAIN = b"nous/proof/1\0"
RUN_ENVELOPE = sealed(ROOT, "run", MANIFEST.to_bytes())

Fields = dict[str, Any]


def receipt(number: int, code: str = "", peer: Identity = ALICE) -> list[Any]:
    figures = [0.5, 1e-4] if code else [None, None]
    group = bytes([number]) * 32
    return [group, peer.key, "refused" if code else "accepted", code, *figures, 0 if code else 40]


def standing(peer: Identity = ALICE, state: str = "active", until: int = 0) -> list[Any]:
    return [peer.key, state, 10, 2, 400, 15, 3, 12, until]


def message(items: list[Any], standings: list[Any], seq: int, sender: Identity = TRAINER) -> bytes:
    body = {"items": items, **({"standings": standings} if standings else {})}
    return sealed(sender, "receipts", encode(body), seq, ts=NOW + 1000 * seq, exp=NOW + 1000 * seq + 60_000)


FIRST = message([receipt(1), receipt(9, peer=BOB), receipt(2, "logprob-mismatch")], [], 1)
SECOND = message([receipt(1), receipt(3), receipt(5, "stale"), receipt(6, "stale")], [], 2)
WORD = message([], [standing(BOB), standing()], 7)
OF_OTHERS = message([receipt(9, peer=BOB)], [standing(BOB)], 8)


def signed(**changes: Any) -> Fields:
    whole = {
        "v": 1,
        "key": ALICE.key,
        "made": NOW + 60_000,
        "run": RUN_ENVELOPE,
        "standing": WORD,
        "receipts": [FIRST, SECOND],
    }
    return {name: value for name, value in {**whole, **changes}.items() if value != "absent"}


def packed(fields: Fields, who: Identity = ALICE, **outer: Any) -> bytes:
    data = encode(fields)
    return encode({"sig": who.sign(DOMAIN + data), "signed": data, **outer})


def later(data: bytes) -> bytes:
    """The file with another time in it."""
    at = data.index(b"\xa4made\xcf") + 13
    return data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :]


def proofs() -> list[dict[str, Any]]:
    return [*_whole(), *_broken()]


def _whole() -> list[dict[str, Any]]:
    seen = {"messages": 2, "accepted": 2, "refused": {"logprob-mismatch": 1, "stale": 2}}
    rows: list[tuple[str, Fields, list[Any] | None, Fields]] = [
        ("receipts and a standing; a repeat's receipt counts once a rollout", signed(), standing(), seen),
        ("a standing in quarantine", signed(standing=message([], [standing(state="quarantine", until=NOW + 9)], 7)), standing(state="quarantine", until=NOW + 9), seen),
        ("a standing alone", signed(receipts=[]), standing(), {"messages": 0, "accepted": 0, "refused": {}}),
        ("receipts alone", signed(standing=None, receipts=[FIRST]), None, {"messages": 1, "accepted": 1, "refused": {"logprob-mismatch": 1}}),
        ("nothing but the run", signed(standing=None, receipts=[]), None, {"messages": 0, "accepted": 0, "refused": {}}),
        ("messages that expired long ago prove what they proved", signed(made=NOW * 2), standing(), seen),
    ]  # fmt: skip
    return [
        case(
            comment,
            "RCP-6 RCP-8 RCP-9",
            "valid",
            file=packed(fields).hex(),
            key=ALICE.key.hex(),
            run=RUN.hex(),
            name=MANIFEST.name,
            made=fields["made"],
            standing=None if word is None else [ALICE.key.hex(), *word[1:]],
            **counts,
        )
        for comment, fields, word, counts in rows
    ]


def _broken() -> list[dict[str, Any]]:
    whole = packed(signed())
    checkpoint = sealed(TRAINER, "checkpoint", BASE.to_bytes())
    rows: list[tuple[str, str, bytes, str]] = [
        ("one bit of the signature", "RCP-9", forged(whole), "bad-signature"),
        ("one bit of what is signed", "RCP-9", later(whole), "bad-signature"),
        ("signed by somebody else", "RCP-9", packed(signed(), BOB), "bad-signature"),
        ("about somebody else's key", "RCP-9", packed(signed(key=BOB.key)), "bad-signature"),
        ("signed as an envelope is", "RCP-8", encode({"sig": ALICE.sign(b"nous/envelope/1\0" + encode(signed())), "signed": encode(signed())}), "bad-signature"),
        ("cut short", "RCP-8", whole[:-1], "malformed"),
        ("a byte behind it", "RCP-8", whole + b"\0", "malformed"),
        ("no msgpack", "RCP-8", b"\xc1", "malformed"),
        ("another version of the form", "RCP-8", packed(signed(v=2)), "wrong-type"),
        ("a key that nobody knows", "RCP-8", packed(signed(note="trust me")), "wrong-type"),
        ("a key beside the signature", "RCP-8", packed(signed(), note="trust me"), "wrong-type"),
        ("without the run", "RCP-8", packed(signed(run="absent")), "wrong-type"),
        ("without a standing, and without saying so", "RCP-8", packed(signed(standing="absent")), "wrong-type"),
        ("another root's manifest of this name", "RCP-9", packed(signed(run=sealed(BOB, "run", MANIFEST.to_bytes()))), "wrong-role"),
        ("a forged manifest", "RCP-9", packed(signed(run=forged(RUN_ENVELOPE))), "bad-signature"),
        ("a checkpoint for a manifest", "RCP-9", packed(signed(run=checkpoint)), "wrong-kind"),
        ("a receipt that no trainer signed", "RCP-9", packed(signed(receipts=[FIRST, message([receipt(4)], [], 5, ALICE)])), "wrong-role"),
        ("a forged receipt", "RCP-9", packed(signed(receipts=[FIRST, forged(SECOND)])), "bad-signature"),
        ("receipts of another run", "RCP-9", packed(signed(receipts=[sealed(TRAINER, "receipts", encode({"items": [receipt(1)]}), 5, run=bytes(32))])), "wrong-run"),
        ("receipts for others only", "RCP-9", packed(signed(receipts=[FIRST, OF_OTHERS])), "wrong-role"),
        ("a message twice", "RCP-9", packed(signed(receipts=[FIRST, FIRST])), "duplicate"),
        ("a checkpoint for receipts", "RCP-9", packed(signed(receipts=[checkpoint])), "wrong-kind"),
        ("a standing that the volunteer signed", "RCP-9", packed(signed(standing=message([], [standing()], 5, ALICE))), "wrong-role"),
        ("a forged standing", "RCP-9", packed(signed(standing=forged(WORD))), "bad-signature"),
        ("a standing of somebody else", "RCP-9", packed(signed(standing=OF_OTHERS)), "out-of-range"),
        ("two standings of the key in one message", "RCP-9", packed(signed(standing=message([], [standing(), standing()], 5))), "out-of-range"),
    ]  # fmt: skip
    return [
        case(comment, requires, "invalid", file=data.hex(), code=code)
        for comment, requires, data, code in rows
    ]
