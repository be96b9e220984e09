"""How figures, codes and foreign text look to a person. No rich, no I/O.

Whatever a peer or a model wrote goes through `printable` before it reaches a terminal: an escape sequence
in a run's name could otherwise repaint the screen or type into the shell.
"""

from __future__ import annotations

import time
import unicodedata
from collections.abc import Mapping, Sequence

MAX_FOREIGN = 500
"""Characters of one foreign text that are shown: a sentence with a path fits, a flood does not."""

_UNSAFE = frozenset({"Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"})
"""Unicode categories that move the cursor, reorder text or have no glyph (bidi controls are `Cf`)."""

_BARS = "▁▂▃▄▅▆▇█"
_ASCII_BARS = "_.-=+*#@"
_UNITS = ((1e9, "G"), (1e6, "M"), (1e4, "k"))


def printable(text: str, limit: int = MAX_FOREIGN) -> str:
    """`text` with everything that is no visible character escaped, cut to `limit` characters."""
    shown = "".join(_escape(c) if unicodedata.category(c) in _UNSAFE else c for c in text[:limit])
    return shown + ("..." if len(text) > limit else "")


def _escape(character: str) -> str:
    code = ord(character)
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"


def count(number: float) -> str:
    """A whole number in at most seven characters: `9,876`, `54.3 k`, `1.2 M`."""
    for size, unit in _UNITS:
        if abs(number) >= size:
            scale = 1e3 if unit == "k" else size
            return f"{number / scale:,.1f} {unit}"
    return f"{number:,.0f}"


def size(number: float) -> str:
    """Bytes in binary units: `512 B`, `25.0 KiB`, `1.5 GiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(number) < 1024:
            return f"{number:,.0f} B" if unit == "B" else f"{number:,.1f} {unit}"
        number /= 1024
    return f"{number:,.1f} TiB"


def share(value: float | None) -> str:
    """A share as a percentage, or a dash where it was not measured."""
    return "-" if value is None else f"{100 * value:.0f} %"


def duration(seconds: float) -> str:
    """`12 s`, `3 min 20 s`, `5 h 02 min`."""
    whole = int(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"


def moment(milliseconds: float) -> str:
    """Unix milliseconds as local time: `14:02` where that is today, else `2026-11-30 14:02`. Any
    number will do: some are a peer's."""
    try:
        then, today = time.localtime(milliseconds / 1000), time.localtime()
    except (OverflowError, OSError, ValueError):
        return "a time that no calendar has"
    return time.strftime("%H:%M" if then[:3] == today[:3] else "%Y-%m-%d %H:%M", then)


def refusals(refused: Mapping[str, int]) -> str:
    """`3 refused (stale 2, rate 1)`, the most frequent first; codes may come from a peer."""
    total = sum(refused.values())
    if not total:
        return "0 refused"
    ranked = sorted(refused.items(), key=lambda item: (-item[1], item[0]))
    named = ", ".join(f"{printable(code, 32)} {n:,}" for code, n in ranked[:4])
    return f"{total:,} refused ({named}{', ...' if len(ranked) > 4 else ''})"


def states(keys: Mapping[str, int]) -> str:
    """`2 active, 1 quarantine`: keys by how they stand."""
    return ", ".join(f"{number:,} {printable(state, 32)}" for state, number in sorted(keys.items())) or "none"


def plural(number: int, noun: str) -> str:
    """`1 group`, `2 groups`."""
    return f"{number:,} {noun}" if number == 1 else f"{number:,} {noun}s"


def sparkline(values: Sequence[float], width: int, *, ascii_only: bool = False) -> str:
    """`values` between 0 and 1 as a row of at most `width` bars; longer series are averaged in buckets."""
    bars = _ASCII_BARS if ascii_only else _BARS
    buckets = min(width, len(values))
    heights = []
    for i in range(buckets):
        part = values[i * len(values) // buckets : (i + 1) * len(values) // buckets]
        heights.append(sum(part) / len(part))
    top = len(bars) - 1
    return "".join(bars[min(top, max(0, round(height * top)))] for height in heights)
