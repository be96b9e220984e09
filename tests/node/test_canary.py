"""When a version counts as collapsed, which one the run goes back to, and at what rate it goes on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.node.canary import (
    CANARY_FILE,
    MAX_HALVINGS,
    WINDOW,
    Canary,
    Health,
    Measure,
    rollback_sentence,
)
from nous_node.node.learner_messages import Updated

SHARE = 0.5
TASKS = 256
EASY: dict[str, int] = {"sort-digits": 0}
HARD: dict[str, int] = {"sort-digits": 1}


def share(value: float, tasks: int = TASKS) -> Measure:
    return Measure.of_answers(round(value * tasks), tasks)


def best(value: float, version: int = 20, levels: dict[str, int] | None = None) -> Canary:
    canary = Canary()
    canary.passed(version, share(value), levels or EASY, {"": 0.5})
    return canary


def good(canary: Canary) -> tuple[int, float]:
    assert canary.good is not None
    return canary.good.version, canary.good.measure.value


# --- measures ------------------------------------------------------------------------------------


def test_a_share_has_the_error_of_a_binomial_and_is_never_certain() -> None:
    half = Measure.of_answers(50, 100)
    assert half.value == 0.5
    assert half.error == pytest.approx(0.05)
    assert Measure.of_answers(0, 64).error > 0.01
    assert Measure.of_answers(64, 64).error > 0.01


def test_rewards_have_the_error_of_their_mean() -> None:
    measure = Measure.of_rewards([0.4, 0.6, 0.4, 0.6])
    assert measure.value == pytest.approx(0.5)
    assert measure.error == pytest.approx(0.0577, abs=1e-4)


# --- collapse ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "now", "collapsed"),
    [
        (0.98, 0.69, False),  # measured, when tasks became harder
        (0.98, 0.50, False),
        (0.98, 0.48, True),
        (0.98, 0.0, True),
        (0.42, 0.22, False),
        (0.42, 0.12, True),
        (0.05, 0.0, True),
        (0.03, 0.0, False),  # may be chance
        (0.0, 0.0, False),
    ],
)
def test_collapsed_is_below_half_and_beyond_chance(before, now, collapsed) -> None:
    assert best(before).collapsed(share(now), EASY, SHARE) == collapsed


def test_few_tasks_prove_nothing() -> None:
    canary = Canary()
    canary.passed(20, share(0.5, 4), EASY, {})
    assert not canary.collapsed(share(0.0, 4), EASY, SHARE)


def test_nothing_is_collapsed_before_anything_was_measured_or_where_it_is_switched_off() -> None:
    assert not Canary().collapsed(share(0.0), EASY, SHARE)
    assert not best(0.98).collapsed(share(0.0), EASY, 0.0)


@pytest.mark.parametrize(("now", "collapsed"), [(0.4, False), (0.25, False), (0.1, True)])
def test_each_harder_level_may_cost_the_share_once_more(now, collapsed) -> None:
    assert best(0.98).collapsed(share(now), HARD, SHARE) == collapsed


@pytest.mark.parametrize(
    ("before", "now", "collapsed"),
    [(-1.0, -0.6, False), (-1.0, -1.4, False), (-1.0, -1.6, True), (1.0, -0.1, True), (0.0, -0.01, False)],
)
def test_below_nothing_it_is_the_amount_that_is_halved(before, now, collapsed) -> None:
    """Games pay losses with -1, and some environments nothing but losses."""
    canary = Canary()
    canary.passed(20, Measure(before, 0.01), EASY, {})
    assert canary.collapsed(Measure(now, 0.01), EASY, SHARE) == collapsed


# --- the version to go back to -------------------------------------------------------------------


def test_the_best_version_is_the_one_to_go_back_to() -> None:
    canary = best(0.5, 20)
    canary.passed(40, share(0.8), EASY, {})
    canary.passed(60, share(0.7), EASY, {})
    assert good(canary) == (40, share(0.8).value)
    canary.passed(80, share(0.8), EASY, {})
    assert good(canary)[0] == 80


def test_slow_decline_is_measured_against_the_best() -> None:
    canary = best(0.9)
    for version, value in ((40, 0.8), (60, 0.65), (80, 0.5)):
        assert not canary.collapsed(share(value), EASY, SHARE)
        canary.passed(version, share(value), EASY, {})
    assert canary.collapsed(share(0.4), EASY, SHARE)
    assert good(canary)[0] == 20


def test_the_first_measurement_of_harder_tasks_is_the_new_mark() -> None:
    """Going back further would lose what was learnt of them."""
    canary = best(0.98)
    canary.passed(40, share(0.7), HARD, {})
    assert good(canary) == (40, share(0.7).value)


# --- going back ----------------------------------------------------------------------------------


def test_each_rollback_halves_the_rate_and_each_new_best_doubles_it_again() -> None:
    canary = best(0.5)
    rates = []
    for version in (40, 60, 80):
        assert canary.roll_back(version).version == 20
        rates.append(canary.rate)
    assert rates == [0.5, 0.25, 0.125]
    canary.passed(100, share(0.5), EASY, {})  # as good as ever is not better
    assert canary.rate == 0.125
    for version, value in ((120, 0.6), (140, 0.65), (160, 0.7), (180, 0.75)):
        canary.passed(version, share(value), EASY, {})
        rates.append(canary.rate)
    assert rates[3:] == [0.25, 0.5, 1.0, 1.0]


def test_the_rate_stays_above_nothing() -> None:
    canary = best(0.5)
    for version in range(100):
        canary.roll_back(version)
    assert canary.rate == 0.5**MAX_HALVINGS


def test_groups_of_collapsed_versions_are_not_trained_on() -> None:
    canary = best(0.5)
    canary.roll_back(40)
    assert canary.oldest == 40


# --- without held-out tasks ----------------------------------------------------------------------


def test_the_mean_reward_of_a_window_of_updates_is_the_measure() -> None:
    canary = Canary(levels=dict(EASY))
    for number in range(WINDOW + 4):
        assert (canary.measured_by_rewards() is None) == (number < WINDOW)
        canary.trained(0.8 + 0.01 * (number % 2), EASY)
    measure = canary.measured_by_rewards()
    assert measure is not None
    canary.passed(20, measure, EASY, {})
    for _ in range(WINDOW):
        canary.trained(0.3, EASY)
    fallen = canary.measured_by_rewards()
    assert fallen is not None
    assert canary.collapsed(fallen, EASY, SHARE)


def test_the_window_begins_anew_with_harder_tasks_and_after_a_rollback() -> None:
    canary = best(0.5)
    canary.levels = dict(EASY)
    for _ in range(WINDOW):
        canary.trained(0.5, EASY)
    canary.trained(0.5, HARD)
    assert canary.rewards == []
    canary.trained(0.25, HARD)
    assert canary.rewards == [0.25]
    canary.roll_back(40)
    assert (canary.rewards, canary.levels) == ([], EASY)


# --- between sessions ----------------------------------------------------------------------------

measures = st.builds(Measure, st.floats(-1e6, 1e6), st.floats(0, 1e3))
levels = st.dictionaries(st.text(max_size=8), st.integers(0, 9), max_size=3)


@pytest.fixture
def beside(make_folder: Any) -> Any:
    folder = make_folder()
    folder.checkpoint(20).mkdir()
    folder.optimizer(20).mkdir(parents=True)

    def stored(data: bytes) -> Canary:
        (folder.optimizer(20) / CANARY_FILE).write_bytes(data)
        return Canary.beside(folder, folder.checkpoint(20))

    return stored


@given(
    measures,
    levels,
    st.dictionaries(st.text(max_size=4), st.floats(-1, 1), max_size=3),
    st.integers(0, 3),
    st.lists(st.floats(0, 1), max_size=4),
)
def test_what_is_known_is_kept_beside_the_optimizers_state(
    tmp_path_factory, base_run, measure, harder, baselines, rollbacks, rewards
) -> None:
    canary = Canary(rewards=rewards)
    canary.passed(0, measure, harder, baselines)
    for version in range(rollbacks):
        canary.roll_back(version)
    place: Path = tmp_path_factory.mktemp("run") / "optimizer"
    (place / "000007").mkdir(parents=True)
    (place / "000007" / CANARY_FILE).write_bytes(canary.to_bytes())
    (place.parent / "checkpoints" / "000000").mkdir(parents=True)
    folder = type(base_run)(place.parent, base_run.run, base_run.envelope, base_run.manifest)
    assert Canary.beside(folder, folder.checkpoint(7)) == canary


@pytest.mark.parametrize("data", [b"", b"{", b'{"halvings":"x"}', b"\xff"])
def test_a_damaged_memory_is_none(beside, data) -> None:
    assert beside(data) == Canary()


def test_a_version_whose_folder_is_gone_is_not_gone_back_to(beside) -> None:
    assert beside(best(0.5, 20).to_bytes()).good is not None
    canary = best(0.5, 10)
    canary.roll_back(11)
    found = beside(canary.to_bytes())
    assert (found.good, found.halvings) == (None, 1)


# --- what people are told ------------------------------------------------------------------------


def test_a_person_is_told_what_happened_and_what_to_do() -> None:
    canary = best(0.6)
    stats = Health(0.6, canary.roll_back(40), 0.02).stats(canary.rate)
    text = rollback_sentence(Updated(40, "", [], 0, [], {}, {}, stats, {}, 20, 20))
    assert "from 0.602 to 0.020: version 40 has the weights of version 20 again" in text
    assert "0.5 times the rate" in text
    assert "lower `rate`" in text


def test_a_version_that_is_well_has_nothing_to_tell() -> None:
    assert Health(0.6).stats(1.0) == {}
