"""What figures say of a group and of a key: limits by number of tokens, sums over groups, evidence."""

from __future__ import annotations

import math

import numpy as np
import pytest
from numpy.typing import NDArray

from nous_node.node.statistics import MAX_EVIDENCE, Drift, Evidence, Figures, check_figures
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.runs import Bound, Thresholds

LIMITS = Thresholds(
    logprobs=Bound(0.03, 0.004, 0.05),
    distances=Bound(1e-3, 3e-4, 3e-3),
    distance_max=0.1,
    tokens=400,
    drift_slack=1.0,
    drift_limit=15.0,
    stop_probability=1e-9,
    reward=1e-6,
    verifier="float32",
    calibrated="for these tests",
)
HONEST = Figures(400, 0.03, 1e-3, 0.05)


def code(figures: Figures) -> Code | None:
    try:
        check_figures(figures, LIMITS, "group")
    except RemoteError as error:
        return error.code
    return None


def drifted(sums: Drift) -> Code | None:
    try:
        sums.check(LIMITS)
    except RemoteError as error:
        return error.code
    return None


def test_figures_are_means_over_tokens_by_how_unsure_they_were() -> None:
    reported = np.array([-1, -2, -3], np.float32)
    recomputed = np.log(np.array([0.4, 0.1, 1.0], np.float32))
    weight = 0.64 + 0.91 + 0.1
    differences = float(np.abs(reported.astype(np.float64) - recomputed).sum())
    figures = Figures.of(reported, recomputed, np.array([0.0, 0.3, 0.6]))
    assert figures.tokens == pytest.approx(weight)
    assert figures.logprob == pytest.approx(differences / weight)
    assert (figures.distance, figures.largest) == (pytest.approx(0.9 / weight), 0.6)
    assert Figures.of(reported, recomputed, None) == Figures(figures.tokens, figures.logprob, 0.0, 0.0)
    assert Figures.of(reported[:0], recomputed[:0], np.zeros(0)) == Figures(0.0, 0.0, 0.0, 0.0)


def test_a_log_prob_that_is_no_number_makes_no_weight_that_is_none() -> None:
    figures = Figures.of(np.zeros(2, np.float32), np.array([0, np.nan], np.float32), np.zeros(2))
    assert figures.tokens == pytest.approx(1.1)
    assert math.isnan(figures.logprob)


def test_figures_of_parts_make_those_of_all_their_tokens() -> None:
    parts = [Figures(1, 0.1, 0.2, 0.3), Figures(0, 0, 0, 0), Figures(3, 0.3, 0.4, 0.2)]
    assert Figures.together(parts) == Figures(4, pytest.approx(0.25), pytest.approx(0.35), 0.3)
    assert Figures.together([]) == Figures(0, 0.0, 0.0, 0.0)


@pytest.mark.parametrize(
    ("figures", "expected"),
    [
        (HONEST, None),
        (Figures(400, 0.05, 3e-3, 0.1), None),
        (Figures(400, 0.0501, 0, 0), Code.LOGPROB_MISMATCH),
        (Figures(400, 0, 3.01e-3, 0), Code.SAMPLING_MISMATCH),
        (Figures(400, 0, 0, 0.101), Code.SAMPLING_MISMATCH),
        (Figures(400, 1, 1, 1), Code.LOGPROB_MISMATCH),
        (Figures(100, 0.07, 5e-3, 0.1), None),  # a quarter of the tokens: twice the excess
        (Figures(100, 0.0701, 0, 0), Code.LOGPROB_MISMATCH),
        (Figures(4000, 0.0501, 0, 0), Code.LOGPROB_MISMATCH),  # more tokens than were calibrated: no less
        (Figures(400, math.nan, 0, 0), Code.LOGPROB_MISMATCH),
        (Figures(400, 0, math.nan, 0), Code.SAMPLING_MISMATCH),
        (Figures(400, 0, 0, math.nan), Code.SAMPLING_MISMATCH),
    ],
)
def test_limits_follow_the_number_of_tokens(figures: Figures, expected: Code | None) -> None:
    assert code(figures) == expected


