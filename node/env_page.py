"""A group that was tried, as one HTML page: no script, nothing from elsewhere, every text escaped."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from pathlib import Path
from typing import Final

from .env_try import Part, Sample, Token, Tried
from .home import disk_errors
from .wording import printable

POLICY: Final = "default-src 'none'; style-src 'unsafe-inline'"
"""What a browser may load for it: nothing, whatever a model managed to write."""

STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; padding: 0 1rem;
       color: #1b1b1b; background: #fff; }
h1 { font-size: 1.3rem; } h2 { font-size: 1rem; margin: 1.6rem 0 .3rem; }
.facts { color: #555; } .part { display: flex; gap: .8rem; margin: .25rem 0; }
.role { flex: 0 0 5.5rem; text-align: right; color: #777; font-size: .85rem; }
pre { margin: 0; flex: 1; white-space: pre-wrap; overflow-wrap: anywhere; font: 13px/1.6 monospace;
      border-left: 3px solid #bbb; padding-left: .6rem; }
.trained pre { border-left-color: #1a7f37; }
.trained span { background: #dafbe1; border-radius: 2px; }
.trained span:nth-child(even) { background: #aceebb; }
.trained span.worse { background: #ffebe9; } .trained span.worse:nth-child(even) { background: #ffcecb; }
span:hover { outline: 1px solid #555; } i { color: #777; font-style: normal; }
table { border-collapse: collapse; } td, th { padding: .1rem .7rem .1rem 0; text-align: left; }
@media (prefers-color-scheme: dark) {
  body { color: #ddd; background: #111; } pre { border-left-color: #555; }
  .trained span { background: #0f3d1e; } .trained span:nth-child(even) { background: #17572c; }
  .trained span.worse { background: #4a1512; } .trained span.worse:nth-child(even) { background: #631b17; }
}
"""


def write_page(path: Path, tried: Tried) -> None:
    """Raises a StorageError where it cannot be written."""
    with disk_errors(path):
        path.write_text(page(tried), encoding="utf-8")


def page(tried: Tried) -> str:
    """The whole page."""
    title = f"{tried.environment}, seed {tried.seed}"
    return "\n".join(
        [
            '<!doctype html><html lang="en"><head><meta charset="utf-8">',
            f'<meta http-equiv="Content-Security-Policy" content="{escape(POLICY)}">',
            f"<title>{_line(title)}</title><style>{STYLE}</style></head><body>",
            f"<h1>{_line(title)}</h1>",
            *_facts(tried),
            *(line for index, sample in enumerate(tried.samples) for line in _sample(index, sample)),
            "</body></html>",
            "",
        ]
    )


def _facts(tried: Tried) -> Iterator[str]:
    yield (
        f'<p class="facts">Version {_line(tried.version)}, level {tried.level}, {tried.group} samples of '
        f"{_line(tried.model)} at temperature {tried.temperature:g}. Green and red are sampled and trained "
        "on, by advantage; all else is the environment's. Point at a token for its id and log-prob.</p>"
    )
    if tried.note:
        yield f'<p class="facts">No conversation format: {_line(tried.note)}</p>'
    if not tried.learns:
        yield "<p><b>A trainer learns nothing from this group: all rewards are equal.</b></p>"
    yield "<table><tr><th>trajectory</th><th>reward</th><th>advantage</th><th>sampled</th><th>end</th></tr>"
    for index, sample in enumerate(tried.samples):
        yield (
            f"<tr><td>{index} {_line(sample.agent)}</td><td>{sample.reward:g}</td><td>{_advantage(sample)}"
            f"</td><td>{sample.sampled}</td><td>{_line(sample.finish)}</td></tr>"
        )
    yield "</table>"


def _sample(index: int, sample: Sample) -> Iterator[str]:
    yield f"<h2>Trajectory {index} {_line(sample.agent)}: reward {sample.reward:g}</h2>"
    if sample.components:
        named = ", ".join(f"{_line(name)} {value:g}" for name, value in sorted(sample.components.items()))
        yield f'<p class="facts">{named}</p>'
    for part in sample.parts:
        yield from _part(part)


def _part(part: Part) -> Iterator[str]:
    kind = "part trained" if part.trained else "part"
    origin = "" if part.parent is None else f"<br>from {part.parent}"
    spans = "".join(_span(token) for token in part.tokens)
    yield f'<div class="{kind}"><div class="role">{_line(part.role)}{origin}</div><pre>{spans}</pre></div>'


def _span(token: Token) -> str:
    told = "id " + " ".join(map(str, token.ids))
    if token.logprobs:
        told += "; log-prob " + " ".join(f"{value:.4f}" for value in token.logprobs)
        told += "; advantage " + " ".join(f"{value:+.2f}" for value in token.advantages)
    worse = ' class="worse"' if token.advantages and min(token.advantages) < 0 else ""
    return f'<span{worse} title="{escape(told)}">{_text(token.text)}</span>'


def _advantage(sample: Sample) -> str:
    return "of each token" if sample.advantage is None else f"{sample.advantage:+.2f}"


def _text(text: str) -> str:
    """With its line ends; other characters that cannot be seen are spelled out."""
    return "\n".join(_line(line) for line in text.split("\n")) if text else "<i>&empty;</i>"


def _line(text: str) -> str:
    return escape(printable(text, len(text)))
