"""Vectors of chapter 03: which addresses are passed on, and which are believed."""

from __future__ import annotations

from typing import Any

from vectors_world import BOB, case

from nous_node.protocol.introductions import believed, passed_on, vouched

HERE, HERE_6 = "/ip4/127.0.0.1/tcp/5000", "/ip6/::1/tcp/5000"
NEAR, NEAR_6 = "/ip4/192.168.1.7/tcp/5000", "/ip6/fd00::1/tcp/5000"
FAR, FAR_6 = "/ip4/93.184.216.34/tcp/5000", "/ip6/2606:2800:220:1::1/tcp/5000"
SOCKET = "/ip4/93.184.216.34/tcp/40000"


def introductions() -> list[dict[str, Any]]:
    return _passed_on() + _believed()


def _passed_on() -> list[dict[str, Any]]:
    every = [HERE, NEAR, FAR]
    rows: list[tuple[str, str, str, bool, list[str], str]] = [
        (
            "the port is believed, the IP is that of the connection",
            "valid",
            SOCKET,
            False,
            [_of("/ip4/192.168.1.7/tcp/7000")],
            FAR,
        ),
        (
            "what is said of that IP comes first",
            "valid",
            SOCKET,
            False,
            [_of("/ip4/8.8.8.8/tcp/6000"), _of("/ip4/93.184.216.34/tcp/7000")],
            FAR,
        ),
        ("of a name only the port counts", "valid", SOCKET, False, [_of("/dns4/node.example/tcp/7000")], FAR),
        ("who was dialled is reached there", "valid", FAR, True, [_of("/ip4/192.168.1.7/tcp/7000")], FAR),
        (
            "two addresses of one peer at most",
            "valid",
            SOCKET,
            False,
            [_of(f"/ip4/93.184.216.34/tcp/{port}") for port in (7000, 7001, 7002)],
            FAR,
        ),
        ("IPv6", "valid", "/ip6/2606:2800:220:1::1/tcp/40000", False, [_of(FAR_6)], FAR),
        ("IPv4 in an IPv6 socket", "valid", "/ip6/::ffff:93.184.216.34/tcp/40000", False, [_of(FAR)], FAR),
        ("a port of the system", "invalid", SOCKET, False, [_of("/ip4/93.184.216.34/tcp/25")], FAR),
        ("nothing is said", "invalid", SOCKET, False, [], FAR),
        ("no TCP port", "invalid", SOCKET, False, [_of("/ip4/93.184.216.34/udp/7000")], FAR),
    ]
    for name, place in (("loopback", HERE), ("private", NEAR), ("global", FAR)):
        for other, asker in (("loopback", HERE_6), ("private", NEAR_6), ("global", FAR_6)):
            fits = every.index(place) >= [HERE_6, NEAR_6, FAR_6].index(asker)
            rows.append(
                (
                    f"a {name} peer to a {other} one",
                    "valid" if fits else "invalid",
                    place,
                    False,
                    [_of(place)],
                    asker,
                )
            )
    return [
        case(
            comment,
            "STR-7",
            flags,
            remote=remote,
            peer=BOB.peer_id,
            dialled=dialled,
            addresses=addresses,
            asker=asker,
            result=passed_on(vouched(BOB.peer_id, remote, not dialled, addresses), asker),
        )
        for comment, flags, remote, dialled, addresses, asker in rows
    ]


def _believed() -> list[dict[str, Any]]:
    every = [_of(place) for place in (HERE, HERE_6, NEAR, NEAR_6, FAR, FAR_6)]
    rows: list[tuple[str, str, str, list[str]]] = [
        ("by a loopback peer", "valid", HERE, every),
        ("by a private peer", "valid", NEAR, every),
        ("by a global peer", "valid", FAR, every),
        ("a name", "invalid", HERE, [_of("/dns4/localhost/tcp/5000")]),
        ("another transport", "invalid", HERE, [_of("/ip4/93.184.216.34/udp/5000/quic-v1")]),
        ("more behind the port", "invalid", HERE, [_of("/ip4/93.184.216.34/tcp/5000/ws")]),
        ("a port of the system", "invalid", HERE, [_of("/ip4/93.184.216.34/tcp/1023")]),
        ("no port", "invalid", HERE, [_of("/ip4/93.184.216.34/tcp/65536")]),
        ("multicast", "invalid", HERE, [_of("/ip4/224.0.0.1/tcp/5000")]),
        ("unspecified", "invalid", HERE, [_of("/ip4/0.0.0.0/tcp/5000"), _of("/ip6/::/tcp/5000")]),
        ("a zone", "invalid", HERE, [_of("/ip6/2606:2800:220:1::1%1/tcp/5000"), _of("/ip6/::1%lo/tcp/5000")]),
        ("link-local IPv6", "invalid", HERE, [_of("/ip6/fe80::1/tcp/5000")]),
        (
            "IPv4 behind a translator",
            "invalid",
            HERE,
            [_of("/ip6/64:ff9b::a00:1/tcp/5000"), _of("/ip6/2002:a00:1::1/tcp/5000")],
        ),
        ("IPv4 in IPv6 is told as IPv4", "valid", HERE, [_of("/ip6/::ffff:10.0.0.1/tcp/5000")]),
        ("leading zeros", "invalid", HERE, [_of("/ip4/93.184.216.034/tcp/5000")]),
        ("no peer", "invalid", HERE, [FAR, f"{FAR}/p2p/", f"{FAR}/p2p/Qmhash"]),
    ]
    return [
        case(
            comment,
            "STR-7",
            flags,
            remote=remote,
            addresses=addresses,
            result=[one.address for one in believed(addresses, remote)],
        )
        for comment, flags, remote, addresses in rows
    ]


def _of(place: str) -> str:
    return f"{place}/p2p/{BOB.peer_id}"
