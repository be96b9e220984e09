"""Trees of segments: one pass over them computes what one pass for each path computes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import (
    AutoModelForCausalLM,
    GPT2Config,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from nous_node.trainer import batch as batch_module
from nous_node.trainer.batch import flatten, micro_batches
from nous_node.trainer.errors import BatchError
from nous_node.trainer.loss import chosen_logprobs
from nous_node.trainer.optim import Optimizer, OptimizerConfig
from nous_node.trainer.policy import DEFAULT_FOLDER, Policy
from nous_node.trainer.prefill import Recorded, prefill
from nous_node.trainer.step import Group, Trajectory, UpdateConfig, update
from nous_node.trainer.tree import Tree
from nous_node.trainer.warmstart import make_tokenizer

VOCABULARY = 259


def record(lengths: list[int], parents: list[int], trained: list[bool], seed: int) -> Recorded:
    rng = np.random.default_rng(seed)
    marks = np.repeat(np.array(trained, np.bool_), lengths)
    tokens = rng.integers(0, 250, len(marks))
    return Recorded(tokens, marks, rng.random(int(marks.sum())), Tree.of(lengths, parents))


@st.composite
def trees(draw: st.DrawFn) -> Recorded:
    """Up to eight segments, each behind any earlier one; nothing trained at a root."""
    count = draw(st.integers(1, 8))
    lengths = [draw(st.integers(1, 5)) for _ in range(count)]
    parents = [draw(st.integers(-1, number - 1)) for number in range(count)]
    trained = [parent >= 0 and draw(st.booleans()) for parent in parents]
    return record(lengths, parents, trained, draw(st.integers(0, 3)))


def past(one: Recorded, place: int) -> list[int]:
    """The tokens in front of a place, by the words of the specification."""
    assert one.tree is not None
    lengths, parents = one.tree.lengths_S.tolist(), one.tree.parents_S.tolist()
    starts = np.cumsum([0, *lengths]).tolist()
    segment = next(number for number in range(len(lengths)) if starts[number + 1] > place)
    found = one.tokens[starts[segment] : place].tolist()
    while (segment := parents[segment]) >= 0:
        found = one.tokens[starts[segment] : starts[segment + 1]].tolist() + found
    return found


def seen(b, row: int, column: int) -> list[int]:
    """The tokens that a place attends to, in the order of their positions."""
    if b.mask_B1LL is None:
        return b.tokens_BL[row, : column + 1].tolist()
    visible = b.mask_B1LL[row, 0, column].nonzero()[:, 0]
    positions = b.positions_BL[row, visible]
    assert sorted(positions.tolist()) == list(range(len(visible)))
    return b.tokens_BL[row, visible[positions.argsort()]].tolist()


@settings(deadline=None, max_examples=150)
@given(st.lists(trees(), max_size=4), st.integers(1, 60), st.booleans(), st.sampled_from([0, 8, 512]))
def test_every_trained_token_is_predicted_once_from_its_own_path(records, budget, share, columns):
    pasts = [past(one, int(place)) for one in records for place in np.flatnonzero(one.trained)]
    flat_targets = np.concatenate([one.tokens[one.trained] for one in records] or [np.zeros(0)])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(batch_module, "SHARED_COLUMNS", columns)
        batches = micro_batches(records, budget, VOCABULARY, share)
    places = np.concatenate([b.places_N.numpy() for b in batches] or [np.zeros(0)])
    assert sorted(places.tolist()) == list(range(len(flat_targets)))
    for b in batches:
        assert share or b.mask_B1LL is None
        assert b.targets_N.tolist() == flat_targets[b.places_N.numpy()].tolist()
        for row, column, place in zip(b.rows_N, b.columns_N, b.places_N, strict=True):
            assert seen(b, int(row), int(column)) == pasts[int(place)]


def test_trees_with_one_root_share_it():
    root = record([20, 3, 4], [-1, 0, 0], [False, True, True], 0)
    others = [record([20, 3, 4, 2], [-1, 0, 0, 1], [False, True, True, True], n) for n in range(1, 4)]
    for one in others:
        one.tokens[:20] = root.tokens[:20]
    (batch,) = micro_batches([root, *others], 4096, VOCABULARY)
    assert batch.tokens_BL.shape[0] == 1
    assert batch.tokens_BL.shape[1] < 20 + 4 * 9


def test_a_chain_of_segments_is_plain():
    one = record([3, 2, 2], [-1, 0, 1], [False, True, False], 0)
    (batch,) = micro_batches([one], 4096, VOCABULARY)
    assert batch.mask_B1LL is None
    assert batch.positions_BL is None


def test_a_trained_root_is_refused():
    with pytest.raises(BatchError, match="nothing predicts it"):
        micro_batches([record([2, 2], [-1, -1], [False, True], 0)], 100, VOCABULARY)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Small random models with grouped heads; the last three have attention that trees are not given to."""
    shape = {
        "vocab_size": VOCABULARY,
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "max_position_embeddings": 512,
        "initializer_range": 0.3,
        "eos_token_id": 258,
        "pad_token_id": 256,
        "bos_token_id": 257,
    }
    window = {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 0}
    configs = {
        "qwen2": Qwen2Config(**shape),
        "qwen3": Qwen3Config(**shape, head_dim=16),
        "qwen2 with a window": Qwen2Config(**shape, **window),
        "mistral with a window": MistralConfig(**shape, sliding_window=8),
        "gpt2": GPT2Config(**shape, n_positions=512, n_embd=48, n_layer=2, n_head=6),
    }
    made = {}
    for number, (name, config) in enumerate(configs.items()):
        torch.manual_seed(number)
        made[name] = tmp_path_factory.mktemp("model")
        AutoModelForCausalLM.from_config(config).save_pretrained(made[name])
        make_tokenizer().save(str(made[name] / "tokenizer.json"))
    return made


