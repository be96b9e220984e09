"""Which versions a trainer deletes. Pure: sizes in, versions out."""

from __future__ import annotations

from collections.abc import Collection, Mapping


def surplus(sizes: Mapping[int, int], needed: Collection[int], keep: int, room: int) -> list[int]:
    """Versions to delete, the oldest first: all that nobody needs but the newest `keep`, and of those as many
    as it takes until what is left fits `room` bytes. `sizes`: bytes of each version here.

    What is needed stays, and counts: where it is more than `room` by itself, nothing else is kept.
    """
    newest = sorted(sizes)[-keep:] if keep else []
    left = sum(sizes.values())
    gone = []
    for version in sorted(set(sizes).difference(needed)):
        if version not in newest or left > room:
            gone.append(version)
            left -= sizes[version]
    return gone
