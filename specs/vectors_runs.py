"""Vectors of chapters 03, 04 and 05: streams, shards, run manifests, invites."""

from __future__ import annotations

import base64
import hashlib
from typing import Any

import msgspec
from vectors_encoding import tagged
from vectors_world import (
    ALICE,
    BOB,
    MANIFEST,
    ROOT,
    RUN,
    TRAINER,
    case,
    forged,
    plain,
    sealed,
)

from nous_node.protocol.encoding import decode, encode
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import Bound, Invite, Topics, run_id, shard_of

replace = msgspec.structs.replace


def runs() -> list[dict[str, Any]]:
    body = MANIFEST.to_bytes()
    extended = encode({**plain(MANIFEST), "zebra": 1})
    good = [
        case(
            comment,
            rule,
            "valid",
            manifest=data.hex(),
            value=tagged(decode(data, 1 << 20)),
            run=run_id(data).hex(),
            envelope=sealed(ROOT, "run", data, run=run_id(data), exp=1_800_000_000_001).hex(),
            topics={
                "rollouts/0": Topics(run_id(data)).rollouts(0),
                "checkpoints": Topics(run_id(data)).checkpoints,
                "receipts": Topics(run_id(data)).receipts,
            },
        )
        for comment, rule, data in (
            ("a run", "RUN-1 RUN-2 RUN-3", body),
            ("an unknown key is ignored, and part of the run id", "RUN-1 ENC-10", extended),
            ("a conversation format", "RUN-5", replace(MANIFEST, chat="template").to_bytes()),
            (
                "a name of 256 characters beyond the basic plane",
                "RUN-5",
                replace(MANIFEST, name="\U0001f600" * 256).to_bytes(),
            ),
            ("an empty conversation format: none", "RUN-5", encode({**plain(MANIFEST), "chat": ""})),
            *(
                (f"{where}, as much as there may be", "RUN-5", encode({**plain(MANIFEST), **changes}))
                for where, changes in _largest(0).items()
            ),
            (
                "no refusals, no order among the figures of a bound",
                "RUN-5",
                replace(
                    MANIFEST,
                    thresholds=replace(
                        MANIFEST.thresholds, false_refusals=0.0, logprobs=Bound(2.0, 1e-300, 1.0)
                    ),
                ).to_bytes(),
            ),
        )
    ]
    return good + _bad_runs()


def _largest(beyond: int) -> dict[str, dict[str, Any]]:
    """Changes of a manifest that bring something to its limit, or beyond."""
    entry, sampling = plain(MANIFEST.environments[0]), plain(MANIFEST.sampling)
    keys = [hashlib.sha256(bytes([number])).digest() for number in range(64 + beyond)]
    return {
        "samples of a group": {"group": 1_024 + beyond},
        "staleness": {"staleness": 8 + beyond},
        "shards": {"shards": 65_536 + beyond},
        "stop tokens": {"sampling": {**sampling, "stop": list(range(64 + beyond))}},
        "trainers": {"trainers": keys},
        "the weight of an environment": {"environments": [{**entry, "weight": 1_000_000 + beyond}]},
    }


