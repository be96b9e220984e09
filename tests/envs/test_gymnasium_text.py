"""gymnasium's toy games in words."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from nous_node.envs.environment import Completion, GenerateRequest, PolicySettings
from nous_node.envs.errors import BadConfig, EnvironmentFailed, UnknownEnvironment
from nous_node.envs.gymnasium_text import MAX_ILLEGAL, Games, Gymnasium, read_action
from nous_node.envs.gymnasium_words import GAMES
from nous_node.envs.replay import replay
from nous_node.envs.single_turn import Wording
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import Role, RolloutGroup, Trajectory, unpack_floats, unpack_tokens
from nous_node.protocol.runs import Setting

from .markdown_chat import Markdown

pytest.importorskip("gymnasium", reason="the extra `envs` is not installed")

SEED = bytes(range(32))
Grouped = Callable[[list[Trajectory]], RolloutGroup]


class Plays:
    """A policy that gives each sample its own replies, one a turn, the last one for ever."""

    def __init__(self, settings: PolicySettings, replies: Sequence[Sequence[str]]) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = len(replies)
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format
        self.replies = replies
        self.turns = [0] * len(replies)
        self.batches: list[list[int]] = []

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.batches.append([one.trajectory for one in requests])
        return [self._next(one) for one in requests]

    def _next(self, request: GenerateRequest) -> Completion:
        replies = self.replies[request.trajectory]
        turn = self.turns[request.trajectory]
        self.turns[request.trajectory] += 1
        tokens = [*replies[min(turn, len(replies) - 1)].encode(), 258]
        cut = tokens[: request.max_tokens]
        return Completion(cut, [-0.5] * len(cut), "stop" if cut == tokens else "length")


@pytest.fixture
def roomy(settings: PolicySettings) -> PolicySettings:
    return PolicySettings(settings.tokenizer, 4, 256, 8_192, settings.stop)


def chatty(settings: PolicySettings) -> PolicySettings:
    return PolicySettings(settings.tokenizer, 4, 256, 8_192, settings.stop, "f32", Markdown())


def made(member: str, **config: Setting) -> Games:
    environment = Gymnasium.make(member, config)
    assert isinstance(environment, Games)
    return environment


def played(environment: Games, policy: Plays, seed: bytes = SEED) -> list[Trajectory]:
    return asyncio.run(environment.collect_trajectories(environment.task(seed, 0), policy))


WAY = ["right", "right", "down", "down", "down", "right"]
"""From the start to the goal of the small lake."""


def test_the_way_to_the_goal_is_paid(roomy: PolicySettings) -> None:
    (trajectory,) = played(made("FrozenLake-v1", is_slippery=False), Plays(roomy, [WAY]))
    assert trajectory.reward == 1.0
    assert trajectory.components == {"correct": 1.0, "steps": 6.0, "illegal": 0.0}
    assert trajectory.finish == "stop"
    assert [segment.trained for segment in trajectory.segments] == [False, True] * 6


def test_a_hole_ends_the_game_unpaid(roomy: PolicySettings) -> None:
    policy = Plays(roomy, [["right", "down"]])
    (trajectory,) = played(made("FrozenLake-v1", is_slippery=False), policy)
    assert trajectory.reward == 0.0
    assert trajectory.components == {"correct": 0.0, "steps": 2.0, "illegal": 0.0}


def test_samples_are_played_in_lockstep(roomy: PolicySettings) -> None:
    policy = Plays(roomy, [WAY, ["right", "down"], WAY])
    played(made("FrozenLake-v1", is_slippery=False), policy)
    assert policy.batches == [[0, 1, 2], [0, 1, 2], [0, 2], [0, 2], [0, 2], [0, 2]]


def test_the_policy_reads_where_it_is(roomy: PolicySettings) -> None:
    (trajectory,) = played(made("FrozenLake-v1", is_slippery=False), Plays(roomy, [["right", "down"]]))
    text = roomy.tokenizer.decode(unpack_tokens(trajectory.tokens))
    assert "row 1, column 1:\n@FFF\nFHFH\nFFFH\nHFFG\nAction:right<258>\nYou are in row 1, column 2" in text
    assert "Actions: left, down, right, up. You have 16 steps." in text


def test_a_chat_model_plays_in_its_own_format(roomy: PolicySettings) -> None:
    environment = made("FrozenLake-v1", is_slippery=False, system="Play well.")
    (trajectory,) = played(environment, Plays(chatty(roomy), [["I go\nright", "down"]]))
    roles = [segment.role for segment in trajectory.segments]
    assert roles == [Role.SYSTEM, *[Role.USER, Role.ASSISTANT, Role.ASSISTANT] * 2]
    text = roomy.tokenizer.decode(unpack_tokens(trajectory.tokens))
    assert text.startswith("# system\nPlay well.\n# user\nYou cross a frozen lake.")
    assert trajectory.components["steps"] == 2.0


def test_a_reply_that_is_no_action_is_told_and_ends_the_game_after_a_few(roomy: PolicySettings) -> None:
    policy = Plays(roomy, [["fly", "right", "swim", "crawl", "right"]])
    (trajectory,) = played(made("FrozenLake-v1", is_slippery=False), policy)
    assert trajectory.components == {"correct": 0.0, "steps": 4.0, "illegal": float(MAX_ILLEGAL)}
    text = roomy.tokenizer.decode(unpack_tokens(trajectory.tokens))
    assert text.count("That is no action.") == MAX_ILLEGAL - 1


@pytest.mark.parametrize("replies", [["no"], ["up"], ["up", "no", "no", "no"]])
def test_leaving_early_costs_what_idling_costs(roomy: PolicySettings, replies: list[str]) -> None:
    (trajectory,) = played(made("CliffWalking-v1", steps=9), Plays(roomy, [replies]))
    assert trajectory.reward == -9.0


def test_running_out_of_tokens_costs_what_idling_costs(roomy: PolicySettings) -> None:
    tight = PolicySettings(roomy.tokenizer, 4, 7, 8_192, roomy.stop)
    (trajectory,) = played(made("CliffWalking-v1", steps=9), Plays(tight, [["up"]]))
    assert (trajectory.reward, trajectory.finish) == (-9.0, "length")
    full = PolicySettings(roomy.tokenizer, 4, 256, 700, roomy.stop)
    (trajectory,) = played(made("CliffWalking-v1", steps=9), Plays(full, [["up"]]))
    assert (trajectory.reward, trajectory.finish) == (-9.0, "length")


def test_a_round_of_blackjack_that_is_not_played_is_lost(roomy: PolicySettings) -> None:
    trajectories = played(made("Blackjack-v1"), Plays(roomy, [["no"], ["stick"]]))
    assert trajectories[0].reward == -1.0
    assert trajectories[1].reward in (-1.0, 0.0, 1.0)
    assert trajectories[1].components["correct"] == float(trajectories[1].reward > 0)


def test_a_turn_that_was_cut_off_is_no_action_and_the_game_goes_on(roomy: PolicySettings) -> None:
    environment = made("FrozenLake-v1", is_slippery=False, turn_tokens=6)
    trajectories = played(environment, Plays(chatty(roomy), [["right", "well, I wonder"], ["thinking"]]))
    assert [one.components["illegal"] for one in trajectories] == [3.0, 3.0]
    assert [one.finish for one in trajectories] == ["cut", "cut"]
    closing = [segment for segment in trajectories[1].segments if segment.length == 1]
    assert len(closing) == 2
    assert not any(segment.trained for segment in closing)


def test_samples_of_a_task_begin_alike_and_tasks_differ(roomy: PolicySettings) -> None:
    environment = made("Taxi-v4", steps=1)
    prompts = set()
    for index in range(6):
        trajectories = played(
            environment, Plays(roomy, [["up"], ["up"]]), hashlib.sha256(bytes([index])).digest()
        )
        assert trajectories[0].tokens == trajectories[1].tokens
        prompts.add(trajectories[0].tokens)
    assert len(prompts) == 6


def test_each_task_may_have_a_lake_of_its_own(roomy: PolicySettings) -> None:
    environment = made("FrozenLake-v1", map_size=6, steps=1)
    seeds = [hashlib.sha256(bytes([index])).digest() for index in range(4)]
    texts = [played(environment, Plays(roomy, [["up"]]), seed)[0].tokens for seed in seeds]
    assert len(set(texts)) == 4
    assert texts[0] == played(environment, Plays(roomy, [["up"]]), seeds[0])[0].tokens


def test_advantages_are_what_is_to_come_less_the_groups_mean(roomy: PolicySettings) -> None:
    environment = made("FrozenLake-v1", is_slippery=False, advantages=True)
    won, lost = played(environment, Plays(roomy, [WAY, ["right", "down"]]))
    assert won.advantages is not None
    assert lost.advantages is not None
    assert unpack_floats(won.advantages) == [0.5] * sum(len(step) + 1 for step in WAY)
    assert unpack_floats(lost.advantages) == [-0.5] * len("right.down.")


def test_advantages_of_turns_follow_their_own_rewards(roomy: PolicySettings) -> None:
    environment = made("CliffWalking-v1", steps=2, advantages=True)
    fell, stayed = played(environment, Plays(roomy, [["right", "up"], ["up", "up"]]))
    assert (fell.reward, stayed.reward) == (-101.0, -2.0)
    assert fell.advantages is not None
    assert unpack_floats(fell.advantages) == [-49.5] * len("right.") + [0.0] * len("up.")


@pytest.mark.parametrize("member", sorted(GAMES))
@pytest.mark.parametrize("chat", [False, True])
@pytest.mark.parametrize("advantages", [False, True])
def test_a_group_of_any_game_replays_to_its_rewards(
    member: str, chat: bool, advantages: bool, roomy: PolicySettings, group_of: Grouped
) -> None:
    settings = chatty(roomy) if chat else roomy
    environment = made(member, advantages=advantages, steps=6, turn_tokens=8)
    actions = GAMES[member].actions
    replies = [
        [actions[(sample * turn + sample) % len(actions)] for turn in range(5)] + ["no such thing"]
        for sample in range(4)
    ]
    trajectories = played(environment, Plays(settings, replies))
    assert len(trajectories) == 4
    group = group_of(trajectories)
    task = environment.task(SEED, 0)
    assert replay(
        made(member, advantages=advantages, steps=6, turn_tokens=8), task, group, settings, 1e-6
    ) == (trajectories)


def test_a_group_of_another_task_does_not_replay(roomy: PolicySettings, group_of: Grouped) -> None:
    environment = made("Taxi-v4", steps=3)
    group = group_of(played(environment, Plays(roomy, [["up"]] * 4)))
    with pytest.raises(RemoteError) as caught:
        replay(environment, environment.task(bytes(32), 0), group, roomy, 1e-6)
    assert caught.value.code is Code.PROMPT_MISMATCH


@pytest.mark.parametrize(
    ("said", "action"),
    [
        ("left", 0),
        (" Left. ", 0),
        ("UP!", 3),
        ("I think\nright", 2),
        ("right\nI think", None),
        ("go left", None),
        ("left right", None),
        ("", None),
        ("0", None),
    ],
)
def test_an_action_is_its_name_on_the_last_line(said: str, action: int | None) -> None:
    assert read_action(Wording(answer="last-line"), GAMES["FrozenLake-v1"], said) == action


@given(said=st.text())
def test_any_reply_is_an_action_or_none(said: str) -> None:
    action = read_action(Wording(answer="whole"), GAMES["Taxi-v4"], said)
    assert action is None or GAMES["Taxi-v4"].actions[action] in said.lower()


@pytest.mark.parametrize(
    ("member", "config", "told"),
    [
        (
            "FrozenLake-v1",
            {"slippery": True},
            "it takes is_slippery, steps, turn_tokens, map_size, advantages",
        ),
        ("FrozenLake-v1", {"is_slippery": "no"}, "true or false"),
        ("FrozenLake-v1", {"map_size": 100}, "map_size"),
        ("FrozenLake-v1", {"map_size": 1}, "map_size"),
        ("FrozenLake-v1", {"template": "{question}"}, "template"),
        ("Taxi-v4", {"map_size": 4}, "map_size"),
        ("Taxi-v4", {"steps": 0}, "steps"),
        ("Taxi-v4", {"steps": 1_000}, "steps"),
        ("Taxi-v4", {"steps": True}, "steps"),
        ("Blackjack-v1", {"advantages": 1}, "advantages"),
        ("Blackjack-v1", {"turn_tokens": -1}, "turn_tokens"),
        ("Blackjack-v1", {"render_mode": "human"}, "render_mode"),
    ],
)
def test_a_bad_config_is_told_with_what_is_allowed(
    member: str, config: dict[str, Setting], told: str
) -> None:
    with pytest.raises(BadConfig, match=told):
        Gymnasium.make(member, config)


def test_an_unknown_game_is_told_with_those_known() -> None:
    with pytest.raises(UnknownEnvironment, match="Taxi-v4"):
        Gymnasium.facts("CartPole-v1")


def test_chat_without_a_format_fails_with_what_to_do(roomy: PolicySettings) -> None:
    with pytest.raises(EnvironmentFailed, match="take a chat model"):
        played(made("Taxi-v4", format="chat"), Plays(roomy, [["up"]]))


def test_facts_agree_with_the_library() -> None:
    import gymnasium

    for member, words in GAMES.items():
        game: Any = gymnasium.make(member, disable_env_checker=True)
        assert game.action_space.n == len(words.actions)
        assert Gymnasium.facts(member).id == f"gymnasium/{member}"
    assert Gymnasium.members() == sorted(GAMES)
