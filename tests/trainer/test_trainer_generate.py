"""Generation: the cache loop against whole forward passes, whatever else is in the batch."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
import torch

from nous_node.trainer import generate as generate_module
from nous_node.trainer.decoder import LlamaDecoder, ModelDecoder, make_decoder
from nous_node.trainer.errors import LogitsError, RequestError
from nous_node.trainer.generate import Request, generate, uniforms
from nous_node.trainer.policy import Policy
from nous_node.trainer.sampling import choose


def key(n: int) -> bytes:
    return hashlib.sha256(b"key %d" % n).digest()


def mixed_requests(count: int = 12) -> list[Request]:
    rng = np.random.default_rng(0)
    return [
        Request(rng.integers(0, 250, rng.integers(1, 40)).tolist(), key(n), 5 * n, int(rng.integers(1, 90)))
        for n in range(count)
    ]


def by_whole_passes(policy: Policy, request: Request, stop_ids: set[int]) -> tuple[list[int], list[float]]:
    """One token at a time, the whole sequence read again each time."""
    tokens, logprobs = list(request.prompt), []
    for u in uniforms(request.key, request.start, request.max_tokens):
        with torch.inference_mode():
            logits = policy.model(input_ids=torch.tensor([tokens])).logits[:, -1]
        token, logprob = choose(logits, torch.tensor([u]), 0.9)
        tokens.append(int(token))
        logprobs.append(float(logprob))
        if tokens[-1] in stop_ids:
            break
    return tokens[len(request.prompt) :], logprobs


@pytest.fixture(params=["llama", "model"])
def either_decoder(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = {"llama": LlamaDecoder, "model": ModelDecoder}[request.param]
    monkeypatch.setattr(generate_module, "make_decoder", lambda policy: kind(policy.model))


@pytest.mark.usefixtures("either_decoder")
@pytest.mark.parametrize("which", ["default_policy", "small_policy"])
def test_batch_of_mixed_lengths_equals_whole_passes_one_by_one(which, request):
    policy = request.getfixturevalue(which)
    requests, stops = mixed_requests(8), {258, 7, 100}
    for asked, answer in zip(requests, generate(policy, requests, 0.9, stops), strict=True):
        tokens, logprobs = by_whole_passes(policy, asked, stops)
        assert answer.tokens == tokens
        np.testing.assert_allclose(answer.logprobs, logprobs, atol=2e-5)
        assert answer.finish == ("stop" if tokens[-1] in stops else "length")
        assert answer.finish == "stop" or len(tokens) == asked.max_tokens


def test_samples_of_a_group_share_their_prompt_and_differ_by_key(default_policy):
    prompt = default_policy.tokenizer.encode("sort 5283=")
    requests = [Request(prompt, key(n), 0, 8) for n in range(16)]
    together = generate(default_policy, requests, 1.0, {258})
    alone = [generate(default_policy, [r], 1.0, {258})[0] for r in requests]
    assert [c.tokens for c in together] == [c.tokens for c in alone]
    for one, other in zip(together, alone, strict=True):
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-5)
    assert len({tuple(c.tokens) for c in together}) > 1


def test_a_second_turn_goes_on_with_the_uniforms_of_the_first(small_policy):
    whole = generate(small_policy, [Request([1, 2, 3], key(1), 0, 20)], 1.0, ())[0]
    again = generate(small_policy, [Request([1, 2, 3, *whole.tokens[:12]], key(1), 12, 8)], 1.0, ())[0]
    assert whole.tokens[12:] == again.tokens
    np.testing.assert_allclose(whole.logprobs[12:], again.logprobs, atol=1e-5)


def test_batches_that_do_not_fit_the_cache_budget_give_the_same(small_policy, monkeypatch):
    requests = mixed_requests(10)
    expected = [c.tokens for c in generate(small_policy, requests, 1.0, {258})]
    monkeypatch.setattr(generate_module, "CACHE_BYTES", 200 * small_policy.cache_bytes_per_token)
    assert [c.tokens for c in generate(small_policy, requests, 1.0, {258})] == expected


def test_heartbeat_counts_every_token(small_policy):
    beats: list[int] = []
    completions = generate(small_policy, mixed_requests(), 1.0, {258}, beats.append)
    assert sum(beats) == sum(len(c.tokens) for c in completions)
    assert all(c.logprobs.dtype == np.float32 and len(c.logprobs) == len(c.tokens) for c in completions)


def test_uniforms_are_those_of_the_protocol():
    from nous_node.protocol.sampling import uniforms as reference

    assert uniforms(key(0), 3, 40).tolist() == reference(key(0), 3, 40)


def test_weights_changed_after_a_generation_are_used_by_the_next(small_folder):
    policy = Policy.load(small_folder)
    before = generate(policy, mixed_requests(3), 1.0, ())
    policy.load_tensors({n: w * 0.9 for n, w in policy.tensors().items()})
    after = generate(policy, mixed_requests(3), 1.0, ())
    assert [c.tokens for c in before] != [c.tokens for c in after]


def test_llama_is_decoded_by_the_plain_forward(small_policy, default_policy):
    assert isinstance(make_decoder(small_policy), LlamaDecoder)
    assert isinstance(make_decoder(default_policy), LlamaDecoder)


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        (Request([], key(0), 0, 4), "at least one token"),
        (Request([1], key(0), 0, 0), "at least one token"),
        (Request([1, 1500], key(0), 0, 4), "outside the vocabulary"),
        (Request([-1], key(0), 0, 4), "outside the vocabulary"),
        (Request([1] * 500, key(0), 0, 13), "context of 512"),
    ],
)
def test_requests_outside_the_model_are_refused_in_a_sentence(small_policy, asked, words):
    with pytest.raises(RequestError, match=words):
        generate(small_policy, [asked], 1.0, ())


def test_broken_weights_are_named(small_folder):
    policy = Policy.load(small_folder)
    policy.load_tensors({n: w * torch.nan for n, w in policy.tensors().items()})
    with pytest.raises(LogitsError):
        generate(policy, mixed_requests(1), 1.0, ())


@pytest.mark.parametrize(("dtype", "tolerance"), [("float32", 1e-5), ("bfloat16", 0.15)])
def test_the_plain_forward_computes_the_logits_of_the_model(small_folder, dtype, tolerance):
    policy = Policy.load(small_folder, dtype)
    tokens = torch.randint(0, 1500, (3, 40), generator=torch.Generator().manual_seed(0))
    pads = torch.tensor([0, 12, 39])
    plain, model = LlamaDecoder(policy.model), ModelDecoder(policy.model)
    with torch.inference_mode():
        pairs = [(plain.prefill(tokens, pads), model.prefill(tokens, pads))]
        for step in range(70):  # beyond one growth of the cache
            if step == 30:
                rows = torch.tensor([2, 0, 0, 1])
                plain.select(rows)
                model.select(rows)
            chosen = torch.arange(4 if step >= 30 else 3) + step
            pairs.append((plain.step(chosen), model.step(chosen)))
        spread = float(pairs[0][1].float().std())
        for one, other in pairs:
            assert float((one - other).abs().max()) < tolerance * max(1.0, spread)
