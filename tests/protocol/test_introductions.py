"""Which addresses are told, passed on and believed: pure rules, no network."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.protocol.identity import peer_id
from nous_node.protocol.introductions import (
    LEAST_PORT,
    MAX_PORTS,
    MAX_TOLD,
    Scope,
    believed,
    endpoint,
    passed_on,
    scope_of,
    told,
    vouched,
)

PEER = peer_id(b"p" * 32)
HERE, LAN, FAR, FAR_6 = (
    "/ip4/127.0.0.1/tcp/5000",
    "/ip4/192.168.1.7/tcp/5000",
    "/ip4/93.184.216.34/tcp/5000",
    "/ip6/2606:2800:220:1::1/tcp/5000",
)


def at(place: str) -> str:
    return f"{place}/p2p/{PEER}"


@pytest.mark.parametrize(
    ("address", "scope"),
    [
        (HERE, Scope.MACHINE),
        ("/ip6/::1/tcp/5000", Scope.MACHINE),
        ("/ip6/::ffff:127.0.0.1/tcp/5000", Scope.MACHINE),
        (LAN, Scope.NETWORK),
        ("/ip4/10.0.0.1/tcp/5000", Scope.NETWORK),
        ("/ip4/100.64.0.1/tcp/5000", Scope.NETWORK),
        ("/ip4/169.254.169.254/tcp/8080", Scope.NETWORK),
        ("/ip6/fd00::1/tcp/5000", Scope.NETWORK),
        ("/ip6/::ffff:10.0.0.1/tcp/5000", Scope.NETWORK),
        (FAR, Scope.WORLD),
        (FAR_6, Scope.WORLD),
        ("/ip4/0.0.0.0/tcp/5000", None),
        ("/ip4/224.0.0.1/tcp/5000", None),
        ("/ip4/255.255.255.255/tcp/5000", None),
        ("/ip6/fe80::1/tcp/5000", None),
        ("/ip6/2002:a00:1::1/tcp/5000", None),
        ("/ip6/64:ff9b::a00:1/tcp/5000", None),
        ("/ip6/64:ff9b:1::a00:1/tcp/5000", None),
        ("/dns4/node.example/tcp/5000", None),
        ("", None),
    ],
)
def test_address_reaches_as_far_as_its_ip(address: str, scope: Scope | None) -> None:
    assert scope_of(address) is scope


@pytest.mark.parametrize(
    "address",
    [
        at("/dns4/localhost/tcp/5000"),
        at("/ip4/93.184.216.34/udp/5000"),
        at("/ip4/93.184.216.34/tcp/5000/ws"),
        at("/ip4/93.184.216.34/tcp/22"),
        at("/ip4/93.184.216.34/tcp/65536"),
        at("/ip4/93.184.216.34/tcp/-1"),
        at("/ip4/93.184.216.34/tcp/5000/p2p-circuit"),
        at("/ip4/93.184.216.034/tcp/5000"),
        at("/ip4/5.9/tcp/5000"),
        at("/ip6/93.184.216.34/tcp/5000"),
        at("/ip6/fe80::1%eth0/tcp/5000"),
        at("/ip6/2606:2800:220:1::1%1/tcp/5000"),
        at(f"/ip6/2606:2800:220:1::1%{'z' * 60_000}/tcp/5000"),
        at("/ip6/2606:2800:220:1::1%/tcp/5000"),
        at("/ip4/93.184.216.34%1/tcp/5000"),
        at("/ip4/224.0.0.1/tcp/5000"),
        FAR,
        f"{FAR}/p2p/Qmhash",
        f"{FAR}/p2p/",
        at(FAR) + "/p2p/" + PEER,
    ],
)
def test_what_is_no_plain_address_of_a_node_is_passed_over(address: str) -> None:
    assert endpoint(address) is None


@given(st.text() | st.sampled_from([HERE, FAR, FAR_6]).map(at))
def test_any_text_is_an_address_or_passed_over(text: str) -> None:
    found = endpoint(text)
    assert found is None or endpoint(found.address) == found
    scope_of(text)
    vouched(PEER, FAR, True, [text])


def test_own_addresses_of_the_machine_are_told_to_the_machine_only() -> None:
    ours = [at(HERE), at(LAN), at(FAR), at("/dns4/node.example/tcp/5000")]
    assert told(ours, HERE) == ours
    assert told(ours, LAN) == told(ours, FAR) == ours[1:]
    assert told(ours, "") == []
    assert len(told(ours * 9, HERE)) == MAX_TOLD


def test_peer_is_vouched_for_at_the_ip_of_its_connection_and_nowhere_else() -> None:
    said = [
        at("/ip4/8.8.8.8/tcp/6000"),
        at("/ip4/93.184.216.34/tcp/7000"),
        at("/dns4/victim.example/tcp/8000"),
    ]
    found = [one.address for one in vouched(PEER, "/ip4/93.184.216.34/tcp/40000", True, said)]
    assert found == [at("/ip4/93.184.216.34/tcp/7000"), at("/ip4/93.184.216.34/tcp/6000")]
    assert len(found) == MAX_PORTS


def test_peer_that_was_dialled_is_vouched_for_where_it_answered() -> None:
    assert [one.address for one in vouched(PEER, FAR, False, [at(FAR)])] == [at(FAR)]
    assert vouched(PEER, FAR, True, []) == []


def test_ports_of_the_system_are_nobodys() -> None:
    low = at(f"/ip4/93.184.216.34/tcp/{LEAST_PORT - 1}")
    assert vouched(PEER, FAR, True, [low]) == []
    assert believed([low], FAR) == []


@pytest.mark.parametrize(
    ("far", "fit"), [(HERE, [HERE, LAN, FAR, FAR_6]), (LAN, [LAN, FAR, FAR_6]), (FAR, [FAR, FAR_6]), ("", [])]
)
def test_introductions_reach_no_further_in_than_the_peer_they_come_from_or_go_to(
    far: str, fit: list[str]
) -> None:
    every = [HERE, LAN, FAR, FAR_6]
    found = [one for place in every if (one := endpoint(at(place))) is not None]
    assert passed_on(found, far) == [at(place) for place in fit]
    assert [one.address for one in believed([at(place) for place in every], far)] == [
        at(place) for place in fit
    ]
