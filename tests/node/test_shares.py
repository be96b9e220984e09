"""What is remembered of those who take part in a checkpoint: bounded, and told no more than they need."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.shares import (
    ASK_AGAIN_S,
    MAX_MEMBERS,
    MAX_NEIGHBOURS,
    MEMBER_SECONDS,
    NEWCOMERS,
    TELLS_BURST,
    TELLS_PER_S,
    Share,
)
from nous_node.protocol.checkpoints import DELTA, FULL, CheckpointManifest, FileEntry, file_entry
from nous_node.protocol.errors import Code, RemoteError

CHUNK = 1 << 14


def entry(path: str, *chunks: int) -> FileEntry:
    """A file of chunks that are equal where their numbers are."""
    return file_entry(path, [bytes([chunk]) * CHUNK for chunk in chunks], CHUNK)


FILES = [entry("a.safetensors", 1, 2, 3), entry("b.json", 4)]
MANIFEST = CheckpointManifest(1, FULL, FILES, {"w": bytes(32)}, bytes(32), bytes(32))


def share(manifest: CheckpointManifest = MANIFEST) -> Share:
    return Share.of(b"c" * 32, manifest)


def test_chunks_of_files_come_before_those_of_deltas() -> None:
    deltas = [entry("a.safetensors", 7, 8)]
    one = share(CheckpointManifest(1, DELTA, FILES, {"w": bytes(32)}, bytes(32), b"p" * 32, deltas=deltas))
    assert (one.files, one.deltas) == (0b1111, 0b110000)
    one.add(deltas[0].hashes()[1])
    one.add(FILES[0].hashes()[0])
    assert one.bitmap() == b"\x21"


def test_a_chunk_that_occurs_twice_is_held_in_both_places() -> None:
    files = [entry("a.safetensors", 1, 2, 1), entry("b.safetensors", 1)]
    one = share(CheckpointManifest(1, FULL, files, {"w": bytes(32)}, bytes(32), bytes(32)))
    one.add(files[0].hashes()[0])
    assert one.have == 0b1101


def test_nothing_is_announced_as_nothing() -> None:
    assert share().bitmap() is None


@given(st.binary(max_size=3))
def test_what_is_no_bitmap_is_refused_and_changes_nothing(have: bytes) -> None:
    one = share()
    if len(have) == 1 and have[0] < 16:
        one.heard("peer", have, None, 0, 0.0)
        assert one.members["peer"].have == have[0]
        return
    with pytest.raises(RemoteError) as error:
        one.heard("peer", have, None, 0, 0.0)
    assert error.value.code == Code.SIZE_MISMATCH
    assert not one.members


def test_both_sides_know_after_one_exchange_and_ask_no_more_until_something_is_new() -> None:
    one = share()
    assert one.due(["peer"], 0.0, curious=True) == ["peer"]
    one.heard("peer", b"\x01", None, one.have, 0.0)
    assert one.due(["peer"], 1.0, curious=True) == []
    one.add(FILES[0].hashes()[2])
    assert one.due(["peer"], 1.0, curious=True) == ["peer"]


def test_one_with_all_files_is_told_nothing_more() -> None:
    one = share()
    one.heard("seed", b"\x0f", None, 0, 0.0)
    one.add(FILES[0].hashes()[0])
    assert one.due(["seed"], 1.0, curious=True) == []
    assert list(one.takers(["seed"])) == []


def test_without_a_download_nobody_is_asked_what_it_has() -> None:
    one = share()
    one.have = one.files
    assert one.due(["stranger"], 0.0, curious=False) == []
    one.heard("taker", None, None, 0, 0.0)
    assert one.due(["stranger", "taker"], 0.0, curious=False) == ["taker"]


def test_one_that_did_not_answer_is_asked_again_later() -> None:
    one = share()
    one.ask_at["peer"] = ASK_AGAIN_S
    assert one.due(["peer"], 1.0, curious=True) == []
    assert one.due(["peer"], ASK_AGAIN_S + 1, curious=True) == ["peer"]


def test_liars_are_asked_nothing() -> None:
    one = share()
    one.liars.add("liar")
    assert one.due(["liar"], 0.0, curious=True) == []


@pytest.mark.parametrize("taken_by", ["silence", "chunks"])
def test_few_are_asked_at_once_however_many_are_connected(taken_by: str) -> None:
    one = share()
    connected = [f"peer {number}" for number in range(200)]
    first = one.due(connected, 0.0, curious=True)
    assert first == connected[:MAX_NEIGHBOURS]
    for peer in first:
        if taken_by == "silence":
            one.ask_at[peer] = 10.0
        else:
            one.heard(peer, b"\x0f", None, 0, 0.0)
            one.givers.add(peer)
    assert one.due(connected, 1.0, curious=True) == connected[MAX_NEIGHBOURS : MAX_NEIGHBOURS + NEWCOMERS]


def test_who_only_announces_takes_nobodys_place() -> None:
    one = share()
    strangers = [f"stranger {number}" for number in range(200)]
    for peer in strangers:
        one.heard(peer, None, None, 0, 0.0)
    assert one.due(["seed", *strangers], 0.0, curious=True) == ["seed"]


def test_who_delivers_is_remembered_longer_than_who_only_announces() -> None:
    one = share()
    one.heard("seed", b"\x0f", None, 0, 0.0)
    one.givers.add("seed")
    for number in range(MAX_MEMBERS + 9):
        one.heard(f"stranger {number}", None, None, 0, 0.0)
    assert "seed" in one.members
    assert len(one.members) == MAX_MEMBERS


def test_messages_of_one_peer_are_taken_at_a_bounded_rate() -> None:
    one = share()
    taken = sum(one.takes("loud", number / 1000) for number in range(10_000))
    assert taken == pytest.approx(TELLS_BURST + 10 * TELLS_PER_S, abs=1)
    assert one.takes("other", 10.0)


def test_members_are_bounded_in_number_and_time() -> None:
    one = share()
    for number in range(MAX_MEMBERS + 9):
        one.heard(f"peer {number}", None, None, 0, 0.0)
    assert len(one.members) == MAX_MEMBERS
    one.heard("seed", b"\x0f", None, 0, 0.0)
    one.due(["seed"], MEMBER_SECONDS + 1, curious=False)
    assert list(one.members) == ["seed"]
    one.due([], MEMBER_SECONDS + 1, curious=False)
    assert not one.members
