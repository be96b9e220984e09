"""Micro-batches under a token budget: every token is computed once, logits only where they are needed.

Samples of one prompt are laid out as one row: the prompt, then the answers side by side, each seeing the
prompt and itself. With 8 answers as long as the prompt that is 9 lengths instead of 16, exactly the same
log-probs. A sample whose attention is a tree (`tree.py`) is a row of the same kind and may share its prompt,
too. Rows are sorted by length and padded on the right, where causal attention needs no mask; the last token
of a sequence predicts nothing and is left out.

Shape suffixes: B rows, L columns, N trained tokens, R segments of a row.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .errors import BatchError
from .tree import Tree, sees

# Answers share a row up to this length without asking what it costs: attention inside a row is dense, but at
# 512 columns it is a tenth of the rest for models of 576 dimensions and less for wider ones.
SHARED_COLUMNS = 512

# What a pair of columns costs, in tokens, where the caller does not know its model: 576 dimensions.
PAIR_COST = 1 / 6144

# Columns squared of the rows that have a mask: 2^27 bools are 128 MiB, and as float32 (`Policy.logits`) 512.
MASK_ELEMENTS = 1 << 27

# Logits of one micro-batch: 2^27 float32 are 512 MiB, and about three such arrays are alive at once.
LOGIT_ELEMENTS = 1 << 27


class TokenSequence(Protocol):
    """Token ids with the places where the policy sampled, and how attention goes where it is a tree."""

    @property
    def tokens(self) -> NDArray[np.int64]: ...

    @property
    def trained(self) -> NDArray[np.bool_]: ...

    @property
    def tree(self) -> Tree | None: ...


@dataclass(frozen=True)
class Sample:
    """One trajectory with what the loss needs.

    `tokens` int64 [T], `trained` bool [T]; one entry a trained token: `behaviour_logprobs` float32 [N] of the
    policy that sampled, at checkpoint `version`, and `advantages` float32 [N]. `tree`: where attention is
    one.
    """

    tokens: NDArray[np.int64]
    trained: NDArray[np.bool_]
    behaviour_logprobs: NDArray[np.float32]
    advantages: NDArray[np.float32]
    version: int
    tree: Tree | None = None

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
    """A sequence that is trained at `places_N`, each behind the token at `before_N`; these are the trained
    tokens `numbers_N` of all. Others may share its first `prefix` tokens; from `end` on it predicts nothing.
    `tree`: attention where it is not plain causal; the prefix is its first `segments`."""

    tokens: NDArray[np.int64]
    prefix: int
    end: int
    places_N: NDArray[np.int64]
    before_N: NDArray[np.int64]
    numbers_N: NDArray[np.int64]
    tree: Tree | None = None
    segments: int = 1

    @property
    def above(self) -> list[int]:
        """The parent of each segment: plain ones have two, the prefix and the rest."""
        return [-1, 0] if self.tree is None else self.tree.parents_S.tolist()

    def laid_out(self, start: int, end: int) -> tuple[NDArray[np.int64] | int, NDArray[np.int64]]:
        """Segment and position of the tokens from `start`, where a segment begins, to `end`."""
        if self.tree is None:
            return int(start > 0), np.arange(start, end)
        return self.tree.segment_of[start:end], self.tree.positions[start:end]


@dataclass(frozen=True)
class _Row:
    """Sequences that go on from the same prefix."""

    members: list[_Member]

    @property
    def masked(self) -> bool:
        return len(self.members) > 1 or self.members[0].tree is not None

    @property
    def length(self) -> int:
        prefix = self.members[0].prefix
        return prefix + sum(member.end - prefix for member in self.members)

    @property
    def trained(self) -> int:
        return sum(len(member.places_N) for member in self.members)


@dataclass(frozen=True)
class _Costs:
    """What decides which sequences share a row: `pair` is the cost of a pair of columns, in tokens."""

    budget: int
    pair: float

    def row(self, length: int, masked: bool) -> float:
        """Causal attention looks at half of all pairs, attention with a mask at each."""
        return length + self.pair * length * length / (1 if masked else 2)

    def fits(self, length: int, alone: int) -> bool:
        """Whether a row with a mask may have `length` columns, where its first sequence has `alone`."""
        room = self.budget if alone <= self.budget else alone + self.budget
        return length <= SHARED_COLUMNS or (length <= room and length * length <= MASK_ELEMENTS)


def micro_batches(
    sequences: Sequence[TokenSequence],
    token_budget: int,
    vocab_size: int,
    share_prompts: bool = True,
    device: torch.device | str = "cpu",
    pair_cost: float = PAIR_COST,
) -> list[MicroBatch]:
    """All trained tokens of `sequences`, each once, in micro-batches of at most `token_budget` places
    (padding included; a longer sequence is alone, or with others of its prompt that take a budget more at
    most). Sequences without trained tokens are left out. Without `share_prompts` no row needs a mask.

    Sequences share a row where that is cheaper: a token costs 1, and a pair of columns `pair_cost`
    (`Policy.pair_cost`). Raises BatchError if a token is marked as trained that nothing predicts.
    """
    costs = _Costs(token_budget, pair_cost)
    rows = sorted(_rows(sequences, share_prompts, costs), key=lambda row: row.length)
    logit_budget = max(1, LOGIT_ELEMENTS // vocab_size)
    return [_collate(part, device) for part in _parts(rows, token_budget, logit_budget)]


def flatten(arrays: Sequence[NDArray[np.float32]], device: torch.device | str = "cpu") -> Tensor:
    """The per-sequence arrays of trained tokens as one float32 vector: what `places_N` points into."""
    joined = np.concatenate(arrays) if arrays else np.zeros(0, np.float32)
    return torch.from_numpy(joined.astype(np.float32, copy=False)).to(device)


def _rows(sequences: Sequence[TokenSequence], share_prompts: bool, costs: _Costs) -> list[_Row]:
    """Sequences with trained tokens, gathered by what they may share."""
    families: dict[object, list[_Member]] = {}
    start = 0
    for sequence in sequences:
        count = int(sequence.trained.sum())
        if not count:
            continue
        numbers_N = np.arange(start, start + count)
        for member in _members(sequence, numbers_N, share_prompts, costs):
            key = _shared(member) if share_prompts else object()
            families.setdefault(key, []).append(member)
        start += count
    return [row for family in families.values() for row in _split(family, costs)]


def _members(
    sequence: TokenSequence, numbers_N: NDArray[np.int64], share_prompts: bool, costs: _Costs
) -> list[_Member]:
    """The sequence as one row; one whose attention is a tree as its paths, where that is cheaper or rows
    cannot have masks."""
    tree = sequence.tree
    if tree is None or tree.is_chain:
        return [_plain(sequence.tokens, sequence.trained, numbers_N)]
    whole = _branched(sequence.tokens, sequence.trained, tree, numbers_N)
    if share_prompts and whole.end <= SHARED_COLUMNS:
        return [whole]
    number_T = np.full(len(sequence.tokens), -1)
    number_T[sequence.trained] = numbers_N
    apart = [
        _plain(sequence.tokens[places], fresh, number_T[places[fresh]])
        for places, fresh in tree.paths(sequence.trained)
    ]
    separate = sum(costs.row(one.end, masked=False) for one in apart)
    cheaper = costs.row(whole.end, masked=True) <= separate
    return [whole] if share_prompts and cheaper and whole.end**2 <= MASK_ELEMENTS else apart


def _plain(tokens: NDArray[np.int64], trained: NDArray[np.bool_], numbers_N: NDArray[np.int64]) -> _Member:
    """Shares what stands before its first trained token."""
    places = trained.nonzero()[0]
    first, last = int(places[0]), int(places[-1])
    if first == 0:
        raise BatchError("The first token of a sequence is marked as trained, but nothing predicts it.")
    return _Member(tokens, first, last, places, places - 1, numbers_N)


def _branched(
    tokens: NDArray[np.int64], trained: NDArray[np.bool_], tree: Tree, numbers_N: NDArray[np.int64]
) -> _Member:
    """Shares the segments at its beginning of which each goes on from the one before."""
    places = trained.nonzero()[0]
    before = tree.before[places]
    if before.min() < 0:
        raise BatchError("The first token of a path is marked as trained, but nothing predicts it.")
    segments = tree.leading(trained)
    prefix = int(tree.lengths_S[:segments].sum())
    end = max(prefix, int(before.max()) + 1)
    return _Member(tokens, prefix, end, places, before, numbers_N, tree, segments)


def _shared(member: _Member) -> object:
    """Equal for members that may share a row. Plain ones never share with trees: their prefix is one segment
    whatever it was made of."""
    lengths = b"" if member.tree is None else member.tree.lengths_S[: member.segments].tobytes()
    return lengths, member.tokens[: member.prefix].tobytes()


def _split(family: list[_Member], costs: _Costs) -> Iterator[_Row]:
    while family:
        count = _together(family, costs)
        yield _Row(family[:count])
        family = family[count:]


def _together(family: list[_Member], costs: _Costs) -> int:
    """How many of the first members share a row: all that fit SHARED_COLUMNS, or more where rows of so many
    make the family cheaper."""
    first = family[0]
    more = [member.end - first.prefix for member in family]
    lengths = [0, *(first.prefix + length for length in accumulate(more))]

    def row(count: int) -> float:
        return costs.row(lengths[count], masked=count > 1 or first.tree is not None)

    together, least = 1, math.inf
    for count in range(1, len(lengths)):
        if not costs.fits(lengths[count], first.end):
            break
        rows, rest = divmod(len(family), count)
        total = rows * row(count) + row(rest)
        if lengths[count] <= SHARED_COLUMNS or total < least:
            together, least = count, total
    return together


def _parts(rows: list[_Row], token_budget: int, logit_budget: int) -> Iterator[list[_Row]]:
    part: list[_Row] = []
    trained = 0
    for row in rows:  # shortest first: the newest row is the longest
        columns = (len(part) + 1) * row.length
        full = columns > token_budget or trained + row.trained > logit_budget
        if part and (full or (columns * row.length > MASK_ELEMENTS and _masked([*part, row]))):
            yield part
            part, trained = [], 0
        part.append(row)
        trained += row.trained
    if part:
        yield part


def _masked(rows: Sequence[_Row]) -> bool:
    return any(row.masked for row in rows)


def _collate(rows: list[_Row], device: torch.device | str) -> MicroBatch:
    shape = (len(rows), rows[-1].length)
    tokens = np.zeros(shape, np.int64)
    segments = np.full(shape, -1, np.int64)  # -1: padding
    positions = np.tile(np.arange(shape[1]), (len(rows), 1))
    columns, targets, places, parents = [], [], [], []
    for number, row in enumerate(rows):
        head = row.members[0]
        prefix, offset = head.prefix, head.prefix
        tokens[number, :prefix] = head.tokens[:prefix]
        segments[number, :prefix], _ = head.laid_out(0, prefix)
        above = head.above[: head.segments]
        for member in row.members:
            after, shift = offset + member.end - prefix, len(above) - member.segments
            tokens[number, offset:after] = member.tokens[prefix : member.end]
            own, positions[number, offset:after] = member.laid_out(prefix, member.end)
            segments[number, offset:after] = own + shift
            own_above = member.above[member.segments :]
            above += [one if one < member.segments else one + shift for one in own_above]
            before = member.before_N
            columns.append(np.where(before < prefix, before, before + (offset - prefix)))
            targets.append(member.tokens[member.places_N])
            places.append(member.numbers_N)
            offset = after
        parents.append(above)
    masked = _masked(rows)
    row_numbers = np.repeat(np.arange(len(rows)), [row.trained for row in rows])
    return MicroBatch(
        torch.from_numpy(tokens).to(device),
        torch.from_numpy(row_numbers).to(device),
        torch.from_numpy(np.concatenate(columns)).to(device),
        torch.from_numpy(np.concatenate(targets)).to(device),
        torch.from_numpy(np.concatenate(places)).to(device),
        torch.from_numpy(positions).to(device) if masked else None,
        _mask(segments, parents, device) if masked else None,
    )


def _mask(
    segments_BL: NDArray[np.int64], parents: Sequence[Sequence[int]], device: torch.device | str
) -> Tensor:
    """Causal inside the own segment, and all segments that it goes on from. Padding is a segment behind the
    first one: no softmax over nothing."""
    width = segments_BL.shape[1]
    causal_LL = torch.ones(width, width, dtype=torch.bool, device=device).tril_()
    masks = []
    for segments_L, above in zip(segments_BL, parents, strict=True):
        sees_RR = torch.from_numpy(sees([*above, 0])).to(device)  # the last one is padding
        own_L = torch.from_numpy(segments_L % len(sees_RR)).to(device)
        masks.append(sees_RR.index_select(0, own_L).index_select(1, own_L) & causal_LL)
    return torch.stack(masks)[:, None]
