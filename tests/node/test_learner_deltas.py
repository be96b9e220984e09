"""The learner writes deltas that make each version of the one before, and stops where they do not pay."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.node.create import folder_entries
from nous_node.node.delta_files import apply_delta
from nous_node.node.delta_writer import DeltaWriter, Written
from nous_node.node.learner import Learner
from nous_node.node.learner_messages import Candidate, Open, Published, Updated
from nous_node.node.runfolder import RunFolder
from nous_node.trainer.checkpoint import save_checkpoint
from nous_node.trainer.policy import Policy

UPDATE = 4
WEIGHTS = "model.safetensors"
SLOW = 1e-9
"""A rate at which hardly any weight changes by more than its last bits."""


@pytest.fixture(scope="module")
def honest(base_run: RunFolder, volunteers: Any) -> list[Candidate]:
    """Groups of version 0."""
    groups: list[Candidate] = volunteers.candidates(base_run, 4 * UPDATE)
    return groups


def opened(folder: RunFolder, version: int = 0, place: Path | None = None) -> Learner:
    place = place or folder.checkpoint(version)
    return Learner.open(Open(str(folder.path), version, str(place), {version: str(place)}, {}, "cpu", 1))


def lesson(learner: Learner, candidates: list[Candidate]) -> Updated:
    """A version that is published; the groups are taken for ones of the newest."""
    known = [msgspec.structs.replace(one, accepted=True, version=learner.version) for one in candidates]
    learner.verify(known)
    updated = learner.step()
    assert updated is not None
    learner.published(Published(updated.version))
    return updated


def leads(folder: RunFolder, before: Path, updated: Updated, scratch: Path) -> bool:
    """Whether the delta of a version makes its very file of the one in `before`."""
    assert updated.deltas == folder_entries(folder.deltas(updated.version))
    assert [entry.path for entry in updated.deltas] == [WEIGHTS]
    out = scratch / "made.safetensors"
    apply_delta(before / WEIGHTS, folder.deltas(updated.version) / WEIGHTS, out, updated.tensors)
    return out.read_bytes() == (Path(updated.folder) / WEIGHTS).read_bytes()


def test_each_version_has_a_delta_that_makes_it_of_the_one_before(make_folder, honest, tmp_path) -> None:
    folder = make_folder(groups=UPDATE, rate=SLOW, warmup=0)
    learner, before = opened(folder), folder.checkpoint(0)
    for number in range(2):
        updated = lesson(learner, honest[number * UPDATE : (number + 1) * UPDATE])
        assert (updated.note, updated.version) == ("", number + 1)
        assert leads(folder, before, updated, tmp_path)
        assert 4 * sum(entry.size for entry in updated.deltas) <= sum(entry.size for entry in updated.files)
        before = Path(updated.folder)


def test_the_delta_of_a_bf16_model_pays_at_an_ordinary_rate(make_folder, honest, tmp_path) -> None:
    folder = make_folder(groups=UPDATE, rate=1e-6, warmup=0)
    learner = opened(folder)
    learner.policy = Policy.load(folder.checkpoint(0), "bfloat16")
    learner.optimizer.policy = learner.policy
    base = tmp_path / "bf16"
    save_checkpoint(learner.policy, base)
    learner.examiner.versions._folders[0] = base
    updated = lesson(learner, honest[:UPDATE])
    assert leads(folder, base, updated, tmp_path)


def test_a_version_after_a_renewed_beacon_is_made_of_the_same_weights(make_folder, honest, tmp_path) -> None:
    folder = make_folder(groups=UPDATE, rate=SLOW, warmup=0)
    learner = opened(folder)
    lesson(learner, honest[:UPDATE])
    learner.published(Published(2))
    updated = lesson(learner, honest[UPDATE : 2 * UPDATE])
    assert updated.version == 3
    assert leads(folder, folder.checkpoint(1), updated, tmp_path)


def test_a_learner_begun_anew_goes_on_with_deltas(make_folder, honest, tmp_path) -> None:
    folder = make_folder(groups=UPDATE, rate=SLOW, warmup=0)
    lesson(opened(folder), honest[:UPDATE])
    updated = lesson(opened(folder, 7, folder.checkpoint(1)), honest[:UPDATE])
    assert updated.version == 8
    assert leads(folder, folder.checkpoint(1), updated, tmp_path)


def test_deltas_that_do_not_pay_leave_nothing_and_are_tried_seldom(make_folder, honest) -> None:
    """A model in float32: at a high rate nearly all bits of every weight change."""
    folder = make_folder(groups=UPDATE, rate=0.1, warmup=0)
    learner, due = opened(folder), []
    for number in range(5):
        due.append(learner.deltas.tries.due(learner.version + 1))
        updated = lesson(learner, honest[number % 4 * UPDATE : (number % 4 + 1) * UPDATE])
        assert (updated.deltas, updated.note) == (None, "")
    assert due == [True, False, True, False, False]
    assert list((folder.path / "deltas").iterdir()) == []


# --- the writer by itself ------------------------------------------------------------------------


class Bench:
    """A run's folder with version 1 beside the base, and who writes its delta."""

    def __init__(self, folder: RunFolder) -> None:
        self.folder, self.writer = folder, DeltaWriter(folder)
        self.place = shutil.copytree(folder.checkpoint(0), folder.checkpoint(1))
        data = bytearray((self.place / WEIGHTS).read_bytes())
        data[-1] ^= 1
        (self.place / WEIGHTS).write_bytes(data)

    def write(self, version: int = 1) -> Written:
        return self.writer.write(version, self.folder.checkpoint(0), self.place, folder_entries(self.place))


