"""Environments written for Atropos, run as they are in an interpreter that has it, through a host process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from nous_node.envs import sandbox
from nous_node.envs.atropos import Atropos
from nous_node.envs.batcher import Batcher, EngineRequest, Job, Outcome
from nous_node.envs.chat import load_chat
from nous_node.envs.environment import Completion, Environment, PolicySettings
from nous_node.envs.errors import BadConfig, BrokenEnvironment, EnvironmentFailed, UnknownEnvironment
from nous_node.envs.remote import remote
from nous_node.envs.replay import replay
from nous_node.envs.sandbox import Launch
from nous_node.protocol.rollouts import Engine, RolloutGroup, Trajectory, unpack_floats, unpack_tokens
from nous_node.protocol.runs import Setting
from nous_node.protocol.tasks import assign

from .chat_worlds import CREATED, STYLES, Spoken, write_folder
from .conftest import EOS, dreamt

PACKAGE = Path(__file__).parent / "packages" / "atropos-maths"
VALUE = "nous_node.envs.atropos:Atropos"

Make = Callable[..., Environment]


@pytest.fixture(scope="module", params=["chatml", "llama3"])
def settings(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> PolicySettings:
    folder = tmp_path_factory.mktemp("model") / request.param
    chat = load_chat(write_folder(folder, "bytes", STYLES[request.param]), "template", CREATED)
    return PolicySettings(Spoken(chat), 4, 64, 2048, frozenset([chat.close]), chat=chat)


@pytest.fixture(scope="module")
def make(ecosystem_python: Callable[[str], Path]) -> Make:
    """Makes an environment of the example package in a process of its own."""
    launch = Launch(
        ecosystem_python("atropos"),
        "nous_node.envs.host",
        (PACKAGE,),
        (PACKAGE,),
        sandboxed=sandbox.unavailable() is None,
        network=False,
        memory=2 << 30,
        hidden=(),
    )

    def made(name: str, config: Mapping[str, Setting] | None = None) -> Environment:
        member = f"atropos_maths:{name}"
        return remote(launch, Atropos.facts(member), VALUE, member, config or {})

    return made


class Dreams:
    """An engine whose answers are digits, with the stop token of the model."""

    def __init__(self, settings: PolicySettings) -> None:
        (zero,) = settings.tokenizer.encode("0")
        self._ids = {EOS: settings.tokenizer.eos_id, **{48 + digit: zero + digit for digit in range(10)}}

    def __call__(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        return [self._in_its_tokens(dreamt(request)) for _, request in requests]

    def _in_its_tokens(self, said: Completion) -> Completion:
        return Completion([self._ids[token] for token in said.tokens], said.logprobs, said.finish)


def played(environment: Environment, settings: PolicySettings, count: int = 3) -> list[Outcome]:
    jobs = [
        Job(environment, environment.task(bytes([number]) * 32, 0), assign(bytes([number]) * 32, [1]))
        for number in range(count)
    ]
    with Batcher(settings, Dreams(settings), linger=5) as batcher:
        return batcher.run(jobs)


def trajectories(outcome: Outcome) -> list[Trajectory]:
    assert isinstance(outcome, list), outcome
    return outcome


def text(settings: PolicySettings, trajectory: Trajectory) -> str:
    return settings.tokenizer.decode(unpack_tokens(trajectory.tokens))


@pytest.mark.ecosystem
@pytest.mark.parametrize("name", ["Sums", "Chats", "Guesses"])
def test_groups_are_replayed_to_the_last_token_and_reward(
    name: str, make: Make, settings: PolicySettings
) -> None:
    outcomes = played(make(name), settings)
    fresh = make(name, {"max_token_length": 512})  # made anew: nothing of the first is known to it
    for number, outcome in enumerate(outcomes):
        made = trajectories(outcome)
        group = RolloutGroup(bytes(32), 0, "atropos", Engine("dream", "1", "float32", "cpu"), made)
        assert replay(fresh, fresh.task(bytes([number]) * 32, 0), group, settings, 0.0) == made
    shown = {text(settings, trajectories(outcome)[0]) for outcome in outcomes}
    assert len(shown) == 3 or name == "Guesses"  # whose prompt does not show the digit


@pytest.mark.ecosystem
@pytest.mark.parametrize("name", ["Sums", "Chats", "Guesses"])
def test_groups_do_not_depend_on_the_rules_of_those_played_before(
    name: str, make: Make, settings: PolicySettings
) -> None:
    """A trainer evaluates with groups of one, and replays those of its run in the same process."""
    used, fresh = make(name), make(name, {"max_token_length": 511})
    assert [len(trajectories(one)) for one in played(used, replace(settings, group=1))] == [1, 1, 1]
    assert played(used, settings) == played(fresh, settings)


@pytest.mark.ecosystem
def test_an_answer_in_one_turn_has_its_score(make: Make, settings: PolicySettings) -> None:
    outcomes = played(make("Sums", {"largest": 9}), settings, 12)
    assert len([one for one in outcomes if not trajectories(one)[0].components]) > 3
    for outcome in outcomes:
        made = trajectories(outcome)
        assert len(made) == settings.group
        assert [[segment.trained for segment in one.segments] for one in made] == [[False, True]] * 4
        assert all("You add numbers." in text(settings, one) for one in made)
        assert all(one.advantage is None and one.advantages is None for one in made)
        if made[0].components:  # all alike: the environment gave the group up
            assert [one.components for one in made] == [{"given_up": 1.0}] * 4
        else:
            assert len({one.reward for one in made}) > 1


@pytest.mark.ecosystem
def test_an_override_takes_a_trajectory_out_of_the_gradient(make: Make, settings: PolicySettings) -> None:
    made = [one for outcome in played(make("Chats"), settings, 4) for one in trajectories(outcome)]
    assert {one.advantage for one in made} == {None, 0.0}
    for one in made:
        answer = unpack_tokens(one.tokens)[one.segments[0].length :]
        assert one.reward == len([token for token in answer if token != settings.tokenizer.eos_id])


@pytest.mark.ecosystem
def test_a_conversation_of_many_turns_is_one_trajectory_with_its_own_advantages(
    make: Make, settings: PolicySettings
) -> None:
    made = [one for outcome in played(make("Guesses"), settings, 8) for one in trajectories(outcome)]
    assert max(sum(segment.trained for segment in one.segments) for one in made) == 3
    for one in made:
        assert one.advantages is not None
        assert unpack_floats(one.advantages) == pytest.approx([one.reward - 0.5] * (len(one.logprobs) // 4))
        assert settings.tokenizer.decode([settings.tokenizer.eos_id] * 2) not in text(settings, one)
    assert {one.reward for one in made} > {0.0}


@pytest.mark.ecosystem
@pytest.mark.parametrize(
    ("name", "words"),
    [("Invents", "nothing that the policy said"), ("Hurries", "stopped waiting for an answer")],
)
def test_a_group_that_is_not_what_the_policy_said_is_given_up(
    name: str, words: str, make: Make, settings: PolicySettings
) -> None:
    (outcome,) = played(make(name), settings, 1)
    assert isinstance(outcome, EnvironmentFailed)
    assert words in str(outcome)


@pytest.mark.ecosystem
@pytest.mark.parametrize(
    ("name", "config", "error", "words"),
    [
        ("Sums", {"largest": "many"}, BadConfig, "largest"),
        ("Sums", {"smallest": 1}, BadConfig, "no setting 'smallest'"),
        ("Sums", {"group_size": 2}, BadConfig, "not a run's to choose"),
        ("Sums", {"nous.items": 0}, BadConfig, "nous.items"),
        ("Sums", {"nous.other": 0}, BadConfig, "nous.counter and nous.items"),
        ("Row", {}, BrokenEnvironment, "BaseEnv"),
        ("Nothing", {}, BrokenEnvironment, "--with"),
    ],
)
def test_what_cannot_be_made_is_refused_in_words(
    name: str, config: dict[str, Setting], error: type[Exception], words: str, make: Make
) -> None:
    with pytest.raises(error, match=words):
        make(name, config)


@pytest.mark.parametrize(
    "member", ["", "maths", "maths:", ":Sums", "maths:Sums:x", "a/b:C", "os.path:x y", "x" * 300]
)
def test_members_are_module_and_class(member: str) -> None:
    with pytest.raises(UnknownEnvironment, match="MODULE:CLASS"):
        Atropos.facts(member)


def test_the_package_of_a_class_is_part_of_its_version() -> None:
    facts = Atropos.facts("my_maths.server:Sums")
    assert facts.id == "atropos/my_maths.server:Sums"
    assert facts.distributions == ("atroposlib", "math-verify", "my-maths")
    assert facts.reproducible == "seeded"