def _bad_runs() -> list[dict[str, Any]]:
    entry = MANIFEST.environments[0]
    rows: list[tuple[str, str, dict[str, Any], str]] = [
        ("a later protocol", "RUN-3", {"protocol": [2, 3]}, "unsupported-version"),
        ("an empty range of protocols", "RUN-3", {"protocol": [2, 1]}, "unsupported-version"),
        ("an environment twice", "RUN-4", {"environments": [entry, entry]}, "out-of-range"),
        ("no environment", "RUN-5", {"environments": []}, "wrong-type"),
        ("a weight of 0", "RUN-5", {"environments": [replace(entry, weight=0)]}, "wrong-type"),
        ("a negative temperature", "RUN-5", {"sampling": replace(MANIFEST.sampling, temperature=-1.0)}, "wrong-type"),
        ("a temperature of 0", "RUN-5", {"sampling": replace(MANIFEST.sampling, temperature=0.0)}, "wrong-type"),
        ("a stop token outside the vocabulary", "RUN-4", {"sampling": replace(MANIFEST.sampling, stop=[259])}, "out-of-range"),
        ("no stop token", "RUN-5", {"sampling": replace(MANIFEST.sampling, stop=[])}, "wrong-type"),
        ("more tokens than the context", "RUN-4", {"sampling": replace(MANIFEST.sampling, max_tokens=65)}, "out-of-range"),
        ("another sampling mode", "RUN-5", {"sampling": replace(MANIFEST.sampling, mode="greedy")}, "wrong-type"),
        ("a group of one", "RUN-5", {"group": 1}, "wrong-type"),
        ("a conversation format of 257 characters", "RUN-5", {"chat": "x" * 257}, "wrong-type"),
        ("a name of 257 characters beyond the basic plane", "RUN-5", {"name": "\U0001f600" * 257}, "wrong-type"),
        ("no shard", "RUN-5", {"shards": 0}, "wrong-type"),
        ("a trainer key of 31 bytes", "RUN-5", {"trainers": [bytes(31)]}, "wrong-type"),
    ]  # fmt: skip
    bad = [
        _run_case(comment, rule, (data := encode(replace(MANIFEST, **changes))), run_id(data), code)
        for comment, rule, changes, code in rows
    ]
    nil = [
        _run_case(comment, "ENC-12", data, run_id(data), "wrong-type")
        for comment, changes in (
            ("nil for chat, which is optional", {"chat": None}),
            ("nil for the model of thresholds, which is optional", {"thresholds": {**plain(MANIFEST.thresholds), "model": None}}),
            ("nil for the config of an environment, which is optional", {"environments": [{**plain(entry), "config": None}]}),
            ("nil as a setting of an environment", {"environments": [{**plain(entry), "config": {"length": None}}]}),
            ("a map as a setting of an environment", {"environments": [{**plain(entry), "config": {"length": {}}}]}),
        )
        for data in [encode({**plain(MANIFEST), **changes})]
    ]  # fmt: skip
    three = encode({**plain(MANIFEST), "protocol": [1, 1, 2]})
    later = encode({"protocol": [2, 3], "root": ROOT.key, "trainers": {"keys": []}})
    whole = plain(MANIFEST)
    ranges = [
        _run_case(f"{where} of {value}", "RUN-5", data, run_id(data), "wrong-type")
        for where, changes, value in (
            ("the mean of a bound", {"thresholds": {**whole["thresholds"], "logprobs": {"mean": 0.0, "deviation": 1.0, "limit": 1.0}}}, 0.0),
            ("the deviation of a bound", {"thresholds": {**whole["thresholds"], "distances": {"mean": 1.0, "deviation": 0, "limit": 1.0}}}, 0),
            ("the limit of a bound", {"thresholds": {**whole["thresholds"], "distances": {"mean": 1.0, "deviation": 1.0, "limit": -1.0}}}, -1.0),
            ("tokens", {"thresholds": {**whole["thresholds"], "tokens": 0}}, 0),
            ("a stop probability", {"thresholds": {**whole["thresholds"], "stop_probability": 1.5}}, 1.5),
            ("false refusals", {"thresholds": {**whole["thresholds"], "false_refusals": -0.5}}, -0.5),
            ("a rate", {"limits": {**whole["limits"], "groups_per_second": 0}}, 0),
            ("inline bytes", {"limits": {**whole["limits"], "inline_bytes": 1023}}, 1023),
            ("a vocabulary", {"model": {**whole["model"], "vocabulary": 0}}, 0),
        )
        for data in [encode({**whole, **changes})]
    ]  # fmt: skip
    large = [
        _run_case(f"{where}, one too many", "RUN-5", data, run_id(data), "wrong-type")
        for where, changes in _largest(1).items()
        for data in [encode({**whole, **changes})]
    ]
    names = [
        _run_case(f"an empty {where}", "RUN-5", data, run_id(data), "wrong-type")
        for where, changes in (
            ("name", {"name": ""}),
            ("family", {"model": {**whole["model"], "family": ""}}),
            ("version of an environment", {"environments": [{**plain(entry), "version": ""}]}),
        )
        for data in [encode({**whole, **changes})]
    ]
    without = encode({key: value for key, value in plain(MANIFEST).items() if key != "thresholds"})
    body = MANIFEST.to_bytes()
    return [
        *bad,
        *nil,
        *ranges,
        *large,
        *names,
        _run_case("a later protocol of another shape", "RUN-3", later, run_id(later), "unsupported-version"),
        _run_case("protocol with a third element", "RUN-5", three, run_id(three), "wrong-type"),
        _run_case("a key is missing", "RUN-5", without, run_id(without), "wrong-type"),
        _run_case("another run than was asked for", "RUN-1", body, bytes(32), "wrong-run"),
        _run_case("the envelope names another run", "RUN-1", body, RUN, "wrong-run", run=bytes(32)),
        _run_case("not signed by the root", "RUN-2", body, RUN, "wrong-role", signer=ALICE),
        case(
            "another kind",
            "RUN-2",
            "invalid",
            run=RUN.hex(),
            envelope=sealed(ROOT, "hello", body).hex(),
            code="wrong-kind",
        ),
        case(
            "a forged signature",
            "RUN-2",
            "invalid",
            run=RUN.hex(),
            envelope=forged(sealed(ROOT, "run", body)).hex(),
            code="bad-signature",
        ),
    ]


