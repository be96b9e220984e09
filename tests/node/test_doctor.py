"""The doctor's checks: what is fit, what is only noted, and what is a problem."""

from __future__ import annotations

import json
import os
import socket
from pathlib import Path

import msgspec
import pytest

from nous_node.node import doctor
from nous_node.node.calibration import embedded_thresholds
from nous_node.node.doctor import (
    Check,
    check_clock,
    check_disk,
    check_home,
    check_port,
    check_reproducibility,
    checks,
    print_checks,
)
from nous_node.node.home import Home
from nous_node.node.statistics import Figures
from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Bound


def test_this_machine_is_fit_and_every_check_has_a_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert print_checks(tmp_path / "home", None, json=True) == 0
    told = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [one["name"] for one in told if one["state"] == "problem"] == []
    assert {"python", "torch", "libp2p", "home", "disk", "reproducibility", "bfloat16", "environments"} <= {
        one["name"] for one in told
    }
    texts = {one["name"]: one["text"] for one in told}
    assert "limit" in texts["reproducibility"]
    assert "verifies its first 4 groups" in texts["first groups"]


def test_a_problem_makes_the_exit_code_1_and_the_others_are_still_checked(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(device: str) -> Check:
        raise RuntimeError("no wheel for this machine")

    monkeypatch.setattr(doctor, "check_torch", broken)
    monkeypatch.setattr(doctor, "check_reproducibility", lambda *_: Check("reproducibility", "ok", ""))
    assert print_checks(tmp_path, None, json=False) == 1
    told = capsys.readouterr().out
    assert "no wheel for this machine" in told
    assert "environments" in told
    assert "1 problem\n" in told


def test_doctor_makes_no_identity(tmp_path: Path) -> None:
    assert "made on first start" in check_home(tmp_path / "home").text
    assert not (tmp_path / "home" / "identity.pem").exists()


def test_running_node_is_noticed_and_no_problem(tmp_path: Path) -> None:
    home = Home.open(tmp_path)
    home.identity()
    with home.lock():
        check = check_home(tmp_path)
    assert check.state == "ok"
    assert "a node is running" in check.text


def test_damaged_identity_is_a_problem(tmp_path: Path) -> None:
    Home.open(tmp_path).identity_file.write_text("no key")
    (tmp_path / "identity.pem").chmod(0o600)
    found = {check.name: check for check in checks_without_torch(tmp_path)}
    assert found["home"].state == "problem"
    assert "identity import" in found["home"].text


def checks_without_torch(home: Path) -> list[Check]:
    """The checks before the first heavy one."""
    found = []
    for check in checks(home):
        found.append(check)
        if check.name == "libp2p":
            break
    return found


def test_clock_behind_our_own_files_is_a_problem(tmp_path: Path) -> None:
    file = tmp_path / "last_run"
    file.touch()
    assert check_clock(tmp_path).state == "ok"
    future = file.stat().st_mtime + 100_000
    os.utime(file, (future, future))
    assert check_clock(tmp_path).state == "problem"


def test_port_in_use_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket() as other:
        other.bind(("0.0.0.0", 0))
        other.listen()
        monkeypatch.setattr(doctor, "DEFAULT_PORT", other.getsockname()[1])
        assert check_port().state == "note"
    assert check_port().state == "ok"


def test_little_disk_is_noted_and_none_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for limit, state in (("LOW_DISK", "note"), ("NO_DISK", "problem")):
        monkeypatch.setattr(doctor, limit, 1 << 60)
        assert check_disk(tmp_path / "not" / "there").state == state


def test_engine_that_computes_other_numbers_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    limit = embedded_thresholds().distance_max
    monkeypatch.setattr(doctor, "self_test", lambda device, dtype: Figures(40, 0.0, 0.0, 2 * limit))
    check = check_reproducibility()
    assert check.state == "problem"
    assert "would be refused" in check.text


def test_each_dtype_is_measured_against_what_was_calibrated_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []

    def measured(device: str, dtype: str) -> Figures:
        asked.append(dtype)
        return Figures(40, 0.01, 0.001, 0.02)

    monkeypatch.setattr(doctor, "self_test", measured)
    known = embedded_thresholds()
    loose = msgspec.structs.replace(known, logprobs=Bound(1.0, 1.0, 1.0), distances=Bound(1.0, 1.0, 1.0))
    found = {"float32": known, "bfloat16": msgspec.structs.replace(loose, distance_max=1.0)}
    monkeypatch.setattr(doctor, "_limits", found.get)
    assert check_reproducibility("cpu", "float32").state == "problem"
    assert check_reproducibility("cpu", "bfloat16").state == "ok"
    assert asked == ["float32", "bfloat16"]


def test_a_broken_engine_shows_in_a_dtype_that_nobody_calibrated(monkeypatch: pytest.MonkeyPatch) -> None:
    for distance, state in ((0.001, "ok"), (0.2, "problem"), (float("nan"), "problem")):
        monkeypatch.setattr(doctor, "self_test", lambda *_, d=distance: Figures(40, 0.01, d, 0.02))
        check = check_reproducibility("cpu", "bfloat16")
        assert (check.name, check.state) == ("bfloat16", state)
        assert "1.0e-02" in check.text


def test_bfloat16_differs_more_than_float32() -> None:
    exact, rough = doctor.self_test("cpu", "float32"), doctor.self_test("cpu", "bfloat16")
    assert exact.logprob < 1e-5 < rough.logprob
    assert exact.distance < rough.distance


def test_device_that_is_not_there_is_a_problem_and_nothing_is_measured_on_it() -> None:
    assert doctor.check_torch("cuda:999").state == "problem"
    assert "The device cuda:999 is missing" in doctor.check_torch("cuda:999").text
    assert check_reproducibility("cuda:999").state == "problem"


def test_device_that_has_no_such_name_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LocalError, match="device cannot be 'gpu'"):
        print_checks(tmp_path, "gpu", json=False)
