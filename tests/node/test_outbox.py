"""Groups until a receipt says what became of them."""

from __future__ import annotations

import signal
import sqlite3
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nous_node.node.home import StorageError
from nous_node.node.outbox import Outbox, Word
from nous_node.node.outbox_tables import KEPT_GROUPS, KEPT_OPEN, TRIES
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import LocalError
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, Standing
from nous_node.protocol.rollouts import Engine

ME = Identity.from_seed(bytes(32))
RUN = b"r" * 32
CHECKPOINT = b"c" * 32
NOW = 1_000_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "outbox.sqlite"


@pytest.fixture
def outbox(path: Path) -> Iterator[Outbox]:
    with Outbox.open(path) as opened:
        yield opened


def sealed(seq: int, ts: int = NOW) -> bytes:
    return seal(ME, Kind.ROLLOUT, RUN, b"group", seq=seq, ts=ts)


def again(outbox: Outbox, rollout: bytes, seq: int, ts: int) -> bytes:
    """Sends a group again as the volunteer does; the id of the new envelope."""
    content = outbox.content(rollout)
    assert content is not None
    kind, body = content
    data = seal(ME, kind, RUN, body, seq=seq, ts=ts)
    outbox.repeat(rollout, data)
    outbox.was_repeated(rollout, ts)
    return unseal(data).id


def put(outbox: Outbox, number: int, ts: int = NOW, version: int = 1) -> bytes:
    return outbox.put(sealed(number, ts), checkpoint=CHECKPOINT, version=version, counter=number)


def test_outbox_is_unused_until_its_first_group_whatever_became_of_it(outbox: Outbox) -> None:
    assert outbox.unused()
    rollout = put(outbox, 1)
    assert not outbox.unused()
    outbox.acknowledge([accepted(rollout)], b"")
    assert not outbox.unused()


def accepted(rollout: bytes, credit: int = 10) -> Receipt:
    return Receipt(rollout, ME.key, "accepted", "", None, None, credit)


def refused(rollout: bytes, code: str = "stale") -> Receipt:
    return Receipt(rollout, ME.key, "refused", code, 5.0, 4.0, 0)


def test_a_group_waits_until_its_receipt_comes(outbox: Outbox) -> None:
    rollout = put(outbox, 0)
    assert rollout == unseal(sealed(0)).id
    assert outbox.waiting() == 1
    assert outbox.acknowledge([accepted(rollout)], b"proof") == [accepted(rollout)]
    assert outbox.waiting() == 0
    assert outbox.due(NOW + 60_000, 0) == []
    assert outbox.proofs() == [b"proof"]


def test_a_group_survives_a_restart_and_is_sent_again(path: Path) -> None:
    with Outbox.open(path) as outbox:
        rollout = put(outbox, 0)
    with Outbox.open(path) as outbox:
        assert outbox.waiting() == 1
        assert outbox.due(NOW + 20_000, 10_000) == [rollout]
        assert outbox.content(rollout) == (Kind.ROLLOUT, b"group")


def test_chunks_of_a_group_by_reference_are_kept_until_its_receipt_comes(path: Path) -> None:
    first, second = [(bytes([number]) * 32, b"chunk %d" % number) for number in range(2)]

    def referred(outbox: Outbox, seq: int, version: int) -> bytes:
        data = seal(ME, Kind.REFERENCE, RUN, b"reference", seq=seq, ts=NOW)
        place = {"checkpoint": CHECKPOINT, "version": version, "counter": seq}
        return outbox.put(data, chunks=[first, second], **place)  # type: ignore[arg-type]

    with Outbox.open(path) as outbox:
        answered, stale = referred(outbox, 0, 1), referred(outbox, 1, 0)
    with Outbox.open(path) as outbox:
        assert outbox.content(answered) == (Kind.REFERENCE, b"reference")
        again(outbox, answered, 2, NOW + 10_000)
        assert [outbox.chunk(digest) for digest, _ in (first, second)] == [b"chunk 0", b"chunk 1"]
        assert outbox.chunk(bytes([2]) * 32) is None
        outbox.acknowledge([refused(answered)], b"proof")
        assert outbox.chunk(first[0]) == b"chunk 0"  # the other group has the same
        assert outbox.drop_stale(1) == 1
        assert outbox.chunk(first[0]) is None
        assert outbox.content(stale) is None


