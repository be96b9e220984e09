"""What a volunteer does in quarantine, and when it is banned."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from nous_node.node.cli_exit import Exit, verdict
from nous_node.node.events import Event, Note
from nous_node.node.outbox import Outbox
from nous_node.node.restraint import LONGEST_MS, BannedError, Restraint
from nous_node.protocol.envelope import Kind, seal
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, Standing, State

ME = Identity.from_seed(bytes(32))
NOW = 1_800_000_000_000


@pytest.fixture
def outbox(tmp_path: Path) -> Iterator[Outbox]:
    with Outbox.open(tmp_path / "outbox.sqlite") as outbox:
        yield outbox


def standing(state: State, until: int = 0, peer: bytes = ME.key) -> Standing:
    return Standing(peer, state, 9, 3, 100, 10, 3, 12, until)


class Watched:
    """A restraint whose clock is trio's, and what it tells."""

    def __init__(self, outbox: Outbox) -> None:
        self.told: list[str] = []
        self.restraint = Restraint(ME.key, outbox, self._hear, self.now)

    def _hear(self, event: Event) -> None:
        assert isinstance(event, Note)
        self.told.append(event.text)

    def now(self) -> int:
        return NOW + int(trio.current_time() * 1000)


def refuse(outbox: Outbox, code: str, measured: float, threshold: float) -> None:
    data = seal(ME, Kind.ROLLOUT, bytes(32), b"body", seq=outbox.next_seq(), ts=NOW)
    rollout = outbox.put(data, checkpoint=bytes(32), version=1, counter=0)
    outbox.acknowledge([Receipt(rollout, ME.key, "refused", code, measured, threshold, 0)], b"proof")


async def test_quarantine_is_told_once_with_its_reason_and_ends_by_itself(
    outbox: Outbox, autojump_clock: object
) -> None:
    refuse(outbox, "logprob-mismatch", 0.5, 1e-4)
    watched = Watched(outbox)
    restraint = watched.restraint
    async with trio.open_nursery() as nursery:
        nursery.start_soon(restraint.watch)
        until = watched.now() + 60_000
        restraint.note_standing(standing("quarantine", until), NOW, b"proof")
        for ts in (NOW + 1, NOW + 2):  # receipts for what was on its way
            receipt = Receipt(bytes(32), ME.key, "refused", "quarantined", float(NOW), float(until), 0)
            restraint.note_receipt(receipt, ts)
        assert restraint.holds
        (text,) = watched.told
        assert "in quarantine until" in text
        assert "(for 1 min 00 s) after refusals with logprob-mismatch (0.5, limit 0.0001)" in text
        before = watched.now()
        await restraint.lifted()
        assert watched.now() - before == 60_000
        await wait_all_tasks_blocked()
        assert watched.told[1:] == ["The quarantine is over: groups are made again."]
        nursery.cancel_scope.cancel()


async def test_a_receipt_alone_holds_the_volunteer_back(outbox: Outbox, autojump_clock: object) -> None:
    watched = Watched(outbox)
    until = float(watched.now() + 5_000)
    watched.restraint.note_receipt(
        Receipt(bytes(32), ME.key, "refused", "quarantined", float(NOW), until, 0), NOW
    )
    assert watched.restraint.holds
    await watched.restraint.lifted()
    assert not watched.restraint.holds


@pytest.mark.parametrize("how", ["standing", "receipt"])
@pytest.mark.parametrize("ahead", [120_000, -20_000])
async def test_a_quarantine_lasts_as_long_whatever_our_clock_says(
    ahead: int, how: str, outbox: Outbox, autojump_clock: object
) -> None:
    watched = Watched(outbox)
    theirs = watched.now() - ahead
    if how == "standing":
        watched.restraint.note_standing(standing("quarantine", theirs + 60_000), theirs, b"proof")
    else:
        end = float(theirs + 60_000)
        receipt = Receipt(bytes(32), ME.key, "refused", "quarantined", float(theirs), end, 0)
        watched.restraint.note_receipt(receipt, theirs)
    before = watched.now()
    await watched.restraint.lifted()
    assert watched.now() - before == 60_000


MOST = (1 << 63) - 1


@pytest.mark.parametrize(
    "word",
    [
        standing("quarantine", MOST),
        *(
            Receipt(bytes(32), ME.key, "refused", "quarantined", measured, threshold, 0)
            for measured, threshold in ((None, 1e300), (-1.7e308, 1.7e308), (0.0, 1e18), (float(NOW), 1e14))
        ),
    ],
    ids=["standing", "no figure", "beyond floats", "for ever", "centuries"],
)
async def test_a_quarantine_beyond_all_measure_is_a_bounded_one(
    word: Standing | Receipt, outbox: Outbox, autojump_clock: object
) -> None:
    """A trainer's key says so: the node neither ends nor stands still for ever, also after a restart."""
    watched = Watched(outbox)
    if isinstance(word, Standing):
        watched.restraint.note_standing(word, NOW, b"proof")
    else:
        watched.restraint.note_receipt(word, NOW)
    assert watched.restraint.holds
    again = Watched(outbox)
    for one in (watched, again):
        if not one.restraint.holds:  # what a receipt said is asked for again
            continue
        assert one.restraint.doing().startswith("in quarantine until 20")
        before = one.now()
        await one.restraint.lifted()
        assert one.now() - before <= LONGEST_MS


