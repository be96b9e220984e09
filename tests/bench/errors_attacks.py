"""Attacks that are made from honest rollouts, without generating again."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import torch
from errors_engines import recompute
from errors_store import GROUP, Rollouts
from numpy.typing import NDArray

from nous_node.trainer.batch import micro_batches
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recorded

LIKELY = 20
"""An edit takes one of the model's most likely tokens: what reads well."""


def edited(policy: Policy, rollouts: Rollouts, recorded: list[Recorded], seed: int) -> Rollouts:
    """One token of each trajectory replaced by another likely one, and all log-probs re-made by the node.

    Neither the end-of-sequence token of a trajectory nor an early end is made: that is another attack."""
    draw = np.random.default_rng(seed)
    lengths = rollouts.lengths.tolist()
    places = [int(draw.integers(max(1, n - 1))) for n in lengths]
    tokens = rollouts.tokens.copy()
    starts = np.cumsum([0, *lengths])
    for row, ids in enumerate(_likely(policy, recorded, places)):
        at = starts[row] + places[row]
        others = [i for i in ids if i not in (tokens[at], policy.tokenizer.eos_id)]
        if lengths[row] > 1:
            tokens[at] = others[int(draw.integers(len(others)))]
    new = replace(rollouts, tokens=tokens)
    remade = recompute(policy, _with_tokens(recorded, new))
    return replace(new, reported=remade.logprobs)


@torch.inference_mode()
def _likely(policy: Policy, recorded: list[Recorded], places: list[int]) -> list[list[int]]:
    """The LIKELY most probable tokens at one place of each trajectory."""
    asked = []
    for one, place in zip(recorded, places, strict=True):
        first = int(np.flatnonzero(one.trained)[0])
        asked.append(
            Recorded(one.tokens, np.arange(len(one.tokens)) == first + place, one.uniforms[place : place + 1])
        )
    found = torch.zeros(len(asked), LIKELY, dtype=torch.int64)
    for batch in micro_batches(asked, 1500, policy.tokenizer.vocab_size, policy.shares_prompts):
        found[batch.places_N] = policy.logits(batch).float().topk(LIKELY, -1).indices
    return [row.tolist() for row in found]


def _with_tokens(recorded: list[Recorded], rollouts: Rollouts) -> list[Recorded]:
    renewed = []
    for one, tokens in zip(recorded, rollouts.token_list(), strict=True):
        whole = one.tokens.copy()
        whole[one.trained] = tokens
        renewed.append(replace(one, tokens=whole))
    return renewed


def one_edit(honest: Rollouts, edit: Rollouts, seed: int) -> NDArray[np.bool_]:
    """Which trajectories of `edit` a cheat uses who edits one trajectory a group: one in each group."""
    draw = np.random.default_rng(seed)
    chosen = np.zeros(len(honest.lengths), bool)
    changed = [bool((a != b).any()) for a, b in zip(honest.token_list(), edit.token_list(), strict=True)]
    for start in range(0, len(chosen), GROUP):
        able = [i for i in range(start, start + GROUP) if changed[i]]
        chosen[able[int(draw.integers(len(able)))]] = True
    return chosen


def other_prompt(rollouts: Rollouts) -> Rollouts:
    """The completions under the prompt of another group of similar length, as if made for that one."""
    prompts = rollouts.prompt_list()
    by_length = np.argsort(rollouts.prompt_lengths, kind="stable").tolist()
    taken = dict(zip(by_length, [*by_length[1:], by_length[0]], strict=True))
    swapped = [prompts[taken[group]] for group in range(len(prompts))]
    return replace(
        rollouts,
        prompts=np.concatenate(swapped).astype(np.int32),
        prompt_lengths=np.array([len(p) for p in swapped]),
    )