def test_a_peer_as_honest_as_the_mean_never_drifts() -> None:
    sums = Drift()
    for _ in range(100):
        sums = sums.after(HONEST, None, LIMITS)
    assert sums == Drift()


def test_what_is_a_little_off_group_after_group_is_a_drift() -> None:
    """Two and a half deviations above the mean, well within the limit of a group."""
    for figures in (Figures(400, 0.04, 0, 0), Figures(400, 0, 1.75e-3, 0)):
        sums, groups = Drift(), 0
        while drifted(sums) is None:
            assert code(figures) is None
            sums, groups = sums.after(figures, None, LIMITS), groups + 1
        assert drifted(sums) == Code.DRIFT
        assert groups in (10, 11)  # the limit is ten times what a group adds


def test_one_odd_group_is_no_drift_and_is_forgotten() -> None:
    sums = Drift().after(Figures(400, 100.0, 100.0, 100.0), None, LIMITS)
    assert (sums.logprob, sums.distance) == (3.0, 3.0)
    assert drifted(sums) is None
    for _ in range(3):
        sums = sums.after(HONEST, None, LIMITS)
    assert sums == Drift()


def test_few_tokens_weigh_less() -> None:
    assert Drift().after(Figures(100, 0.046, 0, 0), None, LIMITS).logprob == pytest.approx(1.0)
    assert Drift().after(Figures(400, 0.046, 0, 0), None, LIMITS).logprob == pytest.approx(3.0)


# --- the version before --------------------------------------------------------------------------

Logprobs = NDArray[np.float32]


def versions(seed: int, step: float, tokens: int = 560) -> tuple[Logprobs, Logprobs, Logprobs]:
    """Log-probs as sampled by an engine with rounding, under its version, and under one a step away. As in a
    model in bfloat16, unlikely tokens have both more rounding and more change."""
    draw = np.random.default_rng(seed)
    named = np.log(draw.uniform(0.02, 1, tokens))
    unsure = 1 - np.exp(named)
    reported = named + 0.06 * unsure * draw.standard_t(4, tokens)
    other = named + step * unsure * draw.standard_normal(tokens)
    return reported.astype(np.float32), named.astype(np.float32), other.astype(np.float32)


def test_honest_peers_are_not_blamed_by_chance() -> None:
    for step in (0.004, 0.02, 0.2):
        sums = 0.0
        for seed in range(3000):
            sums = max(0.0, sums + Evidence.of(*versions(seed, step)).ratio)
            assert sums < MAX_EVIDENCE / 2


def test_who_samples_with_the_version_before_is_found_the_sooner_the_more_it_differs() -> None:
    needed = []
    for step in (0.006, 0.012, 0.05):
        sums, groups = 0.0, 0
        while sums <= MAX_EVIDENCE:
            reported, own, newer = versions(groups, step)
            sums, groups = max(0.0, sums + Evidence.of(reported, newer, own).ratio), groups + 1
        needed.append(groups)
    assert needed == sorted(needed, reverse=True)
    assert needed[0] < 60
    assert needed[-1] == 1
    assert drifted(Drift(0.0, 0.0, 20.1)) == Code.WRONG_CHECKPOINT


def test_evidence_is_as_probable_as_it_says() -> None:
    """Of the right version its mean is minus half of its variance, which is what a likelihood ratio has."""
    found = np.array([Evidence.of(*versions(seed, 0.006)).ratio for seed in range(2000)])
    assert found.mean() == pytest.approx(-found.var() / 2, rel=0.2)


def test_versions_that_agree_and_groups_without_tokens_tell_nothing() -> None:
    reported, named, _ = versions(1, 0.01)
    assert Evidence.of(reported, named, named).ratio == 0.0
    assert Evidence.of(reported[:0], named[:0], named[:0]).ratio == 0.0


def test_exact_agreement_has_a_floor_of_noise() -> None:
    _, named, other = versions(1, 0.01)
    ratio = Evidence.of(named, named, other).ratio
    assert math.isfinite(ratio)
    assert ratio < -1e6