@pytest.fixture
def bench(make_folder: Any) -> Bench:
    return Bench(make_folder())


def test_a_delta_replaces_what_a_learner_left_that_died(bench: Bench) -> None:
    bench.folder.deltas(1).mkdir(parents=True)
    (bench.folder.deltas(1) / "left.safetensors").write_bytes(b"left")
    written = bench.write()
    assert written.deltas == folder_entries(bench.folder.deltas(1))
    assert [path.name for path in bench.folder.deltas(1).iterdir()] == [WEIGHTS]


def test_a_delta_that_cannot_be_written_is_told_and_costs_only_itself(bench: Bench) -> None:
    (bench.folder.path / "deltas").rmdir()
    (bench.folder.path / "deltas").write_bytes(b"in the way")
    written = bench.write()
    assert written.deltas is None
    assert written.note.startswith("Version 1 is published in full, since its delta failed: ")
    assert bench.write(2) == Written()  # not again at once
    (bench.folder.path / "deltas").unlink()
    assert bench.write(3).deltas is not None


@pytest.mark.parametrize("harm", ["other layout", "gone", "garbage"])
def test_there_is_no_delta_to_what_is_not_alike(bench: Bench, harm: str) -> None:
    weights = bench.folder.checkpoint(0) / WEIGHTS
    if harm == "gone":
        weights.unlink()
    else:
        weights.write_bytes(b"garbage" if harm == "garbage" else weights.read_bytes()[:-4])
    assert bench.write() == Written()
    assert list((bench.folder.path / "deltas").iterdir()) == []


def test_of_several_files_all_have_a_delta_or_none(bench: Bench) -> None:
    for folder in (bench.folder.checkpoint(0), bench.place):
        shutil.copyfile(folder / WEIGHTS, folder / "second.safetensors")
    deltas = bench.write().deltas
    assert deltas is not None
    assert [entry.path for entry in deltas] == [WEIGHTS, "second.safetensors"]
    (bench.folder.checkpoint(0) / "second.safetensors").unlink()
    assert bench.write(2) == Written()
    assert not bench.folder.deltas(2).exists()