def _run_case(
    comment: str,
    rule: str,
    body: bytes,
    expected: bytes,
    code: str,
    *,
    signer: Identity = ROOT,
    **changes: Any,
) -> dict[str, Any]:
    envelope = sealed(signer, "run", body, **{"run": run_id(body), **changes})
    return case(comment, rule, "invalid", run=expected.hex(), envelope=envelope.hex(), code=code)


WHITE = (
    "\t\n\v\f\r \x85\xa0\u1680" + "".join(map(chr, range(0x2000, 0x200B))) + "\u2028\u2029\u202f\u205f\u3000"
)
"""Unicode White_Space."""
ADDRESS = f"/ip4/192.0.2.1/tcp/4001/p2p/{TRAINER.peer_id}"


def _address(length: int) -> str:
    """One of so many bytes."""
    return "/dns4/" + "a" * (length - len("/dns4/" + ADDRESS)) + ADDRESS


def _invite(value: object, check: bytes | None = None) -> str:
    payload = value if isinstance(value, bytes) else encode(value)
    digest = check if check is not None else hashlib.sha256(payload).digest()[:4]
    return "nous1" + base64.urlsafe_b64encode(payload + digest).decode().rstrip("=")


def invites() -> list[dict[str, Any]]:
    relayed = f"/dns4/relay.example/tcp/4001/p2p/{BOB.peer_id}/p2p-circuit/p2p/{TRAINER.peer_id}"
    six = f"/ip6/2001:db8::1/tcp/4001/p2p/{TRAINER.peer_id}"
    one, three = Invite(RUN, [ADDRESS]), Invite(RUN, [ADDRESS, six, relayed])
    text = one.to_text()
    broken = f" {text[:40]}\n  {text[40:]}\r\n"
    extended = _invite({**plain(one), "zebra": 1})
    good = [
        ("one address", text, one),
        ("three addresses, one behind a relay", three.to_text(), three),
        ("white space anywhere is dropped", broken, one),
        ("an unknown key is ignored", extended, one),
        ("an address of 256 bytes", Invite(RUN, [_address(256)]).to_text(), Invite(RUN, [_address(256)])),
        ("every kind of Unicode white space is dropped", "".join(WHITE[number % len(WHITE)] + sign for number, sign in enumerate(text)), one),
    ]  # fmt: skip
    positive = [
        case(
            comment,
            "INV-1 INV-2 INV-3",
            "valid",
            text=written,
            run=invite.run.hex(),
            addresses=invite.addresses,
        )
        for comment, written, invite in good
    ]
    return positive + [
        case(comment, rule, "invalid", text=written, code="invite")
        for comment, rule, written in _bad_invites(text)
    ]


