"""Questions and games in the conversation formats of real model families: played, then replayed."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Backend

from nous_node.envs.chat import load_chat
from nous_node.envs.environment import Completion, Family, GenerateRequest, PolicySettings
from nous_node.envs.gymnasium_text import Gymnasium
from nous_node.envs.reasoning_gym import ReasoningGym
from nous_node.envs.replay import replay
from nous_node.protocol.rollouts import RolloutGroup, Trajectory, unpack_tokens
from nous_node.protocol.runs import Setting

from .chat_worlds import CREATED, STYLES, write_folder

pytest.importorskip("gymnasium", reason="the extra `envs` is not installed")
pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")

SEED = bytes(range(32))
LINES = ("up", "Right it is.\nright", "I do not know", "down")


class Spoken:
    """A tokenizer of a model folder, as environments see it."""

    def __init__(self, folder: Path, end: str) -> None:
        self.backend = Backend.from_file(str(folder / "tokenizer.json"))
        self.eos_id = int(self.backend.token_to_id(end))

    def encode(self, text: str) -> list[int]:
        return list(self.backend.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self.backend.decode(list(ids), skip_special_tokens=False))


class Speaker:
    """A policy that says its lines one after the other, each sample beginning with another."""

    def __init__(self, settings: PolicySettings) -> None:
        self.tokenizer = settings.tokenizer
        self.chat = settings.chat
        self.group = settings.group
        self.max_tokens = settings.max_tokens
        self.context = settings.context
        self.logprob_format = settings.logprob_format

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        return [self._said(one) for one in requests]

    def _said(self, request: GenerateRequest) -> Completion:
        line = LINES[(request.trajectory + request.start) % len(LINES)]
        tokens = [*self.tokenizer.encode(line), self.tokenizer.eos_id][: request.max_tokens]
        ended = tokens[-1] == self.tokenizer.eos_id
        return Completion(tokens, [-0.5] * len(tokens), "stop" if ended else "length")


@pytest.fixture(params=STYLES)
def settings(request: pytest.FixtureRequest, tmp_path: Path) -> PolicySettings:
    style = STYLES[request.param]
    folder = write_folder(tmp_path / style.name, "merges", style)
    tokenizer = Spoken(folder, style.end)
    chat = load_chat(folder, "template", CREATED)
    return PolicySettings(tokenizer, 4, 400, 8_192, frozenset([tokenizer.eos_id]), "f32", chat)


@pytest.mark.parametrize(
    ("family", "member", "config", "turns"),
    [
        (Gymnasium, "FrozenLake-v1", {"is_slippery": False, "steps": 6}, 3),
        (Gymnasium, "CliffWalking-v1", {"steps": 4, "advantages": True, "turn_tokens": 8}, 3),
        (ReasoningGym, "chain_sum", {"answer": "last-line"}, 1),
    ],
)
def test_a_group_in_a_real_format_replays(
    family: type[Family],
    member: str,
    config: dict[str, Setting],
    turns: int,
    settings: PolicySettings,
    group_of: Callable[[list[Trajectory]], RolloutGroup],
) -> None:
    environment = family.make(member, config)
    task = environment.task(SEED, 0)
    trajectories = asyncio.run(environment.collect_trajectories(task, Speaker(settings)))
    assert replay(environment, task, group_of(trajectories), settings, 1e-6) == trajectories
    assert max(sum(segment.trained for segment in one.segments) for one in trajectories) >= turns
    text = settings.tokenizer.decode(unpack_tokens(trajectories[0].tokens))
    assert "Actions: " in text or "the final answer on the last line" in text
