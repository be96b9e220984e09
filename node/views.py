"""Where events go: a live terminal view, plain lines where there is no terminal, or JSON lines.

    view = open_view(json=False)
    with view:
        await volunteer(..., report=view.report, ...)

`report` never blocks: a thread does the writing, so that a stopped terminal or a full pipe cannot hold up
the network. Statuses supersede each other while they wait; notes, versions and summaries are kept.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Protocol, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from .events import (
    Event,
    Note,
    RelayStatus,
    RunReady,
    Summary,
    TrainerStatus,
    VersionReport,
    VolunteerStatus,
    to_line,
)
from .panels import Scene
from .wording import count, duration, plural, printable, refusals, share

REDRAW_S = 0.25
"""Four pictures a second look alive and cost about 1 % of a core."""
PLAIN_S = 5.0
"""A log is read later: one status line in five seconds is enough."""
MAX_PENDING = 1000
"""Lines that wait for a slow reader; beyond it the oldest go, so that memory stays bounded."""
CLOSE_S = 2.0
"""How long the end waits for a reader that does not read."""


class View(Protocol):
    """A sink of events that is entered before the first and left after the last."""

    def report(self, event: Event, source: str = "") -> None:
        """Takes one event; `source` says which node it is from where several are watched."""

    def __enter__(self) -> View: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...


def open_view(*, json: bool, stream: TextIO | None = None) -> View:
    """The view that fits: JSON lines if asked for, else live on a terminal, else plain lines."""
    stream = stream or sys.stdout
    if json:
        return LineView(stream, json_line, on_broken=stop_this_process)
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveView(console)
    return LineView(stream, PlainWording())


def stop_this_process() -> None:
    """What a closed pipe means to any program of a pipeline: nobody listens, so finish (cleanly)."""
    os.kill(os.getpid(), signal.SIGTERM)


class Pen(threading.Thread):
    """Writes what is put into it, in order, in a thread of its own, at most once in `pause` seconds.

    An item put under a key replaces the one that waits under that key. `write` gets all that waits.
    """

    def __init__(self, write: Callable[[list[str]], None], pause: float) -> None:
        super().__init__(name="pen", daemon=True)
        self._write, self._pause = write, pause
        self._waiting: dict[object, str] = {}
        self._changed = threading.Condition()
        self._closing = False
        self._numbers = 0

    def put(self, line: str, key: object | None = None) -> None:
        """Queue a line; never blocks for longer than it takes to swap a dict."""
        with self._changed:
            self._numbers += 1
            key = self._numbers if key is None else key
            self._waiting.pop(key, None)
            self._waiting[key] = line
            if len(self._waiting) > MAX_PENDING:
                self._waiting.pop(next(iter(self._waiting)))
            self._changed.notify()

    def close(self) -> None:
        """Write what waits and end; gives up after CLOSE_S."""
        with self._changed:
            self._closing = True
            self._changed.notify()
        self.join(CLOSE_S)

    def run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closing)
                lines, self._waiting = list(self._waiting.values()), {}
                closing = self._closing
            if lines:
                self._write(lines)
            if closing:
                return
            with self._changed:
                self._changed.wait_for(lambda: self._closing, timeout=self._pause)


class LineView:
    """One line an event, worded by `wording`, which gives None for what is not worth a line now."""

    def __init__(
        self,
        stream: TextIO,
        wording: Callable[[Event, str], str | None],
        on_broken: Callable[[], None] | None = None,
    ) -> None:
        self._stream, self._wording, self._on_broken = stream, wording, on_broken
        self._broken = False
        self._pen = Pen(self._write, pause=0.05)

    def report(self, event: Event, source: str = "") -> None:
        line = self._wording(event, source)
        if line is not None:
            is_status = isinstance(event, VolunteerStatus | TrainerStatus | RelayStatus)
            self._pen.put(line, (type(event), source) if is_status else None)

    def __enter__(self) -> LineView:
        self._pen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pen.close()

    def _write(self, lines: list[str]) -> None:
        if self._broken:
            return
        try:
            self._stream.write("".join(line + "\n" for line in lines))
            self._stream.flush()
        except (OSError, ValueError):  # the reader is gone, or the stream was closed
            self._broken = True
            if self._on_broken is not None:
                self._on_broken()


class LiveView:
    """Panels that are redrawn in place, with notes scrolling above them."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self.scene = Scene()
        self._live = Live(self.scene, console=console, auto_refresh=False, vertical_overflow="crop")
        self._pen = Pen(self._write, REDRAW_S)

    def report(self, event: Event, source: str = "") -> None:
        self.scene.apply(event, source)
        lines = above_picture(event, source)
        for line in lines:
            self._pen.put(line)
        if not lines:
            self._pen.put("", key="picture")

    def __enter__(self) -> LiveView:
        self._live.start()
        self._pen.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._pen.close()
        self._live.stop()

    def _write(self, lines: list[str]) -> None:
        for line in lines:
            if line:
                self._console.print(Text(line), soft_wrap=True)
        self._live.refresh()


