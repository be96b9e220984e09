"""Games of textarena, played by the policy against itself. [TXA-n]"""

from __future__ import annotations

import asyncio
import hashlib
import random
import re
from collections.abc import Callable, Mapping, Sequence

import pytest

from nous_node.envs.access import Access
from nous_node.envs.environment import (
    Completion,
    Environment,
    GenerateRequest,
    Message,
    Piece,
    PolicySettings,
    Tokenizer,
    Tool,
)
from nous_node.envs.errors import BadConfig, EnvironmentFailed
from nous_node.envs.registry import make
from nous_node.envs.remote import close_all
from nous_node.envs.replay import replay
from nous_node.envs.textarena import TextArena
from nous_node.protocol.rollouts import Role, RolloutGroup, Trajectory, unpack_tokens
from nous_node.protocol.runs import Setting

EOS = 258

Say = Callable[[GenerateRequest, str], str]
"""What is said to a request, of which the text so far is given."""


class Voices:
    """A policy that speaks texts, a stop token behind each; what is too long is cut off."""

    def __init__(self, settings: PolicySettings, say: Say) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = settings.group
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format
        self.calls: list[list[int]] = []
        """Trajectories asked for in each call."""
        self._say = say

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        self.calls.append([request.trajectory for request in requests])
        await asyncio.sleep(0)
        return [self._one(request) for request in requests]

    def _one(self, request: GenerateRequest) -> Completion:
        tokens = self.tokenizer.encode(self._say(request, self.tokenizer.decode(request.tokens)))
        if len(tokens) < request.max_tokens:
            return Completion([*tokens, EOS], [-0.5] * (len(tokens) + 1), "stop")
        return Completion(tokens[: request.max_tokens], [-0.5] * request.max_tokens, "length")


def dreamt(request: GenerateRequest, text: str) -> str:
    """Something in brackets that was heard before, or rubbish; it depends on the whole request."""
    draws = random.Random(hashlib.sha256(repr(request[:3]).encode()).digest())
    known = re.findall(r"\[[^\[\]\n]{1,30}\]", text)
    return draws.choice([*known, f"[{draws.randrange(9)}]", "rubbish"])


def scripted(*games: Sequence[str]) -> Say:
    """Moves of each trajectory, in turn; the last one again where there are no more."""
    turns: dict[int, int] = {}

    def say(request: GenerateRequest, _: str) -> str:
        turn = turns.get(request.trajectory, 0)
        turns[request.trajectory] = turn + 1
        moves = games[request.trajectory]
        return moves[min(turn, len(moves) - 1)]

    return say


def settings_of(
    tokenizer: Tokenizer, group: int = 1, tokens: int = 2_000, context: int = 20_000
) -> PolicySettings:
    return PolicySettings(tokenizer, group, tokens, context, frozenset([EOS]))


def play(
    member: str,
    settings: PolicySettings,
    say: Say,
    config: Mapping[str, Setting] | None = None,
    seed: int = 7,
) -> list[Trajectory]:
    environment = TextArena.make(member, config or {})
    task = environment.task(bytes([seed] * 32), 0)
    return asyncio.run(environment.collect_trajectories(task, Voices(settings, say)))


def text_of(tokenizer: Tokenizer, trajectory: Trajectory) -> str:
    return tokenizer.decode(unpack_tokens(trajectory.tokens))


ROUND_TRIPS = [
    ("GuessTheNumber-v0-raw", {}),
    ("Sudoku-v0-easy-raw", {}),
    ("KuhnPoker-v0-raw", {}),
    ("IteratedPrisonersDilemma-v0-raw", {"turn_tokens": 12}),
    ("ThreePlayerTicTacToe-v0-raw", {}),
    ("LiarsDice-v0-raw", {"players": 5}),
    ("Taboo-v0-food-raw", {}),
    ("SecretMafia-v0-raw", {"players": 7, "turn_tokens": 20}),
]


@pytest.mark.parametrize(("member", "config"), ROUND_TRIPS)
def test_a_replay_gives_the_same_trajectories(
    member: str,
    config: Mapping[str, Setting],
    tokenizer: Tokenizer,
    group_of: Callable[[list[Trajectory]], RolloutGroup],
) -> None:
    settings = settings_of(tokenizer, 3)
    played = play(member, settings, dreamt, config)
    environment = TextArena.make(member, config)
    task = environment.task(bytes([7] * 32), 0)
    assert replay(environment, task, group_of(played), settings, 0.0) == played