def _bad_invites(text: str) -> list[tuple[str, str, str]]:
    spare = "".join(_spare_bits(text))
    return [
        ("nothing", "INV-1", ""),
        ("only the prefix", "INV-1", "nous1"),
        ("another prefix", "INV-1", "nous2" + text[5:]),
        ("the prefix in upper case", "INV-1", "NOUS1" + text[5:]),
        ("the last character is missing", "INV-1", text[:-1]),
        ("a character is missing within", "INV-1", text[:30] + text[31:]),
        ("a character is changed", "INV-1", text[:30] + ("A" if text[30] != "A" else "B") + text[31:]),
        ("padding", "INV-1", text + "="),
        ("a sign that is not base64url", "INV-1", text[:30] + "+" + text[31:]),
        ("a character beyond ASCII", "INV-1", text[:30] + "é" + text[31:]),
        ("spare bits of the last character are set", "INV-1", spare),
        ("a wrong check", "INV-1", _invite({"addresses": [ADDRESS], "run": RUN}, bytes(4))),
        ("not canonical", "INV-1", _invite(b"\xde\x00\x00")),
        ("no run", "INV-1", _invite({"addresses": [ADDRESS]})),
        ("a run of 31 bytes", "INV-1", _invite({"addresses": [ADDRESS], "run": RUN[:31]})),
        ("no address", "INV-3", _invite({"addresses": [], "run": RUN})),
        ("17 addresses", "INV-3", _invite({"addresses": [ADDRESS] * 17, "run": RUN})),
        ("an address that is nothing but a peer id", "INV-3", _invite({"addresses": [f"/p2p/{TRAINER.peer_id}"], "run": RUN})),
        ("an address without a peer id", "INV-3", _invite({"addresses": ["/ip4/192.0.2.1/tcp/1"], "run": RUN})),
        ("an address with a terminal's escape", "INV-3", _invite({"addresses": ["/\x1b[2J" + ADDRESS], "run": RUN})),
        ("an address with a line break behind it", "INV-3", _invite({"addresses": [ADDRESS + "\n"], "run": RUN})),
        ("a control character that is no white space", "INV-1", text[:30] + "\x1c" + text[30:]),
        ("a zero-width space, which is no white space", "INV-1", text[:30] + "\u200b" + text[30:]),
        ("a byte order mark, which is no white space", "INV-1", "\ufeff" + text),
        ("an address of 257 bytes", "INV-3", _invite({"addresses": [_address(257)], "run": RUN})),
        ("a peer id with a sign that base58 has not", "INV-3", _invite({"addresses": [ADDRESS[:-1] + "l"], "run": RUN})),
        ("more than 2,048 characters", "INV-4", _invite({"addresses": ["/" + "a" * 150 + ADDRESS] * 8, "run": RUN})),
    ]  # fmt: skip


def _spare_bits(text: str) -> list[str]:
    """The invite with the unused low bits of its last character set: the same bytes to a lax decoder."""
    alphabet = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"
    encoded = text[5:]
    assert len(encoded) % 4, "choose another address: this invite has no spare bits"
    return [text[:-1], alphabet[alphabet.index(text[-1]) | 1]]


def streams() -> list[dict[str, Any]]:
    frames: list[tuple[str, str, str, Any]] = [
        ("a head request", "STR-2", "head-request", {"run": RUN}),
        ("a head reply", "STR-2", "head-reply", {"run": b"envelope", "checkpoint": b"envelope"}),
        ("a head reply before the first checkpoint", "STR-2", "head-reply", {"run": b"envelope"}),
        ("a head reply of a peer that follows another run", "STR-2", "head-reply", {"error": "wrong-run"}),
        ("a blob request", "STR-3", "blob-request", {"hash": bytes(32)}),
        ("a blob reply", "STR-3", "blob-reply", {"data": b"chunk"}),
        ("a blob that the peer does not hold", "STR-3", "blob-reply", {"error": "not-found"}),
    ]
    bad: list[tuple[str, str, str, Any]] = [
        ("a run id of 31 bytes", "STR-2", "head-request", {"run": RUN[:31]}),
        ("no run id", "STR-2", "head-request", {}),
        ("a hash as text", "STR-3", "blob-request", {"hash": bytes(32).hex()}),
        ("data as an array", "STR-3", "blob-reply", {"data": [1, 2]}),
    ]
    return [
        case(comment, f"{rule} STR-1", "valid", message=kind, frame=_framed(value).hex(), value=tagged(value))
        for comment, rule, kind, value in frames
    ] + [
        case(comment, rule, "invalid", message=kind, frame=_framed(value).hex(), code="wrong-type")
        for comment, rule, kind, value in bad
    ]


def _framed(value: object) -> bytes:
    data = encode(value)
    return len(data).to_bytes(4, "big") + data


def shards() -> list[dict[str, Any]]:
    keys = [ALICE.key, BOB.key, bytes(32), b"\xff" * 32, bytes([1]) + bytes(31), bytes(7) + b"\1" + bytes(24)]
    return [
        case("a key and its topic", "GOS-4", "valid", key=key.hex(), shards=count, shard=shard_of(key, count))
        for key in keys
        for count in (1, 4, 1000, 65_536)
    ]
