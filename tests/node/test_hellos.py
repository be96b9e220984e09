"""From which version on a key counts: as a trainer answers, whatever was lost or crossed on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node import hellos
from nous_node.node.following import Following, Head
from nous_node.node.hellos import ANSWERED_AT_ONCE, MAX_AHEAD, Answers, Greeting
from nous_node.node.network_errors import NoSubscribersError
from nous_node.node.outbox import Outbox
from nous_node.node.runfolder import RunFolder
from nous_node.node.store import Journal
from nous_node.protocol.buckets import HELLO_BURST, HELLOS, Bucket
from nous_node.protocol.checkpoints import FULL, CheckpointManifest, file_entry
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Known, Receipt, refused

ME = Identity.from_seed(b"v" * 32).key
OTHER = b"O" * 32
NOW = 1_800_000_000_000
FILES = [file_entry("model.safetensors", [b"weights"])]


class Trainer:
    """Hears hellos into a journal at the version that it has then, and answers."""

    def __init__(self, path: Path, key: bytes, version: int = 0) -> None:
        self.key, self.version, self._path = key, version, path
        self.answers = Answers()

    def hears(self) -> None:
        with Journal.open(self._path) as journal:
            self.answers.heard(journal.hear_many({ME: "test/1", OTHER: "test/1"}, NOW, self.version))

    def restarts(self) -> None:
        self.answers = Answers()

    def loses_its_journal(self) -> None:
        self._path.unlink()

    def answer(self) -> list[Known]:
        known = self.answers.due()
        self.answers.told(known)
        return known

    def receipt(self, version: int) -> Receipt:
        """For a group of ours of a version that does not count."""
        with Journal.open(self._path) as journal:
            record = journal.key(ME)
        threshold = None if record is None else record.heard_version + 1
        error = RemoteError(Code.KEY_TOO_NEW, "", measured=version, threshold=threshold)
        return refused(bytes(32), ME, error)


class Node:
    """A greeting, what it says when, and the versions that its node knows."""

    def __init__(self, base_run: RunFolder, outbox: Outbox) -> None:
        self.following = Following.of(base_run.run, base_run.envelope)
        self.outbox = outbox
        self.listeners = True
        self.said: list[float] = []
        self.knows(0)
        self.starts()

    def starts(self) -> None:
        self.greeting = Greeting(ME, self.following, self.outbox, self._say)

    def knows(self, version: int) -> None:
        manifest = CheckpointManifest(version, FULL, FILES, {"w": bytes(32)}, bytes(32), b"p" * 32)
        self.following.head = Head(bytes([version]) * 32, manifest, b"")

    async def _say(self) -> None:
        await trio.lowlevel.checkpoint()
        if not self.listeners:
            raise NoSubscribersError("rollouts")
        self.said.append(trio.current_time())


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield outbox


@pytest.fixture
def node(base_run: RunFolder, outbox: Outbox) -> Node:
    return Node(base_run, outbox)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    return Trainer(tmp_path / "journal.sqlite", b"T" * 32)


async def test_hello_that_crosses_new_versions_counts_from_where_it_was_heard(
    node: Node, trainer: Trainer, autojump_clock: object
) -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.greeting.loop)
        await wait_all_tasks_blocked()
        assert node.said == [0]
        for version in (1, 2, 3):  # while the hello is on its way
            node.knows(version)
            assert not node.greeting.counts(version)
        trainer.version = 5
        trainer.hears()
        node.greeting.note_known(trainer.key, trainer.answer())
        assert not node.greeting.counts(5)
        assert node.greeting.counts(6)
        nursery.cancel_scope.cancel()


async def test_hello_is_repeated_until_it_is_answered_and_counts(
    node: Node, trainer: Trainer, autojump_clock: object
) -> None:
    """Answers are lost; the one that comes is about the first hello that was heard."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.greeting.loop)
        await trio.sleep(1)
        trainer.hears()
        trainer.answer()
        await trio.sleep(12)
        assert node.said == [0, 2, 12]
        trainer.version = 3
        trainer.hears()
        with trio.move_on_after(1) as early:
            await node.greeting.answered()
        assert early.cancelled_caught
        node.greeting.note_known(trainer.key, trainer.answer())
        await node.greeting.answered()
        assert node.greeting.known_from == 0
        await trio.sleep(30)
        assert node.said[:6] == [0, 2, 12, 22, 32, 42]  # version 0 is still the newest
        node.knows(1)
        await trio.sleep(30)
        assert len(node.said) == 6
        nursery.cancel_scope.cancel()


