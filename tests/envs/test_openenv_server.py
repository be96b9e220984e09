"""A real OpenEnv server on this machine, played through a host process that may talk to it."""

from __future__ import annotations

import dataclasses
import subprocess
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from nous_node.envs.environment import Environment, PolicySettings
from nous_node.envs.errors import BadConfig, BrokenEnvironment, EnvironmentFailed
from nous_node.envs.openenv import OpenEnv
from nous_node.envs.remote import remote
from nous_node.protocol.rollouts import Role
from nous_node.protocol.runs import Setting

from .package_plays import PACKAGES, Says, chat_settings, collected, launch, one_of, text

VALUE = "nous_node.envs.openenv:OpenEnv"
VAULT = PACKAGES / "openenv-vault" / "vault_server.py"
DIGITS = one_of(*"0123456789")

Make = Callable[..., Environment]

pytestmark = [pytest.mark.ecosystem, pytest.mark.timeout(300)]


@contextmanager
def served(python: Path, sessions: int) -> Iterator[tuple[str, subprocess.Popen[str]]]:
    """A server with room for so many sessions: its URL."""
    command = [str(python), str(VAULT), str(sessions)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            yield f"http://127.0.0.1:{int(process.stdout.readline())}", process
        finally:
            process.kill()


@pytest.fixture(scope="module")
def python(ecosystem_python: Callable[[str], Path]) -> Path:
    return ecosystem_python("openenv")


@pytest.fixture(scope="module")
def vault(python: Path) -> Iterator[str]:
    with served(python, 64) as (url, _):
        yield url


@pytest.fixture(scope="module")
def make(python: Path) -> Make:
    place = launch(python, network=True)

    def made(url: str, config: Mapping[str, Setting] | None = None) -> Environment:
        wanted = {"observation": "text", **(config or {}), "server": url}
        return remote(place, OpenEnv.facts("vault"), VALUE, "vault", wanted)

    return made


@pytest.fixture(scope="module")
def settings(tmp_path_factory: pytest.TempPathFactory) -> PolicySettings:
    return chat_settings(tmp_path_factory.mktemp("models"), "chatml", max_tokens=64)


def searches(so_far: str, trajectory: int) -> str:
    """Opens the vault: the middle of what is left for the present digit."""
    low, high = 0, 9
    for turn in so_far.split("assistant\n")[1:]:
        said = turn[:1]
        if "Click." in turn:
            low, high = 0, 9
        elif "Higher." in turn:
            low = int(said) + 1
        elif "Lower." in turn:
            high = int(said) - 1
    return str((low + high) // 2)


def test_episodes_are_rewarded_by_the_server_and_replay_alike(
    make: Make, vault: str, settings: PolicySettings
) -> None:
    made = collected(make(vault), settings, searches)
    assert [one.reward for one in made] == [2.0] * 4
    assert {one.components["done"] for one in made} == {1.0}
    assert "The vault has 2 digits. Say the first." in text(made[0], settings)


def test_another_seed_is_another_task(make: Make, vault: str, settings: PolicySettings) -> None:
    environment = make(vault, {"reset.digits": 5, "max_turns": 64})
    texts = {
        text(collected(environment, settings, searches, bytes([number]) * 32)[0], settings)
        for number in range(4)
    }
    assert len(texts) > 1


@pytest.mark.parametrize(
    ("config", "says", "reward", "components"),
    [
        ({"max_turns": 2}, one_of("x"), -0.2, {"turns": 2.0, "done": 0.0, "refused": 0.0}),
        ({"max_turns": 2, "reward": "last"}, one_of("x"), -0.1, {"turns": 2.0, "refused": 0.0}),
        ({}, one_of("jam"), 0.0, {"turns": 1.0, "refused": 1.0}),
        ({"answer": "tags"}, one_of("no tags"), 0.0, {"turns": 1.0, "refused": 1.0}),
        ({"answer": "tags", "max_turns": 1}, one_of("so: <answer>x</answer>"), -0.1, {"refused": 0.0}),
    ],
)
def test_what_answers_are_worth(
    make: Make,
    vault: str,
    settings: PolicySettings,
    config: dict[str, Setting],
    says: Says,
    reward: float,
    components: dict[str, float],
) -> None:
    for one in collected(make(vault, config), settings, says):
        assert one.reward == pytest.approx(reward)
        assert components.items() <= one.components.items()


def test_a_server_with_one_seat_plays_the_samples_one_after_the_other(
    make: Make, python: Path, settings: PolicySettings
) -> None:
    with served(python, 1) as (url, _):
        made = collected(make(url.replace("http", "ws")), settings, DIGITS)
    with served(python, 16) as (url, _):
        assert collected(make(url), settings, DIGITS) == made


@pytest.mark.parametrize("change", [{"max_tokens": 5}, {"context": 120}])
def test_limits_of_the_run_end_an_episode(
    make: Make, vault: str, settings: PolicySettings, change: dict[str, int]
) -> None:
    smaller = dataclasses.replace(settings, **change)
    made = collected(make(vault, {"max_turns": 64}), smaller, one_of("x"))
    assert {one.finish for one in made} == {"length"}


@pytest.mark.parametrize("config", [{}, {"format": "plain"}])
def test_a_base_model_gets_plain_text(
    make: Make, vault: str, settings: PolicySettings, config: dict[str, Setting]
) -> None:
    plain = dataclasses.replace(settings, chat=None)
    made = collected(make(vault, {**config, "template": "Vault: {observation}\n"}), plain, DIGITS)
    assert text(made[0], plain).startswith("Vault: The vault has 2 digits. Say the first.\n")
    assert made[0].segments[0].role == Role.RAW


def test_a_server_that_dies_is_told(make: Make, python: Path, settings: PolicySettings) -> None:
    with served(python, 8) as (url, process):
        environment = make(url)

        def kills(so_far: str, trajectory: int) -> str:
            process.kill()
            process.wait()
            return "1"

        with pytest.raises(EnvironmentFailed, match="The server"):
            collected(environment, settings, kills)


@pytest.mark.parametrize(
    ("config", "error", "told"),
    [
        ({"action": "nothing"}, BrokenEnvironment, "they have move"),
        ({"observations": "text"}, BadConfig, "no setting 'observations'"),
    ],
)
def test_what_does_not_fit_the_server_is_told(
    make: Make, vault: str, config: dict[str, Setting], error: type[Exception], told: str
) -> None:
    with pytest.raises(error, match=told):
        make(vault, config)


def test_a_server_that_is_not_there_is_told(make: Make) -> None:
    with pytest.raises(BrokenEnvironment, match="--env-server openenv/vault=URL"):
        make("http://127.0.0.1:9")


def test_a_field_that_no_observation_has_is_told(make: Make, vault: str, settings: PolicySettings) -> None:
    with pytest.raises(EnvironmentFailed, match="it has metadata, text, clicks"):
        collected(make(vault, {"observation": "board"}), settings, DIGITS)
