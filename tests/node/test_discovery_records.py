"""The DNS-SD records of a run, as chapter 05 tells them. [DSC-1] [DSC-2]"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from nous_node.node import discovery
from nous_node.node.discovery import LOOPBACK, MAX_ADDRESSES, Found, nearby

RUN = bytes(range(32))
PEER = "12D3KooWMbbPVGsZYh3ChQjue712NHHGNybRRXwnuSpezYjGbCDS"
ADDRESS = f"/ip4/192.0.2.7/tcp/4001/p2p/{PEER}"


def record(**changes: bytes | None) -> dict[bytes, bytes | None]:
    fields = {"run": RUN.hex().encode(), "a0": ADDRESS.encode(), **changes}
    return {name.encode(): value for name, value in fields.items()}


def test_records_have_the_names_and_keys_of_the_chapter() -> None:
    addresses = tuple(f"/ip4/192.0.2.{number}/tcp/{4000 + number}/p2p/{PEER}" for number in range(1, 11))
    info = discovery._service_info(RUN, addresses, "192.0.2.7")
    assert info.type == "_nous-run._tcp.local."
    assert info.name == "000102030405-zYjGbCDS._nous-run._tcp.local."
    assert (info.server, info.port) == ("000102030405-zYjGbCDS.local.", 4001)
    assert info.addresses == [bytes([192, 0, 2, 7])]
    keys = {key for key, _ in info.properties.items()}
    assert keys == {b"run"} | {b"a%d" % number for number in range(MAX_ADDRESSES)}
    assert discovery.heard(info.properties) == Found(RUN, addresses[:MAX_ADDRESSES])


def test_a_record_is_read_whatever_else_it_holds() -> None:
    assert discovery.heard(record(more=b"\xff", a5=b"/ip6/::1")) == Found(RUN, (ADDRESS, "/ip6/::1"))


@pytest.mark.parametrize(
    "changes",
    [
        {"run": None},
        {"run": b"00"},
        {"run": b"g" * 64},
        {"run": "é".encode() * 32},
        {"a0": None},
        {"a0": b""},
        {"a0": b"192.0.2.7:4001"},
        {"a1": b"no address"},
        {"a1": b"/" + b"x" * 240},
        {"a1": "/é".encode()},
    ],
)
def test_a_record_of_another_form_is_no_run(changes: dict[str, bytes | None]) -> None:
    assert discovery.heard(record(**changes)) is None


async def test_a_node_that_only_this_machine_reaches_stays_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("it was advertised")

    monkeypatch.setattr(discovery, "advertise", refuse)
    async with nearby(RUN, [f"/ip4/{LOOPBACK}/tcp/4001/p2p/{PEER}"]):
        pass


async def test_all_who_answered_are_resolved_at_once() -> None:
    """Each waits for all the others, so that one after the other would never end."""
    together = threading.Barrier(20, timeout=10)

    class Responders:
        def get_service_info(self, kind: str, name: str, timeout: float) -> str:
            together.wait()
            return name

    responders: Any = Responders()
    names = [f"run-{number}" for number in range(20)]
    assert sorted(map(str, await discovery._resolved(responders, names))) == sorted(names)