async def test_hellos_stay_within_the_rate_of_a_key(node: Node, autojump_clock: object) -> None:
    bucket, sent = Bucket(HELLO_BURST, 0), 0
    with trio.move_on_after(300):
        await node.greeting.loop()
    for at in node.said:
        bucket.take(HELLOS, int(at * 1000))
        sent += 1
    assert sent > 25


async def test_hello_that_nobody_could_be_given_is_no_hello(node: Node, autojump_clock: object) -> None:
    node.listeners = False
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.greeting.loop)
        await trio.sleep(60.1)
        node.knows(1)
        await trio.sleep(60.0)
        assert not node.said
        node.listeners = True
        await trio.sleep(3)
        assert len(node.said) == 2
        await trio.sleep(25)
        assert node.greeting.known_from is None
        nursery.cancel_scope.cancel()


async def test_answer_outlives_a_restart_of_the_volunteer(
    node: Node, trainer: Trainer, autojump_clock: object
) -> None:
    trainer.hears()
    node.greeting.note_known(trainer.key, trainer.answer())
    node.knows(1)
    node.starts()
    assert node.greeting.counts(1)
    with trio.move_on_after(60):
        await node.greeting.loop()
    assert not node.said


async def test_hello_without_an_answer_is_said_again_after_a_restart(
    node: Node, trainer: Trainer, autojump_clock: object
) -> None:
    with trio.move_on_after(1):
        await node.greeting.loop()
    trainer.hears()
    trainer.version = 4
    node.knows(4)
    node.starts()
    with trio.move_on_after(1):
        await node.greeting.loop()
    trainer.restarts()  # and has no answer left to give
    trainer.hears()
    node.greeting.note_known(trainer.key, trainer.answer())
    assert len(node.said) == 2
    assert node.greeting.known_from == 0
    assert node.greeting.counts(4)


async def test_trainer_that_lost_its_journal_is_told_again(
    node: Node, trainer: Trainer, autojump_clock: object
) -> None:
    trainer.hears()
    node.greeting.note_known(trainer.key, trainer.answer())
    node.knows(7)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.greeting.loop)
        await trio.sleep(5)
        assert not node.said
        trainer.loses_its_journal()
        trainer.version = 7
        for _ in range(20):  # groups that were on their way
            node.greeting.note_too_new(trainer.key, trainer.receipt(7))
        await trio.sleep(1)
        assert node.said == [5]
        assert not node.greeting.counts(7)
        trainer.hears()
        node.greeting.note_known(trainer.key, trainer.answer())
        assert (node.greeting.counts(7), node.greeting.counts(8)) == (False, True)
        assert node.outbox.known_from == 7
        nursery.cancel_scope.cancel()


async def test_run_that_began_anew_is_no_reason_to_wait_for_its_old_versions(
    base_run: RunFolder, outbox: Outbox, trainer: Trainer, autojump_clock: object
) -> None:
    outbox.note_known(900)
    node = Node(base_run, outbox)
    node.knows(2)
    with trio.move_on_after(1):
        await node.greeting.loop()
    assert node.said == [0]
    trainer.version = 2
    trainer.hears()
    node.greeting.note_known(trainer.key, trainer.answer())
    assert node.greeting.known_from == 2


async def test_receipt_says_from_when_on_a_key_counts(node: Node, trainer: Trainer) -> None:
    trainer.version = 5
    trainer.hears()
    node.greeting.note_too_new(trainer.key, trainer.receipt(5))
    await node.greeting.answered()
    assert node.greeting.known_from == node.outbox.known_from == 5


