"""Addresses in introductions: which are told, which are passed on, which are worth a dial. Pure. [STR-7]

What a peer says of itself is believed as far as the socket shows: its IP address is that of its connection,
and only the port is its word. So nobody can send others to a third party's machine. What a peer says of
others is a claim, and reaches no further in than that peer itself: who is far away cannot name what is behind
our router.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from ipaddress import IPv4Address, IPv6Address, ip_address

from .errors import RemoteError
from .identity import key_of

IP = IPv4Address | IPv6Address

MAX_TOLD = 8
"""Addresses of one node in a have-request."""

MAX_PORTS = 2
"""Ports of one peer that are passed on: its own, and one that a router forwards."""

LEAST_PORT = 1_024
"""Lower ones belong to services of the system: what a lie could be aimed at."""

_TRANSLATORS = (
    (int(IPv6Address("64:ff9b::")) >> 32, 32),  # RFC 6052
    (int(IPv6Address("64:ff9b:1::")) >> 80, 80),  # RFC 8215
)
"""Prefixes of IPv6 addresses that stand for IPv4 ones, and the bits behind each."""


class Scope(IntEnum):
    """From how far away an address can be reached."""

    MACHINE = 0
    NETWORK = 1
    WORLD = 2


@dataclass(frozen=True, slots=True)
class Endpoint:
    """Where a peer can be dialled."""

    ip: IP
    port: int
    peer: str

    @property
    def address(self) -> str:
        return f"/ip{self.ip.version}/{self.ip}/tcp/{self.port}/p2p/{self.peer}"


def endpoint(address: str) -> Endpoint | None:
    """Of `/ip4/.../tcp/.../p2p/...`; None for what is not exactly that, or cannot be anybody's address. Names
    are not looked up: who is introduced by one could be anywhere."""
    head, separator, peer = address.partition("/p2p/")
    place = transport(head)
    if not separator or place is None or scope(place[0]) is None or not LEAST_PORT <= place[1] <= 65_535:
        return None
    try:
        key_of(peer)
    except RemoteError:
        return None
    return Endpoint(*place, peer)


def transport(address: str) -> tuple[IP, int] | None:
    """IP and port of `/ip4/.../tcp/...`, also where the peer is named behind it."""
    parts = address.split("/")
    if len(parts) not in (5, 7) or parts[0] or parts[1] not in ("ip4", "ip6") or parts[3] != "tcp":
        return None
    if parts[5:6] not in ([], ["p2p"]):
        return None
    if not (parts[4].isascii() and parts[4].isdigit() and len(parts[4]) <= 5):
        return None
    if "%" in parts[2]:  # a zone is any text, and says something on one machine only
        return None
    try:
        ip = ip_address(parts[2])
    except ValueError:
        return None
    if f"ip{ip.version}" != parts[1]:
        return None
    return getattr(ip, "ipv4_mapped", None) or ip, int(parts[4])


def scope(ip: IP) -> Scope | None:
    """None for what is no single machine's address, or stands for another one."""
    if ip.is_loopback:
        return Scope.MACHINE
    if ip.is_multicast or ip.is_unspecified or ip.is_reserved:
        return None
    if isinstance(ip, IPv6Address):
        translated = any(int(ip) >> bits == prefix for prefix, bits in _TRANSLATORS)
        if ip.is_link_local or ip.ipv4_mapped or ip.sixtofour or ip.teredo or translated:
            return None
    return Scope.WORLD if ip.is_global else Scope.NETWORK


def scope_of(address: str) -> Scope | None:
    """Of the other end of a connection, or of any IP address with a port; None where that says nothing."""
    place = transport(address)
    return None if place is None else scope(place[0])


def told(addresses: Iterable[str], listener: str) -> list[str]:
    """Our own addresses for the peer at the other end of a connection. Those behind a router are among them:
    it is the port that counts."""
    near = scope_of(listener)
    if near is None:
        return []
    return [one for one in addresses if scope_of(one) is not Scope.MACHINE or near is Scope.MACHINE][
        :MAX_TOLD
    ]


def vouched(peer: str, remote: str, inbound: bool, said: Sequence[str]) -> list[Endpoint]:
    """Where a peer that we are connected to can be dialled: at the very address at which we have dialled it,
    and at the IP of its connection with the ports that it says, those that it says of this IP first."""
    place = transport(remote)
    if place is None:
        return []
    said = sorted(said, key=lambda address: (transport(address) or (None,))[0] != place[0])
    ports = [] if inbound else [place[1]]
    ports += [port for address in said if (port := _port(address)) is not None]
    found = (endpoint(Endpoint(place[0], port, peer).address) for port in dict.fromkeys(ports))
    return [one for one in found if one is not None][:MAX_PORTS]


def _port(address: str) -> int | None:
    """Also of an address with a name in it."""
    parts = address.split("/")
    for name, value in itertools.pairwise(parts):
        if name == "tcp" and value.isascii() and value.isdigit() and len(value) <= 5:
            return int(value)
    return None


def passed_on(found: Iterable[Endpoint], asker: str) -> list[str]:
    """Those of them that `asker`, the other end of a connection, can reach."""
    near = scope_of(asker)
    if near is None:
        return []
    return [one.address for one in found if (own := scope(one.ip)) is not None and own >= near]


def believed(addresses: Iterable[str], introducer: str) -> list[Endpoint]:
    """Introductions by the peer at the other end of a connection that may be dialled."""
    near = scope_of(introducer)
    if near is None:
        return []
    found = (endpoint(address) for address in addresses)
    return [one for one in found if one is not None and (own := scope(one.ip)) is not None and own >= near]
