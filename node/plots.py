"""The course of a demo as a picture: what the policy got right, over time."""

from __future__ import annotations

from pathlib import Path

from nous_node.protocol.errors import LocalError

from .demo_report import DemoReport

INCHES = (8.0, 4.5)
DOTS_PER_INCH = 120
SMOOTHED = 5
"""Versions of the running mean: one update has too few groups to be read by itself."""


def check_plots() -> None:
    """LocalError where nothing can be drawn: before the work, not after it."""
    import importlib.util

    if importlib.util.find_spec("matplotlib") is None:
        raise LocalError(
            "--plot needs matplotlib; install it (`pip install matplotlib`), or leave --plot out."
        )


def plot(report: DemoReport, file: Path, title: str) -> None:
    """Writes a PNG. Raises LocalError where the file cannot be written."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=INCHES, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    minutes = [point.seconds / 60 for point in report.versions]
    correct = [point.correct for point in report.versions]
    axes.plot(minutes, correct, ".", color="#9ab", markersize=3, label="rollouts of one update")
    axes.plot(minutes, smoothed(correct), color="#357", label=f"mean of {SMOOTHED} updates")
    held_out = [(point.seconds / 60, point.greedy) for point in report.versions if point.greedy is not None]
    axes.plot(
        *zip(*held_out, strict=True), "o-", color="#c60", label="held out, greedy"
    ) if held_out else None
    ends = [0.0, report.seconds / 60]
    axes.plot(
        ends, [report.sampled_before, report.sampled_after], "D", color="#282", label="held out, sampled"
    )
    axes.set(title=title, xlabel="minutes", ylabel="share answered rightly", ylim=(0, 1.02))
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    try:
        figure.savefig(file, dpi=DOTS_PER_INCH, format="png")
    except OSError as error:
        raise LocalError(f"The plot cannot be written to {file} ({error.strerror}).") from error


def smoothed(values: list[float], width: int = SMOOTHED) -> list[float]:
    """Means over the last `width` values, or as many as there are."""
    parts = [values[max(0, end - width) : end] for end in range(1, len(values) + 1)]
    return [sum(part) / len(part) for part in parts]