BRANCHED = [
    record([30, 5, 7, 4, 6, 2], [-1, 0, 0, 1, 2, 2], [False, True, True, False, True, True], 1),
    record([9, 3, 12, 5, 5], [-1, -1, 0, 1, 2], [False, False, True, True, True], 2),
    record([4, 4, 6, 6], [-1, 0, 1, 0], [False, False, True, True], 3),
]

MODELS = {
    "default": True,
    "small": True,
    "qwen2": True,
    "qwen3": True,
    "qwen2 with a window": False,
    "mistral with a window": False,
    "gpt2": False,
}


def policy_of(name: str, folders: dict[str, Path], small_folder: Path, dtype: str = "float32") -> Policy:
    folder = {"default": DEFAULT_FOLDER, "small": small_folder, **folders}[name]
    return Policy.load(folder, dtype, threads=1)


@pytest.mark.parametrize(("name", "shared"), MODELS.items())
def test_one_pass_over_trees_has_the_logprobs_of_each_path_alone(name, shared, folders, small_folder):
    policy = policy_of(name, folders, small_folder)
    assert policy.shares_prompts is shared
    together = prefill(policy, BRANCHED, 0.8)
    for one, found in zip(BRANCHED, together, strict=True):
        trained = np.flatnonzero(one.trained)
        for number, place in enumerate(trained.tolist()):
            tokens = torch.tensor([past(one, place)])
            with torch.inference_mode():
                alone = torch.log_softmax(policy.model(input_ids=tokens).logits[0, -1].float() / 0.8, -1)
            assert abs(found.logprobs[number] - float(alone[one.tokens[place]])) < 1e-4


def as_trees() -> Group:
    rng = np.random.default_rng(0)
    trajectories = [
        Trajectory(
            one.tokens,
            one.trained,
            np.full(int(one.trained.sum()), -5.0, np.float32),
            rng.normal(size=int(one.trained.sum())).astype(np.float32),
            tree=one.tree,
        )
        for one in BRANCHED
    ]
    return Group(trajectories, [0.0, 1.0, 2.0], 0)


def as_paths(group: Group) -> Group:
    """The same trained tokens, each path a trajectory of its own."""
    trajectories = []
    for one in group.trajectories:
        assert one.tree is not None
        number_T = np.cumsum(one.trained) - 1
        for places, fresh in one.tree.paths(one.trained):
            numbers = number_T[places[fresh]]
            trajectories.append(
                Trajectory(
                    one.tokens[places], fresh, one.behaviour_logprobs[numbers], one.advantages[numbers]
                )
            )
    return Group(trajectories, [float(n) for n in range(len(trajectories))], 0)