def test_a_group_that_was_unavailable_is_sent_again_a_few_times(path: Path) -> None:
    """A trainer answers all envelopes that came in one try alike, and may say so again."""
    digest, now = b"d" * 32, NOW
    data = seal(ME, Kind.REFERENCE, RUN, b"reference", seq=0, ts=NOW)
    with Outbox.open(path) as outbox:
        rollout = outbox.put(data, checkpoint=CHECKPOINT, version=1, counter=0, chunks=[(digest, b"chunk")])
    envelopes = [rollout]
    for tried in range(1, TRIES + 1):
        with Outbox.open(path) as outbox:
            assert outbox.due(now + 10_000, 10_000) == [rollout]
            for _ in range(3):
                now += 10_000
                envelopes.append(again(outbox, rollout, len(envelopes), now))
            assert (outbox.waiting(), outbox.chunk(digest)) == (1, b"chunk")
            word = [refused(one, "unavailable") for one in envelopes]
            settled = outbox.acknowledge(word, b"proof") + outbox.acknowledge(word, b"proof")
            assert settled == ([refused(rollout, "unavailable")] if tried == TRIES else [])
            assert outbox.waiting() == (tried < TRIES)
    with Outbox.open(path) as outbox:
        assert outbox.totals().refused == {"unavailable": 1}
        assert outbox.chunk(digest) is None


def test_a_group_that_was_unavailable_is_settled_by_its_receipt_and_given_up_in_time(outbox: Outbox) -> None:
    first, second = put(outbox, 0), put(outbox, 1, version=0)
    assert outbox.acknowledge([refused(one, "unavailable") for one in (first, second)], b"proof") == []
    repeat = again(outbox, first, 10, NOW + 10_000)
    assert outbox.acknowledge([accepted(repeat)], b"proof") == [accepted(first)]
    assert outbox.drop_stale(1) == 1
    assert (outbox.waiting(), outbox.totals().given_up) == (0, 1)
    assert outbox.acknowledge([refused(second, "unavailable")], b"proof") == [refused(second, "unavailable")]


def test_a_group_is_due_after_a_silence_that_doubles(outbox: Outbox) -> None:
    rollout = put(outbox, 0)
    for number, (early, due) in enumerate(((9_999, 10_000), (29_999, 30_000), (69_999, 70_000))):
        assert outbox.due(NOW + early, 10_000) == []
        assert outbox.due(NOW + due, 10_000) == [rollout]
        again(outbox, rollout, 1 + number, NOW + due)


def test_a_receipt_for_any_envelope_of_a_group_settles_it_once(outbox: Outbox) -> None:
    first, other = put(outbox, 0), put(outbox, 1)
    repeats = [again(outbox, first, 10 + number, NOW + 10_000) for number in range(2)]
    assert outbox.acknowledge([accepted(repeats[1])], b"proof") == [accepted(first)]
    assert outbox.acknowledge([accepted(first), accepted(repeats[0]), refused(repeats[1])], b"more") == []
    totals = outbox.totals()
    assert (totals.accepted, totals.credit, totals.waiting) == (1, 10, 1)
    assert outbox.content(first) is None
    assert outbox.due(NOW + 60_000, 0) == [other]


def test_one_message_of_receipts_for_all_envelopes_of_a_group_counts_once(outbox: Outbox) -> None:
    first = put(outbox, 0)
    repeat = again(outbox, first, 10, NOW + 10_000)
    assert outbox.acknowledge([accepted(first), accepted(repeat)], b"proof") == [accepted(first)]
    assert outbox.totals().credit == 10


def test_a_late_receipt_for_a_repeat_counts_for_a_group_that_was_given_up(path: Path) -> None:
    with Outbox.open(path) as outbox:
        first = put(outbox, 0)
        repeat = again(outbox, first, 10, NOW + 10_000)
        outbox.drop_stale(2)
    with Outbox.open(path) as outbox:
        assert outbox.acknowledge([accepted(repeat)], b"proof") == [accepted(first)]
        assert (outbox.totals().accepted, outbox.totals().given_up) == (1, 0)


def test_a_group_whose_envelope_expired_is_kept_to_be_sealed_anew(outbox: Outbox) -> None:
    rollout = put(outbox, 0)
    late = NOW + 600_000
    assert not outbox.expired(rollout, late - 1)
    assert outbox.expired(rollout, late)
    assert outbox.drop_stale(0) == 0
    assert outbox.due(late, 0) == [rollout]
    assert outbox.content(rollout) is not None


