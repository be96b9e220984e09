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


class Sequence_(Protocol):  # noqa: N801 (Sequence is taken)
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
class _Row:
    """A prefix of `shared` tokens and the sequences (by index) that go on from it."""

    members: tuple[int, ...]
    shared: int
    length: int
    trained: int


def micro_batches(
    sequences: Sequence[Sequence_],
    token_budget: int,
    vocab_size: int,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
) -> list[MicroBatch]:
    """All trained tokens of `sequences`, each once, in micro-batches of at most `token_budget` places
    (padding included; a longer sequence is alone). Sequences without trained tokens are left out.

    Raises BatchError if a first token is marked as trained: nothing predicts it.
    """
    starts = np.cumsum([0, *(int(s.trained.sum()) for s in sequences)])
    rows = sorted(_rows(sequences, share_prompts), key=lambda row: row.length)
    logit_budget = max(1, LOGIT_ELEMENTS // vocab_size)
    return [_collate(sequences, starts, part, device) for part in _parts(rows, token_budget, logit_budget)]


def flatten(arrays: Sequence[NDArray[np.float32]], device: torch.device | str = "cpu") -> Tensor:
    """The per-sequence arrays of trained tokens as one float32 vector: what `places_N` points into."""
    joined = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
    return torch.from_numpy(joined.astype(np.float32, copy=False)).to(device)


def _rows(sequences: Sequence[Sequence_], share_prompts: bool) -> list[_Row]:
    """Sequences with trained tokens, gathered by their tokens before the first trained one."""
    families: dict[bytes, list[int]] = {}
    for index, sequence in enumerate(sequences):
        places = np.flatnonzero(sequence.trained)
        if not len(places):
            continue
        if places[0] == 0:
            raise BatchError("The first token of a sequence is marked as trained, but nothing predicts it.")
        prompt = sequence.tokens[: places[0]].tobytes() if share_prompts else index.to_bytes(8, "little")
        families.setdefault(prompt, []).append(index)
    return [row for family in families.values() for row in _split(sequences, family)]


def _split(sequences: Sequence[Sequence_], family: list[int]) -> Iterator[_Row]:
    """Rows of at most SHARED_COLUMNS columns, one sequence at least."""
    shared = int(np.flatnonzero(sequences[family[0]].trained)[0])
    members: list[int] = []
    length = trained = 0
    for index in family:
        more = _used(sequences[index]) - shared
        if members and length + more > SHARED_COLUMNS:
            yield _Row(tuple(members), shared, length, trained)
            members = []
        if not members:
            length, trained = shared, 0
        members.append(index)
        length += more
        trained += int(sequences[index].trained.sum())
    yield _Row(tuple(members), shared, length, trained)


def _used(sequence: Sequence_) -> int:
    """Tokens that predict something: all before the last trained one."""
    return int(np.flatnonzero(sequence.trained)[-1])


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


def _collate(
    sequences: Sequence[Sequence_], starts: NDArray[np.int64], rows: list[_Row], device: torch.device | str
) -> MicroBatch:
    width = rows[-1].length
    tokens = np.zeros((len(rows), width), np.int64)
    # Branch 0 is the shared prefix, 1.. the sequences after it, -1 padding.
    branch = np.full((len(rows), width), -1, np.int64)
    positions = np.tile(np.arange(width), (len(rows), 1))
    chosen: list[NDArray[np.int64]] = []
    for number, row in enumerate(rows):
        first = sequences[row.members[0]].tokens
        tokens[number, : row.shared], branch[number, : row.shared] = first[: row.shared], 0
        offset = row.shared
        for order, index in enumerate(row.members, start=1):
            end = _used(sequences[index])
            span = slice(offset, offset + end - row.shared)
            tokens[number, span] = sequences[index].tokens[row.shared : end]
            branch[number, span] = order
            positions[number, span] = np.arange(row.shared, end)
            chosen.append(_chosen(sequences[index], number, row.shared, offset, int(starts[index])))
            offset += end - row.shared
    rows_N, columns_N, targets_N, places_N = torch.from_numpy(np.concatenate(chosen, 1)).to(device)
    plain = all(len(row.members) == 1 for row in rows)
    return MicroBatch(
        torch.from_numpy(tokens).to(device),
        rows_N,
        columns_N,
        targets_N,
        places_N,
        None if plain else torch.from_numpy(positions).to(device),
        None if plain else _mask(torch.from_numpy(branch).to(device)),
    )


def _chosen(sequence: Sequence_, row: int, shared: int, offset: int, start: int) -> NDArray[np.int64]:
    """[4, n]: row, column that predicts, target and flat place of each trained token of one branch."""
    places = np.flatnonzero(sequence.trained)
    before = places - 1
    columns = np.where(before < shared, before, before - shared + offset)
    flat = np.arange(start, start + len(places))
    return np.stack([np.full_like(places, row), columns, sequence.tokens[places], flat])


def _mask(branch_BL: Tensor) -> Tensor:
    """Causal inside the own branch, and the whole prefix. Padding sees itself: no softmax over nothing."""
    width = branch_BL.shape[1]
    causal_LL = torch.ones(width, width, dtype=torch.bool, device=branch_BL.device).tril_()
    same = branch_BL[:, :, None] == branch_BL[:, None, :]
    seen = causal_LL & (same | (branch_BL == 0)[:, None, :])
    return seen[:, None]
