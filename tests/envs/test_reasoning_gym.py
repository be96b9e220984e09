"""The family reasoning-gym: tasks, scores and groups of a few of its datasets."""

from __future__ import annotations

import asyncio
import hashlib
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st

from nous_node.envs.environment import Chat, HeldOut, Policy, PolicySettings, small_seed
from nous_node.envs.errors import BadConfig, UnknownEnvironment
from nous_node.envs.reasoning_gym import MAX_ANSWER, Puzzle, Puzzles, ReasoningGym
from nous_node.envs.reasoning_gym_facts import DATASETS, DEPENDENCIES, EXECUTING, READING, REFUSED
from nous_node.envs.replay import replay
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import RolloutGroup, Trajectory
from nous_node.protocol.runs import Setting

from .markdown_chat import Markdown

pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")

SEED = bytes(range(32))
QUICK = ["chain_sum", "leg_counting", "gcd", "bitwise_arithmetic", "knights_knaves", "prime_factorization"]


def made(member: str, **config: Setting) -> Puzzles:
    environment = ReasoningGym.make(member, config)
    assert isinstance(environment, Puzzles)
    return environment


def solution(environment: Puzzles, seed: bytes, level: int = 0) -> str:
    puzzle = environment.task(seed, level).payload
    assert isinstance(puzzle, Puzzle)
    return str(puzzle.entry["answer"])


def test_facts_are_told_without_the_library() -> None:
    code = (
        "import sys; from nous_node.envs.reasoning_gym import ReasoningGym as R; "
        "print(len(R.members()), R.facts('leg_counting').id, 'reasoning_gym' in sys.modules, "
        "'sympy' in sys.modules)"
    )
    told = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60
    )
    assert told.stdout.split() == [
        str(len(DATASETS) - len(REFUSED)),
        "reasoning-gym/leg_counting",
        "False",
        "False",
    ]


def test_the_table_names_datasets_of_the_library() -> None:
    from reasoning_gym import factory

    assert set(DATASETS) == set(factory.DATASETS) - {"composite"}
    assert len(DATASETS) == 105
    for part in (DEPENDENCIES, EXECUTING, READING, REFUSED):
        assert set(part) <= set(DATASETS)


@pytest.mark.parametrize("member", sorted(EXECUTING - set(REFUSED)))
def test_datasets_that_execute_answers_need_a_sandbox(member: str) -> None:
    assert ReasoningGym.facts(member).scorer == "sandbox"


@pytest.mark.parametrize("member", sorted(REFUSED))
def test_a_refused_dataset_is_told_with_its_reason(member: str) -> None:
    with pytest.raises(UnknownEnvironment, match=REFUSED[member][:30]):
        ReasoningGym.make(member, {})
    assert member not in ReasoningGym.members()


def test_an_unknown_dataset_is_told() -> None:
    with pytest.raises(UnknownEnvironment, match="leg_counting_2"):
        ReasoningGym.facts("leg_counting_2")


@pytest.mark.parametrize("member", QUICK)
def test_a_task_follows_from_its_seed_and_leaves_no_trace(member: str) -> None:
    environment = made(member)
    random.seed(5)
    before = random.getstate()
    first = environment.prompt(environment.task(SEED, 0))
    assert random.getstate() == before
    others = {environment.prompt(environment.task(hashlib.sha256(bytes([i])).digest(), 0)) for i in range(5)}
    assert environment.prompt(environment.task(SEED, 0)) == first
    assert len(others - {first}) == 5


def test_a_task_is_the_first_item_of_its_small_seed() -> None:
    from reasoning_gym import create_dataset

    item = create_dataset("leg_counting", seed=small_seed(SEED), size=1)[0]
    puzzle = made("leg_counting").task(SEED, 0).payload
    assert isinstance(puzzle, Puzzle)
    assert (puzzle.question, puzzle.entry["answer"]) == (item["question"], item["answer"])


@pytest.mark.parametrize("member", QUICK)
def test_the_right_answer_is_paid_in_full(member: str) -> None:
    environment = made(member)
    task = environment.task(SEED, 0)
    score = environment.score(task, f"<answer>{solution(environment, SEED)}</answer>", True)
    assert score.reward == 1.0
    assert score.components == {"correct": 1.0, "score": 1.0, "format": 1.0}