def test_groups_of_an_old_version_are_given_up(outbox: Outbox) -> None:
    put(outbox, 0, version=1)
    fresh = put(outbox, 1, version=5)
    assert outbox.drop_stale(5) == 1
    assert outbox.drop_stale(5) == 0
    assert outbox.due(NOW, 0) == [fresh]
    assert (outbox.waiting(), outbox.totals().given_up) == (1, 1)


def test_a_late_receipt_counts_for_a_group_that_was_given_up(outbox: Outbox) -> None:
    rollout = put(outbox, 0)
    outbox.drop_stale(2)
    assert outbox.acknowledge([accepted(rollout)], b"proof") == [accepted(rollout)]
    assert (outbox.totals().accepted, outbox.totals().given_up) == (1, 0)


def test_a_receipt_counts_once_and_only_for_groups_of_ours(outbox: Outbox) -> None:
    rollout = put(outbox, 0)
    outbox.acknowledge([accepted(rollout)], b"proof")
    assert outbox.acknowledge([accepted(rollout), refused(rollout)], b"other") == []
    assert outbox.acknowledge([accepted(b"x" * 32)], b"other") == []
    assert outbox.totals().credit == 10
    assert outbox.proofs() == [b"proof"]


def test_totals_and_history_tell_what_became_of_each_group(outbox: Outbox) -> None:
    ids = [put(outbox, number) for number in range(4)]
    outbox.acknowledge([accepted(ids[0]), refused(ids[1]), refused(ids[2], "reward-mismatch")], b"proof")
    totals = outbox.totals()
    assert (totals.waiting, totals.accepted, totals.credit) == (1, 1, 10)
    assert totals.refused == {"reward-mismatch": 1, "stale": 1}
    newest, third, second, first = outbox.history()
    assert (newest.state, newest.counter, newest.checkpoint) == ("waiting", 3, CHECKPOINT)
    assert (third.state, third.code, third.measured, third.threshold) == (
        "refused",
        "reward-mismatch",
        5.0,
        4.0,
    )
    assert (second.code, first.state, first.credit) == ("stale", "accepted", 10)
    assert len(outbox.history(2)) == 2


def test_totals_outlive_the_groups_that_are_forgotten(outbox: Outbox, path: Path) -> None:
    outbox.acknowledge([accepted(put(outbox, 0))], b"proof")
    again(outbox, put(outbox, 1), 10, NOW)
    outbox.drop_stale(2)
    with sqlite3.connect(path) as raw:  # as if many groups had come since
        for table in ("groups", "repeats"):
            raw.execute(f"UPDATE {table} SET made = made - ?", (KEPT_GROUPS,))
    raw.close()
    put(outbox, 2)
    outbox.drop_stale(0)
    assert [group.counter for group in outbox.history()] == [2]
    assert outbox.totals().accepted == 1
    assert outbox._database.number("SELECT count(*) FROM repeats") == 0


def test_the_same_message_cannot_be_put_twice(outbox: Outbox) -> None:
    put(outbox, 0)
    with pytest.raises(LocalError, match="already"):
        put(outbox, 0)
    assert outbox.waiting() == 1


def test_counters_run_without_holes_for_each_checkpoint(path: Path) -> None:
    with Outbox.open(path) as outbox:
        assert [*outbox.counters(CHECKPOINT), *outbox.counters(CHECKPOINT, 2)] == [0, 1, 2]
        assert outbox.counters(b"d" * 32, 64) == range(64)
    with Outbox.open(path) as outbox:
        assert outbox.counters(CHECKPOINT) == range(3, 4)
        assert outbox.counters(b"d" * 32) == range(64, 65)


def test_a_task_is_unfinished_until_it_is_a_group_or_is_skipped(path: Path) -> None:
    with Outbox.open(path) as outbox:
        outbox.counters(CHECKPOINT, 4)
        put(outbox, 1)
        outbox.skip(CHECKPOINT, 2)
    with Outbox.open(path) as outbox:
        assert outbox.unfinished(CHECKPOINT) == [0, 3]
        assert outbox.unfinished(b"d" * 32) == []


def test_unfinished_tasks_of_old_checkpoints_are_forgotten(outbox: Outbox) -> None:
    for number in range(KEPT_OPEN + 1):
        outbox.counters(bytes([number]) * 32, 2)
    assert outbox.unfinished(bytes(32)) == []
    assert outbox.unfinished(bytes([1]) * 32) == [0, 1]


def standing(rank: int, peer: bytes = ME.key) -> Standing:
    return Standing(peer, "active", 9, 1, 100, 10, rank, 12, 0)


