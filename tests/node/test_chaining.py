"""Full or delta, and when a delta is tried."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.chaining import LONGEST_PAUSE, Chain, Tries
from nous_node.protocol.checkpoints import (
    DELTA,
    FULL,
    CheckpointManifest,
    FileEntry,
    check_manifest,
    checkpoint_hash,
    file_entry,
)

FILE = "model.safetensors"
SIZE = 1000


def entry(size: int) -> FileEntry:
    return file_entry(FILE, [bytes(size)])


def full(version: int, parent: bytes | None) -> CheckpointManifest:
    return CheckpointManifest(version, FULL, [entry(SIZE)], {"w": bytes(32)}, bytes(32), parent)


class Trainer:
    """Publishes one version after the other; `sizes` of their deltas, None where there is none."""

    def __init__(self, longest: int = 31) -> None:
        self.longest, self.chain, self.parent = longest, Chain(), None
        self.made: list[CheckpointManifest] = []

    def publish(self, *sizes: int | None) -> list[str]:
        for size in sizes:
            deltas = None if size is None else [entry(size)] if size else []
            made = self.chain.link(full(len(self.made), self.parent), deltas, self.longest)
            check_manifest(made)
            self.parent = checkpoint_hash(made.to_bytes())
            self.chain = self.chain.after(self.parent, made)
            self.made.append(made)
        return [made.kind for made in self.made[-len(sizes) :]]


def test_the_first_version_is_full_and_small_deltas_follow_it() -> None:
    trainer = Trainer()
    assert trainer.publish(None, 10, 0, 10) == [FULL, DELTA, DELTA, DELTA]
    hashes = [checkpoint_hash(made.to_bytes()) for made in trainer.made]
    assert [made.chain for made in trainer.made] == [hashes[:count] for count in range(4)]
    assert [made.delta_size for made in trainer.made] == [0, 10, 0, 10]
    assert trainer.chain.spent == 20


@pytest.mark.parametrize(("size", "kind"), [(500, DELTA), (501, FULL), (0, DELTA)])
def test_deltas_have_at_most_half_of_the_full(size: int, kind: str) -> None:
    assert Trainer().publish(None, size) == [FULL, kind]


def test_the_deltas_of_a_chain_have_together_at_most_half_of_the_full() -> None:
    kinds = Trainer().publish(None, 200, 200, 100, 1, 200, 0, 301, 300)
    assert kinds == [FULL, DELTA, DELTA, DELTA, FULL, DELTA, DELTA, FULL, DELTA]


def test_every_so_many_versions_one_is_full() -> None:
    assert Trainer(longest=3).publish(None, *[1] * 8) == [FULL, *[DELTA] * 3, FULL, *[DELTA] * 3, FULL]
    assert set(Trainer(longest=0).publish(None, 0, 0)) == {FULL}


def test_a_version_without_a_delta_is_full_and_begins_a_chain() -> None:
    trainer = Trainer()
    assert trainer.publish(None, 400, None, 400) == [FULL, DELTA, FULL, DELTA]
    assert len(trainer.made[-1].chain) == 1


def test_a_chain_that_is_not_known_is_not_continued() -> None:
    trainer = Trainer()
    trainer.publish(None, 1)
    trainer.chain = Chain()
    assert trainer.publish(1, 1) == [FULL, DELTA]


@given(st.lists(st.one_of(st.none(), st.integers(0, 700)), max_size=80), st.integers(0, 64))
def test_no_chain_is_longer_or_larger_than_it_may_be(sizes: list[int | None], longest: int) -> None:
    trainer = Trainer(longest)
    trainer.publish(None, *sizes)
    spent = 0
    for made in trainer.made:
        spent = spent + made.delta_size if made.kind == DELTA else 0
        assert len(made.chain) <= longest
        assert spent <= SIZE / 2
        assert made.kind == FULL or len(made.chain) <= made.version


def tried(versions: int, pays: set[int]) -> list[int]:
    tries, found = Tries(), []
    for version in range(1, versions + 1):
        if tries.due(version):
            found.append(version)
            if version in pays:
                tries.paid()
            else:
                tries.failed(version)
    return found


def test_deltas_that_pay_are_tried_each_time() -> None:
    assert tried(5, {1, 2, 3, 4, 5}) == [1, 2, 3, 4, 5]


def test_deltas_that_do_not_pay_are_tried_ever_more_seldom() -> None:
    at = tried(260, set())
    assert at == [1, 3, 6, 11, 20, 37, 70, 135, 200]
    assert at[-1] - at[-2] == LONGEST_PAUSE + 1


def test_one_that_pays_again_is_followed_by_the_next() -> None:
    assert tried(24, {20, 21}) == [1, 3, 6, 11, 20, 21, 22, 24]
