"""What an Atropos environment returns, compared with what the policy said. Spec: `specs/envs/atropos.md`.

Atropos has training data as lists over positions: `masks` are labels (-100, or the token's own id where it is
trained), `inference_logprobs` has 1.0 where there is none, `scores` is one number a sequence. Here it becomes
a reward and advantages for each line, a trajectory that the policy has part in. Tokens and log-probs are the
policy's own in any case: what comes back only says which of its sequences are meant and which tokens count.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from .errors import EnvironmentFailed

IGNORED: Final = -100
"""The label of a token that is not trained."""

SENTINEL: Final = 1.0
"""The log-prob of a token that was not sampled: no logarithm of a probability is above 0."""

CLOSE: Final = 1e-3
"""Most that a log-prob may differ from the one that was handed out: half precision, and no more."""

ZERO: Final = "set_advantage_to_zero"
"""The override that keeps a sequence in the baseline and out of the gradient."""

Decode = Callable[[Sequence[int]], str]


@dataclass(frozen=True, slots=True)
class Line:
    """One trajectory of the group, as the policy knows it."""

    tokens: list[int]
    spans: list[tuple[int, int]]
    """Where its answers stand."""
    logprobs: list[float]
    """One a sampled token."""

    @property
    def sampled(self) -> list[int]:
        """Positions of sampled tokens."""
        return [position for start, end in self.spans for position in range(start, end)]


@dataclass(frozen=True, slots=True)
class Worth:
    """What becomes of a line."""

    reward: float
    advantages: list[float] | None = None
    """One a sampled token."""
    advantage: float | None = None
    components: Mapping[str, float] | None = None


@dataclass(frozen=True, slots=True)
class _Sequence:
    """One sequence of a scored group."""

    name: str
    tokens: list[int]
    labels: list[int]
    score: float
    advantages: list[float] | None
    logprobs: list[float] | None
    zero: bool


@dataclass(frozen=True, slots=True)
class _Claim:
    """A sequence and the line that it is."""

    line: int
    score: float
    trained: list[bool]
    """One a sampled token of the line."""
    advantages: list[float] | None
    zero: bool


def worths(groups: Sequence[Mapping[str, Any]], lines: Sequence[Line], decode: Decode) -> list[Worth]:
    """What each line is worth. Raises EnvironmentFailed for what the policy did not say. [ATR-5]"""
    claimed: list[list[_Claim]] = []
    free = set(range(len(lines)))
    for number, group in enumerate(groups):
        claims = []
        for sequence in _sequences(group, f"{number}." if len(groups) > 1 else ""):
            claims.append(_claim(sequence, lines, free, decode))
            free.discard(claims[-1].line)
        if claims:
            claimed.append(claims)
    if not claimed:
        return [Worth(0.0, components={"given_up": 1.0}) for _ in lines]
    found = {
        claim.line: _worth(claim, _mean(claims), apart=len(claimed) > 1)
        for claims in claimed
        for claim in claims
    }
    mean = _mean([claim for claims in claimed for claim in claims])
    rest = Worth(mean, advantage=0.0 if len(claimed) > 1 else None, components={"left_out": 1.0})
    return [found.get(index, rest) for index in range(len(lines))]


def _mean(claims: Sequence[_Claim]) -> float:
    return math.fsum(claim.score for claim in claims) / len(claims)


def _worth(claim: _Claim, mean: float, *, apart: bool) -> Worth:
    """`apart`: whether its group is one of several, each with a baseline of its own. [ATR-6]"""
    own = claim.score - mean
    if claim.zero or not any(claim.trained):
        return Worth(claim.score, advantage=0.0)
    if claim.advantages is not None:
        return Worth(claim.score, claim.advantages)
    if not all(claim.trained):
        return Worth(claim.score, [own if trained else 0.0 for trained in claim.trained])
    return Worth(claim.score, advantage=own if apart else None)


# --- one sequence --------------------------------------------------------------------------------


def _claim(sequence: _Sequence, lines: Sequence[Line], free: set[int], decode: Decode) -> _Claim:
    index = min(
        (one for one in free if _fit(sequence, lines[one])),
        key=lambda one: _order(sequence, lines, one),
        default=None,
    )
    if index is None:
        return _claim_by_text(sequence, lines, free, decode)
    line = lines[index]
    trained = _trained(sequence, line)
    _check_logprobs(sequence, line, trained)
    advantages = None
    if sequence.advantages is not None:
        pairs = zip(line.sampled, trained, strict=True)
        advantages = [sequence.advantages[position] if counts else 0.0 for position, counts in pairs]
    return _Claim(index, sequence.score, trained, advantages, sequence.zero)


def _fit(sequence: _Sequence, line: Line) -> bool:
    """Whether one begins with the other, and the policy answered in what they share."""
    shared = min(len(sequence.tokens), len(line.tokens))
    return sequence.tokens[:shared] == line.tokens[:shared] and line.spans[0][0] < shared


def _order(sequence: _Sequence, lines: Sequence[Line], index: int) -> tuple[int, int]:
    """The line that is nearest in length comes first; of these the first."""
    return abs(len(lines[index].tokens) - len(sequence.tokens)), index


def _trained(sequence: _Sequence, line: Line) -> list[bool]:
    sampled = set(line.sampled)
    for position, (token, label) in enumerate(zip(sequence.tokens, sequence.labels, strict=True)):
        if label == IGNORED:
            continue
        if label != token:
            raise EnvironmentFailed(
                f"{sequence.name} has the label {label} at token {position}, which is {token}: labels are "
                f"{IGNORED} or the token itself. Mend the environment."
            )
        if position not in sampled:
            raise EnvironmentFailed(
                f"{sequence.name} trains token {position}, which the policy did not sample. Label what the "
                f"environment wrote {IGNORED}."
            )
    labels = sequence.labels
    return [position < len(labels) and labels[position] != IGNORED for position in line.sampled]


def _check_logprobs(sequence: _Sequence, line: Line, trained: Sequence[bool]) -> None:
    if sequence.logprobs is None:
        return
    for position, ours, counts in zip(line.sampled, line.logprobs, trained, strict=True):
        if counts and not abs(sequence.logprobs[position] - ours) <= CLOSE:
            theirs = sequence.logprobs[position]
            what = "the mark of a token that was not sampled" if theirs == SENTINEL else f"not {ours:g}"
            raise EnvironmentFailed(
                f"{sequence.name} has the log-prob {theirs:g} for the trained token {position}: {what}. Hand "
                "on what the server returned."
            )


def _claim_by_text(sequence: _Sequence, lines: Sequence[Line], free: set[int], decode: Decode) -> _Claim:
    """A sequence that was tokenised again, or has the words of another: it is known by its text, and what
    counts are the tokens that were sampled. [ATR-4]"""
    text = decode(sequence.tokens)
    labelled = decode(
        [token for token, label in zip(sequence.tokens, sequence.labels, strict=True) if label != IGNORED]
    )
    for index in sorted(free):
        line = lines[index]
        start, end = line.spans[-1]
        if not text.startswith(decode(line.tokens)):
            continue
        if sequence.advantages is not None:
            raise EnvironmentFailed(
                f"{sequence.name} has an advantage for each token and is tokenised anew: take the tokens "
                "from `managed_server`."
            )
        count = len(line.logprobs)
        if labelled == decode([line.tokens[position] for position in line.sampled]):
            return _Claim(index, sequence.score, [True] * count, None, sequence.zero)
        if labelled == decode(line.tokens[start:end]):
            last = end - start
            return _Claim(
                index, sequence.score, [False] * (count - last) + [True] * last, None, sequence.zero
            )
    raise EnvironmentFailed(
        f"{sequence.name} is nothing that the policy said: {_difference(sequence, lines, free)}. Take tokens "
        "and masks from `managed_server`, or from `tokenize_for_trainer` with the answers as they came."
    )


def _difference(sequence: _Sequence, lines: Sequence[Line], free: set[int]) -> str:
    if not free:
        return "every answer was returned already"
    most = max(_shared(sequence.tokens, lines[index].tokens) for index in free)
    return f"from token {most} on it is no answer that was sampled, or trains more than that"


def _shared(ours: Sequence[int], theirs: Sequence[int]) -> int:
    pairs = enumerate(zip(ours, theirs, strict=False))
    return next((place for place, (one, other) in pairs if one != other), min(len(ours), len(theirs)))


# --- reading -------------------------------------------------------------------------------------


def _sequences(group: Mapping[str, Any], prefix: str) -> list[_Sequence]:
    """The sequences of a ScoredDataGroup."""
    tokens, labels, scores = (_listed(group, key) for key in ("tokens", "masks", "scores"))
    count = len(tokens)
    optional = {
        key: _optional(group, key, count) for key in ("advantages", "inference_logprobs", "overrides")
    }
    if not len(labels) == len(scores) == count:
        raise EnvironmentFailed(
            f"A scored group has {count} sequences, {len(labels)} masks and {len(scores)} scores; mend the "
            "environment."
        )
    everything = _is_zero(group.get("group_overrides"))
    return [
        _sequence(
            f"Sequence {prefix}{index}",
            tokens[index],
            labels[index],
            scores[index],
            *(
                optional[key][index] if optional[key] else None
                for key in ("advantages", "inference_logprobs")
            ),
            zero=everything or _is_zero(optional["overrides"][index] if optional["overrides"] else None),
        )
        for index in range(count)
    ]


def _sequence(
    name: str, tokens: Any, labels: Any, score: Any, advantages: Any, logprobs: Any, *, zero: bool
) -> _Sequence:
    try:
        made = _Sequence(
            name,
            [int(one) for one in tokens],
            [int(one) for one in labels],
            float(score),
            None if advantages is None else [float(one) for one in advantages],
            None if logprobs is None else [float(one) for one in logprobs],
            zero,
        )
    except (TypeError, ValueError, OverflowError) as error:
        raise EnvironmentFailed(f"{name} holds something that is no number: {error}.") from error
    for what, values in (
        ("masks", made.labels),
        ("advantages", made.advantages),
        ("log-probs", made.logprobs),
    ):
        if values is not None and len(values) != len(made.tokens):
            raise EnvironmentFailed(
                f"{name} has {len(made.tokens)} tokens and {len(values)} {what}; mend the environment."
            )
    if not math.isfinite(made.score):
        raise EnvironmentFailed(f"{name} has the score {made.score}; mend the environment's scorer.")
    return made


def _listed(group: Mapping[str, Any], key: str) -> Sequence[Any]:
    value: Any = group.get(key)
    if not hasattr(value, "__len__") or not hasattr(value, "__getitem__") or isinstance(value, str | Mapping):
        raise EnvironmentFailed(f"A scored group has no list {key!r}; mend the environment.")
    listed: Sequence[Any] = value
    return listed


def _optional(group: Mapping[str, Any], key: str, count: int) -> Sequence[Any]:
    """Of what may be missing: empty, or one a sequence."""
    if group.get(key) is None:
        return ()
    values = _listed(group, key)
    if len(values) not in (0, count):
        raise EnvironmentFailed(
            f"A scored group has {len(values)} {key} for {count} sequences; mend the environment."
        )
    return values


def _is_zero(overrides: object) -> bool:
    return isinstance(overrides, Mapping) and bool(overrides.get(ZERO))
