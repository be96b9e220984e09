"""The live view's pictures: what is known of a node, and how it is drawn.

A `Scene` keeps the newest of everything that was reported; `draw` turns it into rich renderables. Foreign
text enters as `Text`, never as markup.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from rich.console import Console, ConsoleOptions, Group, RenderableType, RenderResult
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from .events import Event, RelayStatus, Summary, TrainerStatus, VersionReport, VolunteerStatus
from .wording import count, duration, plural, printable, refusals, share, size, sparkline, states

MAX_VERSIONS = 4096
"""Version reports that are kept for the curve: an hour of the demo's small steps."""
MAX_SOURCES = 8
"""Volunteers that are drawn; more than that do not fit a screen."""
CURVE_WIDTH = 60
"""Columns of a curve: fits beside its label in a terminal of 80."""
RECENT = 20
"""Versions that a shown mean is over: single small batches jump about."""


@dataclass(slots=True)
class Scene:
    """The newest status by source, and the versions so far."""

    volunteers: dict[str, VolunteerStatus] = field(default_factory=dict)
    trainer: TrainerStatus | None = None
    relay: RelayStatus | None = None
    versions: deque[VersionReport] = field(default_factory=lambda: deque(maxlen=MAX_VERSIONS))

    def apply(self, event: Event, source: str = "") -> None:
        """Takes in a status, also the last one of a summary, or a version; other events change no picture."""
        match event.status if isinstance(event, Summary) else event:
            case VolunteerStatus() as status:
                self.volunteers[source] = status
            case TrainerStatus() as status:
                self.trainer = status
            case RelayStatus() as status:
                self.relay = status
            case VersionReport() as report:
                self.versions.append(report)
            case _:
                pass

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        yield self.draw(ascii_only=options.ascii_only)

    def draw(self, *, ascii_only: bool = False) -> RenderableType:
        """All panels, one under the other."""
        panels: list[RenderableType] = []
        if self.trainer is not None:
            panels.append(trainer_panel(self.trainer, list(self.versions), ascii_only=ascii_only))
        if self.relay is not None:
            panels.append(relay_panel(self.relay))
        for source, status in list(self.volunteers.items())[:MAX_SOURCES]:
            panels.append(volunteer_panel(status, source))
        return Group(*(panels or [Text("starting ...", style="dim")]))


def volunteer_panel(status: VolunteerStatus, source: str = "") -> Panel:
    """How a volunteer stands: run, checkpoint, peers, speed, what became of its groups, credit."""
    waiting = f"{status.groups_waiting:,} waiting"
    given_up = f", {status.groups_given_up:,} given up" if status.groups_given_up else ""
    rows = [
        ("run", f"{printable(status.name, 64)}  {status.run[:16]}"),
        ("checkpoint", f"{_version(status.version)}  {status.checkpoint[:16]}"),
        ("peers", f"{status.peers:,}"),
        ("speed", f"{count(status.tokens_per_second)} tokens/s, {_time(status)}"),
        ("groups", f"{status.accepted:,} accepted, {refusals(status.refused)}, {waiting}{given_up}"),
        ("credit", f"{plural(status.credit, 'token')} of {status.generated_tokens:,} sampled"),
        ("standing", _standing(status)),
        ("now", printable(status.doing, 120)),
    ]
    return _panel(source or "volunteer", rows, status.seconds)


def trainer_panel(status: TrainerStatus, versions: list[VersionReport], *, ascii_only: bool = False) -> Panel:
    """How a trainer stands, with reward and accuracy over the versions."""
    rate = f"{status.groups_per_second:.1f} groups/s, {size(status.wire_bytes)} received"
    base = f" (base {share(status.greedy_base)})" if status.greedy_base is not None else ""
    rows = [
        ("run", f"{printable(status.name, 64)}  {status.run[:16]}"),
        ("checkpoint", f"{_version(status.version)}  {status.checkpoint[:16]}"),
        ("volunteers", f"{status.volunteers:,}, {plural(status.peers, 'peer')}"),
        ("keys", states(status.keys)),
        *_curves(versions, ascii_only=ascii_only),
        ("accuracy", f"held-out greedy {share(status.greedy)}{base}, sampled {share(status.correct)}"),
        ("tokens", f"{count(status.tokens_verified)} verified, {count(status.tokens_trained)} trained on"),
        ("groups", f"{status.accepted:,} accepted, {refusals(status.refused)}, {status.waiting:,} waiting"),
        ("traffic", rate),
        ("staleness", f"{status.staleness:.2f} versions"),
        ("now", printable(status.doing, 120)),
    ]
    return _panel("trainer", rows, status.seconds)


def relay_panel(status: RelayStatus) -> Panel:
    """How a relay stands."""
    rows = [
        ("run", f"{printable(status.name, 64)}  {status.run[:16]}"),
        ("checkpoint", _version(status.version)),
        ("peers", f"{status.peers:,}"),
        ("gossip", f"{status.forwarded:,} forwarded, {refusals(status.refused)}"),
        ("chunks", f"{status.chunks:,} held"),
    ]
    return _panel("relay", rows, status.seconds)


def _curves(versions: list[VersionReport], *, ascii_only: bool) -> list[tuple[str, str]]:
    """Rows for the reward and, where it was measured, the greedy accuracy."""
    if not versions:
        return []
    rewards = [report.reward for report in versions if report.version > 0] or [0.0]
    recent = rewards[-RECENT:]
    line = sparkline(rewards, CURVE_WIDTH, ascii_only=ascii_only)
    rows = [("reward", f"{line} {sum(recent) / len(recent):.2f}")]
    greedy = [report.greedy for report in versions if report.greedy is not None]
    if greedy:
        line = sparkline(greedy, CURVE_WIDTH, ascii_only=ascii_only)
        rows.append(("greedy", f"{line} {greedy[-1]:.2f}"))
    return rows


def _time(status: VolunteerStatus) -> str:
    """`generating 93 % of the time, loading 2 %, waiting 4 %`; without parts below half a percent."""
    rest = [f", {phase} {share(part)}" for phase, part in status.spent.items() if part >= 0.005]
    return f"generating {share(status.generating_share)} of the time{''.join(rest)}"


def _standing(status: VolunteerStatus) -> str:
    """`active, rank 3 of 12`"""
    if not status.state:
        return "the trainer has not said yet"
    rank = f", rank {status.rank:,} of {status.of:,}" if status.rank else ""
    return f"{printable(status.state, 32)}{rank}"


def _version(version: int) -> str:
    return "none yet" if version < 0 else f"version {version}"


def _panel(title: str, rows: list[tuple[str, str]], seconds: float) -> Panel:
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for name, value in rows:
        grid.add_row(Text(name), Text(value))
    heading = Text(f"{printable(title, 64)} · {duration(seconds)}")
    return Panel(grid, title=heading, title_align="left")
