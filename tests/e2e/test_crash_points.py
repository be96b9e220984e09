"""A trainer that dies between two writes, step by step: journal, learner's folders, publication.

The parts are those of a running trainer, in this process and in its order; a crash is that nothing follows.
"""

from __future__ import annotations

import os
import random
import time
from hashlib import sha256
from typing import Any

import pytest

from nous_node.envs.batcher import Batcher, Job
from nous_node.node.blobs import BlobIndex
from nous_node.node.following import Following
from nous_node.node.home import Home
from nous_node.node.learner import Learner
from nous_node.node.learner_messages import Candidate, Open, Published, Updated
from nous_node.node.publishing import Publisher
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal, StoredGroup
from nous_node.node.worker import Ready
from nous_node.node.worker_messages import Load
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.identity import Identity
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.tasks import assign, task_seed
from nous_node.trainer.policy import Policy

UPDATE = 4
SENT = 6
"""Groups: those of one update and two more."""
VOLUNTEER = Identity.from_seed(b"v" * 32)


class Trainer:
    """A trainer's state, as it is after a start."""

    def __init__(self, folder: RunFolder, identity: Identity) -> None:
        self.folder = folder
        self.journal = Journal.open(folder.journal)
        self.following = Following.of(folder.run, folder.envelope)
        index = BlobIndex(lambda file: None)
        entropy = random.Random(0).randbytes
        self.publisher = Publisher(identity, folder, self.journal, self.following, index, entropy)
        self.said = self.publisher.resume()

    def learner(self) -> Learner:
        head = self.publisher.head
        folders = {version: str(path) for version, path in self.publisher.folders.items()}
        place = str(self.publisher.folders[head.version])
        return Learner.open(Open(str(self.folder.path), head.version, place, folders, {}, "cpu", 1))

    def candidates(self) -> list[Candidate]:
        beacons = {head.hash: head.manifest.beacon for head in self.publisher.heads.values()}
        return [
            Candidate(
                group.id,
                unseal(group.envelope).content(),
                group.key,
                group.version,
                group.checkpoint,
                beacons.get(group.checkpoint, bytes(32)),
                {},
                group.state == "accepted",
            )
            for group in self.journal.unused()
        ]

    def lesson(self, learner: Learner) -> Updated:
        judged = learner.verify(self.candidates())
        self.journal.decide([one.receipt for one in judged], time.time_ns() // 1_000_000)
        updated = learner.step()
        assert updated is not None
        return updated

    def crash(self) -> None:
        """What was written stays; what only was in memory is gone."""
        self.journal.__exit__()


@pytest.fixture
def run(tmp_path: Any, make_run: Any) -> tuple[RunFolder, Identity]:
    return make_run(tmp_path, groups=UPDATE), Home.open(tmp_path).identity()


def send(trainer: Trainer) -> None:
    """Journals SENT honest groups of the newest checkpoint."""
    folder, head = trainer.folder, trainer.publisher.head
    manifest = folder.manifest
    policy = Policy.load(trainer.publisher.folders[head.version], "float32")
    ready = Ready(policy, Load("", head.hash, "cpu", 1, manifest.to_bytes()))
    trainer.journal.hear(VOLUNTEER.key, "test", 0, -1)
    jobs = []
    for counter in range(SENT):
        seed = task_seed(folder.run, head.hash, head.manifest.beacon, VOLUNTEER.key, counter)
        assignment = assign(seed, manifest.weights)
        environment = ready.environment(0)
        jobs.append(Job(environment, environment.task(assignment.task_seed, 0), assignment))
    with Batcher(ready.settings, lambda requests: ready.sample(requests, silent)) as batcher:
        outcomes = batcher.run(jobs)
    for counter, outcome in enumerate(outcomes):
        assert isinstance(outcome, list)
        group = RolloutGroup(head.hash, counter, manifest.environments[0].id, ready.said, outcome)
        now = time.time_ns() // 1_000_000
        data = seal(VOLUNTEER, Kind.ROLLOUT, folder.run, group.to_bytes(), seq=counter, ts=now)
        place = (unseal(data).id, VOLUNTEER.key, head.hash, head.version, counter)
        trainer.journal.add(StoredGroup(*place, sha256(group.to_bytes()).digest(), now, data))


silent: Any = lambda tokens: None  # noqa: E731


def used(journal: Any) -> dict[int, set[bytes]]:
    found: dict[int, set[bytes]] = {}
    for rollout, (state, version) in journal.groups().items():
        if state == "used":
            found.setdefault(version, set()).add(rollout)
    return found


def test_crash_after_the_journal_loses_no_group(run, journal) -> None:
    trainer = Trainer(*run)
    send(trainer)
    trainer.crash()
    again = Trainer(*run)
    assert again.publisher.head.version == 0
    updated = again.lesson(again.learner())
    again.publisher.update(updated)
    again.crash()
    assert used(journal(run[0])) == {1: set(updated.used)}
    assert len(updated.used) == UPDATE


def test_crash_between_a_checkpoints_folder_and_its_publication_uses_nothing_twice(run, journal) -> None:
    trainer = Trainer(*run)
    send(trainer)
    first = trainer.lesson(trainer.learner())
    assert run[0].checkpoint(1).is_dir()
    trainer.crash()

    again = Trainer(*run)
    assert again.publisher.head.version == 0
    assert {candidate.accepted for candidate in again.candidates()} == {True}
    second = again.lesson(again.learner())
    assert second.used == first.used
    assert second.tensors == first.tensors  # the same step again, bit for bit
    head = again.publisher.update(second)
    assert head.version == 1
    again.crash()
    stored = journal(run[0])
    stored.assert_sound()
    assert used(stored) == {1: set(first.used)}


def test_crash_right_after_the_publication_goes_on_from_the_new_version(run, journal) -> None:
    trainer = Trainer(*run)
    send(trainer)
    learner = trainer.learner()
    updated = trainer.lesson(learner)
    head = trainer.publisher.update(updated)
    trainer.crash()

    again = Trainer(*run)
    assert (again.publisher.head.hash, again.publisher.head.envelope) == (head.hash, head.envelope)
    assert len(again.candidates()) == SENT - UPDATE
    opened = again.learner()
    assert opened.version == 1
    assert opened.optimizer.steps == learner.optimizer.steps
    assert opened.step() is None
    again.crash()
    assert used(journal(run[0])) == {1: set(updated.used)}


def test_crash_while_a_checkpoint_is_written_leaves_no_litter(run) -> None:
    trainer = Trainer(*run)
    send(trainer)
    trainer.crash()
    half = run[0].path / "checkpoints" / ".000001.abcdefgh"
    half.mkdir()
    (half / "model.safetensors").write_bytes(bytes(1000))
    again = Trainer(*run)
    assert not half.exists()
    again.publisher.update(again.lesson(again.learner()))
    again.crash()


def test_versions_go_on_when_the_one_that_the_learner_began_with_is_deleted(run) -> None:
    """Also of a learner that was opened in the middle of a run."""
    trainer = Trainer(*run)
    send(trainer)
    trainer.publisher.update(trainer.lesson(trainer.learner()))
    for _ in range(run[0].manifest.staleness + 2):
        trainer.publisher.renew()
    learner = trainer.learner()
    for _ in range(12):
        send(trainer)
        head = trainer.publisher.update(trainer.lesson(learner))
        learner.published(Published(head.version))
        trainer.publisher.prune(2)
    assert not run[0].checkpoint(1).exists()
    trainer.crash()


def test_damaged_newest_checkpoint_costs_one_version_and_no_group(run, journal) -> None:
    trainer = Trainer(*run)
    send(trainer)
    trainer.publisher.update(trainer.lesson(trainer.learner()))
    trainer.crash()
    os.truncate(run[0].checkpoint(1) / "model.safetensors", 1000)
    before = journal(run[0]).groups()

    again = Trainer(*run)
    assert "Version 1 is damaged" in again.said
    assert again.publisher.head.version == 2
    assert again.publisher.folders[2] == run[0].checkpoint(0)
    assert journal(run[0]).groups() == before
    again.crash()


def test_run_folder_may_be_moved(run, tmp_path) -> None:
    trainer = Trainer(*run)
    head = trainer.publisher.head
    trainer.crash()
    there = tmp_path / "elsewhere"
    run[0].path.rename(there)
    again = Trainer(RunFolder.open(there), run[1])
    assert again.publisher.head.hash == head.hash
    assert again.publisher.folders[0] == there / "checkpoints" / "000000"
    again.crash()
