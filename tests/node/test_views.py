"""The three sinks of events, on canned events, and what is done to foreign text."""

from __future__ import annotations

import io
import json
import math
import os
import threading
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from nous_node.node.events import (
    Event,
    Note,
    RelayStatus,
    RunReady,
    Summary,
    TrainerStatus,
    VersionReport,
    VolunteerStatus,
    from_line,
)
from nous_node.node.panels import Scene
from nous_node.node.views import (
    PLAIN_S,
    LineView,
    LiveView,
    Pen,
    PlainWording,
    json_line,
    open_view,
)
from nous_node.node.wording import count, duration, moment, printable, refusals, size, sparkline

HOSTILE = "sort\x1b]0;owned\x07\x1b[2J\u202eevil\r\n[red]markup[/red]"

VOLUNTEER = VolunteerStatus(
    run="ab" * 32,
    name=HOSTILE,
    version=7,
    checkpoint="cd" * 32,
    peers=2,
    doing="generating",
    tokens_per_second=1234.5,
    generated_tokens=60000,
    groups_waiting=3,
    groups_given_up=1,
    accepted=120,
    refused={"stale": 3, "rate": 1},
    credit=54321,
    generating_share=0.9,
    seconds=75,
)
TRAINER = TrainerStatus(
    run="ab" * 32,
    name="demo",
    version=7,
    checkpoint="cd" * 32,
    volunteers=2,
    greedy=0.71,
    greedy_base=0.41,
    correct=0.55,
    reward=0.8,
    tokens_verified=123456,
    accepted=240,
    refused={"sampling-mismatch": 2},
    staleness=0.4,
    doing="learning",
    seconds=75,
)
VERSIONS = [
    VersionReport(i, "ef" * 32, reward=i / 10, greedy=0.4 + i / 20 if i % 2 else None) for i in range(8)
]
EVENTS: list[Event] = [
    Note("hello"),
    RunReady("ab" * 32, "demo", "nous1" + "x" * 300, ["/ip4/127.0.0.1/tcp/4001/p2p/12D3"]),
    VOLUNTEER,
    TRAINER,
    RelayStatus(run="ab" * 32, name="demo", peers=3, forwarded=9),
    *VERSIONS,
    Summary("Contributed 120 groups.", VOLUNTEER),
]


def test_the_last_picture_has_the_final_figures() -> None:
    scene = Scene()
    scene.apply(VolunteerStatus(accepted=1), "v")
    scene.apply(Summary("done", VolunteerStatus(accepted=2)), "v")
    assert scene.volunteers["v"].accepted == 2


def drawn(scene: Scene, width: int = 100, *, terminal: bool = True) -> str:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    console.print(scene)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_live_panels_show_what_a_volunteer_asks_for() -> None:
    scene = Scene()
    scene.apply(VOLUNTEER)
    text = drawn(scene)
    for wanted in (
        "abababab",
        "version 7",
        "1,234 tokens/s",
        "120 accepted",
        "stale 3",
        "54,321",
        "generating",
    ):
        assert wanted in text


def test_live_panels_show_what_a_trainer_asks_for() -> None:
    scene = Scene()
    scene.apply(TRAINER)
    for report in VERSIONS:
        scene.apply(report)
    text = drawn(scene)
    for wanted in (
        "reward",
        "greedy",
        "▂▂▃▄",
        "71 %",
        "base 41 %",
        "123.5 k verified",
        "sampling-mismatch 2",
        "0.40",
    ):
        assert wanted in text


def test_demo_shows_trainer_and_each_volunteer() -> None:
    scene = Scene()
    scene.apply(TRAINER, "trainer")
    scene.apply(VOLUNTEER, "volunteer 1")
    scene.apply(VOLUNTEER, "volunteer 2")
    text = drawn(scene)
    assert [name in text for name in ("trainer", "volunteer 1", "volunteer 2")] == [True] * 3


def test_live_view_leaves_the_invite_on_one_line_of_the_scroll_back() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    with LiveView(console) as view:
        for event in EVENTS:
            view.report(event)
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "nous-node join nous1" + "x" * 300 + "\n" in text
    assert "Contributed 120 groups." in text


@pytest.mark.parametrize("terminal", [True, False])
def test_no_view_lets_a_control_character_through(terminal: bool) -> None:
    scene = Scene()
    scene.apply(VOLUNTEER, HOSTILE)
    scene.apply(TrainerStatus(name=HOSTILE, doing=HOSTILE, refused={HOSTILE: 2}))
    scene.apply(RelayStatus(name=HOSTILE))
    plain = PlainWording(clock=lambda: 0.0)
    hostile: list[Event] = [
        Note(HOSTILE),
        RunReady("ab", HOSTILE, HOSTILE, [HOSTILE]),
        VolunteerStatus(doing=HOSTILE, refused={HOSTILE: 1}),
        Summary(HOSTILE, VOLUNTEER),
    ]
    lines = [plain(event, str(n)) or "" for n, event in enumerate(hostile)]
    for text in (drawn(scene, terminal=terminal), *lines):
        assert "\x1b" not in text
        assert "\x07" not in text
        assert "\u202e" not in text
        assert "[red]" in text


