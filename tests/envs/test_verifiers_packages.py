"""Packages of verifiers (v0), unmodified, in an interpreter that has the library, through a host process."""

from __future__ import annotations

import asyncio
import dataclasses
import re
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from nous_node.envs.environment import Environment, PolicySettings
from nous_node.envs.errors import BadConfig, BrokenEnvironment, EnvironmentFailed
from nous_node.envs.remote import remote
from nous_node.envs.verifiers_v0 import VerifiersV0
from nous_node.protocol.rollouts import Role, unpack_floats
from nous_node.protocol.runs import Setting

from .package_plays import Says, Speaker, chat_settings, collected, launch, one_of, text

VALUE = "nous_node.envs.verifiers_v0:VerifiersV0"
NAMES = ("vf-sums", "vf-guess", "vf-shelf", "vf-notes", "vf-prose", "vf-judged")

Make = Callable[..., Environment]

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(300)]


@pytest.fixture(scope="module")
def make(ecosystem_python: Callable[[str], Path]) -> Make:
    place = launch(ecosystem_python("verifiers-v0"), *NAMES)

    def made(name: str, config: Mapping[str, Setting] | None = None) -> Environment:
        return remote(place, VerifiersV0.facts(name), VALUE, name, config or {})

    return made


@pytest.fixture(scope="module")
def chats(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PolicySettings]:
    folder = tmp_path_factory.mktemp("models")
    return {style: chat_settings(folder, style) for style in ("chatml", "qwen3")}


def call(name: str, arguments: str) -> str:
    return f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call>'


def adds(so_far: str, trajectory: int) -> str:
    """The right sum in the odd trajectories."""
    left, right = map(int, re.findall(r"(\d+) \+ (\d+)", so_far)[-1])
    return f"<think>easy</think>\n<answer>{left + right + (trajectory + 1) % 2}</answer>"


PLAYS: list[tuple[str, dict[str, Setting], str, Says]] = [
    ("vf-sums", {"digits": 1}, "chatml", one_of("<answer>7</answer>", "7", "<think>x</think> 9")),
    ("vf-sums", {"nous.format": "plain"}, "chatml", one_of("<answer>7</answer>", "no idea")),
    ("vf-guess", {"max_turns": 3}, "chatml", one_of("3", "perhaps 7", "well", "0")),
    ("vf-shelf", {}, "qwen3", one_of(call("look_up", '{"item": "pears"}'), call("take", "{}"), "done")),
    ("vf-notes", {}, "chatml", one_of("x and y", "z")),
    ("vf-prose", {}, "chatml", one_of(" there was", "aeiou")),
]  # fmt: skip


@pytest.mark.parametrize("play", PLAYS, ids=[f"{name}-{index}" for index, (name, *_) in enumerate(PLAYS)])
def test_packages_run_unmodified_and_replay_alike(
    make: Make, chats: dict[str, PolicySettings], play: tuple[str, dict[str, Setting], str, Says]
) -> None:
    name, config, style, says = play
    environment = make(name, config)
    for number in range(3):
        made = collected(environment, chats[style], says, bytes([number]) * 32)
        assert len(made) >= 4


@pytest.mark.parametrize(("name", "max_tokens", "context"), [("vf-guess", 5, 4096), ("vf-guess", 256, 90)])
def test_limits_of_the_run_end_a_sample_and_replay_alike(
    make: Make, chats: dict[str, PolicySettings], name: str, max_tokens: int, context: int
) -> None:
    settings = dataclasses.replace(chats["chatml"], max_tokens=max_tokens, context=context)
    made = collected(make(name), settings, one_of("a long way from a digit", "3", "5"))
    assert "length" in {one.finish for one in made}


def test_rewards_are_the_rubrics(make: Make, chats: dict[str, PolicySettings]) -> None:
    made = collected(make("vf-sums"), chats["chatml"], adds)
    assert [one.components["correct"] for one in made] == [0.0, 1.0, 0.0, 1.0]
    assert made[1].components.keys() >= {"digits_right", "format_reward_func", "spread", "num_turns"}
    for one in made:
        parts = one.components
        wanted = parts["correct"] + 0.25 * parts["digits_right"] + 0.2 * parts["format_reward_func"]
        assert one.reward == pytest.approx(wanted + 0.05 * parts["spread"])


def test_samples_of_a_task_share_what_the_package_draws(make: Make, chats: dict[str, PolicySettings]) -> None:
    """All guess 5: either all win or all hear the same."""
    made = collected(make("vf-guess", {"max_turns": 2}), chats["chatml"], one_of("5"))
    assert len({text(one, chats["chatml"]) for one in made}) == 1