def test_fifty_games_at_once_are_the_fifty_games_one_by_one(tokenizer: Tokenizer) -> None:
    """[TXA-1]"""
    settings = settings_of(tokenizer, 1)
    members = ["LiarsDice-v0-raw", "Snake-v0-raw", "Blackjack-v0-raw", "Poker-v0-small-raw", "2048-v0-raw"]
    environments = [TextArena.make(member, {"max_turns": 6}) for member in members]
    jobs = [(environments[number % 5], bytes([number] * 32)) for number in range(50)]

    async def one(environment: Environment, seed: bytes) -> list[Trajectory]:
        return await environment.collect_trajectories(environment.task(seed, 0), Voices(settings, dreamt))

    async def together() -> list[list[Trajectory]]:
        return await asyncio.gather(*[one(*job) for job in jobs])

    async def in_turn() -> list[list[Trajectory]]:
        return [await one(*job) for job in reversed(jobs)]

    assert asyncio.run(together()) == asyncio.run(in_turn())[::-1]


def test_nobody_else_notices_that_a_game_draws(tokenizer: Tokenizer) -> None:
    random.seed(5)
    expected = random.random()
    random.seed(5)
    play("LiarsDice-v0-raw", settings_of(tokenizer), dreamt)
    assert random.random() == expected


def test_the_winner_and_the_loser_have_their_own_rewards(tokenizer: Tokenizer) -> None:
    """[TXA-6]"""
    first, second = play(
        "TicTacToe-v0-raw", settings_of(tokenizer), scripted(["[0]", "[1]", "[2]"], ["[3]", "[4]"])
    )
    assert (first.agent, first.reward, first.finish) == ("player-0", 1.0, "stop")
    assert (second.agent, second.reward, second.finish) == ("player-1", -1.0, "stop")
    assert first.components == {
        "win": 1.0, "draw": 0.0, "loss": 0.0, "invalid": 0.0, "turns": 3.0, "unfinished": 0.0,
    }  # fmt: skip
    assert second.components["loss"] == 1.0
    assert second.components["turns"] == 2.0


def test_a_draw_is_worth_nothing_to_anybody(tokenizer: Tokenizer) -> None:
    moves = scripted(["[0]", "[2]", "[3]", "[7]", "[8]"], ["[1]", "[4]", "[5]", "[6]"])
    played = play("TicTacToe-v0-raw", settings_of(tokenizer), moves)
    assert [one.reward for one in played] == [0.0, 0.0]
    assert [one.components["draw"] for one in played] == [1.0, 1.0]


def test_a_player_hears_what_concerns_it_and_nothing_else(tokenizer: Tokenizer) -> None:
    """[TXA-3]"""
    played = play("KuhnPoker-v0-raw", settings_of(tokenizer), scripted(["[check]"], ["[check]"]))
    texts = [text_of(tokenizer, one) for one in played]
    cards = [re.findall("Your card is: '(.)'", text) for text in texts]
    assert cards[0]
    assert all(ours != theirs for ours, theirs in zip(*cards, strict=False))
    assert {
        f"You are Player {one.agent[-1]} in" in text for one, text in zip(played, texts, strict=True)
    } == {True}


def test_what_a_player_said_is_not_told_to_it_again(tokenizer: Tokenizer) -> None:
    (played,) = play("GuessTheNumber-v0-raw", settings_of(tokenizer), scripted(["[19] is it"]))
    said = text_of(tokenizer, played)
    assert said.count("[19] is it") == played.components["turns"]


def test_a_player_that_never_moved_has_no_trajectory(tokenizer: Tokenizer) -> None:
    """[TXA-2]"""
    (played,) = play("TicTacToe-v0-raw", settings_of(tokenizer), scripted(["no move"]))
    assert (played.agent, played.reward, played.components["invalid"]) == ("player-0", -1.0, 1.0)


