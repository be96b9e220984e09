"""The demo's conduct with processes that play `train` and `join`: figures, exit codes, nobody left behind."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import msgspec
import pytest

from nous_node.node.children import Family
from nous_node.node.cli_exit import Exit
from nous_node.node.demo import LEARNING, DemoOptions, Tally, clear, demo_identity, run_demo
from nous_node.node.demo_report import DemoReport, told
from nous_node.node.events import Summary, TrainerStatus, VersionReport, VolunteerStatus
from nous_node.node.plots import DOTS_PER_INCH, INCHES, plot, smoothed
from nous_node.protocol.errors import LocalError

PLAYER = """
import os, signal, sys, time
from nous_node.node.events import *

def say(event):
    print(to_line(event), flush=True)

class Stop(Exception):
    pass

def stop(*_):
    raise Stop

signal.signal(signal.SIGINT, stop)
role, mode = sys.argv[2], sys.argv[1]
try:
    if role == "train":
        if mode == "trainer-fails":
            print("the port is in use", file=sys.stderr)
            sys.exit(3)
        say(RunReady("ab", "demo", "nous1fake", []))
        say(VersionReport(0, "00" * 32, greedy=0.4))
        for version in range(1, 1000):
            greedy = 0.5 if version % 100 == 0 else None
            say(VersionReport(version, f"{version % 256:02x}" * 32, reward=0.5, greedy=greedy))
            say(TrainerStatus(version=version, accepted=version, wire_bytes=600, tokens_verified=200))
            time.sleep(0.02)
    print("no event", flush=True)
    if mode == "volunteer-fails" and any(a.endswith("volunteer-1") for a in sys.argv):
        sys.exit(5)
    for n in range(1000):
        say(VolunteerStatus(generated_tokens=1000, accepted=n))
        time.sleep(0.02)
except Stop:
    if mode == "stubborn":
        time.sleep(60)
    if role == "join":
        say(Summary("done", VolunteerStatus(generated_tokens=5000)))