@pytest.mark.parametrize("member", ["prime_factorization", "boxnet", "game_of_life"])
def test_a_grader_that_raises_costs_the_answer_and_nothing_else(member: str) -> None:
    environment = made(member, answer="whole")
    task = environment.task(SEED, 0)
    scores = [environment.score(task, text, True) for text in ("no idea", '{"a": 1}', "7")]
    assert any(score.components.get("grader_failed") for score in scores)
    assert all(score.reward == 0.0 for score in scores if "grader_failed" in score.components)


@pytest.mark.parametrize("member", sorted(EXECUTING - set(REFUSED)))
def test_nothing_in_an_answer_is_run(member: str, tmp_path: Path) -> None:
    environment = made(member, answer="whole")
    task = environment.task(SEED, 0)
    written = tmp_path / "written"
    payloads = [
        f"__import__('pathlib').Path({str(written)!r}).touch()",
        f"[open({str(written)!r}, 'w')]",
        "[setattr(type(self), 'score_answer', lambda *any: 1.0)]",
        "oracle_answer.split()",
        "[list(row) for row in entry['answer']]",
        "Integral(x, x)",
        "exit()",
        "x**9**9**9",
        "9**9**9**9",
        "1e99999999",
    ]
    scores = [environment.score(task, payload, True) for payload in payloads]
    assert not written.exists()
    assert all(score.reward <= 0.05 for score in scores)
    assert environment.score(task, "no", True).reward <= 0.05
    answer = solution(environment, SEED)
    assert environment.score(task, answer, True).reward == 1.0


def test_a_list_that_is_written_out_is_read_as_one() -> None:
    environment = made("spiral_matrix", answer="whole")
    task = environment.task(SEED, 0)
    numbers = [int(one) for one in solution(environment, SEED).split()]
    assert environment.score(task, str(numbers), True).reward == 0.1


def graded(reward: object) -> Callable[[str], Any]:
    class Odd:
        def score_answer(self, answer: str, entry: dict[str, Any]) -> object:
            if isinstance(reward, BaseException):
                raise reward
            return reward

    from nous_node.envs.reasoning_gym import _mark

    return lambda answer: _mark(Puzzle(Odd(), {}), False, answer)


@pytest.mark.parametrize(
    ("reward", "component"),
    [
        (float("nan"), "grader_out_of_range"),
        (float("inf"), "grader_out_of_range"),
        (1.5, "grader_out_of_range"),
        (-0.5, "grader_out_of_range"),
        (None, "grader_failed"),
        ("much", "grader_failed"),
        (RecursionError(), "grader_failed"),
    ],
)
def test_a_reward_that_is_none_is_worth_nothing_and_named(reward: object, component: str) -> None:
    assert graded(reward)("7") == (0.0, {component: 1.0})


@pytest.mark.parametrize(("reward", "given"), [(1 + 1e-12, 1.0), (1 - 1e-12, 1 - 1e-12), (-1e-12, 0.0)])
def test_rounding_errors_of_graders_are_no_fault(reward: float, given: float) -> None:
    score = graded(reward)("7")
    assert score.reward == given
    assert score.components["correct"] == float(reward > 0.5)


def test_an_answer_beyond_all_size_is_not_graded() -> None:
    assert graded(1.0)("7" * (MAX_ANSWER + 1)) == (0.0, {"too_long": 1.0})


@given(answer=st.text(max_size=200))
@examples(deadline=None, max_examples=25)
@pytest.mark.parametrize("member", QUICK)
def test_any_text_gets_a_reward_between_0_and_1(member: str, answer: str) -> None:
    environment = _KEPT.setdefault(member, made(member, answer="whole"))
    score = environment.score(environment.task(SEED, 0), answer, True)
    assert 0.0 <= score.reward <= 1.0
    assert {"correct", "score", "format"} <= set(score.components)


_KEPT: dict[str, Puzzles] = {}


@pytest.mark.parametrize("chat", [None, Markdown()], ids=["base", "chat"])
@pytest.mark.parametrize("member", ["chain_sum", "knights_knaves"])
def test_a_group_replays_to_its_rewards(
    member: str,
    chat: Chat | None,
    policy: Policy,
    settings: PolicySettings,
    group_of: Callable[[list[Trajectory]], RolloutGroup],
) -> None:
    roomy = PolicySettings(settings.tokenizer, 4, 12, 4_096, settings.stop, chat=chat)
    environment = made(member, answer="whole")
    task = environment.task(SEED, 0)
    trajectories = asyncio.run(environment.collect_trajectories(task, type(policy)(roomy)))  # type: ignore[call-arg]
    group = group_of(trajectories)
    again = replay(environment, environment.task(SEED, 0), group, roomy, 1e-6)
    assert again == trajectories
    other = environment.task(bytes(32), 0)
    with pytest.raises(RemoteError) as caught:
        replay(environment, other, group, roomy, 1e-6)
    assert caught.value.code is Code.PROMPT_MISMATCH


