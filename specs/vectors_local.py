"""Vectors of what a node does on its own machine: announcements, display, and which uniforms turns take."""

from __future__ import annotations

from typing import Any

from vectors_world import ALICE, RUN, TRAINER, case

from nous_node.protocol.sampling import uniforms

PEER = TRAINER.peer_id
NEAR, HOME = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}", f"/ip4/127.0.0.1/tcp/4001/p2p/{PEER}"
SIX = f"/ip6/2001:db8::7/tcp/4001/p2p/{PEER}"


def announcements() -> list[dict[str, Any]]:
    return [*_announced(), *_heard()]


def _announced() -> list[dict[str, Any]]:
    many = [f"/ip4/192.0.2.{number}/tcp/4001/p2p/{PEER}" for number in range(1, 11)]
    rows: list[tuple[str, list[str], list[str] | None]] = [
        ("one address", [NEAR], [NEAR]),
        ("in the order in which they are", [SIX, NEAR], [SIX, NEAR]),
        ("loopback is left out", [HOME, NEAR], [NEAR]),
        ("nothing but loopback: silence", [HOME], None),
        ("no address: silence", [], None),
        ("the first eight of ten", many, many[:8]),
    ]
    return [
        case(
            comment,
            "DSC-1",
            "announced",
            run=RUN.hex(),
            addresses=given,
            instance=None if told is None else f"{RUN.hex()[:12]}-{told[0][-8:]}",
            record=None
            if told is None
            else {"run": RUN.hex(), **{f"a{n}": one for n, one in enumerate(told)}},
        )
        for comment, given, told in rows
    ]


def _heard() -> list[dict[str, Any]]:
    run = RUN.hex()
    end = f"/tcp/1/p2p/{PEER}"
    long = "/dns4/".ljust(240 - len(end), "a") + end
    rows: list[tuple[str, dict[str, str | bytes | None], list[str] | None]] = [
        ("run and one address", {"run": run, "a0": NEAR}, [NEAR]),
        ("two addresses", {"run": run, "a0": NEAR, "a1": SIX}, [NEAR, SIX]),
        ("a number is left out", {"run": run, "a0": NEAR, "a3": SIX}, [NEAR, SIX]),
        ("a key without a value, and an empty one", {"run": run, "a0": None, "a1": "", "a2": NEAR}, [NEAR]),
        ("a ninth address is not looked at", {"run": run, "a0": NEAR, "a8": SIX}, [NEAR]),
        ("further keys are not looked at", {"run": run, "a0": NEAR, "zebra": b"\xff"}, [NEAR]),
        ("the run in upper case", {"run": run.upper(), "a0": NEAR}, [NEAR]),
        ("an address of 240 bytes", {"run": run, "a0": long}, [long]),
        ("no run", {"a0": NEAR}, None),
        ("a run without a value", {"run": None, "a0": NEAR}, None),
        ("a run of 31 bytes", {"run": run[:62], "a0": NEAR}, None),
        ("a run of 33 bytes", {"run": run + "00", "a0": NEAR}, None),
        ("white space in the run", {"run": run[:2] + " " + run[2:], "a0": NEAR}, None),
        ("a run that is no hexadecimal", {"run": "g" + run[1:], "a0": NEAR}, None),
        ("a run of bytes", {"run": RUN, "a0": NEAR}, None),
        ("no address", {"run": run}, None),
        ("nothing but a ninth address", {"run": run, "a8": NEAR}, None),
        ("an address of 241 bytes", {"run": run, "a0": long.replace("/tcp/1/", "/tcp/12/")}, None),
        ("an address that is no path", {"run": run, "a0": NEAR, "a1": "192.0.2.7:4001"}, None),
        ("an address beyond ASCII", {"run": run, "a0": "/dns4/é.example/tcp/1"}, None),
        ("an address that is no text", {"run": run, "a0": b"/\xff"}, None),
    ]  # fmt: skip
    return [
        case(
            comment,
            "DSC-2",
            "heard",
            properties={name: _hex(value) for name, value in properties.items()},
            run=None if told is None else run,
            addresses=told,
        )
        for comment, properties, told in rows
    ]


def _hex(value: str | bytes | None) -> str | None:
    return (value.encode() if isinstance(value, str) else value).hex() if value is not None else None


def display() -> list[dict[str, Any]]:
    rows = [
        ("a name", "digits of Ümlaut 数字 😀"),
        ("an escape sequence that clears a screen", "a\x1b[2Jb"),
        ("line breaks and tabs", "a\nb\rc\td"),
        ("a bell, a backspace, delete", "\x07a\x08\x7f"),
        ("control characters above ASCII", "a\x85\x9bb"),
        ("a zero character", "a\0b"),
        ("separators of lines and paragraphs", "a\u2028b\u2029c"),
        ("characters that turn the direction of text", "a\u202eb\u2066c\u2069d\u200fe\u061c"),
        ("nothing", ""),
    ]
    return [
        case(comment, "CNV-1", "", text=text, held=[at for at, one in enumerate(text) if one in UNSHOWN])
        for comment, text in rows
    ]


UNSHOWN = {
    *map(chr, [*range(0x20), *range(0x7F, 0xA0), 0x2028, 0x2029]),
    *map(chr, [0x61C, 0x200E, 0x200F, *range(0x202A, 0x202F), *range(0x2066, 0x206A)]),
}
"""What CNV-1 holds back, and what it says of direction."""


def turns() -> list[dict[str, Any]]:
    key = ALICE.key
    rows: list[tuple[str, list[tuple[int, bool]]]] = [
        ("one turn: the prompt takes no uniform", [(5, False), (4, True)]),
        ("a second turn goes on where the first ended", [(5, False), (3, True), (7, False), (2, True)]),
        ("two turns behind each other, as branches are", [(2, False), (2, True), (3, True)]),
        ("turns across a block of the keystream", [(1, False), (7, True), (1, False), (2, True), (9, False), (1, True)]),
        ("nothing is sampled", [(5, False)]),
    ]  # fmt: skip
    made = []
    for comment, segments in rows:
        every = iter(uniforms(key, 0, sum(length for length, sampled in segments if sampled)))
        drawn = [[next(every) for _ in range(length)] for length, sampled in segments if sampled]
        made.append(
            case(comment, "SMP-4", "", key=key.hex(), turns=[list(one) for one in segments], uniforms=drawn)
        )
    return made
