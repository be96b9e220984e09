"""The state machine over verdicts: each transition of its table, and what moves nothing."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.reputation import (
    FORGIVEN_AFTER,
    MAX_QUARANTINES,
    PASSED,
    SOFT,
    Reputation,
    weight_of,
)
from nous_node.protocol.errors import Code

NOW = 1_800_000_000_000
ASSIGNED = Path(__file__).parents[2] / "specs" / "assigned.md"
HARD = sorted(set(Code) - SOFT)


def accepted(reputation: Reputation, count: int, versions: tuple[int, ...] = (1, 2)) -> Reputation:
    for number in range(count):
        reputation = reputation.accepted(versions[number % len(versions)], NOW)
    return reputation


def refused(
    reputation: Reputation, code: str = "reward-mismatch", count: int = 1, now: int = NOW
) -> Reputation:
    for _ in range(count):
        reputation = reputation.refused(code, None, None, now)
    return reputation


ACTIVE = accepted(Reputation(), PASSED)
THROTTLED = refused(ACTIVE, count=2)
QUARANTINED = refused(Reputation(), count=4)


def through_quarantine(reputation: Reputation) -> tuple[Reputation, int]:
    """Into one and out of it again; its length in seconds."""
    inside = refused(reputation, count=4)
    assert inside.state == "quarantine"
    return inside.at(inside.until_ms), (inside.until_ms - NOW) // 1000


# --- weights -------------------------------------------------------------------------------------


def test_soft_codes_are_those_of_the_specification() -> None:
    table = re.findall(r"^\| `([a-z0-9-]+)` \| (yes|no) \|", ASSIGNED.read_text(), re.MULTILINE)
    assert {code for code, soft in table if soft == "yes"} == set(SOFT)
    assert {code for code, _ in table} == set(Code)


@pytest.mark.parametrize("code", [Code.LOGPROB_MISMATCH, Code.SAMPLING_MISMATCH])
def test_a_mismatch_near_its_threshold_weighs_half(code: Code) -> None:
    assert weight_of(code, 0.99, 0.1) == 0.5
    assert weight_of(code, 1.0, 0.1) == 1.0
    assert weight_of(code, None, 0.1) == 1.0  # was no number
    assert weight_of(code, 1.0, None) == 1.0


def test_a_copy_of_which_nobody_knows_who_made_it_weighs_nothing() -> None:
    assert weight_of(Code.COPIED, None, None) == 0.0
    assert weight_of(Code.COPIED, 48.0, 40.0) == 1.0


def test_codes_that_weigh_less_than_one_are_named_and_all_others_weigh_one() -> None:
    assert weight_of(Code.WITHHELD, 5.0, 3.0) == 0.0
    assert weight_of(Code.REPETITION, 96.0, 64.0) == 0.0
    assert weight_of(Code.ENVIRONMENT_FAILED, None, None) == 0.5
    assert weight_of(Code.REWARD_MISMATCH, 0.2, 0.1) == 1.0
    assert weight_of("a-code-of-tomorrow", None, None) == 1.0


# --- the table -----------------------------------------------------------------------------------


def test_a_key_begins_on_probation_without_faults() -> None:
    assert (Reputation().state, Reputation().score) == ("probation", 0.0)


def test_sixteen_accepted_groups_of_two_versions_end_a_probation() -> None:
    assert accepted(Reputation(), PASSED - 1).state == "probation"
    assert ACTIVE.state == "active"


def test_groups_of_one_version_end_no_probation() -> None:
    waiting = accepted(Reputation(), 1_000, versions=(7,))
    assert waiting.state == "probation"
    assert waiting.accepted(8, NOW).state == "active"


def test_a_probation_does_not_end_with_a_score_of_one() -> None:
    waiting = accepted(refused(Reputation(), count=3), PASSED)
    assert (waiting.state, waiting.score > 1) == ("probation", True)
    assert accepted(waiting, 60).state == "active"


def test_an_active_key_is_throttled_at_two_and_relieved_below_a_half() -> None:
    assert refused(ACTIVE).state == "active"
    assert THROTTLED.state == "throttled"
    assert accepted(THROTTLED, 68).state == "throttled"
    assert accepted(THROTTLED, 69).state == "active"


def test_a_key_on_probation_is_not_throttled() -> None:
    assert refused(Reputation(), count=3).state == "probation"


@pytest.mark.parametrize("before", [Reputation(), ACTIVE, THROTTLED])
def test_a_score_of_four_leads_into_quarantine_from_any_state(before: Reputation) -> None:
    after = refused(before, count=4)
    assert (after.state, after.until_ms, after.quarantines) == ("quarantine", NOW + 60_000, 1)


@pytest.mark.parametrize("before", [Reputation(), ACTIVE, THROTTLED])
@pytest.mark.parametrize("code", ["drift", "wrong-checkpoint"])
def test_what_many_groups_have_proven_leads_into_quarantine_at_once(before: Reputation, code: str) -> None:
    assert refused(before, code).state == "quarantine"


def test_a_quarantine_ends_with_its_time_and_on_probation() -> None:
    assert QUARANTINED.at(QUARANTINED.until_ms - 1) is QUARANTINED
    after = QUARANTINED.at(QUARANTINED.until_ms)
    assert after == Reputation(score=1.0, quarantines=1)
    assert refused(after, count=3).state == "quarantine"
    assert accepted(after, PASSED).state == "active"


def test_verdicts_during_a_quarantine_change_nothing() -> None:
    """They are on groups that came before it."""
    assert accepted(QUARANTINED, 5) is QUARANTINED
    assert refused(QUARANTINED, "drift", 5) is QUARANTINED


def test_quarantines_become_four_times_longer_and_the_seventh_is_a_ban() -> None:
    reputation, lengths = Reputation(), []
    for _ in range(MAX_QUARANTINES):
        reputation, seconds = through_quarantine(reputation)
        lengths.append(seconds)
    assert lengths == [60, 240, 960, 3_840, 15_360, 61_440]
    banned = refused(reputation, count=4)
    assert banned.state == "banned"
    for after in (banned.at(NOW + 10**15), accepted(banned, 100), refused(banned, "drift")):
        assert after is banned


def test_a_thousand_accepted_groups_since_the_last_quarantine_make_one_forgotten() -> None:
    reputation, _ = through_quarantine(through_quarantine(Reputation())[0])
    assert reputation.quarantines == 2
    almost = accepted(reputation, FORGIVEN_AFTER - 1)
    assert almost.quarantines == 2
    assert almost.accepted(1, NOW).quarantines == 1
    assert accepted(reputation, 2 * FORGIVEN_AFTER).quarantines == 0
    assert accepted(reputation, 5 * FORGIVEN_AFTER).quarantines == 0


def test_a_new_quarantine_begins_the_count_to_its_being_forgotten_anew() -> None:
    reputation = accepted(through_quarantine(Reputation())[0], FORGIVEN_AFTER - 1)
    again, _ = through_quarantine(reputation)
    assert accepted(again, FORGIVEN_AFTER - 1).quarantines == 2


# --- what moves nothing --------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(SOFT))
def test_one_soft_failure_never_bans_and_a_thousand_change_nothing(code: Code) -> None:
    for before in (Reputation(), ACTIVE, THROTTLED, QUARANTINED):
        assert refused(before, code, 1_000) is before


@pytest.mark.parametrize("code", HARD)
def test_no_single_failure_bans(code: Code) -> None:
    assert refused(Reputation(), code).state in ("probation", "quarantine")
    assert refused(ACTIVE, code).state in ("active", "quarantine")


STEPS = st.one_of(
    st.tuples(st.just("accepted"), st.integers(0, 5)),
    st.tuples(st.just("refused"), st.sampled_from(sorted(Code))),
    st.tuples(st.just("later"), st.integers(0, 10**8)),
)
FIGURES = st.none() | st.floats(allow_nan=True)


def walked(steps: list[tuple[str, int | Code]]) -> Reputation:
    reputation, now = Reputation(), NOW
    for what, value in steps:
        match what, value:
            case "accepted", int():
                reputation = reputation.accepted(value, now)
            case "refused", Code():
                reputation = reputation.refused(value, None, None, now)
            case "later", int():
                now += value
                reputation = reputation.at(now)
    return reputation


@given(
    st.lists(STEPS, max_size=60),
    st.lists(st.tuples(st.sampled_from(sorted(SOFT)), FIGURES, FIGURES), max_size=20),
)
def test_no_sequence_of_soft_refusals_changes_how_a_key_stands(
    steps: list[tuple[str, int | Code]], refusals: list[tuple[Code, float | None, float | None]]
) -> None:
    before = after = walked(steps)
    for code, measured, threshold in refusals:
        after = after.refused(code, measured, threshold, NOW)
    assert after is before


@given(st.lists(STEPS, max_size=120))
def test_whatever_happens_the_figures_stay_within_their_bounds(steps: list[tuple[str, int | Code]]) -> None:
    reputation = walked(steps)
    assert 0 <= reputation.score < 5
    assert 0 <= reputation.quarantines <= MAX_QUARANTINES
    assert reputation.until_ms > 0 or reputation.state not in ("quarantine",)
    assert reputation.state != "active" or reputation.score < 2