async def test_of_several_trainers_the_one_that_heard_last_decides(
    node: Node, trainer: Trainer, tmp_path: Path
) -> None:
    second = Trainer(tmp_path / "second.sqlite", b"S" * 32, version=9)
    for one in (second, trainer):
        one.hears()
        node.greeting.note_known(one.key, one.answer())
    assert node.greeting.known_from == node.outbox.known_from == 9
    second.loses_its_journal()
    second.version = 11
    second.hears()
    node.greeting.note_known(second.key, second.answer())
    assert node.greeting.known_from == 11


def too_new(threshold: float) -> Receipt:
    return Receipt(bytes(32), ME, "refused", "key-too-new", 0.0, threshold, 0)


@pytest.mark.parametrize("answered", [False, True])
@pytest.mark.parametrize("threshold", [1e300, -1e300, 1e18, 2.5, -1.0, float(MAX_AHEAD + 2)])
async def test_receipt_that_cannot_be_true_changes_nothing(
    threshold: float, answered: bool, node: Node, trainer: Trainer
) -> None:
    if answered:
        trainer.hears()
        node.greeting.note_known(trainer.key, trainer.answer())
    node.greeting.note_too_new(trainer.key, too_new(threshold))
    node.greeting.note_too_new(b"S" * 32, too_new(threshold))
    assert node.greeting.known_from == node.outbox.known_from == (0 if answered else None)


async def test_answer_far_ahead_is_asked_for_again(
    node: Node, trainer: Trainer, autojump_clock: object
) -> None:
    """It may be true, of a node that knows no newer version yet; or a trainer's key wants it to wait."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.greeting.loop)
        for version in (MAX_AHEAD + 1, (1 << 63) - 1):
            node.greeting.note_known(trainer.key, [Known(ME, version)])
            assert node.greeting.known_from is None
        trainer.version = 100
        trainer.hears()
        node.greeting.note_known(trainer.key, trainer.answer())
        assert node.greeting.known_from is None
        node.knows(99)
        await trio.sleep(5)
        assert len(node.said) == 2
        trainer.hears()
        node.greeting.note_known(trainer.key, trainer.answer())
        assert node.greeting.known_from == 100
        nursery.cancel_scope.cancel()


async def test_answers_to_others_are_none(node: Node, trainer: Trainer) -> None:
    node.greeting.note_known(trainer.key, [Known(OTHER, 3)])
    assert node.greeting.known_from is None


async def test_trainer_that_never_answers_is_taken_to_have_heard_the_first_hello(
    node: Node, autojump_clock: object
) -> None:
    """A trainer of the revision before: its first version after the hello is for us."""
    async with trio.open_nursery() as nursery:
        nursery.start_soon(node.greeting.loop)
        await trio.sleep(60)  # it publishes nothing: it may be away
        assert node.greeting.known_from is None
        node.knows(1)
        await trio.sleep(hellos.SILENT_SECONDS - 1)
        assert node.greeting.known_from is None
        await trio.sleep(2 * hellos.REPEAT_SECONDS)
        assert node.greeting.known_from == 0
        assert node.greeting.counts(1)
        node.greeting.note_known(b"T" * 32, [Known(ME, 2)])  # it was slow
        assert node.greeting.known_from == 2
        nursery.cancel_scope.cancel()


def test_each_answer_is_told_once_and_many_in_turn() -> None:
    answers = Answers()
    keys = [number.to_bytes(32) for number in range(ANSWERED_AT_ONCE + 5)]
    answers.heard(dict.fromkeys(keys, 3))
    first = answers.due()
    assert first == [Known(key, 3) for key in keys[:ANSWERED_AT_ONCE]]
    assert answers.due() == first  # it could not be published
    answers.told(first)
    answers.heard({keys[0]: 3})
    assert answers.due() == [Known(key, 3) for key in [*keys[ANSWERED_AT_ONCE:], keys[0]]]


def test_answers_to_a_flood_are_bounded_and_those_that_wait_keep_their_turn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(hellos, "MAX_DUE", 3)
    answers = Answers()
    answers.heard({bytes([number]) * 32: 1 for number in range(5)})
    answers.heard({bytes(32): 1})
    assert [known.peer[0] for known in answers.due()] == [0, 1, 2]