@pytest.mark.parametrize("threshold", [-1e300, 0.0, 5.0])
async def test_a_quarantine_that_ended_before_it_began_holds_nobody(threshold: float, outbox: Outbox) -> None:
    restraint = Watched(outbox).restraint
    receipt = Receipt(bytes(32), ME.key, "refused", "quarantined", float(NOW), threshold, 0)
    restraint.note_receipt(receipt, NOW)
    assert not restraint.holds


async def test_a_later_word_lifts_a_quarantine_and_an_older_one_does_not(
    outbox: Outbox, autojump_clock: object
) -> None:
    watched = Watched(outbox)
    restraint = watched.restraint
    restraint.note_standing(standing("quarantine", watched.now() + 60_000), NOW, b"proof")
    restraint.note_standing(standing("active"), NOW - 1, b"older")
    assert restraint.holds
    restraint.note_standing(standing("probation"), NOW + 1, b"later")
    assert not restraint.holds
    assert restraint.standing == standing("probation")


async def test_of_receipts_and_standings_the_latest_holds(outbox: Outbox, autojump_clock: object) -> None:
    watched = Watched(outbox)
    restraint = watched.restraint
    until = float(watched.now() + 60_000)
    receipt = Receipt(bytes(32), ME.key, "refused", "quarantined", float(NOW), until, 0)
    restraint.note_receipt(receipt, NOW + 5)
    restraint.note_standing(standing("active"), NOW + 4, b"late")
    assert restraint.standing == standing("active")
    assert restraint.holds
    restraint.note_standing(standing("probation"), NOW + 6, b"latest")
    assert not restraint.holds
    restraint.note_receipt(receipt, NOW + 5)
    assert not restraint.holds


async def test_a_quarantine_outlives_a_restart(outbox: Outbox, autojump_clock: object) -> None:
    first = Watched(outbox)
    first.restraint.note_standing(standing("quarantine", first.now() + 60_000), NOW, b"proof")
    again = Watched(outbox)
    assert again.restraint.holds
    outbox.note_standing(standing("quarantine", first.now() + 60_000, b"o" * 32), NOW, b"another key")
    assert not Watched(outbox).restraint.holds


@pytest.mark.parametrize("how", ["standing", "receipt"])
async def test_a_ban_ends_the_node_with_a_sentence(how: str, outbox: Outbox, autojump_clock: object) -> None:
    refuse(outbox, "drift", 21.0, 20.0)
    restraint = Watched(outbox).restraint

    async def banned() -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(restraint.watch)
            nursery.start_soon(restraint.lifted)
            await wait_all_tasks_blocked()
            if how == "standing":
                restraint.note_standing(standing("banned"), NOW, b"proof")
            else:
                restraint.note_receipt(Receipt(bytes(32), ME.key, "refused", "banned", None, None, 0), NOW)

    with pytest.raises(BaseExceptionGroup) as error:
        await banned()
    code, text = verdict(error.value)
    assert code is Exit.INPUT
    assert "has banned this key from the run after refusals with drift (21, limit 20)" in text


async def test_a_ban_of_before_the_restart_is_asked_for_again(outbox: Outbox, autojump_clock: object) -> None:
    outbox.note_standing(standing("banned"), NOW, b"proof")
    restraint = Watched(outbox).restraint
    assert not restraint.holds
    restraint.note_receipt(Receipt(bytes(32), ME.key, "refused", "banned", None, None, 0), NOW)
    with pytest.raises(BannedError):
        await restraint.watch()


async def test_who_parts_waits_for_a_word_that_counts_all_groups(
    outbox: Outbox, autojump_clock: object
) -> None:
    restraint = Watched(outbox).restraint
    few, all_of_them = standing("probation"), Standing(ME.key, "probation", 10, 3, 110, 10, 3, 12, 0)
    told = trio.Event()

    async def wait() -> None:
        await restraint.told_of(10)
        told.set()

    async with trio.open_nursery() as nursery:
        nursery.start_soon(wait)
        restraint.note_standing(few, NOW, b"proof")
        await wait_all_tasks_blocked()
        assert not told.is_set()
        restraint.note_standing(all_of_them, NOW + 1, b"proof")
        await told.wait()
