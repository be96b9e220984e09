"""A group that was tried, for a terminal: what was sampled stands out, also where there are no colours.

Everything that a model or an environment wrote is escaped line by line: no control character gets through.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Final

from rich.console import Console
from rich.text import Text

from .env_try import Part, Sample, Tried
from .wording import plural, printable

MAX_TEXT: Final = 20_000
"""Characters of one turn that are shown: more is for `--html`."""

TRAINED: Final = "bold green"
UNTRAINED: Final = "cyan"
BAD: Final = "red"

GUTTERS: Final = {True: "┃", False: "│"}
"""Beside lines that are trained on, and lines that are not."""


def print_tried(tried: Tried, console: Console, *, tokens: bool) -> None:
    """`tokens`: with the id and the log-prob of each token."""
    for line in lines(tried, tokens=tokens):
        console.print(line, soft_wrap=True)


def lines(tried: Tried, *, tokens: bool) -> Iterator[Text]:
    """All lines, without control characters."""
    yield Text(
        f"{printable(tried.environment)} {printable(tried.version)}, seed {tried.seed}, level {tried.level}, "
        f"with {printable(tried.model)} at temperature {tried.temperature:g}",
        "bold",
    )
    yield Text.assemble(
        (f"{GUTTERS[True]} sampled, trained on", TRAINED),
        "   ",
        (f"{GUTTERS[False]} not trained on: the environment's", UNTRAINED),
    )
    if tried.note:
        yield Text(f"No conversation format: {printable(tried.note, 1_000)}")
    shared = _shared(tried.samples)
    if shared:
        yield Text("")
        yield Text(f"All {len(tried.samples)} trajectories begin with:", "bold")
        for part in tried.samples[0].parts[:shared]:
            yield from _part(part, tokens=tokens)
    for index, sample in enumerate(tried.samples):
        yield Text("")
        yield _head(index, sample)
        for part in sample.parts[shared:]:
            yield from _part(part, tokens=tokens)
    yield Text("")
    yield from _lesson(tried)


def _shared(samples: Sequence[Sample]) -> int:
    """Parts at the beginning that are the same in all, before anything is sampled."""
    if len(samples) < 2:
        return 0
    count = 0
    for parts in zip(*(sample.parts for sample in samples), strict=False):
        if parts[0].trained or any(part != parts[0] for part in parts):
            break
        count += 1
    return count


def _head(index: int, sample: Sample) -> Text:
    agent = f" ({printable(sample.agent, 64)})" if sample.agent else ""
    named = "  ".join(f"{printable(name, 64)} {value:g}" for name, value in sorted(sample.components.items()))
    return Text.assemble(
        (f"Trajectory {index}{agent}", "bold"),
        f"  reward {sample.reward:g}",
        (f"  [{named}]" if named else "", "dim"),
        f"  advantage {_advantage(sample)}  {sample.sampled} tokens sampled, ends by "
        f"{printable(sample.finish, 64)}",
    )


def _advantage(sample: Sample) -> str:
    if sample.advantage is None:
        return "of each token"
    return f"{sample.advantage:+.2f}{' (its own)' if sample.own_advantage else ''}"


def _part(part: Part, *, tokens: bool) -> Iterator[Text]:
    style, gutter = (TRAINED if part.trained else UNTRAINED), GUTTERS[part.trained]
    if part.parent is not None:
        yield Text(f"  goes on from segment {part.parent}:", "dim")
    label = f"{printable(part.role, 64):>9} {gutter} "
    if tokens:
        yield from _tokens(part, label, style)
        return
    for line in shown(part.text):
        yield Text.assemble((label, style), (line, style if part.trained else ""))
        label = f"{'':9} {gutter} "


def shown(text: str) -> list[str]:
    """A text in lines, each of them printable."""
    cut = text[:MAX_TEXT]
    told = [printable(line, MAX_TEXT) for line in cut.split("\n")]
    return [*told, f"... and {len(text) - MAX_TEXT:,} characters more"] if len(text) > MAX_TEXT else told


def _tokens(part: Part, label: str, style: str) -> Iterator[Text]:
    for token in part.tokens:
        ids = " ".join(map(str, token.ids))
        said = "  ".join(f"{value:.4f}" for value in token.logprobs)
        given = "  ".join(f"{value:+.2f}" for value in token.advantages)
        yield Text.assemble(
            (label, style), f"{ids:>8}  {said:>10}  {given:>6}  ", (quoted(token.text), style)
        )
        label = f"{'':9} {GUTTERS[part.trained]} "


def quoted(text: str) -> str:
    """A token's text on one line, with its spaces to be seen."""
    return f"'{printable(text, 200)}'"


def _lesson(tried: Tried) -> Iterator[Text]:
    """What a trainer does with the group."""
    trained = sum(sample.sampled for sample in tried.samples)
    rewards = [sample.reward for sample in tried.samples]
    if not rewards:
        yield Text("There is no trajectory: a trainer has nothing to learn from.", BAD)
        return
    yield Text(
        f"A trainer learns from {trained:,} sampled tokens of {plural(len(rewards), 'answer')}; the mean "
        f"reward is {sum(rewards) / len(rewards):.3f}.",
        "bold",
    )
    cut = sum(sample.finish == "length" for sample in tried.samples)
    if 2 * cut > len(rewards):
        yield Text(f"{cut} of {len(rewards)} ran into the limit of their tokens: --max-tokens allows more.")
    if not tried.learns:
        yield Text(
            "It learns nothing here: all rewards are equal, so no answer is better than another (GRPO). Try "
            "other seeds, an easier task, or rewards that tell more.",
            BAD,
        )
        return
    yield Text("Advantages are by GRPO, from the rewards of the group, where the environment gives none.")
