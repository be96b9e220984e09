"""What a trainer is told of its run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from nous_node.node import training as module
from nous_node.node.events import from_line, to_line
from nous_node.node.following import Following, Head
from nous_node.node.learner_messages import Judged, Updated
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal, StoredGroup
from nous_node.node.training import PRESENT_SECONDS, Training
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.receipts import accepted, refused

FIGURES = {
    "reward": 0.5,
    "correct": 0.25,
    "loss": -0.1,
    "kl": 0.01,
    "entropy": 1.0,
    "grad_norm": 0.75,
    "clipped": 0.0,
    "groups": 32.0,
    "zero_variance": 3.0,
    "tokens": 1280.0,
    "staleness": 1.5,
}


class Clock:
    """Stands where it is put."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with Journal.open(tmp_path / "journal.sqlite") as journal:
        yield journal


@pytest.fixture
def training(base_run: RunFolder, journal: Journal, clock: Clock) -> Training:
    return Training(Following.of(base_run.run, base_run.envelope), journal)


def head(version: int) -> Head:
    files = [file_entry("model.safetensors", [b"weights"])]
    manifest = CheckpointManifest(version, FULL, files, {"w": bytes(32)}, bytes(32), b"p" * 32)
    return Head(bytes([version]) * 32, manifest, b"")


def updated(version: int, **figures: float) -> Updated:
    return Updated(version, "", [], 0, [], {}, {}, FIGURES, figures)


def yes(credit: int) -> Judged:
    return Judged(accepted(bytes(32), b"k" * 32, credit), reward=0.5)


def no(code: Code) -> Judged:
    return Judged(refused(bytes(32), b"k" * 32, RemoteError(code, "no")), "no")


def test_verdicts_are_counted(training: Training) -> None:
    training.decided([yes(40), yes(20), no(Code.REWARD_MISMATCH)])
    training.decided([no(Code.REWARD_MISMATCH), no(Code.STALE)])
    status = training.status(0)
    assert (status.accepted, status.tokens_verified) == (2, 60)
    assert status.refused == {"reward-mismatch": 2, "stale": 1}


def test_what_the_gossip_path_turns_away_counts_unless_nobody_did_wrong(training: Training) -> None:
    for code in (Code.DUPLICATE, Code.SEQUENCE_REUSED, Code.BAD_SIGNATURE, Code.BAD_SIGNATURE):
        training.turned_away(code)
    training.refused(Code.KEY_TOO_NEW)
    assert training.status(0).refused == {"bad-signature": 2, "key-too-new": 1}


def test_volunteers_are_the_keys_heard_of_in_the_last_minute(training: Training, clock: Clock) -> None:
    training.heard(b"a")
    training.received(b"b", 1000)
    training.received(b"b", 500)
    assert (training.status(0).volunteers, training.status(0).wire_bytes) == (2, 1500)
    clock.now += PRESENT_SECONDS - 1
    training.heard(b"a")
    clock.now += 1
    assert training.status(0).volunteers == 1
    training.heard(b"b")
    assert training.status(0).volunteers == 2


def test_groups_a_second_are_those_of_the_last_ten(training: Training, clock: Clock) -> None:
    training.decided([yes(1)] * 20)
    assert training.status(0).groups_per_second == 20  # never over less than a second
    clock.now += 5
    training.decided([yes(1)] * 10)
    assert training.status(0).groups_per_second == 6
    clock.now += 5.5
    assert training.status(0).groups_per_second == 1
    clock.now += 10
    assert training.status(0).groups_per_second == 0


def test_a_version_is_reported_with_the_figures_of_its_groups(training: Training, clock: Clock) -> None:
    clock.now += 12
    report = training.published(head(3), updated(3, greedy=0.75))
    assert (report.version, report.checkpoint, report.seconds) == (3, "03" * 32, 12)
    assert (report.reward, report.correct, report.greedy, report.staleness) == (0.5, 0.25, 0.75, 1.5)
    assert (report.groups, report.zero_variance, report.tokens) == (32, 3, 1280)
    assert from_line(to_line(report)) == report


def test_accuracy_stays_what_was_measured_last(training: Training) -> None:
    training.opened(0.4)
    assert training.published(head(1), updated(1)).greedy is None
    assert (training.status(0).greedy, training.status(0).greedy_base) == (0.4, 0.4)
    training.published(head(2), updated(2, greedy=0.6))
    training.published(head(3), updated(3))
    assert (training.status(0).greedy, training.status(0).greedy_base) == (0.6, 0.4)


def test_rollbacks_are_reported_and_counted(training: Training) -> None:
    rolled = msgspec.structs.replace(updated(2), rolled_back=1)
    assert training.published(head(1), updated(1)).rolled_back is None
    assert training.published(head(2), rolled).rolled_back == 1
    assert training.status(0).rollbacks == 1


def test_trained_tokens_add_up_over_versions(training: Training) -> None:
    for version in (1, 2):
        training.published(head(version), updated(version))
    assert training.status(0).tokens_trained == 2 * 1280


def test_keys_are_counted_by_state(training: Training, journal: Journal) -> None:
    assert training.status(0).keys == {}
    for number in range(3):
        journal.hear(bytes([number]) * 32, "test", 0, -1)
    with journal._database.transaction() as connection:
        connection.execute("UPDATE keys SET state = 'banned' WHERE key = ?", (bytes(32),))
    assert training.status(0).keys == {"probation": 2, "banned": 1}


def test_groups_that_wait_are_those_of_the_journal(training: Training, journal: Journal) -> None:
    journal.hear(b"k" * 32, "test", 0, -1)
    for number in range(3):
        place = (bytes([number]) * 32, b"k" * 32, b"c" * 32, 0, number)
        journal.add(StoredGroup(*place, bytes([number]) * 32, 0, b"envelope"))
    assert training.status(0).waiting == 3


def test_status_and_summary_can_be_written_as_lines(training: Training, clock: Clock) -> None:
    training.turned_away(Code.BAD_SIGNATURE)
    training.decided([yes(40)])
    training.published(head(2), updated(2))
    clock.now += 90
    summary = training.summary()
    assert summary.text == (
        "Trained run to version -1 on 1 verified rollout groups (1280 trained tokens) in 1.5 minutes; "
        "1 groups were refused."
    )
    for event in (training.status(5), summary):
        assert from_line(to_line(event)) == event
