"""Micro-batches under a token budget: every token is computed once, logits only where they are needed.

Samples of one prompt are laid out as one row: the prompt, then the answers side by side, each seeing the
prompt and itself. With 8 answers as long as the prompt that is 9 lengths instead of 16, exactly the same
log-probs. Rows are sorted by length and padded on the right, where causal attention needs no mask; the last
token of a sequence predicts nothing and is left out.

Shape suffixes: B rows, L columns, N trained tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import BatchError

# Answers share a row up to this length. Attention inside a row is dense, so its cost grows with the square;
# at 512 columns it is a tenth of the rest for models of 576 dimensions and less for wider ones.
SHARED_COLUMNS = 512

# Logits of one micro-batch: 2^27 float32 are 512 MiB, and about three such arrays are alive at once.
LOGIT_ELEMENTS = 1 << 27


class TokenSequence(Protocol):
    """Token ids with the places where the policy sampled."""

    @property
    def tokens(self) -> NDArray[np.int64]: ...

    @property
    def trained(self) -> NDArray[np.bool_]: ...


@dataclass(frozen=True)
class Sample:
    """One trajectory with what the loss needs.

    `tokens` int64 [T], `trained` bool [T]; one entry a trained token: `behaviour_logprobs` float32 [N] of the
    policy that sampled, at checkpoint `version`, and `advantages` float32 [N].
    """

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    version: int

    def __post_init__(self) -> None:
        count = int(self.trained.sum())
        if len(self.behaviour_logprobs) != count or len(self.advantages) != count:
            raise BatchError(
                f"A sample with {count} trained tokens has {len(self.behaviour_logprobs)} log-probs and "
                f"{len(self.advantages)} advantages; there must be one of each a trained token."
            )


@dataclass(frozen=True)
class MicroBatch:
    """One forward pass. Trained token n is predicted at (`rows_N`, `columns_N`), is `targets_N`, and has its
    numbers at `places_N` of the flat arrays over all trained tokens of all sequences, in their order.

    `positions_BL` and `mask_B1LL` (bool, true: seen) are None for plain right-padded causal rows."""

    tokens_BL: Tensor
    rows_N: Tensor
    columns_N: Tensor
    targets_N: Tensor
    places_N: Tensor
    positions_BL: Tensor | None
    mask_B1LL: Tensor | None


@dataclass(frozen=True)
class _Member:
    """A sequence with `places` where it is trained, the first of its trained tokens being number `start` of
    all; its tokens before `end` predict something."""

    tokens: NDArray[np.int64]
    places: NDArray[np.int64]
    start: int
    end: int


@dataclass(frozen=True)
class _Row:
    """Sequences that go on from the same `shared` tokens."""

    members: list[_Member]
    shared: int
    length: int
    trained: int


def micro_batches(
    sequences: Sequence[TokenSequence],
    token_budget: int,
    vocab_size: int,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """All trained tokens of `sequences`, each once, in micro-batches of at most `token_budget` places
    (padding included; a longer sequence is alone). Sequences without trained tokens are left out.

    Raises BatchError if a first token is marked as trained: nothing predicts it.
    """
    rows = sorted(_rows(sequences, share_prompts), key=lambda row: row.length)
    logit_budget = max(1, LOGIT_ELEMENTS // vocab_size)
    return [_collate(part, device) for part in _parts(rows, token_budget, logit_budget)]


def flatten(arrays: Sequence[NDArray[np.float32]], device: torch.device | str = "cpu") -> Tensor:
    """The per-sequence arrays of trained tokens as one float32 vector: what `places_N` points into."""
    joined = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
    return torch.from_numpy(joined.astype(np.float32, copy=False)).to(device)


def _rows(sequences: Sequence[TokenSequence], share_prompts: bool) -> list[_Row]:
    """Sequences with trained tokens, gathered by their tokens before the first trained one."""
    families: dict[object, list[_Member]] = {}
    start = 0
    for index, sequence in enumerate(sequences):
        places = sequence.trained.nonzero()[0]
        if not len(places):
            continue
        first, last = int(places[0]), int(places[-1])
        if first == 0:
            raise BatchError("The first token of a sequence is marked as trained, but nothing predicts it.")
        prompt = sequence.tokens[:first].tobytes() if share_prompts else index
        families.setdefault(prompt, []).append(_Member(sequence.tokens, places, start, last))
        start += len(places)
    return [row for family in families.values() for row in _split(family)]


def _split(family: list[_Member]) -> Iterator[_Row]:
    """Rows of at most SHARED_COLUMNS columns, one sequence at least."""
    shared = int(family[0].places[0])
    members: list[_Member] = []
    length, trained = shared, 0
    for member in family:
        more = member.end - shared
        if members and length + more > SHARED_COLUMNS:
            yield _Row(members, shared, length, trained)
            members, length, trained = [], shared, 0
        members.append(member)
        length += more
        trained += len(member.places)
    yield _Row(members, shared, length, trained)


def _parts(rows: list[_Row], token_budget: int, logit_budget: int) -> Iterator[list[_Row]]:
    part: list[_Row] = []
    trained = 0
    for row in rows:  # shortest first: the newest row is the longest
        full = (len(part) + 1) * row.length > token_budget or trained + row.trained > logit_budget
        if part and full:
            yield part
            part, trained = [], 0
        part.append(row)
        trained += row.trained
    if part:
        yield part


def _collate(rows: list[_Row], device: torch.device | str) -> MicroBatch:
    shape = (len(rows), rows[-1].length)
    tokens = np.zeros(shape, np.int64)
    # Branch 0 is the shared prefix, 1.. the sequences after it, -1 padding.
    branch = np.full(shape, -1, np.int64)
    positions = np.tile(np.arange(shape[1]), (len(rows), 1))
    columns, targets, places = [], [], []
    for number, row in enumerate(rows):
        shared = row.shared
        tokens[number, :shared], branch[number, :shared] = row.members[0].tokens[:shared], 0
        offset = shared
        for order, member in enumerate(row.members, start=1):
            after = offset + member.end - shared
            tokens[number, offset:after] = member.tokens[shared : member.end]
            branch[number, offset:after] = order
            positions[number, offset:after] -= offset - shared
            predicting = member.places + (offset - shared - 1)
            predicting[0] = shared - 1  # the first trained token is predicted by the end of the prefix
            columns.append(predicting)
            targets.append(member.tokens[member.places])
            places.append(np.arange(member.start, member.start + len(member.places)))
            offset = after
    plain = all(len(row.members) == 1 for row in rows)
    row_numbers = np.repeat(np.arange(len(rows)), [row.trained for row in rows])
    return MicroBatch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(row_numbers).to(device),
        torch.from_numpy(np.concatenate(columns)).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
        torch.from_numpy(np.concatenate(places)).to(device),
        None if plain else torch.from_numpy(positions).to(device),
        None if plain else _mask(torch.from_numpy(branch).to(device)),
    )


def _mask(branch_BL: Tensor) -> Tensor:
    """Causal inside the own branch, and the whole prefix. Padding sees itself: no softmax over nothing."""
    width = branch_BL.shape[1]
    causal_LL = torch.ones(width, width, dtype=torch.bool, device=branch_BL.device).tril_()
    same = branch_BL[:, :, None] == branch_BL[:, None, :]
    seen = causal_LL & (same | (branch_BL == 0)[:, None, :])
    return seen[:, None]
