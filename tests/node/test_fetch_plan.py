"""How a node that holds some checkpoints comes to another one, and when it leaves one for a newer."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.fetch_plan import NEARLY, Plan, Target, is_left_for, needed_manifests, plans
from nous_node.protocol.checkpoints import DELTA, FULL, CheckpointManifest, FileEntry

CHUNK = 1 << 14
SIZE = 40 * CHUNK
WEIGHTS = "model.safetensors"


def entry(path: str, content: str, size: int) -> FileEntry:
    """Of a file whose chunks are others for each text."""
    chunks = [hashlib.sha256(f"{content} {at}".encode()).digest() for at in range(0, size, CHUNK)]
    return FileEntry(path, size, CHUNK, b"".join(chunks))


def files(version: int, config: str = "config") -> list[FileEntry]:
    return [entry("config.json", config, 100), entry(WEIGHTS, f"weights {version}", SIZE)]


class Line:
    """Versions one after the other: the first is full, the others are deltas unless told otherwise."""

    def __init__(self, count: int, delta: int = CHUNK) -> None:
        self.targets: list[Target] = []
        for _ in range(count):
            self.publish(delta)

    def publish(
        self,
        delta: int | None = CHUNK,
        *,
        weights: int | None = None,
        config: str = "config",
        replaced: bool = False,
    ) -> Target:
        """`delta`: bytes of the delta; 0: a renewal; None: full. `weights`: those of an earlier version.
        `replaced`: new weights without a delta."""
        version = len(self.targets)
        made = files(version if weights is None else weights, config)
        manifest = CheckpointManifest(version, FULL, made, {"w": bytes(32)}, bytes([version]) * 32)
        if self.targets:
            before = self.targets[-1]
            manifest = msgspec.structs.replace(manifest, parent=before.hash)
            if delta == 0 and not replaced:
                manifest = msgspec.structs.replace(manifest, files=before.manifest.files)
            if delta is not None:
                deltas = [entry(WEIGHTS, f"delta {version}", delta)] if delta else []
                chain = [*before.manifest.chain, before.hash]
                manifest = msgspec.structs.replace(manifest, kind=DELTA, deltas=deltas, chain=chain)
        self.targets.append(Target(hashlib.sha256(manifest.to_bytes()).digest(), manifest))
        return self.targets[-1]

    def plans(
        self, *held: int, known: Collection[int] | None = None, deltas: Collection[int] = ()
    ) -> list[Plan]:
        """Ways to the newest, of a node that holds these versions."""
        numbers = range(len(self.targets) - 1) if known is None else known
        here = {self.targets[number].hash: self.targets[number].manifest for number in held}
        manifests = {self.targets[number].hash: self.targets[number].manifest for number in {*numbers, *held}}
        chunks = {digest for one in here.values() for file in one.files for digest in file.hashes()}
        ready = {self.targets[number].hash for number in deltas}
        return plans(self.targets[-1], here, manifests, ready, chunks.__contains__)

    def ways(self, *held: int, known: Collection[int] | None = None) -> list[str]:
        return [self.told(plan) for plan in self.plans(*held, known=known)]

    def told(self, plan: Plan) -> str:
        if plan.base is None:
            return "files"
        return " ".join(str(one.manifest.version) for one in (plan.base, *plan.steps))


def test_a_node_that_holds_the_parent_takes_one_delta() -> None:
    line = Line(4)
    assert line.ways(2) == ["2 3", "files"]
    plan = line.plans(2)[0]
    assert (plan.bytes, plan.scratch) == (CHUNK, SIZE + 100 + CHUNK)
    assert {path: [step.manifest.version for step in steps] for path, steps in plan.recipes.items()} == {
        "config.json": [],
        WEIGHTS: [3],
    }


def test_a_node_that_fell_behind_takes_the_deltas_behind_its_latest() -> None:
    line = Line(6)
    assert line.ways(0, 2) == ["2 3 4 5", "files"]
    plan = line.plans(0, 2)[0]
    assert plan.bytes == 3 * CHUNK
    assert plan.scratch == SIZE + 100 + 3 * CHUNK + SIZE  # what lies between two deltas
    assert [step.manifest.version for step in plan.recipes[WEIGHTS]] == [3, 4, 5]


def test_deltas_that_are_here_cost_nothing() -> None:
    line = Line(6)
    assert line.plans(2, deltas=[3, 4])[0].bytes == CHUNK


def test_a_joiner_takes_the_full_one_and_the_deltas_behind_it() -> None:
    line = Line(4)
    assert line.ways() == ["0 1 2 3", "files"]
    plan = line.plans()[0]
    assert plan.bytes == SIZE + 100 + 3 * CHUNK
    assert plan.scratch == plan.bytes + SIZE + 100 + SIZE


def test_a_joiner_takes_the_files_where_the_chain_is_much_more() -> None:
    assert Line(3, delta=SIZE // 2).ways() == ["files"]
    assert Line(2, delta=SIZE // 3).ways() == ["0 1", "files"]


def test_deltas_that_are_more_than_the_files_are_passed_over() -> None:
    assert Line(5, delta=SIZE // 3).ways(0) == ["files"]
    assert Line(3, delta=SIZE // 3).ways(0) == ["0 1 2", "files"]


def test_a_full_one_is_fetched_by_its_files() -> None:
    line = Line(3)
    line.publish(None)
    assert line.ways(2) == ["files"]


def test_a_renewal_costs_nothing() -> None:
    for kind in (0, None):
        line = Line(3)
        line.publish(kind, weights=2)
        assert line.ways(2) == ["files"]
        assert line.plans(2)[0].bytes == 0


def test_renewals_in_a_chain_are_passed_through() -> None:
    line = Line(2)
    line.publish(0)
    line.publish(0)
    line.publish()
    plan = line.plans(1)[0]
    assert line.told(plan) == "1 2 3 4"
    assert [step.manifest.version for step in plan.recipes[WEIGHTS]] == [4]
    assert plan.scratch == SIZE + 100 + CHUNK


def test_a_file_without_a_delta_that_changed_is_fetched() -> None:
    line = Line(2)
    line.publish(config="another")
    plan = line.plans(1)[0]
    assert set(plan.recipes) == {WEIGHTS}
    assert plan.bytes == CHUNK + 100
    line.publish(config="another")
    assert set(line.plans(1)[0].recipes) == {WEIGHTS}
    assert set(line.plans(2)[0].recipes) == {WEIGHTS, "config.json"}


def test_nothing_is_made_of_a_file_that_was_replaced_on_the_way() -> None:
    """Version 2 changed its weights without a delta: those of version 3 are made from that."""
    line = Line(2)
    line.publish(0, replaced=True)
    line.publish()
    assert line.ways(1) == ["files"]
    assert line.ways(2) == ["2 3", "files"]
    line.publish(0, replaced=True)
    line.publish(0)
    line.publish()
    assert line.ways(3) == ["files"]


def test_without_the_manifests_of_a_chain_its_deltas_are_not_used() -> None:
    line = Line(5)
    assert line.ways(2, known=[0, 1, 2]) == ["files"]
    assert line.ways(2, known=[3]) == ["2 3 4", "files"]
    assert line.ways(known=[0, 1, 2]) == ["files"]
    assert line.ways(known=[1, 2, 3]) == ["files"]


def test_manifests_are_needed_from_the_latest_on_that_is_held() -> None:
    line = Line(5)
    hashes = [one.hash for one in line.targets]
    newest = line.targets[-1]
    assert list(needed_manifests(newest, set())) == hashes[:4]
    assert list(needed_manifests(newest, {hashes[0], hashes[2]})) == hashes[2:4]
    assert list(needed_manifests(newest, {hashes[3]})) == [hashes[3]]
    assert list(needed_manifests(line.targets[0], set())) == []


@given(
    held=st.sets(st.integers(0, 6)),
    known=st.sets(st.integers(0, 6)),
    kinds=st.lists(st.sampled_from([0, CHUNK, SIZE // 3, SIZE, None]), min_size=7, max_size=7),
)
def test_the_last_way_is_always_the_files_and_none_before_it_needs_what_is_not_known(
    held: set[int], known: set[int], kinds: list[int | None]
) -> None:
    line = Line(1)
    for kind in kinds:
        line.publish(kind)
    found = line.plans(*held, known=known)
    assert [plan.base is None for plan in found] == [False] * (len(found) - 1) + [True]
    for plan in found[:-1]:
        assert plan.base is not None
        chain = [plan.base, *plan.steps]
        versions = [one.manifest.version for one in chain]
        assert versions == list(range(versions[0], 8))
        assert {*versions[:-1]} <= known | held
        assert versions[0] in held or not {*versions} & held - {7}
    assert all(plan.bytes >= 0 and plan.scratch >= SIZE for plan in found)


# --- when a newer head comes ---------------------------------------------------------------------

STALENESS = 2


def leaves(current: int, newer: int, done: float, *, again: bool = False, kind: int | None = None) -> bool:
    """Whether a download of one version of a line is left for a later one; `kind`: of all between."""
    line = Line(1)
    for _ in range(newer):
        line.publish(kind)
    newest = line.targets[newer].manifest
    return is_left_for(line.targets[current], newest, done, STALENESS, again=again)


def test_a_download_is_left_when_it_is_too_old_to_be_of_use() -> None:
    assert leaves(1, 1 + STALENESS + 1, 0.5)
    assert not leaves(1, 1 + STALENESS, 0.5)


def test_a_download_that_the_newer_is_made_from_is_finished() -> None:
    assert not leaves(1, 8, 0.0, kind=CHUNK)


def test_a_download_that_is_nearly_done_is_finished() -> None:
    assert leaves(1, 8, NEARLY - 0.01)
    assert not leaves(1, 8, NEARLY)


def test_every_second_download_is_finished_however_fast_versions_come() -> None:
    assert not leaves(1, 200, 0.0, again=True)


@pytest.mark.parametrize("held", [(), (0,), (1,), (0, 1)])
def test_plans_are_the_same_each_time(held: tuple[int, ...]) -> None:
    assert Line(4).ways(*held) == Line(4).ways(*held)