def gradients(policy: Policy, group: Group) -> dict[str, torch.Tensor]:
    """Of the log-probs, each times its advantage."""
    advantages_N = flatten([one.advantages for one in group.trajectories])
    share = policy.shares_prompts
    for batch in micro_batches(group.trajectories, 4096, policy.tokenizer.vocab_size, share):
        current, _ = chosen_logprobs(policy.logits(batch), batch.targets_N, 1.0)
        (current * advantages_N[batch.places_N]).sum().backward()
    return {name: weight.grad for name, weight in policy.model.named_parameters()}


@pytest.mark.parametrize("name", MODELS)
def test_trees_teach_what_their_paths_teach(name, folders, small_folder):
    trees, paths = as_trees(), as_paths(as_trees())
    expected = gradients(policy_of(name, folders, small_folder), paths)
    for weight, found in gradients(policy_of(name, folders, small_folder), trees).items():
        torch.testing.assert_close(found, expected[weight], atol=1e-4, rtol=1e-3)
    reports = []
    for group in (trees, paths):
        policy = policy_of(name, folders, small_folder)
        report = update(policy, Optimizer(policy, OptimizerConfig()), [group], UpdateConfig(), {})
        reports.append((report.tokens, report.gradient_norm, report.loss, report.entropy, report.kl))
    assert reports[0] == pytest.approx(reports[1], rel=1e-4)


def long_family(prompt: int, answers: int, each: int) -> list[Recorded]:
    rng = np.random.default_rng(0)
    head = rng.integers(0, 250, prompt)
    marks = np.arange(prompt + each) >= prompt
    return [
        Recorded(np.concatenate([head, rng.integers(0, 250, each)]), marks, rng.random(each))
        for _ in range(answers)
    ]


def columns(records: list[Recorded], budget: int = 4096, **more: float) -> list[tuple[int, int]]:
    batches = micro_batches(records, budget, VOCABULARY, **more)
    return [tuple(b.tokens_BL.shape) for b in batches]


@pytest.mark.parametrize(("prompt", "answers"), [(600, 8), (2048, 8), (4096, 8)])
def test_answers_to_a_long_prompt_share_it(prompt, answers):
    assert columns(long_family(prompt, answers, 32)) == [(1, prompt + answers * 31)]


def test_answers_that_cost_more_side_by_side_stay_alone():
    records = long_family(8, 8, 600)
    assert columns(records, pair_cost=1 / 100) == [(6, 607), (2, 607)]
    assert columns(records, pair_cost=1e-9) == [(1, 8 + 4 * 599)] * 2


def test_rows_never_outgrow_the_budget_by_more_than_one(monkeypatch):
    shapes = columns(long_family(1000, 64, 100), 500, pair_cost=1e-9)
    assert all(length <= 1099 + 500 for _, length in shapes)
    assert len(shapes) == 11  # six answers a row, and the rest
    monkeypatch.setattr(batch_module, "MASK_ELEMENTS", 1100**2)
    assert columns(long_family(1000, 3, 100), 4096, pair_cost=1e-9) == [(3, 1099)]


def test_masks_of_a_micro_batch_are_bounded(monkeypatch):
    monkeypatch.setattr(batch_module, "MASK_ELEMENTS", 2 * 600**2)
    records = [record([500, 50, 51], [-1, 0, 0], [False, True, True], seed) for seed in range(4)]
    assert columns(records, 10**6) == [(2, 600), (2, 600)]


def test_a_tree_beyond_the_bound_is_computed_as_its_paths(monkeypatch):
    monkeypatch.setattr(batch_module, "MASK_ELEMENTS", 500**2)
    (batch,) = micro_batches([record([500, 50, 51], [-1, 0, 0], [False, True, True], 0)], 4096, VOCABULARY)
    assert batch.mask_B1LL is None
    assert batch.tokens_BL.shape == (2, 550)


def test_branches_with_nothing_in_common_are_computed_apart():
    parents, lengths = [-1, 0, -1, 2], [1000, 10, 1000, 10]
    one = record(lengths, parents, [False, True, False, True], 0)
    assert columns([one], pair_cost=1 / 100) == [(2, 1009)]
    rooted = record([1000, 10, 11], [-1, 0, 0], [False, True, True], 0)
    assert columns([rooted]) == [(1, 1020)]