def test_samples_are_played_in_lockstep_and_counted_by_first_moves(tokenizer: Tokenizer) -> None:
    """[TXA-2] Sample 0 ends after two moves; the others go on without it."""
    environment = TextArena.make("TicTacToe-v0-raw", {})
    lines = (["no move"], ["[0]", "[1]", "[2]"], ["[0]", "[1]", "[2]"], ["[3]", "[4]"], ["[3]", "[4]"])
    policy = Voices(settings_of(tokenizer, 3), scripted(*lines))
    played = asyncio.run(environment.collect_trajectories(environment.task(bytes(32), 0), policy))
    assert policy.calls == [[0, 1, 2], [0, 3, 4], [1, 2], [3, 4], [1, 2]]
    assert [one.agent for one in played] == ["player-0"] * 3 + ["player-1"] * 2
    assert [one.reward for one in played] == [-1.0, 1.0, 1.0, -1.0, -1.0]


def test_a_turn_that_was_cut_short_is_no_move_and_the_game_goes_on(tokenizer: Tokenizer) -> None:
    """[TXA-5]"""
    moves = scripted(["[0] " + "x" * 30, "[0]", "[1]", "[2]"], ["[3]", "[4]"])
    first, second = play("TicTacToe-v0-raw", settings_of(tokenizer), moves, {"turn_tokens": 8})
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert [segment.length for segment in first.segments if segment.trained] == [8, 4, 4, 4]
    assert "attempted an invalid move" in text_of(tokenizer, first)


@pytest.mark.parametrize("member", ["GuessTheNumber-v0-raw", "KuhnPoker-v0-raw", "LiarsDice-v0-raw"])
@pytest.mark.parametrize(("turn_tokens", "finish"), [(16, "cut"), (None, "length")])
def test_a_player_that_babbles_loses(
    member: str, turn_tokens: int | None, finish: str, tokenizer: Tokenizer
) -> None:
    config: dict[str, Setting] = {} if turn_tokens is None else {"turn_tokens": turn_tokens}
    (played,) = play(member, settings_of(tokenizer, tokens=200), lambda *_: "la " * 999, config)
    assert played.finish == finish
    assert played.reward <= 0.0
    assert played.components["invalid"] == 1.0


def test_whoever_has_no_room_left_is_silent_and_the_others_play_on(tokenizer: Tokenizer) -> None:
    """[TXA-5] Player 1 has said all it may after one move; the game takes its silence for invalid moves."""
    moves = scripted(["[0]", "[1]"], ["[3]" + " " * 93, "never asked"])
    first, second = play("TicTacToe-v0-raw", settings_of(tokenizer, tokens=97), moves)
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert (second.finish, second.components["invalid"]) == ("length", 1.0)
    assert [segment.trained for segment in second.segments].count(True) == 1


def test_rules_that_do_not_fit_the_context_are_told_in_words(tokenizer: Tokenizer) -> None:
    with pytest.raises(EnvironmentFailed, match="do not fit the run's context of 100 tokens"):
        play("KuhnPoker-v0-raw", settings_of(tokenizer, context=100), dreamt)


def test_a_context_that_ends_in_the_middle_ends_the_player(
    tokenizer: Tokenizer, group_of: Callable[[list[Trajectory]], RolloutGroup]
) -> None:
    settings = settings_of(tokenizer, context=1_000)
    played = play("KuhnPoker-v0-raw", settings, scripted(["[check]"], ["[check]"]))
    assert "length" in {one.finish for one in played}
    environment = TextArena.make("KuhnPoker-v0-raw", {})
    task = environment.task(bytes([7] * 32), 0)
    assert replay(environment, task, group_of(played), settings, 0.0) == played


def test_control_tokens_in_a_move_are_text(tokenizer: Tokenizer) -> None:
    """A player that samples control tokens says their names; the other hears them as plain text."""

    class Controlling(Voices):
        def _one(self, request: GenerateRequest) -> Completion:
            return Completion([256, 257, *b"[Cooperate]", EOS], [-0.5] * 14, "stop")

    environment = TextArena.make("IteratedPrisonersDilemma-v0-raw", {})
    policy = Controlling(settings_of(tokenizer), dreamt)
    played = asyncio.run(environment.collect_trajectories(environment.task(bytes(32), 0), policy))
    heard = unpack_tokens(played[1].tokens)[: played[1].segments[0].length]
    assert max(heard) < 256
    assert "<256><257>[Cooperate]" in tokenizer.decode(heard)


def test_a_game_that_raises_is_lost_for_whoever_moved(tokenizer: Tokenizer) -> None:
    """[TXA-6] More digits than Python converts."""
    (played,) = play(
        "GuessTheNumber-v0-raw", settings_of(tokenizer, tokens=9_000), lambda *_: f"[{'9' * 5000}]"
    )
    assert (played.reward, played.components["invalid"]) == (-1.0, 1.0)


