"""Vectors of chapter 10: receipts and hellos."""

from __future__ import annotations

from typing import Any

from vectors_world import ALICE, BOB, ENGINE, TRAINER, case, forged, plain, sealed

from nous_node.protocol.encoding import encode
from nous_node.protocol.receipts import Hello, Receipts, accepted


def receipts() -> list[dict[str, Any]]:
    good = Receipts([accepted(bytes(32), ALICE.key, 640)])
    refusal = [bytes(32), BOB.key, "refused", "sampling-mismatch", 0.25, 1e-5, 0]
    fine: list[tuple[str, str, Any]] = [
        ("an accepted group", "RCP-2 RCP-3", plain(good)),
        ("a refused group with its figures", "RCP-2", {"items": [refusal]}),
        (
            "a code that this revision does not know",
            "RCP-2",
            {"items": [[*refusal[:3], "too-good", None, None, 0]]},
        ),
        (
            "a key in quarantine: now and its end as figures",
            "RCP-2",
            {"items": [[*refusal[:3], "quarantined", 1_750_000_000_000, 1_750_000_060_000, 0]]},
        ),
        ("a banned key: no figures", "RCP-2", {"items": [[*refusal[:3], "banned", None, None, 0]]}),
        ("a further element is ignored", "ENC-10", {"items": [[*refusal, "note"]]}),
        ("whole numbers as integers where floats stand", "ENC-12", {"items": [[*refusal[:4], 3, 2, 0]]}),
    ]
    standing = [ALICE.key, "quarantine", 12, 3, 640, 80, 2, 5, 1_750_000_060_000]
    fine += [
        ("no receipt", "RCP-2", {"items": []}),
        ("keys beside it are ignored", "ENC-10", {"items": [], "standing": [standing]}),
        ("a standing", "RCP-2", {"items": [], "standings": [standing]}),
        ("an answer to a hello", "HEL-2", {"items": [], "known": [[ALICE.key, 7]]}),
        ("heard before the first version", "HEL-2", {"items": [], "known": [[ALICE.key, -1]]}),
        (
            "receipts, standings and answers",
            "HEL-2 RCP-2",
            {"items": [refusal], "known": [[ALICE.key, 0], [BOB.key, 7]], "standings": [standing]},
        ),
        (
            "a further element of an answer is ignored",
            "ENC-10",
            {"items": [], "known": [[BOB.key, 7, "note"]]},
        ),
        ("receipts and standings", "RCP-2", {"items": [refusal], "standings": [standing, standing]}),
    ]
    bad: list[tuple[str, str, Any]] = [
        ("a state of its own", "RCP-2", {"items": [], "standings": [[ALICE.key, "king", *standing[2:]]]}),
        ("a code in upper case", "RCP-2", {"items": [[*refusal[:3], "Stale", None, None, 0]]}),
        ("a standing without its end", "RCP-2", {"items": [], "standings": [standing[:-1]]}),
        ("a negative debit", "RCP-2", {"items": [], "standings": [[*standing[:5], -1, *standing[6:]]]}),
        ("an answer without its version", "HEL-2", {"items": [], "known": [[ALICE.key]]}),
        ("heard before there was anything", "HEL-2", {"items": [], "known": [[ALICE.key, -2]]}),
        ("an answer to a key of 31 bytes", "HEL-2", {"items": [], "known": [[bytes(31), 7]]}),
        ("an answer with a text as version", "HEL-2", {"items": [], "known": [[ALICE.key, "7"]]}),
        ("a verdict of its own", "RCP-2", {"items": [[*refusal[:2], "maybe", "", None, None, 0]]}),
        ("a code with a terminal's escape", "RCP-2", {"items": [[*refusal[:3], "\x1b[2J", None, None, 0]]}),
        ("a negative credit", "RCP-2", {"items": [[*refusal[:6], -1]]}),
        ("a peer of 31 bytes", "RCP-2", {"items": [[bytes(32), bytes(31), *refusal[2:]]]}),
        ("a missing element", "RCP-2", {"items": [refusal[:6]]}),
        (
            "a code with a line break behind it",
            "RCP-2",
            {"items": [[*refusal[:3], "stale\n", None, None, 0]]},
        ),
        ("nil for standings, which are optional", "ENC-12", {"items": [], "standings": None}),
        ("nil for known, which is optional", "ENC-12", {"items": [], "known": None}),
    ]
    rows = [
        case(comment, rule, "valid", body=encode(body).hex(), envelope=sealed(TRAINER, "receipts", encode(body)).hex())
        for comment, rule, body in fine
    ] + [
        case(comment, rule, "invalid", envelope=sealed(TRAINER, "receipts", encode(body)).hex(), code="wrong-type")
        for comment, rule, body in bad
    ]  # fmt: skip
    item = encode(refusal)
    before, after = sealed(TRAINER, "receipts", encode({"items": [refusal] * 4097})).split(item * 4097)
    many = [[before.hex(), 1], [item.hex(), 4097], [after.hex(), 1]]
    rows.append(case("4,097 receipts", "RCP-2", "invalid", envelope=many, code="wrong-type"))
    return rows + [
        case(comment, "RCP-1", "invalid", envelope=envelope.hex(), code=code)
        for comment, envelope, code in (
            ("signed by a volunteer", sealed(ALICE, "receipts", good.to_bytes()), "wrong-role"),
            ("a forged signature", forged(sealed(TRAINER, "receipts", good.to_bytes())), "bad-signature"),
            ("of another run", sealed(TRAINER, "receipts", good.to_bytes(), run=bytes(32)), "wrong-run"),
            ("another kind", sealed(TRAINER, "hello", good.to_bytes()), "wrong-kind"),
        )
    ]


def _hello_of(size: int) -> bytes:
    """A hello of so many bytes, with a key that no revision knows."""
    known = plain(Hello("vectors/1", ENGINE))
    missing = size - len(encode({**known, "later": bytes(256)}))
    return encode({**known, "later": bytes(256 + missing)})


def hellos() -> list[dict[str, Any]]:
    body = Hello("vectors/1", ENGINE).to_bytes()
    return [
        case("a hello", "HEL-1", "valid", body=body.hex()),
        case("64 characters of agent", "HEL-1", "valid", body=Hello("a" * 63 + "\u00e4", ENGINE).to_bytes().hex()),
        case("64 characters beyond the basic plane: 128 units of UTF-16", "HEL-1", "valid", body=Hello("\U0001f600" * 64, ENGINE).to_bytes().hex()),
        case("65 characters beyond the basic plane", "HEL-1", "invalid", body=Hello("\U0001f600" * 65, ENGINE).to_bytes().hex(), code="wrong-type"),
        case("65 characters of agent", "HEL-1", "invalid", body=Hello("a" * 65, ENGINE).to_bytes().hex(), code="wrong-type"),
        case("4,096 bytes", "HEL-1", "valid", body=_hello_of(4_096).hex()),
        case("4,097 bytes", "HEL-1", "invalid", body=_hello_of(4_097).hex(), code="oversize"),
        case("without an engine", "HEL-1", "invalid", body=encode({"agent": "x"}).hex(), code="wrong-type"),
        case("a number as agent", "HEL-1", "invalid", body=encode({**plain(Hello("", ENGINE)), "agent": 1}).hex(), code="wrong-type"),
    ]  # fmt: skip