def test_the_latest_word_of_a_trainer_is_kept(path: Path) -> None:
    with Outbox.open(path) as outbox:
        assert outbox.word is None
        outbox.note_standing(standing(3), NOW, b"first")
        outbox.note_standing(standing(4), NOW - 1, b"late")
    with Outbox.open(path) as outbox:
        assert outbox.word == Word(standing(3), NOW, b"first")
        outbox.note_standing(standing(2), NOW + 1, b"later")
        assert outbox.word == Word(standing(2), NOW + 1, b"later")


def test_a_word_about_a_new_key_replaces_that_about_the_old_one(outbox: Outbox) -> None:
    outbox.note_standing(standing(3), NOW, b"first")
    other = standing(0, b"o" * 32)
    outbox.note_standing(other, NOW - 1, b"other")
    assert outbox.word == Word(other, NOW - 1, b"other")


def test_the_engine_of_the_last_groups_is_kept(path: Path) -> None:
    with Outbox.open(path) as outbox:
        assert outbox.engine is None
        for device in ("cuda:0", "cpu"):
            outbox.note_engine(Engine("nous-torch", "1", "float32", device))
    with Outbox.open(path) as outbox:
        assert outbox.engine == Engine("nous-torch", "1", "float32", "cpu")


def test_the_version_from_which_the_key_counts_outlives_a_restart(path: Path) -> None:
    with Outbox.open(path) as outbox:
        assert outbox.known_from is None
        outbox.next_seq()
        outbox.note_known(3)
    with Outbox.open(path) as outbox:
        assert outbox.known_from == 3
        outbox.note_known(5)
        assert outbox.known_from == 5


def test_key_that_no_trainer_knows_any_more_is_forgotten(path: Path) -> None:
    with Outbox.open(path) as outbox:
        outbox.note_known(3)
        outbox.note_known(None)
    with Outbox.open(path) as outbox:
        assert outbox.known_from is None


def test_share_of_the_last_session_is_kept(path: Path) -> None:
    with Outbox.open(path) as outbox:
        assert outbox.generating_share is None
        outbox.note_share(0.25)
        outbox.note_share(0.9126)
    with Outbox.open(path) as outbox:
        assert outbox.generating_share == 0.913


def test_sequence_numbers_are_never_used_again(path: Path) -> None:
    used: list[int] = []
    for _ in range(3):
        with Outbox.open(path) as outbox:
            used += [outbox.next_seq() for _ in range(1500)]
    assert len(set(used)) == len(used)
    assert used == sorted(used)


def test_a_lost_outbox_does_not_begin_with_the_same_sequence_numbers(tmp_path: Path) -> None:
    with Outbox.open(tmp_path / "one") as one, Outbox.open(tmp_path / "two") as two:
        assert abs(one.next_seq() - two.next_seq()) > 1_000_000


def test_nothing_is_lost_or_used_twice_after_kill_9(path: Path) -> None:
    program = (
        "import os, signal, sys; from pathlib import Path\n"
        "from nous_node.node.outbox import Outbox\n"
        "from nous_node.protocol.envelope import Kind, seal\n"
        "from nous_node.protocol.identity import Identity\n"
        "outbox = Outbox.open(Path(sys.argv[1]))\n"
        "for _ in range(20):\n"
        "    seq, counter = outbox.next_seq(), outbox.counters(b'c' * 32)[0]\n"
        "    data = seal(Identity.from_seed(bytes(32)), Kind.ROLLOUT, b'r' * 32, b'x', seq=seq, ts=1000000)\n"
        "    outbox.put(data, checkpoint=b'c' * 32, version=1, counter=counter)\n"
        "print(seq, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    done = subprocess.run([sys.executable, "-c", program, str(path)], capture_output=True, timeout=60)
    assert done.returncode == -signal.SIGKILL, done.stderr.decode()
    with Outbox.open(path) as outbox:
        assert outbox.waiting() == 20
        assert len(outbox.due(NOW + 1, 0)) == 20
        assert outbox.counters(CHECKPOINT) == range(20, 21)
        assert outbox.next_seq() > int(done.stdout)


def test_another_process_can_look_at_it_while_it_is_in_use(outbox: Outbox, path: Path) -> None:
    put(outbox, 0)
    with Outbox.read(path) as other:
        assert other.waiting() == 1
        assert other.totals().waiting == 1
        with pytest.raises(StorageError):
            put(other, 1)
