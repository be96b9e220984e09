"""Where no randomness was assigned, tokens say by themselves that nobody drew them: copies, repetition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nous_node.envs.environment import Completion
from nous_node.node.calibration import embedded_thresholds
from nous_node.protocol.errors import Code

from .cheats import Completions, Requests, one_for_all, stopped

TOKENS = 96
"""Sampled tokens of a trajectory: long enough for 64 that repeat."""

HEAT = 4.0
"""Temperature at which every token is a surprise: two of these answers share no eight tokens by chance."""


LIKELY = 0.01
"""An end after two of four digits has about half of it."""


@pytest.fixture(scope="module")
def garden(make_arena: Any) -> Iterator[Any]:
    """A run without seeded sampling, and with long answers."""
    rules = {"sampling": "free", "temperature": HEAT, "max_tokens": TOKENS}
    with make_arena({"groups": 1000}, rules=rules) as arena:
        yield arena


def replayed(made: Completions, stop: int, shared: float = 1.0) -> Any:
    """An engine that gives the first part of these answers as its own, with log-probs of its own prompt."""

    def engine(forger: Any, requests: Requests) -> Completions:
        taken = []
        for own, one in zip(forger.sample(requests), made, strict=True):
            kept = one.tokens[: max(8, int(shared * len(one.tokens)))]
            tokens = kept if len(kept) == len(one.tokens) else [*kept, *own.tokens][:TOKENS]
            ended = tokens[-1] == stop
            taken.append(Completion(tokens, [-1.0] * len(tokens), "stop" if ended else "length"))
        return forger.scored(requests, taken)

    return engine


@pytest.fixture(scope="module")
def author(garden: Any) -> tuple[Any, Completions]:
    """Whose completions are copied: an accepted group."""
    forger, kept = garden.known("author"), []

    def engine(requests: Requests) -> Completions:
        kept.extend(forger.sample(requests))
        return kept

    group = forger.group(garden.head, None, engine)
    assert garden.outcome(forger, group.to_bytes()).verdict == "accepted"
    return forger, kept


def refused(garden: Any, name: str, engine: Any, code: Code) -> Any:
    forger = garden.known(name)
    group = forger.group(garden.head, None, lambda requests: engine(forger, requests))
    return garden.refuses(forger, group.to_bytes(), code)


@pytest.mark.attack("copy of another's completion", "copied")
@pytest.mark.parametrize("shared", [1.0, 0.5], ids=["whole", "half"])
def test_completions_of_somebody_else_are_refused(garden: Any, author: Any, shared: float) -> None:
    """Under a prompt of its own, and with true log-probs for that."""
    forger, made = author
    engine = replayed(made, forger.manifest.sampling.stop[0], shared)
    receipt = refused(garden, f"copyist {shared}", engine, Code.COPIED)
    assert (receipt.measured, receipt.threshold) == (None, None)  # nothing shows who was copied


@pytest.mark.attack("one sample in place of the others", "copied")
def test_one_sample_instead_of_eight_is_refused(garden: Any) -> None:
    receipt = refused(garden, "lazy", one_for_all, Code.COPIED)
    assert receipt.measured > receipt.threshold


@pytest.mark.attack("endless repetition", "repetition")
@pytest.mark.parametrize("period", [1, 2, 16])
def test_tokens_that_only_repeat_are_refused(garden: Any, period: int) -> None:
    """No two trajectories repeat the same."""

    def engine(forger: Any, requests: Requests) -> Completions:
        made = []
        for number in range(len(requests)):
            phrase = [ord("a") + (number + place) % 26 for place in range(period)]
            tokens = (phrase * TOKENS)[:TOKENS]
            made.append(Completion(tokens, [-1.0] * TOKENS, "length"))
        return forger.scored(requests, made)

    receipt = refused(garden, f"parrot {period}", engine, Code.REPETITION)
    assert receipt.measured >= receipt.threshold


@pytest.mark.attack("fabricated log-probs", "logprob-mismatch")
def test_log_probs_are_checked_where_the_draw_is_not(garden: Any) -> None:
    def engine(forger: Any, requests: Requests) -> Completions:
        return [one._replace(logprobs=[-0.5] * len(one.tokens)) for one in forger.sample(requests)]

    refused(garden, "fabulist", engine, Code.LOGPROB_MISMATCH)


@pytest.mark.slow
@pytest.mark.attack("forged end of sequence", "finish")
def test_end_that_nobody_would_sample_is_refused(make_arena: Any) -> None:
    """Where the draw is not checked, an end has to be likely enough that somebody could have drawn it."""
    thresholds = msgspec.structs.replace(embedded_thresholds(), stop_probability=LIKELY)
    with make_arena({"groups": 1000}, rules={"sampling": "free", "thresholds": thresholds}) as arena:
        receipt = refused(arena, "quitter", stopped, Code.FINISH)
        assert receipt.measured < receipt.threshold == LIKELY