@given(st.text())
def test_printable_leaves_only_printable_characters(text: str) -> None:
    spaces = {character for character in text if unicodedata.category(character) == "Zs"}
    assert all(character.isprintable() or character in spaces for character in printable(text))
    assert "\x1b" not in printable(text)
    assert len(printable(text, 10)) <= 10 * 10 + 3


def test_printable_keeps_ordinary_text_of_any_script() -> None:
    assert printable("Größe 3 · 数字 🙂") == "Größe 3 · 数字 🙂"
    assert printable("a\tb\x9b\u2028") == "a\\x09b\\x9b\\u2028"


def test_plain_lines_come_at_most_every_few_seconds_but_notes_at_once() -> None:
    now = [0.0]
    wording = PlainWording(clock=lambda: now[0])
    assert "120 accepted" in (wording(VOLUNTEER) or "")
    assert wording(VOLUNTEER) is None
    assert wording(Note("careful", "warning")) == "[0 s] warning: careful"
    assert wording(VOLUNTEER, "another node") is not None
    now[0] = PLAIN_S + 0.1
    assert "3 waiting" in (wording(VOLUNTEER) or "")


def test_json_lines_round_trip_with_and_without_a_source() -> None:
    for event in EVENTS:
        assert from_line(json_line(event)) == event
        line = json_line(event, "volunteer 1")
        assert from_line(line) == event
        assert json.loads(line)["source"] == "volunteer 1"


def test_line_view_writes_every_note_in_order_and_only_the_last_waiting_status() -> None:
    stream = io.StringIO()
    view = LineView(stream, json_line)
    for number in range(50):  # before it is entered nothing is written: all of it waits
        view.report(VolunteerStatus(accepted=number))
        view.report(Note(str(number)))
    with view:
        pass
    events = [from_line(line) for line in stream.getvalue().splitlines()]
    notes = [event.text for event in events if isinstance(event, Note)]
    assert notes == [str(number) for number in range(50)]
    assert [event.accepted for event in events if isinstance(event, VolunteerStatus)] == [49]


def test_report_does_not_wait_for_a_reader_that_is_stuck() -> None:
    stuck, entered = threading.Event(), threading.Event()

    def write(lines: list[str]) -> None:
        entered.set()
        stuck.wait(30)

    pen = Pen(write, pause=0)
    pen.start()
    pen.put("first")
    assert entered.wait(10)
    for number in range(100_000):
        pen.put(str(number))
    stuck.set()
    pen.close()
    assert not pen.is_alive()


def test_a_closed_pipe_is_told_once_and_survived() -> None:
    reading, writing = os.pipe()
    os.close(reading)
    told: list[int] = []
    stream = os.fdopen(writing, "w")
    view = LineView(stream, json_line, on_broken=lambda: told.append(1))
    with view:
        view.report(Note("a"))
    view._write(["again"])
    assert told == [1]
    with pytest.raises(BrokenPipeError):  # what it still buffers goes nowhere
        stream.close()


def test_view_without_a_terminal_is_plain_lines_or_json() -> None:
    for as_json in (True, False):
        stream = io.StringIO()
        with open_view(json=as_json, stream=stream) as view:
            view.report(Note("hello"))
        assert stream.getvalue().startswith("{" if as_json else "[0 s] hello")


def test_figures_are_short() -> None:
    assert [count(n) for n in (0, 9876, 54321, 1_234_567)] == ["0", "9,876", "54.3 k", "1.2 M"]
    assert [size(n) for n in (512, 25_600, 3 << 30)] == ["512 B", "25.0 KiB", "3.0 GiB"]
    assert [duration(n) for n in (12.9, 200, 18120)] == ["12 s", "3 min 20 s", "5 h 02 min"]
    assert refusals({}) == "0 refused"
    assert refusals({"a": 1, "b": 3, "c": 2, "d": 1, "e": 1}) == "8 refused (b 3, c 2, a 1, d 1, ...)"


def test_sparkline_never_exceeds_its_width_and_clips() -> None:
    assert sparkline([], 10) == ""
    assert sparkline([0, 0.5, 1, 7, -3], 10) == "▁▅███"[:4] + "▁"
    assert len(sparkline([0.5] * 1000, 60)) == 60
    assert sparkline([0, 1], 5, ascii_only=True) == "_@"


@pytest.mark.parametrize("milliseconds", [1e300, -1e300, 1e22, math.inf, math.nan])
def test_times_that_cannot_be_are_told_all_the_same(milliseconds: float) -> None:
    assert moment(milliseconds) == "a time that no calendar has"