def json_line(event: Event, source: str = "") -> str:
    """`events.to_line`, with the source as one more key where there is one."""
    line = to_line(event)
    return line if not source else line[:-1] + f',"source":"{source}"}}'


def above_picture(event: Event, source: str = "") -> list[str]:
    """The lines that an event leaves in the scroll-back of the live view."""
    who = f"{source}: " if source else ""
    match event:
        case Note():
            return [who + note_line(event)]
        case RunReady():
            return [who + line for line in ready_lines(event)]
        case Summary():
            return [who + printable(event.text)]
        case _:
            return []


def note_line(note: Note) -> str:
    return ("" if note.level == "info" else f"{note.level}: ") + printable(note.text)


def ready_lines(event: RunReady) -> list[str]:
    """How to join; the invite is alone on its line so that it can be copied as a whole."""
    name = printable(event.name, 64)
    return [
        f"run {name} ({event.run[:16]}) is reachable at {', '.join(printable(a) for a in event.addresses)}",
        "join it from another terminal or machine with:",
        f"nous-node join {printable(event.invite, 4096)}",
    ]


class PlainWording:
    """Lines for a log: notes at once, statuses and versions at most every PLAIN_S seconds a source."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._start = clock()
        self._due: dict[tuple[str, str], float] = {}

    def __call__(self, event: Event, source: str = "") -> str | None:
        now = self._clock()
        text = self._text(event, source, now)
        if text is None:
            return None
        stamp, who = f"[{duration(now - self._start)}]", f"{source}: " if source else ""
        return "\n".join(f"{stamp} {who}{line}" for line in text.split("\n"))

    def _text(self, event: Event, source: str, now: float) -> str | None:
        match event:
            case Note():
                return note_line(event)
            case RunReady():
                return "\n".join(ready_lines(event))
            case Summary():
                return printable(event.text)
            case VersionReport():
                return version_line(event) if self._take_turn("version", source, now) else None
            case VolunteerStatus():
                return volunteer_line(event) if self._take_turn("status", source, now) else None
            case TrainerStatus():
                return trainer_line(event) if self._take_turn("status", source, now) else None
            case RelayStatus():
                return relay_line(event) if self._take_turn("status", source, now) else None

    def _take_turn(self, kind: str, source: str, now: float) -> bool:
        if now < self._due.get((kind, source), now):
            return False
        self._due[kind, source] = now + PLAIN_S
        return True


def version_line(report: VersionReport) -> str:
    greedy = "" if report.greedy is None else f", held-out greedy {share(report.greedy)}"
    again = "" if report.rolled_back is None else f", the weights of version {report.rolled_back} again"
    return (
        f"version {report.version}: reward {report.reward:.2f}, correct {share(report.correct)}{greedy}, "
        f"{plural(report.groups, 'group')}, staleness {report.staleness:.1f}{again}"
    )


def volunteer_line(status: VolunteerStatus) -> str:
    version = "no checkpoint yet" if status.version < 0 else f"version {status.version}"
    return (
        f"{version}, {plural(status.peers, 'peer')}, {count(status.tokens_per_second)} tokens/s, "
        f"{status.accepted:,} accepted, {refusals(status.refused)}, {status.groups_waiting:,} waiting, "
        f"credit {count(status.credit)}; {printable(status.doing, 120)}"
    )


def trainer_line(status: TrainerStatus) -> str:
    return (
        f"version {max(status.version, 0)}, {plural(status.volunteers, 'volunteer')}, "
        f"reward {status.reward:.2f}, greedy {share(status.greedy)}, {status.accepted:,} accepted, "
        f"{refusals(status.refused)}, {count(status.tokens_verified)} tokens verified, "
        f"{status.groups_per_second:.1f} groups/s; {printable(status.doing, 120)}"
    )


def relay_line(status: RelayStatus) -> str:
    return (
        f"{plural(status.peers, 'peer')}, {status.forwarded:,} forwarded, {refusals(status.refused)}, "
        f"{status.chunks:,} chunks held"
    )
