"""Seeded generation: a token is a function of the weights, the tokens before it and its uniform.

Requests are answered in batches that fit a memory budget. Equal prompts (the samples of a group) are read
once and their cache repeated; finished rows leave the batch when enough of them have finished.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from numpy.typing import NDArray

from nous_node.protocol.sampling import keystream

from .decoder import Decoder, make_decoder
from .errors import RequestError
from .policy import Policy
from .sampling import choose

# Memory of the key-value cache of one batch: leaves room for the weights on a machine with 4 GB.
CACHE_BYTES = 1 << 30

# More rows than this do not make a CPU or a small GPU faster, only the first answer later.
MAX_ROWS = 512

# Rows are dropped once this share of them has finished: dropping copies the cache of the others.
DROP_SHARE = 0.25


@dataclass(frozen=True)
class Request:
    """Continue `prompt` (token ids) by up to `max_tokens`, with the uniforms of `key` (32 bytes) from
    number `start` on: `start` counts the tokens this trajectory has sampled in earlier turns."""

    prompt: Sequence[int]
    key: bytes
    start: int
    max_tokens: int


@dataclass(frozen=True)
class Completion:
    """The sampled `tokens` with their float32 log-probabilities at the sampling temperature.

    `finish`: "stop" if the last token is a stop id, else "length" and there are exactly `max_tokens`."""

    tokens: list[int]
    logprobs: NDArray[np.float32]
    finish: Literal["stop", "length"]


def uniforms(key: bytes, start: int, count: int) -> NDArray[np.float64]:
    """u_start .. u_(start+count-1) of the sampler key, each in [0, 1): 53 bits of the keystream."""
    words = np.frombuffer(keystream(key, start, count), dtype="<u8")
    return (words >> np.uint64(11)).astype(np.float64) * 2.0**-53


@torch.inference_mode()
def generate(
    policy: Policy,
    requests: Sequence[Request],
    temperature: float,
    stop_ids: Collection[int],
    heartbeat: Callable[[int], None] | None = None,
) -> list[Completion]:
    """One completion a request, in their order.

    `heartbeat`, if given, is called after each step with the number of tokens it made. Raises RequestError
    for an empty prompt, a token outside the vocabulary or a request that does not fit the context, and
    LogitsError when the weights are broken.
    """
    for request in requests:
        _check(policy, request)
    decoder = make_decoder(policy)
    completions: list[Completion] = []
    for batch in _batches(policy, requests):
        rows = _Rows(batch, policy)
        rows.run(decoder, temperature, frozenset(stop_ids), heartbeat)
        completions += rows.completions()
    return completions


class _Rows:
    """A batch in work. `alive` maps rows of the decoder to requests of the batch."""

    def __init__(self, requests: Sequence[Request], policy: Policy) -> None:
        self.requests = requests
        self.limits = np.array([r.max_tokens for r in requests])
        width = int(self.limits.max())
        self.uniforms = np.zeros((len(requests), width))
        for row, r in enumerate(requests):
            self.uniforms[row, : r.max_tokens] = uniforms(r.key, r.start, r.max_tokens)
        self.tokens = np.zeros((len(requests), width), np.int64)
        self.logprobs = np.zeros((len(requests), width), np.float32)
        self.lengths = np.zeros(len(requests), np.int64)
        self.stopped = np.zeros(len(requests), bool)
        self.device, self.pad_id = policy.device, policy.tokenizer.pad_id

    def run(
        self,
        decoder: Decoder,
        temperature: float,
        stop_ids: frozenset[int],
        heartbeat: Callable[[int], None] | None,
    ) -> None:
        stops = np.array(sorted(stop_ids), np.int64)
        logits = self._prefill(decoder)
        alive = np.arange(len(self.requests))
        done = np.zeros(len(alive), bool)
        for step in range(self.tokens.shape[1]):
            u = torch.from_numpy(self.uniforms[alive, step]).to(self.device)
            chosen, logprobs = choose(logits, u, temperature)
            tokens = chosen.cpu().numpy()
            working = alive[~done]
            self.tokens[working, step] = tokens[~done]
            self.logprobs[working, step] = logprobs.cpu().numpy()[~done]
            self.lengths[working] = step + 1
            self.stopped[working] = np.isin(tokens[~done], stops)
            if heartbeat is not None:
                heartbeat(len(working))
            done = self.stopped[alive] | (self.limits[alive] <= step + 1)
            if done.all():
                return
            if done.mean() >= DROP_SHARE:
                keep = np.flatnonzero(~done)
                decoder.select(torch.from_numpy(keep).to(self.device))
                chosen, alive, done = chosen[torch.from_numpy(keep).to(self.device)], alive[keep], done[keep]
            logits = decoder.step(chosen)

    def completions(self) -> list[Completion]:
        return [
            Completion(
                self.tokens[row, :length].tolist(),
                self.logprobs[row, :length].copy(),
                "stop" if self.stopped[row] else "length",
            )
            for row, length in enumerate(self.lengths.tolist())
        ]

    def _prefill(self, decoder: Decoder) -> torch.Tensor:
        """Reads each different prompt once; the logits after it, one row a request."""
        places: dict[tuple[int, ...], int] = {}
        rows = [places.setdefault(tuple(r.prompt), len(places)) for r in self.requests]
        width = max(len(prompt) for prompt in places)
        padded = np.full((len(places), width), self.pad_id, np.int64)
        for row, prompt in enumerate(places):
            padded[row, width - len(prompt) :] = prompt
        pads = torch.tensor([width - len(prompt) for prompt in places], device=self.device)
        logits = decoder.prefill(torch.from_numpy(padded).to(self.device), pads)
        if len(places) == len(rows):
            return logits
        index = torch.tensor(rows, device=self.device)
        decoder.select(index)
        return logits[index]


def _check(policy: Policy, request: Request) -> None:
    if not request.prompt:
        raise RequestError("A prompt has at least one token; begin it with the beginning-of-text token.")
    if request.max_tokens < 1:
        raise RequestError(f"A completion has at least one token, not {request.max_tokens}.")
    policy.check_tokens(min(request.prompt), max(request.prompt), len(request.prompt) + request.max_tokens)


def _batches(policy: Policy, requests: Sequence[Request]) -> Iterator[Sequence[Request]]:
    """Runs of requests, in order, whose caches fit CACHE_BYTES together."""
    budget = CACHE_BYTES // policy.cache_bytes_per_token
    start = 0
    while start < len(requests):
        end, prompt, answer = start, 0, 0
        while end < len(requests) and end - start < MAX_ROWS:
            prompt = max(prompt, len(requests[end].prompt))
            answer = max(answer, requests[end].max_tokens)
            if end > start and (end - start + 1) * (prompt + answer) > budget:
                break
            end += 1
        yield requests[start:end]
        start = end