def test_a_run_may_pay_full_scores_only() -> None:
    partly, fully = made("gcd", answer="whole"), made("gcd", answer="whole", reward="correct")
    task = partly.task(SEED, 0)
    right = solution(partly, SEED)
    near = partly.score(task, f"{right} or so", True)
    assert 0.0 < near.reward < 1.0
    strict = fully.score(task, f"{right} or so", True)
    assert strict.reward == 0.0
    assert strict.components == near.components
    assert fully.score(task, right, True).reward == 1.0


def test_settings_are_the_datasets_own() -> None:
    environment = made("chain_sum", min_terms=2, max_terms=2, min_digits=1, max_digits=1, answer="whole")
    prompt = environment.prompt(environment.task(SEED, 0))
    assert sum(prompt.count(sign) for sign in ("+", "-")) == 1
    assert made("word_sorting", transformation="uppercase").levels == 0
    assert made("time_intervals", min_date="2000-01-01", max_date="2001-01-01").levels == 0


@pytest.mark.parametrize(
    ("config", "told"),
    [
        (
            {"terms": 3},
            "it takes allow_negation, max_digits, max_terms, min_digits, min_terms, curriculum, reward",
        ),
        ({"seed": 3}, "no setting 'seed'"),
        ({"size": 3}, "no setting 'size'"),
        ({"min_terms": "three"}, "min_terms"),
        ({"min_terms": 9, "max_terms": 2}, "max_terms must be"),
        ({"curriculum": "steep"}, "true or false"),
        ({"reward": "half"}, "'score', 'correct'"),
        ({"format": "markdown"}, "format"),
    ],
)
def test_a_bad_config_is_told_with_what_is_allowed(config: dict[str, Setting], told: str) -> None:
    with pytest.raises(BadConfig, match=told):
        ReasoningGym.make("chain_sum", config)


def test_no_setting_names_a_file() -> None:
    with pytest.raises(BadConfig, match="data_file"):
        ReasoningGym.make("spell_backward", {"data_file": "../secret"})


def test_a_curriculum_has_levels_and_the_configs_settings_stay() -> None:
    environment = made("leg_counting", curriculum=True, max_instances=2)
    assert environment.levels > 5
    lengths = [len(environment.prompt(environment.task(SEED, level))) for level in (0, environment.levels)]
    assert lengths[0] < lengths[1]
    top = environment.task(SEED, environment.levels)
    assert environment.prompt(environment.task(SEED, 1_000)) == environment.prompt(top)
    with pytest.raises(BadConfig, match="has no curriculum"):
        made("gsm_symbolic", curriculum=True)


def test_a_curriculum_ends_where_the_dataset_refuses_it() -> None:
    environment = made("caesar_cipher", curriculum=True)
    assert environment.levels == 1
    assert environment.prompt(environment.task(SEED, 1))
    with pytest.raises(BadConfig, match="min_nodes"):
        made("knight_swap", curriculum=True)


@pytest.mark.parametrize("member", ["power_function", "tsumego"])
def test_a_dataset_without_a_validator_can_be_made(member: str) -> None:
    environment = made(member)
    assert environment.prompt(environment.task(SEED, 0))


def test_held_out_tasks_are_fixed_and_distinct() -> None:
    environment = made("chain_sum")
    assert isinstance(environment, HeldOut)
    prompts = [environment.prompt(task) for task in environment.held_out(32)]
    assert prompts == [environment.prompt(task) for task in environment.held_out(32)]
    assert len(set(prompts)) == 32


@pytest.mark.parametrize("member", ["group_anagrams"])
def test_a_kept_dataset_gives_the_tasks_of_a_new_one(member: str) -> None:
    from reasoning_gym import create_dataset

    environment = made(member)
    for index in range(2):
        seed = hashlib.sha256(bytes([index])).digest()
        item = create_dataset(member, seed=small_seed(seed), size=1)[0]
        assert solution(environment, seed) == item["answer"]