def test_a_game_with_too_many_turns_is_broken_off(tokenizer: Tokenizer) -> None:
    played = play("TicTacToe-v0-raw", settings_of(tokenizer), scripted(["[0]"], ["[1]"]), {"max_turns": 1})
    assert [one.reward for one in played] == [0.0, 0.0]
    assert [one.components["unfinished"] for one in played] == [1.0, 1.0]


class Lines:
    """A conversation format of plain lines: what belongs to the format is a control token."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Piece]:
        return [Piece(Role.USER, [256, *self._tokenizer.encode(one.content), 257]) for one in messages]

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[Piece]:
        close = [] if tokens[-1] == EOS else [Piece(Role.ASSISTANT, [EOS])]
        return [*close, *self.prompt(messages)]

    def parse(self, tokens: Sequence[int]) -> Message:
        text = self._tokenizer.decode([token for token in tokens if token < 256])
        reasoning, _, content = text.rpartition("|")
        return Message("assistant", content, reasoning)


def test_a_chat_model_is_told_in_messages_and_its_thoughts_are_no_moves(tokenizer: Tokenizer) -> None:
    settings = PolicySettings(tokenizer, 1, 2_000, 20_000, frozenset([EOS]), chat=Lines(tokenizer))
    moves = scripted(["[8] perhaps?|[0]", "no, [8]|[1]", "[8]|[2]"], ["[3]", "too long " * 9, "[4]"])
    first, second = play("TicTacToe-v0-raw", settings, moves, {"turn_tokens": 40})
    assert (first.reward, second.reward) == (1.0, -1.0)
    assert [segment.role for segment in first.segments[:3]] == [Role.USER, Role.ASSISTANT, Role.USER]
    assert "perhaps" not in text_of(tokenizer, second)
    closed = [
        segment for segment in second.segments if segment.role == Role.ASSISTANT and not segment.trained
    ]
    assert [segment.length for segment in closed] == [1]


@pytest.mark.parametrize(
    ("member", "config", "words"),
    [
        ("KuhnPoker-v0-raw", {"players": 3}, "played by 2 players"),
        ("Taboo-v0-raw", {"players": 5}, "4 or 6 or 8"),
        ("KuhnPoker-v0-raw", {"players": True}, "not True"),
        ("KuhnPoker-v0-raw", {"max_turns": 0}, "whole number from 1"),
        ("KuhnPoker-v0-raw", {"turn_tokens": 1.5}, "whole number from 1"),
        ("KuhnPoker-v0-raw", {"colour": 1}, "no setting 'colour'; the game's own are: max_rounds"),
        ("KuhnPoker-v0-raw", {"max_rounds": "3"}, "something like 3"),
        ("KuhnPoker-v0-raw", {"max_rounds": 10**9}, "something like 3"),
        ("Bandit-v0-raw", {"buttons": ["red", 3]}, "something like"),
        ("Cryptarithm-v0-raw", {"equation": "../../secret"}, "something like"),
        ("LogicPuzzle-v0-raw", {"difficulty": "none at all"}, "does not take"),
    ],
)
def test_a_config_that_does_not_fit_is_refused_in_words(
    member: str, config: Mapping[str, Setting], words: str
) -> None:
    """[TXA-7]"""
    with pytest.raises(BadConfig, match=re.escape(words)):
        TextArena.make(member, config)


def test_a_game_takes_its_own_settings(tokenizer: Tokenizer) -> None:
    config: dict[str, Setting] = {"max_number": 9, "game_max_turns": 2}
    (played,) = play(
        "GuessTheNumber-v0-raw", settings_of(tokenizer), scripted(["[1]", "[2]"]), config, seed=2
    )
    assert "between 1 and 9 within 2 turns" in text_of(tokenizer, played)
    assert played.components["turns"] <= 2.0


def test_a_game_in_its_host_process_is_the_game_here(tokenizer: Tokenizer) -> None:
    settings = settings_of(tokenizer, 2)
    hosted = make("textarena/KuhnPoker-v0-raw", {}, Access(trusted=("textarena",)))
    try:
        policy = Voices(settings, dreamt)
        there = asyncio.run(hosted.collect_trajectories(hosted.task(bytes([7] * 32), 0), policy))
    finally:
        close_all()
    assert there == play("KuhnPoker-v0-raw", settings, dreamt)
