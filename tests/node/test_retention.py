"""Which versions go: by number, by bytes, and never what is needed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.retention import surplus

AMPLE = 1 << 40


def same(count: int, size: int = 10) -> dict[int, int]:
    return dict.fromkeys(range(count), size)


def test_the_newest_are_kept_as_many_as_were_asked_for() -> None:
    assert surplus(same(6), {0}, 2, AMPLE) == [1, 2, 3]
    assert surplus(same(6), {0}, 9, AMPLE) == []
    assert surplus(same(3), set(), 0, AMPLE) == [0, 1, 2]


def test_what_is_needed_stays_however_old_and_however_large() -> None:
    assert surplus(same(6), {0, 2, 5}, 1, 0) == [1, 3, 4]


def test_the_oldest_go_until_the_rest_fits() -> None:
    assert surplus(same(6), {0, 5}, 6, 40) == [1, 2]
    assert surplus(same(6), {0, 5}, 6, 39) == [1, 2, 3]
    assert surplus({0: 10, 1: 100, 2: 1, 3: 1}, {0}, 9, 20) == [1]


@given(
    st.dictionaries(st.integers(0, 99), st.integers(0, 1000)),
    st.sets(st.integers(0, 99)),
    st.integers(0, 20),
    st.integers(0, 9000),
)
def test_nothing_needed_goes_and_nothing_goes_without_reason(
    sizes: dict[int, int], needed: set[int], keep: int, room: int
) -> None:
    gone = surplus(sizes, needed, keep, room)
    assert gone == sorted(gone)
    assert not needed.intersection(gone)
    left = {version: size for version, size in sizes.items() if version not in gone}
    optional = set(left) - needed
    assert not optional or sum(left.values()) <= room
    for version in gone:
        newer = sum(size for other, size in sizes.items() if other >= version or other in needed)
        assert newer > room or version not in sorted(sizes)[len(sizes) - min(keep, len(sizes)) :]
