"""Tasks get harder when the policy does well at those of the present level, and then only."""

from __future__ import annotations

from nous_node.node.curriculum import WINDOW, Curriculum


def school(level: int = 0, raise_at: float = 0.9) -> Curriculum:
    return Curriculum({"sort": level}, {"sort": 2, "other": 1}, raise_at)


def notes(curriculum: Curriculum, level: int, reward: float, count: int = WINDOW) -> None:
    for _ in range(count):
        curriculum.note("sort", level, reward)


def test_a_full_window_of_good_groups_raises_the_level_by_one() -> None:
    curriculum = school()
    notes(curriculum, 0, 0.95)
    assert curriculum.advance() == {"sort": 1}
    assert curriculum.advance() == {"sort": 1}


def test_one_group_less_than_a_window_is_not_enough() -> None:
    curriculum = school()
    notes(curriculum, 0, 1.0, WINDOW - 1)
    assert curriculum.advance() == {"sort": 0}


def test_the_mean_decides_at_its_bound() -> None:
    curriculum = school(raise_at=0.75)
    notes(curriculum, 0, 0.5, WINDOW // 2)
    notes(curriculum, 0, 1.0, WINDOW // 2)
    assert curriculum.advance() == {"sort": 1}
    curriculum = school(raise_at=0.75)
    notes(curriculum, 0, 0.5, WINDOW // 2 + 1)
    notes(curriculum, 0, 1.0, WINDOW // 2 - 1)
    assert curriculum.advance() == {"sort": 0}


def test_only_the_newest_window_counts() -> None:
    curriculum = school()
    notes(curriculum, 0, 0.0)
    notes(curriculum, 0, 1.0)
    assert curriculum.advance() == {"sort": 1}


def test_groups_of_another_level_do_not_count() -> None:
    curriculum = school(level=1)
    notes(curriculum, 0, 1.0)
    notes(curriculum, 2, 1.0)
    assert curriculum.advance() == {"sort": 1}


def test_a_new_level_begins_with_an_empty_window() -> None:
    curriculum = school()
    notes(curriculum, 0, 1.0)
    curriculum.advance()
    notes(curriculum, 1, 1.0, WINDOW - 1)
    assert curriculum.advance() == {"sort": 1}
    notes(curriculum, 1, 1.0, 1)
    assert curriculum.advance() == {"sort": 2}


def test_the_highest_level_stays() -> None:
    curriculum = school(level=2)
    notes(curriculum, 2, 1.0)
    assert curriculum.advance() == {"sort": 2}


def test_environments_rise_apart_and_an_absent_level_is_0() -> None:
    curriculum = school()
    for _ in range(WINDOW):
        curriculum.note("other", 0, 1.0)
        curriculum.note("without levels", 0, 1.0)
    assert curriculum.advance() == {"sort": 0, "other": 1}


def test_what_is_handed_out_is_a_copy() -> None:
    curriculum = school()
    curriculum.advance()["sort"] = 2
    assert curriculum.levels == {"sort": 0}


def test_levels_of_an_earlier_version_begin_a_new_window() -> None:
    curriculum = school(1)
    notes(curriculum, 1, 1.0, WINDOW - 1)
    curriculum.go_back({"sort": 0})
    notes(curriculum, 0, 1.0, WINDOW - 1)
    assert curriculum.advance() == {"sort": 0}
    notes(curriculum, 0, 1.0, 1)
    assert curriculum.advance() == {"sort": 1}
