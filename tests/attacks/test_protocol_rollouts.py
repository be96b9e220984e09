"""Rollout groups that are not what they claim, each by a key that counts: refused with its code, with what
was measured, and none of it is ever trained on."""

from __future__ import annotations

import msgspec
import pytest

from nous_node.protocol.constants import MAX_COUNTER_GAP
from nous_node.protocol.envelope import unseal
from nous_node.protocol.errors import Code

from .cheats import CHEATS, cheating
from .edits import EDITS, attacks, edited, telling


@pytest.mark.parametrize("name", attacks(EDITS))
def test_edited_group_is_refused(arena, liar, name: str) -> None:
    code, edit = EDITS[name]
    arena.refuses(liar, edit(telling(arena.head, liar)).to_bytes(), code)


@pytest.mark.parametrize("name", attacks(CHEATS))
def test_tokens_that_were_not_drawn_are_refused_with_their_measure(arena, liars, name: str) -> None:
    """The environment's own rewards stand beside them."""
    code, engine = CHEATS[name]
    made = ((liar, cheating(arena.head, liar, engine)) for liar in liars)
    liar, group = next((liar, group) for liar, group in made if group is not None)
    receipt = arena.refuses(liar, group.to_bytes(), code)
    assert receipt.measured > receipt.threshold > 0


@pytest.mark.attack("components that say more", "")
def test_components_of_a_reward_are_nobodys_word(arena, liar) -> None:
    """They are for people; only the recomputed ones count."""
    group = edited(liar.group(arena.head), components={"correct": 1.0})
    before = arena.status.correct
    assert arena.outcome(liar, group.to_bytes()).verdict == "accepted"
    assert arena.status.correct == before


# Assignment: which task, which counter, which key.


@pytest.mark.attack("chosen task", "prompt-mismatch")
def test_task_of_another_counter_is_refused(arena, liar) -> None:
    group = liar.group(arena.head, 1)
    arena.refuses(liar, msgspec.structs.replace(group, counter=0).to_bytes(), Code.PROMPT_MISMATCH)


@pytest.mark.attack("task of another key", "prompt-mismatch")
def test_task_of_another_key_is_refused(arena, liar) -> None:
    other = arena.forger("whoever has an easier task")
    arena.refuses(liar, other.group(arena.head, 0).to_bytes(), Code.PROMPT_MISMATCH)


@pytest.mark.attack("reused counter", "counter-reused")
def test_counter_is_used_once(arena, liar) -> None:
    group = telling(arena.head, liar)
    assert arena.outcome(liar, group.to_bytes()).verdict == "accepted"
    other = msgspec.structs.replace(group, trajectories=group.trajectories[::-1])
    receipt = arena.refuses(liar, other.to_bytes(), Code.COUNTER_REUSED)
    assert receipt.measured == group.counter


@pytest.mark.attack("counter far ahead", "counter-gap")
def test_counter_far_ahead_is_refused(arena, liar) -> None:
    group = liar.group(arena.head, MAX_COUNTER_GAP + 1)
    receipt = arena.refuses(liar, group.to_bytes(), Code.COUNTER_GAP)
    assert receipt.measured > receipt.threshold


@pytest.mark.attack("checkpoint that nobody published", "unknown-checkpoint")
def test_checkpoint_that_nobody_published_is_refused(arena, liar) -> None:
    group = msgspec.structs.replace(liar.group(arena.head), checkpoint=bytes(32))
    arena.refuses(liar, group.to_bytes(), Code.UNKNOWN_CHECKPOINT)


@pytest.mark.attack("key that never said hello", "key-too-new")
def test_key_that_never_said_hello_counts_for_nothing(arena) -> None:
    silent = arena.forger("silent")
    arena.refuses(silent, silent.group(arena.head).to_bytes(), Code.KEY_TOO_NEW)


@pytest.mark.attack("key made after the beacon", "key-too-new")
def test_key_that_was_made_after_the_beacon_counts_from_the_next_one_on(arena) -> None:
    """Whoever tries many keys against a beacon that is known finds that none of them counts for it."""
    late, beacon = arena.forger("made after the beacon"), arena.head
    group = late.group(beacon)
    arena.send(late.hello(), late.topic)
    arena.until(lambda: arena.head.version > beacon.version)
    receipt = arena.refuses(late, group.to_bytes(), Code.KEY_TOO_NEW)
    assert (receipt.measured, receipt.threshold) == (beacon.version, beacon.version + 1)
    arena.accepts_honest(late)


def test_receipts_name_the_sender_and_nobody_else(arena, honest) -> None:
    data = honest.seal(honest.group(arena.head).to_bytes())
    arena.send(data, honest.topic)
    receipt = arena.receipt(data)
    assert (receipt.peer, receipt.rollout) == (honest.identity.key, unseal(data).id)
    assert receipt.credit > 0


def test_trainer_lives_after_all_of_them(arena, honest) -> None:
    arena.accepts_honest(honest)
