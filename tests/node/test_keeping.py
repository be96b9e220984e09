"""Which checkpoints stay on a disk of a volunteer or relay."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.keeping import DELTAS, FILES, Thing, Use, kept, total

SIZE = 100
DELTA = 3


def name(version: int) -> bytes:
    return bytes([version]) * 32


def files(version: int, *shared: str) -> Thing:
    """Of one file, or of those that others have too."""
    own = {f"file of {version}": SIZE - 10 * len(shared)}
    return Thing(name(version), version, FILES, own | dict.fromkeys(shared, 10))


def deltas(version: int) -> Thing:
    return Thing(name(version), version, DELTAS, {f"delta of {version}": DELTA})


def use(newest: int, before: int | None = None, full: int | None = None, *always: int) -> Use:
    """`full`: from which on the newest's chain goes."""
    chain = () if full is None else [name(version) for version in range(full, newest)]
    return Use(name(newest), None if before is None else name(before), chain, [name(one) for one in always])


def told(things: list[Thing]) -> set[str]:
    return {f"{thing.version}{'' if thing.what == FILES else ' deltas'}" for thing in things}


def everything(count: int) -> list[Thing]:
    return [thing for version in range(count) for thing in (files(version), deltas(version))]


def test_with_room_for_all_that_is_needed_no_more_than_that_stays() -> None:
    stay = kept(everything(8), use(7, 6, 2, 5), keep=0, room=10_000)
    assert told(stay) == {"7", "6", "5", "2", *(f"{version} deltas" for version in range(2, 8))}


def test_newest_and_what_is_in_use_stay_whatever_the_room() -> None:
    stay = kept(everything(8), use(7, 6, 2, 4, 5), keep=5, room=0)
    assert told(stay) == {"7", "4", "5"}


def test_deltas_come_before_older_files_and_those_before_the_full_one() -> None:
    wanted = use(7, 6, 2)
    assert told(kept(everything(8), wanted, 0, SIZE + 2 * DELTA)) == {"7", "7 deltas", "6 deltas"}
    all_deltas = {f"{version} deltas" for version in range(2, 8)}
    assert told(kept(everything(8), wanted, 0, 2 * SIZE + 6 * DELTA)) == {"7", "6", *all_deltas}
    assert told(kept(everything(8), wanted, 0, 3 * SIZE + 6 * DELTA)) == {"7", "6", "2", *all_deltas}


def test_deltas_of_the_one_before_stay_with_it_where_a_new_chain_has_begun() -> None:
    stay = kept(everything(8), Use(name(7), name(6), (), []), keep=0, room=10_000)
    assert told(stay) == {"7", "6", "7 deltas", "6 deltas"}


def test_others_stay_up_to_the_number_that_is_asked_for_the_newest_first() -> None:
    plain = [files(version) for version in range(8)]
    assert told(kept(plain, use(7, 6), keep=4, room=10_000)) == {"7", "6", "5", "4"}
    assert told(kept(plain, use(7, 6), keep=1, room=10_000)) == {"7", "6"}
    assert told(kept(plain, use(7, 6), keep=8, room=5 * SIZE)) == {"7", "6", "5", "4", "3"}


def test_what_two_checkpoints_share_counts_once() -> None:
    renewals = [Thing(name(version), version, FILES, {"the same": SIZE}) for version in range(4)]
    assert total(renewals) == SIZE
    assert told(kept(renewals, use(3), keep=4, room=SIZE)) == {"0", "1", "2", "3"}


def test_nothing_is_kept_of_nothing() -> None:
    assert kept([], use(3, 2, 0, 1), 5, 100) == []
    assert kept([], Use(), 5, 100) == []


@given(
    versions=st.sets(st.integers(0, 20)),
    newest=st.integers(0, 20),
    before=st.none() | st.integers(0, 20),
    full=st.none() | st.integers(0, 20),
    always=st.lists(st.integers(0, 20), max_size=2),
    keep=st.integers(0, 10),
    room=st.integers(0, 2_000),
)
def test_room_is_kept_beside_what_always_stays(
    versions: set[int],
    newest: int,
    before: int | None,
    full: int | None,
    always: list[int],
    keep: int,
    room: int,
) -> None:
    things = [thing for version in versions for thing in (files(version, "config"), deltas(version))]
    wanted = use(newest, before, full, *always)
    stay = kept(things, wanted, keep, room)
    must = [thing for thing in things if thing.what == FILES and thing.version in {newest, *always}]
    assert len({(thing.version, thing.what) for thing in stay}) == len(stay)
    assert all(thing in stay for thing in must)
    assert total(stay) <= max(room, total(must))
    more = kept(things, wanted, keep, room + 10_000)
    assert {thing.version for thing in must} <= {thing.version for thing in more}