def test_advantages_of_turns_are_taken_where_they_are_asked_for(
    make: Make, chats: dict[str, PolicySettings]
) -> None:
    settings = chats["chatml"]
    plain = collected(make("vf-guess"), settings, one_of("well", "hm"))
    assert all(one.advantages is None for one in plain)
    for one in collected(make("vf-guess", {"nous.credit": "step"}), settings, one_of("well", "hm")):
        trained = [segment.length for segment in one.segments if segment.trained]
        wanted = [-0.1 * (turn + 1) for turn, length in enumerate(trained) for _ in range(length)]
        assert one.advantages is not None
        assert unpack_floats(one.advantages) == pytest.approx(wanted)


def test_tools_with_a_state_are_called(make: Make, chats: dict[str, PolicySettings]) -> None:
    def says(so_far: str, trajectory: int) -> str:
        if "<tool_response>" not in so_far:
            return call("take", '{"item": "pears", "count": 2}')
        return "Done."

    made = collected(make("vf-shelf"), chats["qwen3"], says)
    assert [one.reward for one in made] == [2.0] * 4
    shown = text(made[0], chats["qwen3"])
    assert "3 pears left" in shown
    assert '"shelf"' not in shown  # hidden from the model, handed in by the package
    assert [segment.length for segment in made[0].segments if segment.trained][1] == len("Done.") + 1


def test_a_rewritten_history_is_a_trajectory_of_the_same_group(
    make: Make, chats: dict[str, PolicySettings]
) -> None:
    made = collected(
        make("vf-notes"), chats["chatml"], lambda so_far, _: "z" if "page: z" in so_far else "note"
    )
    assert len(made) == 3 * 4
    assert {one.reward for one in made} == {1.0}
    assert [("Next page: z" in text(one, chats["chatml"])) for one in made] == [False] * 8 + [True] * 4


def test_a_base_model_gets_plain_text(make: Make, chats: dict[str, PolicySettings]) -> None:
    settings = dataclasses.replace(chats["chatml"], chat=None)
    made = collected(make("vf-prose"), settings, one_of("aeiou", "xyz"))
    assert [segment.role for segment in made[0].segments] == [Role.RAW, Role.ASSISTANT]
    assert {one.reward for one in made} <= {0.0, 1.0}
    chat_package = collected(make("vf-sums"), settings, adds)
    assert text(chat_package[0], settings).startswith("Add the numbers.")


def test_tools_need_a_conversation_format(make: Make, chats: dict[str, PolicySettings]) -> None:
    settings = dataclasses.replace(chats["qwen3"], chat=None)
    environment = make("vf-shelf")
    with pytest.raises(EnvironmentFailed, match="offers tools"):
        collected(environment, settings, one_of("done"))


def test_many_groups_at_once_are_as_each_alone(make: Make, chats: dict[str, PolicySettings]) -> None:
    environment, settings, says = make("vf-guess"), chats["chatml"], one_of("3", "perhaps 7", "well", "0")
    tasks = [environment.task(bytes([number]) * 32, 0) for number in range(6)]

    async def together() -> list[object]:
        speakers = [Speaker(settings, says) for _ in tasks]
        return list(
            await asyncio.gather(
                *[
                    environment.collect_trajectories(task, one)
                    for task, one in zip(tasks, speakers, strict=True)
                ]
            )
        )

    assert asyncio.run(together()) == [collected(environment, settings, says, task.seed) for task in tasks]


@pytest.mark.parametrize(
    ("name", "config", "error", "told"),
    [
        ("vf-judged", {}, BrokenEnvironment, "asks a model for its scores"),
        ("vf-judged", {"key": "x"}, BrokenEnvironment, "asks a model for its scores"),
        ("vf-sums", {"digit": 1}, BadConfig, "does not take these settings"),
        ("vf-sums", {"nous.split": "eval"}, BadConfig, "has no dataset 'eval'"),
        ("vf-nothing", {}, BrokenEnvironment, "env install verifiers-v0 --with vf-nothing"),
        ("json", {}, BrokenEnvironment, "does not have a 'load_environment' function"),
    ],
)
def test_what_cannot_be_used_is_told(
    make: Make, name: str, config: dict[str, Setting], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        make(name, config)


def test_a_score_that_wants_the_network_is_no_score(make: Make, chats: dict[str, PolicySettings]) -> None:
    environment = make("vf-judged", {"judge": False})
    with pytest.raises(EnvironmentFailed, match="wants the network to score"):
        collected(environment, chats["chatml"], one_of("nice"))
