"""How keys stand: by the journal's verdicts, for the gossip path, the learner, and in receipts."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path

import msgspec
import pytest

from nous_node.node import journal_trim, standings
from nous_node.node.reputation import PASSED
from nous_node.node.standings import MAX_ANSWERED, TOLD_MS, Standings
from nous_node.node.store import Journal, StoredGroup
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.gossip import GossipView
from nous_node.protocol.receipts import Receipt, accepted, refused
from nous_node.protocol.runs import RunManifest

ALICE, BOB, CAROL = b"A" * 32, b"B" * 32, b"C" * 32
NOW = 1_800_000_000_000
OLD, NEW = b"0" * 32, b"1" * 32
MINUTE = 60_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "journal.sqlite"


@pytest.fixture
def journal(path: Path) -> Iterator[Journal]:
    with Journal.open(path) as opened:
        for key in (ALICE, BOB, CAROL):
            opened.hear(key, "test/1", NOW, -1)
        yield opened


@pytest.fixture
def view(base_run: object) -> GossipView:
    manifest: RunManifest = base_run.manifest  # type: ignore[attr-defined]
    return GossipView(b"r" * 32, manifest)


def group(number: int, key: bytes = ALICE, *, new: bool = True) -> StoredGroup:
    digest = sha256(b"%d" % number + key + bytes([new])).digest()
    return StoredGroup(digest, key, NEW if new else OLD, int(new), number, digest, NOW, b"envelope")


def bad(number: int, key: bytes = ALICE, code: Code = Code.REWARD_MISMATCH) -> Receipt:
    return refused(group(number, key).id, key, RemoteError(code, "no"))


def offend(journal: Journal, key: bytes, first: int = 0, now: int = NOW) -> None:
    """Four groups that are refused: a quarantine."""
    journal.add_many([group(number, key) for number in range(first, first + 4)])
    journal.decide([bad(number, key) for number in range(first, first + 4)], now)


def activate(journal: Journal, key: bytes = ALICE) -> None:
    journal.add_many([group(number, key, new=bool(number % 2)) for number in range(100, 100 + PASSED)])
    done = [group(number, key, new=bool(number % 2)) for number in range(100, 100 + PASSED)]
    journal.decide([accepted(one.id, key, 10) for one in done], NOW)


def state(journal: Journal, one: StoredGroup) -> str:
    row = journal._database.one("SELECT state FROM groups WHERE id = ?", (one.id,))
    assert row is not None
    return str(row[0])


# --- in the journal ------------------------------------------------------------------------------


def test_verdicts_move_a_key_and_a_restart_forgets_nothing(journal: Journal, path: Path) -> None:
    activate(journal)
    offend(journal, BOB)
    journal.add(group(0))
    journal.decide([bad(0)], NOW)
    with Journal.open(path) as again:
        alice, bob = again.key(ALICE), again.key(BOB)
    assert alice is not None
    assert bob is not None
    assert (alice.reputation.state, alice.reputation.score, alice.accepted) == ("active", 1.0, PASSED)
    assert (bob.reputation.state, bob.reputation.until_ms) == ("quarantine", NOW + MINUTE)
    assert (bob.reputation.quarantines, bob.refused) == (1, 4)
    assert journal.states() == {"probation": 1, "active": 1, "quarantine": 1}


def test_a_second_content_for_a_task_counts_and_a_soft_code_does_not(journal: Journal) -> None:
    journal.add(group(0))
    other = sha256(b"other").digest()
    again = StoredGroup(other, ALICE, NEW, 1, 0, other, NOW, b"envelope")
    early = StoredGroup(sha256(b"early").digest(), ALICE, OLD, -1, 0, other, NOW, b"envelope")
    errors = journal.add_many([again, early])
    assert [error and error.code for error in errors] == [Code.COUNTER_REUSED, Code.KEY_TOO_NEW]
    record = journal.key(ALICE)
    assert record is not None
    assert (record.reputation.score, record.refused) == (1.0, 2)


def test_who_makes_tasks_again_after_a_power_failure_is_no_cheat(journal: Journal) -> None:
    """Its log-probs differ in the last bits, since the batches are others."""
    journal.add_many([group(counter) for counter in range(20)])
    again = [msgspec.structs.replace(group(c), id=bytes([c]) * 32, digest=b"2" * 32) for c in range(8, 20)]
    assert {error.code for error in journal.add_many(again) if error is not None} == {Code.COUNTER_REUSED}
    record = journal.key(ALICE)
    assert record is not None
    assert (record.reputation.state, record.reputation.score, record.refused) == ("probation", 1.0, 12)
    assert len(journal.unused()) == 20


def test_what_is_left_of_a_key_in_quarantine_is_answered_or_dropped(journal: Journal) -> None:
    """[REP-2]"""
    journal.add_many([group(number) for number in range(8)] + [group(0, BOB)])
    journal.decide([accepted(group(6).id, ALICE, 5), accepted(group(0, BOB).id, BOB, 5)], NOW)
    again = StoredGroup(sha256(b"sealed anew").digest(), *_place(group(7)))
    assert journal.add_many([again])[0] is not None
    journal.decide([*(bad(number) for number in range(4)), accepted(group(4).id, ALICE, 5)], NOW)
    assert [state(journal, group(number)) for number in (4, 5, 6, 7)] == [
        "dropped",
        "refused",
        "dropped",
        "refused",
    ]
    for rollout in (group(7).id, again.id):
        receipt = journal.receipt(rollout)
        assert receipt is not None
        assert (receipt.code, receipt.measured, receipt.threshold) == ("quarantined", NOW, NOW + MINUTE)
    for number in (4, 6):  # what was accepted stays so
        receipt = journal.receipt(group(number).id)
        assert receipt is not None
        assert (receipt.verdict, receipt.credit) == ("accepted", 5)
    assert [one.id for one in journal.unused()] == [group(0, BOB).id]
    assert journal.count_pending() == 0


def _place(one: StoredGroup) -> tuple[bytes, bytes, int, int, bytes, int, bytes]:
    return one.key, one.checkpoint, one.version, one.counter, one.digest, one.received_ms, one.envelope


def test_groups_that_come_late_into_a_quarantine_are_answered_and_not_taken(journal: Journal) -> None:
    offend(journal, ALICE)
    (error,) = journal.add_many([group(9)])
    assert error is not None
    assert error.code == Code.QUARANTINED
    receipt = journal.receipt(group(9).id)
    assert receipt is not None
    assert receipt.code == "quarantined"


def test_a_verdict_that_comes_after_it_changes_nothing(journal: Journal) -> None:
    """The learner was at work on it."""
    journal.add(group(9))
    offend(journal, ALICE)
    assert journal.decide([accepted(group(9).id, ALICE, 5)], NOW) == []
    assert state(journal, group(9)) == "refused"


def test_what_had_no_audit_is_dropped_when_an_audit_fails(journal: Journal) -> None:
    """[VER-13]"""
    journal.add_many([group(number) for number in range(4)] + [group(0, BOB)])
    receipts = [accepted(group(number).id, ALICE, 5) for number in (0, 1)]
    receipts.append(accepted(group(0, BOB).id, BOB, 5))
    journal.decide(receipts, NOW, unaudited={group(1).id, group(0, BOB).id})
    journal.decide([bad(2)], NOW)
    assert state(journal, group(1)) == "accepted"  # whatever a reward says, it says nothing of the sampling
    journal.decide([bad(3, code=Code.SAMPLING_MISMATCH)], NOW)
    states = [state(journal, one) for one in (group(0), group(1), group(0, BOB))]
    assert states == ["accepted", "dropped", "accepted"]


def test_sums_of_a_key_are_kept_and_begin_anew_with_a_quarantine(journal: Journal, path: Path) -> None:
    journal.decide([], NOW, drifts={ALICE: b"sums", BOB: b"others", b"unknown" * 4: b""})
    with Journal.open(path) as again:
        record = again.key(ALICE)
        assert record is not None
        assert record.drift == b"sums"
    offend(journal, ALICE)
    alice, bob = journal.key(ALICE), journal.key(BOB)
    assert alice is not None
    assert bob is not None
    assert (alice.drift, bob.drift) == (b"", b"others")


def test_a_secret_stays_the_same_and_differs_from_run_to_run(journal: Journal, path: Path) -> None:
    secret = journal.secret("audits")
    assert (len(secret), journal.secret("audits")) == (32, secret)
    with Journal.open(path) as again:
        assert again.secret("audits") == secret
    with Journal.open(path.with_name("other.sqlite")) as other:
        assert other.secret("audits") != secret


def test_ranks_are_by_credit(journal: Journal) -> None:
    for key, credit in ((ALICE, 30), (BOB, 50)):
        journal.add(group(0, key))
        journal.decide([accepted(group(0, key).id, key, credit)], NOW)
    told = journal.standings([ALICE, BOB, CAROL, b"X" * 32])
    assert [(one.peer, one.rank, one.of, one.credit) for one in told] == [
        (ALICE, 2, 2, 30),
        (BOB, 1, 2, 50),
        (CAROL, 0, 2, 0),
    ]


def test_ranks_follow_each_verdict_and_debit(journal: Journal) -> None:
    assert journal.standings([ALICE])[0].of == 0
    journal.add_many([group(0), group(1), group(0, BOB)])
    journal.decide([accepted(group(0).id, ALICE, 30), accepted(group(0, BOB).id, BOB, 50)], NOW)
    assert [one.rank for one in journal.standings([ALICE, BOB])] == [2, 1]
    journal.decide([accepted(group(1).id, ALICE, 30)], NOW)
    assert [one.rank for one in journal.standings([ALICE, BOB])] == [1, 2]
    with journal._ledger(NOW) as ledger:
        ledger.owe(ALICE, 2)
    assert [(one.rank, one.of) for one in journal.standings([ALICE, BOB])] == [(0, 1), (1, 1)]


def test_keys_with_the_same_credit_share_a_rank(journal: Journal) -> None:
    journal.standings([])
    for key in (ALICE, BOB, CAROL):
        journal.add(group(0, key))
        journal.decide([accepted(group(0, key).id, key, 9 if key == CAROL else 10)], NOW)
    assert [one.rank for one in journal.standings([ALICE, BOB, CAROL])] == [1, 1, 3]


def test_keys_that_were_in_quarantine_are_not_forgotten_for_those_that_only_greet(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    """[REP-4]"""
    offend(journal, ALICE)
    journal.release([ALICE], NOW + MINUTE)
    for number in range(5):
        journal.hear(bytes([number]) * 32, "flood", NOW + 1 + number, 0)
    monkeypatch.setattr(journal_trim, "KEPT_KEYS", 2)
    monkeypatch.setattr(journal_trim, "FORGOTTEN_KEYS", 0)
    journal.trim()
    refusals = {one.key: one.refused for one in journal.peers()}
    assert refusals == {ALICE: {"reward-mismatch": 4}, bytes([4]) * 32: {}}


# --- in the gossip view --------------------------------------------------------------------------


def test_the_gossip_path_knows_who_is_restrained_also_after_a_restart(
    journal: Journal, view: GossipView
) -> None:
    live = Standings(journal, view)
    activate(journal)
    journal.add_many([group(0), group(1)])
    journal.decide([bad(0), bad(1)], NOW)
    offend(journal, BOB)
    live.sync(NOW)
    assert (view.throttled, view.quarantined) == ({ALICE}, {BOB: NOW + MINUTE})
    later = GossipView(view.run, view.manifest)
    Standings(journal, later)
    assert (later.throttled, later.quarantined, later.banned) == (view.throttled, view.quarantined, set())


def test_a_throttled_key_that_is_relieved_may_send_again(journal: Journal, view: GossipView) -> None:
    live = Standings(journal, view)
    activate(journal)
    journal.add_many([group(number) for number in range(80)])
    journal.decide([bad(0), bad(1)], NOW)
    live.sync(NOW)
    assert view.throttled == {ALICE}
    journal.decide([accepted(group(number).id, ALICE, 1) for number in range(2, 80)], NOW)
    live.sync(NOW)
    assert view.throttled == set()


def test_a_quarantine_ends_by_itself(journal: Journal, view: GossipView) -> None:
    live = Standings(journal, view)
    offend(journal, ALICE)
    live.sync(NOW)
    live.pass_time(NOW + MINUTE - 1)
    assert ALICE in view.quarantined
    live.pass_time(NOW + MINUTE)
    record = journal.key(ALICE)
    assert record is not None
    assert (view.quarantined, record.reputation.state, record.reputation.score) == ({}, "probation", 1.0)
    (told,) = live.due(NOW + MINUTE)
    assert (told.state, told.until) == ("probation", 0)


def test_a_group_at_the_very_end_of_a_quarantine_is_taken(journal: Journal, view: GossipView) -> None:
    """The gossip path looks at the clock, too, and may be first."""
    live = Standings(journal, view)
    offend(journal, ALICE)
    live.sync(NOW)
    late = StoredGroup(group(9).id, *_place(group(9))[:5], NOW + MINUTE, b"envelope")
    assert journal.add_many([late]) == [None]
    live.sync(NOW + MINUTE)
    assert view.quarantined == {}


def test_bans_stay(journal: Journal, view: GossipView) -> None:
    live, now = Standings(journal, view), NOW
    for number in range(7):
        offend(journal, ALICE, 10 * number, now)
        live.sync(now)
        now = max([now, *view.quarantined.values()])
        live.pass_time(now)
    assert (view.banned, view.quarantined) == ({ALICE}, {})
    (error,) = journal.add_many([group(500)])
    assert error is not None
    assert error.code == Code.BANNED
    assert journal.standings([ALICE])[0].state == "banned"


def test_the_learner_is_told_whom_to_distrust(journal: Journal, view: GossipView) -> None:
    live = Standings(journal, view)
    offend(journal, ALICE)
    assert live.distrusted == set()
    live.sync(NOW)
    assert live.distrusted == {ALICE}


# --- what is told --------------------------------------------------------------------------------


def test_a_standing_follows_receipts_and_then_only_now_and_then(journal: Journal, view: GossipView) -> None:
    """[RCP-6]"""
    live = Standings(journal, view)
    receipts = [accepted(bytes(32), ALICE, 1), accepted(bytes(32), BOB, 1)]

    def told(now: int, *keys: int) -> set[bytes]:
        live.note([receipts[key] for key in keys], now)
        standings = live.due(now)
        live.told(standings, now)
        return {one.peer for one in standings}

    assert told(NOW, 0, 1) == {ALICE, BOB}
    assert told(NOW + 1) == set()
    assert told(NOW + 2, 0) == set()
    assert told(NOW + TOLD_MS - 1, 0) == set()
    assert told(NOW + TOLD_MS) == {ALICE}  # though no receipt came with it
    assert told(NOW + 3 * TOLD_MS) == set()
    assert told(NOW + 3 * TOLD_MS, 1) == {BOB}


def test_a_new_state_is_told_at_once(journal: Journal, view: GossipView) -> None:
    live = Standings(journal, view)
    live.note([accepted(bytes(32), ALICE, 1)], NOW)
    live.told(live.due(NOW), NOW)
    offend(journal, ALICE)
    live.sync(NOW + 1)
    (told,) = live.due(NOW + 1)
    assert (told.peer, told.state, told.until, told.refused) == (ALICE, "quarantine", NOW + MINUTE, 4)


def test_what_was_not_sent_is_told_later_and_at_the_end_all_that_is_due(
    journal: Journal, view: GossipView
) -> None:
    live = Standings(journal, view)
    live.note([accepted(bytes(32), ALICE, 1)], NOW)
    assert len(live.due(NOW)) == 1
    assert len(live.due(NOW)) == 1
    live.told(live.due(NOW), NOW)
    live.note([accepted(bytes(32), ALICE, 1)], NOW + 1)
    assert live.due(NOW + 1) == []
    assert [one.peer for one in live.due(NOW + 1, parting=True)] == [ALICE]


def test_many_standings_go_in_several_messages(
    journal: Journal, view: GossipView, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(standings, "TOLD_AT_ONCE", 2)
    live = Standings(journal, view)
    live.note([accepted(bytes(32), key, 1) for key in (ALICE, BOB, CAROL)], NOW)
    first = live.due(NOW)
    live.told(first, NOW)
    assert {one.peer for one in [*first, *live.due(NOW)]} == {ALICE, BOB, CAROL}


def test_keys_that_nobody_knows_are_not_kept_in_mind(journal: Journal, view: GossipView) -> None:
    live = Standings(journal, view)
    live.note([accepted(bytes(32), b"X" * 32, 1)], NOW)
    assert live.due(NOW) == []
    journal.hear(b"X" * 32, "test", NOW, 0)
    assert live.due(NOW) == []


def test_keys_that_are_not_taken_are_answered_once_a_second(journal: Journal, view: GossipView) -> None:
    """[RCP-7]"""
    live = Standings(journal, view)
    assert [live.answers(ALICE, NOW), live.answers(BOB, NOW), live.answers(ALICE, NOW + 999)] == [
        True,
        True,
        False,
    ]
    assert live.answers(ALICE, NOW + 1000)


def test_a_flood_of_such_keys_costs_no_more_memory_than_some(journal: Journal, view: GossipView) -> None:
    live = Standings(journal, view)
    answered = [live.answers(number.to_bytes(32), NOW) for number in range(MAX_ANSWERED + 10)]
    assert sum(answered) == MAX_ANSWERED
