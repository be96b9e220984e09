"""Block sums must draw what a plain float64 running sum draws."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from nous_node.protocol import sampling as reference
from nous_node.trainer.errors import LogitsError, RequestError
from nous_node.trainer.sampling import BLOCK, SINGLE_BLOCK, choose, distances

HIGHEST = 1 - 2.0**-53
SIZES = [1, 2, 259, SINGLE_BLOCK, SINGLE_BLOCK + 1, 4 * BLOCK + 7, 8 * BLOCK]


def naive(logits: np.ndarray, u: float, temperature: float) -> tuple[int, np.ndarray]:
    z = logits.astype(np.float64)
    sums = np.cumsum(np.exp((z - z.max()) / temperature))
    return int(np.argmax(sums > u * sums[-1])), sums / sums[-1]


@settings(deadline=None, max_examples=60)
@given(
    st.sampled_from(SIZES),
    st.integers(0, 2**32 - 1),
    st.sampled_from([0.0, 1e-3, 0.5, HIGHEST]) | st.floats(0, HIGHEST),
    st.floats(0.05, 5),
    st.sampled_from([0.0, 0.1, 3.0, 40.0]),
    st.floats(0, 0.99),
)
def test_choice_equals_the_plain_running_sum(size, seed, u, temperature, spread, masked):
    rng = np.random.default_rng(seed)
    logits = (rng.normal(size=size) * spread).astype(np.float32)
    logits[rng.random(size) < masked] = -np.inf
    logits[rng.integers(size)] = 0.5
    token, sums = naive(logits, u, temperature)
    tensor = torch.from_numpy(logits)[None]
    chosen, logprobs = choose(tensor, torch.tensor([u], dtype=torch.float64), temperature)
    lower = sums[token - 1] if token else 0.0
    near_an_edge = min(abs(u - lower), abs(u - sums[token])) < 1e-12
    assert chosen.item() == token or near_an_edge
    assert logits[chosen.item()] > -np.inf
    probability = sums[chosen.item()] - (sums[chosen.item() - 1] if chosen.item() else 0.0)
    assert np.exp(logprobs.item()) == pytest.approx(probability, rel=1e-5, abs=1e-12)
    _, away = distances(tensor, chosen, torch.tensor([u], dtype=torch.float64), temperature)
    assert away.item() < 1e-15


@pytest.mark.parametrize("size", SIZES[1:])
def test_ties_go_to_the_interval_above(size):
    logits = torch.full((1, size), -torch.inf)
    logits[0, 0] = logits[0, -1] = 0.0
    half, below = (torch.tensor([v], dtype=torch.float64) for v in (0.5, 0.5 - 2.0**-54))
    assert choose(logits, half, 1.0)[0].item() == size - 1
    assert choose(logits, below, 1.0)[0].item() == 0


@pytest.mark.parametrize("size", SIZES)
def test_extreme_uniforms_draw_tokens_that_exist(size):
    logits = torch.full((2, size), -torch.inf)
    logits[:, size // 2] = 3.0
    u = torch.tensor([0.0, HIGHEST], dtype=torch.float64)
    tokens, logprobs = choose(logits, u, 1.0)
    assert tokens.tolist() == [size // 2] * 2
    assert logprobs.tolist() == [0.0, 0.0]


def test_a_block_sum_rounded_up_never_draws_beyond_the_block():
    """Many distributions at the highest uniform: the last running sum may fall short of the block's sum."""
    logits = torch.randn(400, 5 * BLOCK, generator=torch.Generator().manual_seed(1)) * 2
    logits[:, -BLOCK:] = -torch.inf
    tokens, _ = choose(logits, torch.full((400,), HIGHEST, dtype=torch.float64), 1.0)
    assert tokens.max() < 4 * BLOCK


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
@pytest.mark.parametrize("size", [259, 2000])
def test_distance_is_that_of_the_reference(size, dtype):
    generator = torch.Generator().manual_seed(size)
    logits = (torch.randn(40, size, generator=generator) * 2).to(dtype)
    u = torch.rand(40, generator=generator, dtype=torch.float64)
    tokens = torch.randint(size, (40,), generator=generator)
    logprobs, away = distances(logits, tokens, u, 0.8)
    for row in range(40):
        expected = reference.distance(logits[row].double().tolist(), 0.8, int(tokens[row]), float(u[row]))
        assert away[row].item() == pytest.approx(expected, abs=1e-12)
    plain = torch.log_softmax(logits.double() / 0.8, -1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, plain.float(), rtol=1e-6, atol=1e-6)


def test_choice_agrees_with_the_protocol_reference():
    generator = torch.Generator().manual_seed(3)
    logits = torch.randn(30, 1500, generator=generator) * 3
    u = torch.rand(30, generator=generator, dtype=torch.float64)
    tokens, _ = choose(logits, u, 1.3)
    expected = [
        reference.choose(row.double().tolist(), 1.3, float(v)) for row, v in zip(logits, u, strict=True)
    ]
    assert tokens.tolist() == expected


def test_an_impossible_token_has_no_probability_and_a_distance():
    logits = torch.tensor([[0.0, -torch.inf, 0.0]])
    logprobs, away = distances(logits, torch.tensor([1]), torch.tensor([0.9], dtype=torch.float64), 1.0)
    assert logprobs.item() == -torch.inf
    assert away.item() == pytest.approx(0.4)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
@pytest.mark.parametrize("size", [5, 3000])
def test_broken_logits_are_named(bad, size):
    logits = torch.zeros(3, size)
    logits[1, 2] = bad
    with pytest.raises(LogitsError, match="row 1"):
        choose(logits, torch.zeros(3, dtype=torch.float64), 1.0)


def test_logits_of_minus_infinity_only_are_named():
    with pytest.raises(LogitsError):
        distances(torch.full((1, 4), -torch.inf), torch.tensor([0]), torch.zeros(1).double(), 1.0)


@pytest.mark.parametrize("temperature", [0.0, -1.0, float("nan")])
def test_a_temperature_must_be_positive(temperature):
    with pytest.raises(RequestError):
        choose(torch.zeros(1, 4), torch.zeros(1).double(), temperature)


def test_slices_of_a_large_batch_are_joined():
    logits = torch.randn(50, 49152, generator=torch.Generator().manual_seed(0))
    u = torch.rand(50, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    tokens, logprobs = choose(logits, u, 1.0)
    alone = [choose(logits[i : i + 1], u[i : i + 1], 1.0) for i in range(50)]
    assert tokens.tolist() == [t.item() for t, _ in alone]
    assert logprobs.tolist() == [p.item() for _, p in alone]
