"""Calibration: thresholds from figures that are made up, and one of the embedded default from end to end."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from nous_node.node import calibrate, calibration
from nous_node.node.calibrate import CalibrateOptions, run_calibrate
from nous_node.node.calibrate_engines import Course, kernels
from nous_node.node.calibrate_figures import BFLOAT16, FLOAT32, Margins, Observation, rounded_up, thresholds
from nous_node.node.calibration import PACKAGED, embedded_thresholds, find_thresholds, read_calibration
from nous_node.node.runfolder import RunFolder
from nous_node.node.statistics import Drift, Figures, check_figures
from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Thresholds

TOKENS, GROUP = 64, 8


def observed(seed: int, groups: int = 64, scale: float = 1.0, kernel: str = "avx512") -> list[Observation]:
    """Groups whose tokens differ like those of a model in bfloat16."""
    draw = np.random.default_rng(seed)
    made = []
    for _ in range(groups):
        parts = []
        for _ in range(GROUP):
            count = int(draw.integers(1, TOKENS))
            differences, distances = scale * draw.gamma(1, 0.03, count), scale * draw.gamma(0.1, 0.01, count)
            parts.append(
                Figures(count, float(differences.mean()), float(distances.mean()), float(distances.max()))
            )
        made.append(Observation(kernel, Figures.together(parts), parts, float(draw.uniform(0.01, 1))))
    return made


def strange(by: float = 0.2) -> list[Observation]:
    figures = Figures(TOKENS, 0.03, by, 1.0)
    return [Observation("avx512", figures, [figures], None)]


def calibrated(honest: list[Observation], margins: Margins = BFLOAT16) -> Thresholds:
    return thresholds(honest, strange(), len(honest), margins, "in words")


def test_no_group_and_no_trajectory_that_was_seen_is_refused_and_no_peer_drifts() -> None:
    for margins, scale in ((BFLOAT16, 1.0), (FLOAT32, 1e-5)):
        honest = [*observed(1, scale=scale), *observed(2, kernel="avx2", scale=1.2 * scale)]
        limits, sums = calibrated(honest, margins), Drift()
        for one in honest:
            for part in (one.group, *one.trajectories):
                check_figures(part, limits, "part")
            sums = sums.after(one.group, None, limits)
            sums.check(limits)


def test_groups_of_the_same_kind_that_were_not_seen_pass_too() -> None:
    limits = calibrated(observed(1))
    for one in observed(3):
        for part in (one.group, *one.trajectories):
            check_figures(part, limits, "part")


def test_means_are_those_of_the_engine_that_differs_most() -> None:
    honest = observed(1)
    more = calibrated([*honest, *observed(2, kernel="avx2", scale=1.5)])
    alone = calibrated(honest)
    assert more.logprobs.mean > 1.3 * alone.logprobs.mean
    few = [*honest, *observed(2, groups=2, kernel="default", scale=1.5)]  # two groups are no mean
    assert calibrated(few).logprobs.mean == alone.logprobs.mean


def test_limits_leave_room_for_other_text_where_all_that_was_seen_is_alike() -> None:
    alike = Figures(100.0, 0.04, 1e-3, 0.05)
    limits = calibrated([Observation("avx512", alike, [alike], 0.5)] * 32)
    assert limits.logprobs.limit == pytest.approx(1.25 * 0.04, rel=0.1)
    assert limits.distances.limit == pytest.approx(1.75e-3, rel=0.1)


def test_in_float32_limits_lie_far_above_rounding_and_means_at_a_tenth_of_them() -> None:
    rounding = [
        replace_figures(one, lambda figures: replace(figures, logprob=8e-7, distance=0.0, largest=0.0))
        for one in observed(1)
    ]
    limits = calibrated(rounding, FLOAT32)
    assert limits.logprobs.limit == pytest.approx(20 * 8e-7, rel=0.1)
    assert limits.distances.limit == pytest.approx(limits.logprobs.limit / 100, rel=0.1)
    assert limits.distance_max == pytest.approx(limits.logprobs.limit, rel=0.1)
    for bound in (limits.logprobs, limits.distances):
        assert bound.mean == bound.deviation == pytest.approx(bound.limit / 10, rel=0.1)


def replace_figures(one: Observation, change) -> Observation:
    return Observation(one.kernel, change(one.group), [change(part) for part in one.trajectories], one.stop)


def test_the_share_of_false_refusals_and_the_rest_follow_from_the_groups() -> None:
    honest = observed(1)
    limits = calibrated(honest)
    assert (limits.groups, limits.false_refusals) == (64, 3 / 64)
    assert limits.tokens == int(np.median([one.group.tokens for one in honest]))
    assert limits.calibrated == "in words"
    least = min(one.stop for one in honest if one.stop is not None)
    assert 1e-9 <= limits.stop_probability <= min(least / 100, 1e-4 / limits.tokens) * 1.5
    assert limits.distance_max >= 2 * max(one.group.largest for one in honest)


def test_the_same_figures_make_the_same_thresholds() -> None:
    assert calibrated(observed(1)) == calibrated(observed(1))


def test_honest_figures_like_noise_are_said_so() -> None:
    with pytest.raises(LocalError, match="cannot be told apart"):
        thresholds(observed(1), strange(0.001), 64, BFLOAT16, "in words")
    broken = [
        replace_figures(one, lambda figures: replace(figures, logprob=float("nan"))) for one in observed(1)
    ]
    with pytest.raises(LocalError, match="no numbers"):
        calibrated(broken)


@pytest.mark.parametrize(
    ("value", "expected"), [(1.0, 1.0), (0.0123, 0.013), (8.61e-7, 8.7e-7), (9.96e-5, 1e-4)]
)
def test_limits_are_rounded_up_to_two_digits(value: float, expected: float) -> None:
    assert rounded_up(value) == expected


def test_every_set_of_instructions_makes_its_share(base_run: RunFolder, tmp_path: Path) -> None:
    for capability, names in (
        ("AVX512", ["avx512", "avx2", "default"]),
        ("AVX2", ["avx2", "default"]),
        ("DEFAULT", ["default"]),
        ("SVE256", ["sve256"]),
    ):
        found = kernels(capability, 2)
        assert [one.name for one in found] == names
        assert sum(one.weight for one in found) == 16
        course = Course(base_run, found, 64, tmp_path / "log")
        shares = course._shares()
        assert sorted(n for share in shares for n in share) == list(range(64))
        assert [len(share) for share in shares] == [4 * one.weight for one in found]


def test_a_calibration_of_the_embedded_default_is_found_by_a_run_of_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """One set of instructions, so that two processes do."""
    monkeypatch.setattr(calibrate, "_capability", lambda: "DEFAULT")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    run_calibrate(CalibrateOptions(None, [], None, 64, None, None, tmp_path, True))
    said = json.loads(capsys.readouterr().out)
    file = tmp_path / "calibrations" / "nous-default-float32.json"
    assert said["file"] == str(file)
    made = read_calibration(file)
    assert made.thresholds.model == embedded_thresholds().model
    assert made.thresholds.groups == 8
    assert str(tmp_path) not in file.read_text()
    assert made.thresholds.model is not None
    found = find_thresholds(made.thresholds.model, "float32", tmp_path)
    assert found == embedded_thresholds(), "a quick try replaces nothing"
    monkeypatch.setattr(calibration, "PACKAGED", tmp_path / "none")
    assert find_thresholds(made.thresholds.model, "float32", tmp_path) == made.thresholds


def test_options_that_make_no_sense_are_said_so(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="float32 or bfloat16"):
        run_calibrate(CalibrateOptions(None, [], "int8", 64, None, None, tmp_path, True))
    with pytest.raises(LocalError, match="do not fit"):
        run_calibrate(CalibrateOptions(None, [], None, 64, 100_000, None, tmp_path, True))


def test_the_settings_of_the_run_that_is_meant_are_measured(tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text("max_tokens = 5\ngroup = 4\n[environments.sort-digits]\nconfig = {length = 3}\n")
    options = CalibrateOptions(None, [], None, 64, 7, None, None, False, config=settings)
    plan = calibrate._plan(options)
    assert (plan.max_tokens, plan.group, plan.uncalibrated) == (7, 4, True)
    assert plan.environments["sort-digits"].config == {"length": 3}
    assert calibrate._flags(options) == f" --config {settings} --max-tokens 7"


def test_the_run_that_was_measured_is_the_one_that_is_proposed() -> None:
    model = Path("my models/tea")
    options = CalibrateOptions(model, ["sort-digits=2"], "bfloat16", 64, 32, None, None, False)
    told = calibrate._flags(options)
    assert told == " --model 'my models/tea' --env sort-digits=2 --dtype bfloat16 --max-tokens 32"
    assert calibrate._flags(CalibrateOptions(None, [], None, 64, None, None, None, False)) == ""


@pytest.mark.parametrize("file", sorted(PACKAGED.glob("*.json")), ids=lambda file: file.stem)
def test_packaged_calibrations_are_whole(file: Path) -> None:
    """Each is for weights, of enough groups to say something, and found under its own name."""
    made = read_calibration(file)
    limits = made.thresholds
    assert file.stem == f"{made.name}-{made.dtype}"
    assert limits.model is not None
    assert find_thresholds(limits.model, made.dtype) == limits
    assert limits.groups >= 64
    assert limits.false_refusals == pytest.approx(3 / limits.groups)
    for bound in (limits.logprobs, limits.distances):
        assert bound.mean < bound.limit
    assert "/" not in made.name + limits.calibrated