"""


@pytest.fixture(autouse=True)
def _few_tasks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("nous_node.node.demo_report.TASKS", 64)


def played(mode: str, options: DemoOptions) -> tuple[int, Family]:
    family = Family(program=(sys.executable, "-P", "-c", PLAYER, mode))
    return run_demo(options, family), family


def alive(family: Family) -> list[str]:
    return [child.name for child in family.children if _exists(child.process.pid)]


def _exists(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def test_demo_that_learns_nothing_says_so_and_ends_with_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DemoOptions(seconds=60, seed=3, report=tmp_path / "r.json", target=0.5, home=tmp_path / "home")
    code, family = played("good", options)
    assert code == Exit.FAILED
    assert alive(family) == []
    report = msgspec.json.decode((tmp_path / "r.json").read_bytes(), type=DemoReport)
    assert report.greedy_after == report.greedy_before
    assert 0.2 < report.greedy_before < 0.6
    assert report.groups_accepted >= 1
    assert report.bytes_per_trained_token == 3.0
    assert report.generated_tokens_per_second * report.seconds == pytest.approx(10_000, rel=0.2)
    assert (report.volunteers, report.volunteers_left, report.seed) == (2, 2, 3)
    assert report.checkpoint.hash == f"{report.versions[-1].version % 256:02x}" * 32
    assert Path(report.checkpoint.path).is_dir()
    text = capsys.readouterr().out
    assert "did not learn" in text
    assert report.checkpoint.path in text


def test_trainer_that_dies_is_told_with_the_end_of_its_log_and_its_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, family = played("trainer-fails", DemoOptions(home=tmp_path))
    assert code == Exit.NETWORK
    assert alive(family) == []
    assert "the port is in use" in capsys.readouterr().out


def test_volunteer_that_dies_is_told_and_the_others_go_on(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = DemoOptions(seconds=4, home=tmp_path, report=tmp_path / "r.json")
    code, _ = played("volunteer-fails", options)
    assert code == Exit.FAILED
    assert "volunteer-1 ended with 5" in capsys.readouterr().out
    assert json.loads((tmp_path / "r.json").read_bytes())["volunteers_left"] == 1


def test_demo_without_any_volunteer_left_ends(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, family = played("volunteer-fails", DemoOptions(volunteers=1, seconds=60, home=tmp_path))
    assert code == Exit.INTERNAL
    assert alive(family) == []
    assert "No volunteer is left" in capsys.readouterr().out


def test_child_that_does_not_finish_is_killed(tmp_path: Path) -> None:
    family = Family(program=(sys.executable, "-P", "-c", PLAYER, "stubborn"))
    child = family.start("stubborn", ["train"], tmp_path / "log")
    family.events.get(timeout=30)
    assert family.stop([child], seconds=0.3) == [child]
    assert child.code == -signal.SIGKILL


def test_ctrl_c_ends_the_demo_early_with_all_its_figures(tmp_path: Path) -> None:
    script = (
        "import sys\nfrom pathlib import Path\nfrom nous_node.node.demo import *\n"
        f"family = Family(program=(sys.executable, '-P', '-c', {PLAYER!r}, 'good'))\n"
        "sys.exit(run_demo(DemoOptions(seconds=100, json=True, home=Path(sys.argv[1])), family))\n"
    )
    command = [sys.executable, "-P", "-c", script, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        while '"source":"volunteer-2"' not in process.stdout.readline():
            pass
        began = time.monotonic()
        process.send_signal(signal.SIGINT)
        lines = process.stdout.read().splitlines()
    assert process.returncode == Exit.FAILED
    assert time.monotonic() - began < 60
    assert json.loads(lines[-1])["event"] == "demo"


def test_report_that_cannot_be_written_is_told_before_the_demo_begins(tmp_path: Path) -> None:
    family = Family(program=("/does/not/exist",))
    for place in (tmp_path / "none" / "r.json", tmp_path):
        with pytest.raises(LocalError, match=f"cannot be written to {place} .*--report"):
            run_demo(DemoOptions(report=place, home=tmp_path / "home"), family)
    assert not (tmp_path / "home").exists()
    assert family.children == []


def test_only_what_is_kept_of_a_folder_stays(tmp_path: Path) -> None:
    kept = tmp_path / "trainer" / "runs" / "demo" / "checkpoints" / "000007"
    for folder in (kept, kept.with_name("000006"), tmp_path / "volunteer-1", tmp_path / "logs"):
        folder.mkdir(parents=True)
        (folder / "file").touch()
    (tmp_path / "trainer" / "identity.pem").touch()
    clear(tmp_path, kept)
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == [kept / "file"]
    clear(tmp_path, tmp_path / "logs")
    assert list(tmp_path.iterdir()) == []


def test_what_children_say_to_their_own_terminal_is_not_repeated(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    played("good", DemoOptions(seconds=5, home=tmp_path))
    assert "nous1fake" not in capsys.readouterr().out


def test_tally_takes_the_last_word_of_each_process() -> None:
    tally = Tally()
    tally.apply("a", VolunteerStatus(accepted=1))
    tally.apply("a", Summary("", VolunteerStatus(accepted=2)))
    tally.apply("trainer", TrainerStatus(accepted=3))
    tally.apply("trainer", VersionReport(1, "", greedy=0.7))
    tally.apply("trainer", VersionReport(2, ""))
    assert tally.volunteers["a"].accepted == 2
    assert tally.trainer.accepted == 3
    assert [tally.reached(target) for target in (None, 0.6, 0.8)] == [False, True, False]


def test_keys_differ_between_seeds_and_names() -> None:
    keys = {demo_identity(seed, name).key for seed in (0, 1) for name in ("trainer", "volunteer-1")}
    assert len(keys) == 4
    assert demo_identity(1, "trainer").key in keys


def test_outcome_is_told_in_words(tmp_path: Path) -> None:
    report = msgspec.convert(
        {
            **dict.fromkeys(("greedy_before", "sampled_before"), 0.4),
            **dict.fromkeys(("greedy_after", "sampled_after"), 0.85),
            **dict.fromkeys(("checkpoints", "volunteers", "volunteers_left", "seed"), 2),
            "seconds": 150.0,
            "groups_accepted": 1234,
            "groups_refused": {"stale": 3},
            "bytes_per_trained_token": 5.3,
            "generated_tokens_per_second": 4321.0,
            "model": "llama",
            "judged": "greedy",
            "environments": "sort-digits",
            "tasks": 512,
            "environment_share": 0.0312,
            "checkpoint": {"path": "x", "hash": "ab"},
            "versions": [],
        },
        DemoReport,
    )
    text = told(report, 0.2)
    for wanted in (
        "learned:",
        "40 % -> 85 %",
        "2 min 30 s",
        "1,234 accepted, 3 refused (stale 3)",
        "5.3 bytes",
        "3.1 %",
    ):
        assert wanted in text


def report_of(versions: int) -> DemoReport:
    point = {"reward": 0.5, "correct": 0.25}
    return msgspec.convert(
        {
            **dict.fromkeys(("greedy_before", "sampled_before", "greedy_after", "sampled_after"), 0.5),
            **dict.fromkeys(("checkpoints", "volunteers", "volunteers_left", "seed", "tasks"), 2),
            **dict.fromkeys(("seconds", "bytes_per_trained_token", "generated_tokens_per_second"), 60.0),
            **dict.fromkeys(("model", "environments"), "x"),
            "judged": "sampled",
            "groups_accepted": 1,
            "groups_refused": {},
            "environment_share": 0.0,
            "checkpoint": {"path": "x", "hash": "ab"},
            "versions": [
                {**point, "seconds": 9.0 * n, "version": n, "greedy": None if n % 2 else 0.5}
                for n in range(versions)
            ],
        },
        DemoReport,
    )


@pytest.mark.parametrize("versions", [0, 1, 2, 40])
def test_the_course_is_drawn_however_short_it_was(tmp_path: Path, versions: int) -> None:
    plot(report_of(versions), tmp_path / "course.png", "a title")
    header = (tmp_path / "course.png").read_bytes()[:24]
    assert header.startswith(b"\x89PNG")
    assert int.from_bytes(header[16:20], "big") == INCHES[0] * DOTS_PER_INCH


def test_a_running_mean_is_over_what_there_is() -> None:
    assert smoothed([1.0, 0.0, 1.0, 0.0], 2) == [1.0, 0.5, 0.5, 0.5]
    assert smoothed([]) == []


def test_a_demo_of_another_run_takes_its_settings_and_the_model_over_them(tmp_path: Path) -> None:
    settings = tmp_path / "run.toml"
    settings.write_text('group = 4\nmodel = "nowhere"\n[environments.sort-digits]\nconfig = {length = 3}\n')
    plan = DemoOptions(config=settings, model="elsewhere").plan
    assert (plan.group, plan.model) == (4, "elsewhere")
    assert plan.environments["sort-digits"].config == {"length": 3}
    assert DemoOptions().plan.learning == LEARNING


@pytest.mark.parametrize(("judged", "said"), [("greedy", "did not learn"), ("sampled", "learned:")])
def test_what_has_to_rise_is_said_by_the_report(judged: str, said: str) -> None:
    report = msgspec.structs.replace(report_of(1), judged=judged, sampled_before=0.1)
    assert said in told(report, 0.2)
