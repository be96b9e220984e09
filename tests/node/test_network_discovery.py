from __future__ import annotations

import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node import discovery
from nous_node.node.discovery import LOOPBACK, Found, advertise, discover
from nous_node.node.network_errors import DiscoveryError

PEER = "12D3KooWMbbPVGsZYh3ChQjue712NHHGNybRRXwnuSpezYjGbCDS"


async def test_an_advertised_run_is_found_on_the_same_interface() -> None:
    run_id = bytes(range(32))
    addresses = tuple(f"/ip4/127.0.0.1/tcp/{port}/p2p/{PEER}" for port in (4001, 4002))
    async with advertise(run_id, addresses, LOOPBACK):
        found = await discover(10.0, LOOPBACK)
    assert Found(run_id, addresses) in found


async def test_nothing_is_found_where_nobody_answers() -> None:
    start = trio.current_time()
    found = await discover(0.3, LOOPBACK)
    assert [entry for entry in found if entry.run_id == b"\x99" * 32] == []
    assert trio.current_time() - start < 5


async def test_an_interface_that_we_do_not_have_is_an_error_in_words() -> None:
    with pytest.raises(DiscoveryError, match=r"192\.0\.2\.1.*Use an invite"):
        await discover(0.1, "192.0.2.1")


KEYS = st.sampled_from([b"run", b"a0", b"a1", b"a7", b"other"])


@given(st.dictionaries(KEYS, st.one_of(st.none(), st.binary(max_size=300))))
def test_any_txt_record_is_a_run_or_nothing(properties) -> None:
    found = discovery.heard(properties)
    assert found is None or (len(found.run_id) == 32 and found.addresses)
