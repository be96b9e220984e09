"""Every trained token once, under the budget, and shared prompts change no log-prob."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.trainer import batch as batch_module
from nous_node.trainer.batch import Sample, micro_batches
from nous_node.trainer.errors import BatchError, RequestError
from nous_node.trainer.generate import Request, generate, uniforms
from nous_node.trainer.prefill import Recorded, prefill


def recorded(prompt: list[int], marks: list[bool], seed: int, vocab: int = 250) -> Recorded:
    """The prompt, then one token a mark."""
    rng = np.random.default_rng(seed)
    tokens = np.concatenate([np.array(prompt), rng.integers(0, vocab, len(marks))]).astype(np.int64)
    trained = np.array([False] * len(prompt) + marks, np.bool_)
    return Recorded(tokens, trained, rng.random(int(trained.sum())))


families = st.lists(
    st.tuples(
        st.lists(st.integers(0, 249), min_size=1, max_size=6),
        st.lists(st.lists(st.booleans(), max_size=8), min_size=1, max_size=4),
    ),
    max_size=5,
)


@settings(deadline=None, max_examples=80)
@given(families, st.integers(1, 60), st.booleans())
def test_every_trained_token_is_predicted_once_from_its_own_past(groups, budget, share):
    sequences = [
        recorded(prompt, marks, seed) for prompt, answers in groups for seed, marks in enumerate(answers)
    ]
    batches = micro_batches(sequences, budget, 1500, share)
    flat_targets = np.concatenate([s.tokens[s.trained] for s in sequences] or [np.zeros(0)])
    places = np.concatenate([b.places_N.numpy() for b in batches] or [np.zeros(0)])
    assert sorted(places.tolist()) == list(range(len(flat_targets)))
    pasts = [s.tokens[:at].tolist() for s in sequences for at in np.flatnonzero(s.trained)]
    for b in batches:
        assert b.tokens_BL.numel() <= budget or len(b.tokens_BL) == 1
        assert b.targets_N.tolist() == flat_targets[b.places_N.numpy()].tolist()
        for row, column, place in zip(b.rows_N, b.columns_N, b.places_N, strict=True):
            assert seen(b, int(row), int(column)) == pasts[int(place)]


def seen(b, row: int, column: int) -> list[int]:
    """The tokens that a place attends to, in the order of their positions."""
    if b.mask_B1LL is None:
        return b.tokens_BL[row, : column + 1].tolist()
    visible = b.mask_B1LL[row, 0, column].nonzero()[:, 0]
    positions = b.positions_BL[row, visible]
    assert sorted(positions.tolist()) == list(range(len(visible)))
    return b.tokens_BL[row, visible[positions.argsort()]].tolist()


def test_answers_side_by_side_have_the_logprobs_of_answers_alone(small_policy):
    rng = np.random.default_rng(0)
    sequences = [
        recorded(
            list(range(prompt, prompt + 9)),
            (rng.random(rng.integers(2, 30)) < 0.8).tolist(),
            prompt + n,
            1500,
        )
        for prompt in (5, 40)
        for n in range(6)
    ]
    together = prefill(small_policy, sequences, 0.8)
    for one, alone in zip(together, (prefill(small_policy, [s], 0.8)[0] for s in sequences), strict=True):
        np.testing.assert_allclose(one.logprobs, alone.logprobs, atol=2e-5)
        np.testing.assert_allclose(one.distances, alone.distances, atol=2e-5)
    tokens = torch.from_numpy(sequences[3].tokens)[None]
    with torch.inference_mode():
        whole = torch.log_softmax(small_policy.model(input_ids=tokens).logits[0, :-1] / 0.8, -1)
    expected = whole[torch.arange(len(tokens[0]) - 1), tokens[0, 1:]][sequences[3].trained[1:]]
    np.testing.assert_allclose(together[3].logprobs, expected, atol=2e-5)


@pytest.mark.parametrize("which", ["default_policy", "small_policy"])
def test_honest_generations_have_no_distance(which, request):
    policy = request.getfixturevalue(which)
    prompts = [policy.tokenizer.encode(f"sort {n}=") for n in (1234, 98, 777)]
    asked = [Request(p, bytes([n]) * 32, 0, 12) for p in prompts for n in range(8)]
    answers = generate(policy, asked, 1.0, {258})
    records = [
        Recorded(
            np.array([*r.prompt, *c.tokens]),
            np.arange(len(r.prompt) + len(c.tokens)) >= len(r.prompt),
            uniforms(r.key, 0, len(c.tokens)),
        )
        for r, c in zip(asked, answers, strict=True)
    ]
    for answer, again in zip(answers, prefill(policy, records, 1.0, 100), strict=True):
        np.testing.assert_allclose(again.logprobs, answer.logprobs, atol=2e-5)
        assert again.distances.max() < 1e-5
    other = [Recorded(r.tokens, r.trained, 1 - r.uniforms) for r in records]
    assert np.mean([o.distances.mean() for o in prefill(policy, other, 1.0)]) > 0.01


def test_long_answers_get_rows_of_their_own(monkeypatch):
    monkeypatch.setattr(batch_module, "SHARED_COLUMNS", 20)
    sequences = [recorded([1, 2, 3], [True] * 8, n) for n in range(5)]
    lengths = [b.tokens_BL.shape for b in micro_batches(sequences, 1, 1500)]
    assert lengths == [(1, 10), (1, 17), (1, 17)]


def test_logits_are_bounded_as_well(monkeypatch):
    monkeypatch.setattr(batch_module, "LOGIT_ELEMENTS", 1500 * 10)
    sequences = [recorded([n], [True] * 4, n) for n in range(6)]
    assert [len(b.targets_N) for b in micro_batches(sequences, 10**6, 1500)] == [8, 8, 8]


def test_a_trained_first_token_is_refused():
    with pytest.raises(BatchError, match="nothing predicts it"):
        micro_batches([recorded([], [True, True], 0)], 100, 1500)


def test_nothing_gives_nothing(small_policy):
    assert prefill(small_policy, [], 1.0) == []
    untrained = recorded([1, 2], [False], 0)
    assert [len(r.logprobs) for r in prefill(small_policy, [untrained, untrained], 1.0)] == [0, 0]


def test_records_that_do_not_match_are_refused(small_policy):
    good = recorded([1, 2], [True, True], 0)
    with pytest.raises(RequestError, match="must match"):
        prefill(small_policy, [Recorded(good.tokens, good.trained, good.uniforms[:1])], 1.0)
    with pytest.raises(RequestError, match="vocabulary"):
        prefill(small_policy, [Recorded(good.tokens + 1499, good.trained, good.uniforms)], 1.0)
    long = recorded([1] * 512, [True], 0)
    with pytest.raises(RequestError, match="context"):
        prefill(small_policy, [long], 1.0)


def test_a_sample_needs_one_number_a_trained_token():
    one = recorded([1], [True, True], 0)
    with pytest.raises(BatchError, match="2 trained tokens has 1 log-probs"):
        Sample(one.tokens, one.trained, np.zeros(1, np.float32), np.zeros(2, np.float32), 0)
