"""Environments in another process: the same groups as in this one, and what theirs do to nobody else."""

from __future__ import annotations

import dataclasses
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import pytest

from nous_node.envs import registry, remote
from nous_node.envs.access import Access
from nous_node.envs.batcher import Batcher, EngineRequest, Job, Outcome
from nous_node.envs.environment import (
    Completion,
    Environment,
    HeldOut,
    Message,
    Piece,
    PolicySettings,
    Tool,
)
from nous_node.envs.errors import BadConfig, BrokenEnvironment, EnvironmentFailed, Interrupted
from nous_node.envs.host_process import CALL_S, HostProcess
from nous_node.envs.replay import replay
from nous_node.protocol.errors import Code, RemoteError
from nous_node.protocol.rollouts import Engine, Role, RolloutGroup, Trajectory
from nous_node.protocol.tasks import assign

from .conftest import EOS, DreamEngine
from .foreign import DEEDS, install_worlds

TRUSTED = Access(
    trusted=(
        "toy-guess",
        "toy-duel",
        "toy-bad",
        "toy-pair",
        "toy-tree",
        "toy-chatty",
        "toy-brittle",
        "toy-leaky",
    )
)
"""Without the sandbox, which has tests of its own."""


@pytest.fixture(scope="module")
def foreign(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Installed once: processes are shared by these tests as by the groups of a node."""
    folder = tmp_path_factory.mktemp("foreign")
    install_worlds(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        registry._installed.cache_clear()
        yield folder
    remote.close_all()
    registry._installed.cache_clear()


@pytest.fixture
def worlds(foreign: Path) -> Iterator[ModuleType]:
    """Their module in this process, to compare with."""
    import toy_worlds

    yield toy_worlds
    del sys.modules["toy_worlds"]


@pytest.fixture
def bad(foreign: Path) -> Iterator[Environment]:
    environment = registry.make("toy-bad", {}, TRUSTED)
    yield environment
    environment._process.seconds = CALL_S


def hurry(environment: Environment, deed: str) -> None:
    """Calls end soon where they would not end by themselves."""
    if deed in ("hangs", "waits"):
        environment._process.seconds = BRIEF_S


BRIEF_S = 1.0
"""For what hangs: long enough for a busy machine to give an honest call its turn."""


def job(environment: Environment, first: int) -> Job:
    """A task whose seed begins with this byte."""
    assignment = assign(bytes([first]) * 32, [1])
    return Job(environment, environment.task(bytes([first]) * 32, 0), assignment)


def run(settings: PolicySettings, engine: Any, jobs: Sequence[Job]) -> list[Outcome]:
    with Batcher(settings, engine, linger=5) as batcher:  # a busy machine splits no batch
        return batcher.run(jobs)


def deed(name: str) -> int:
    return DEEDS.index(name)


def group_of(trajectories: list[Trajectory]) -> RolloutGroup:
    return RolloutGroup(bytes(32), 0, "toy", Engine("dream", "1", "float32", "cpu"), trajectories)


@pytest.mark.parametrize(
    ("name", "attribute"), [("toy-guess", "Guess"), ("toy-duel", "Duel"), ("toy-tree", "Tree")]
)
def test_sixteen_groups_in_one_process_are_those_of_an_environment_in_this_one(
    name: str, attribute: str, worlds: ModuleType, engine: DreamEngine, settings: PolicySettings
) -> None:
    environment, local = registry.make(name, {}, TRUSTED), getattr(worlds, attribute)({})
    far = run(settings, engine, [job(environment, number) for number in range(16)])
    here = DreamEngine()
    assert far == run(settings, here, [job(local, number) for number in range(16)])
    assert [len(batch) for batch in engine.batches] == [len(batch) for batch in here.batches]


class Brackets:
    """A conversation format of the byte tokenizer."""

    def prompt(self, messages: Sequence[Message], tools: Sequence[Tool] = ()) -> list[Piece]:
        shown = [f"[{tool.name}:{tool.parameters}]" for tool in tools]
        shown += [f"<{one.role}>{one.content}" for one in messages]
        return [Piece(Role.USER, list(one.encode())) for one in shown]

    def extend(
        self, tokens: Sequence[int], messages: Sequence[Message], tools: Sequence[Tool] = ()
    ) -> list[Piece]:
        close = [] if tokens[-1] == EOS else [Piece(Role.ASSISTANT, [EOS])]
        return [*close, *self.prompt(messages)]

    def parse(self, tokens: Sequence[int]) -> Message:
        return Message("assistant", bytes(one for one in tokens if one < 256).decode())


def test_conversations_are_those_of_the_runs_format(
    worlds: ModuleType, engine: DreamEngine, settings: PolicySettings
) -> None:
    spoken = dataclasses.replace(settings, chat=Brackets(), context=256)
    environment, local = registry.make("toy-chatty", {}, TRUSTED), worlds.Chatty({})
    (far,) = run(spoken, engine, [job(environment, 3)])
    assert isinstance(far, list)
    assert [far] == run(spoken, DreamEngine(), [job(local, 3)])
    assert replay(environment, environment.task(bytes([3]) * 32, 0), group_of(far), spoken, 1e-6) == far


def test_an_environment_of_conversations_needs_a_format(
    foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    (failed,) = run(settings, engine, [job(registry.make("toy-chatty", {}, TRUSTED), 3)])
    assert "no conversation format" in str(failed)


def test_a_second_process_replays_what_the_first_made(
    foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    environment = registry.make("toy-guess", {}, TRUSTED)
    jobs = [job(environment, number) for number in range(4)]
    made = run(settings, engine, jobs)
    remote.close_all()
    for one, trajectories in zip(jobs, made, strict=True):
        assert isinstance(trajectories, list)
        assert replay(environment, one.task, group_of(trajectories), settings, 1e-6) == trajectories


def test_a_replay_with_another_token_is_refused_with_its_code(
    foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    environment = registry.make("toy-guess", {}, TRUSTED)
    one = job(environment, 1)
    (made,) = run(settings, engine, [one])
    assert isinstance(made, list)
    edited = [msgspec.structs.replace(made[0], reward=made[0].reward + 1), *made[1:]]
    with pytest.raises(RemoteError) as refused:
        replay(environment, one.task, group_of(edited), settings, 1e-6)
    assert refused.value.code is Code.REWARD_MISMATCH
    with pytest.raises(RemoteError) as refused:
        replay(environment, one.task, group_of(made[:-1]), settings, 1e-6)
    assert refused.value.code is Code.GROUP_SIZE


@pytest.mark.parametrize("evil", [1, 9])
def test_what_one_groups_text_changes_refuses_no_later_group(
    evil: int, foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    """Where answers are executed, one can change what others are paid, or have them fail: a refusal has to
    hold in a new process. There is one only where there was another group, since each costs seconds."""
    environment = registry.make("toy-leaky", {}, TRUSTED)
    one, other = job(environment, 0), job(environment, evil)
    remote.close_all()
    (made,) = run(settings, engine, [one])
    assert isinstance(made, list)
    run(settings, engine, [other])
    assert replay(environment, one.task, group_of(made), settings, 1e-6) == made
    false = group_of([msgspec.structs.replace(made[0], reward=1.0), *made[1:]])
    for _ in range(2):
        with pytest.raises(RemoteError) as refused:
            replay(environment, one.task, false, settings, 1e-6)
        assert refused.value.code is Code.REWARD_MISMATCH
    assert not environment.renew()  # the last refusal was one of a new process


CAUSES = {
    "raises": "ZeroDivisionError: a bug in the scorer",
    "leaves": "SystemExit: 0",
    "dies": "exit code 3",
    "hangs": "did not end within 1 s",
    "waits": "neither asked for tokens nor ended within 1 s",
    "text": "returned a text where a list of trajectories belongs",
    "texts": "returned a list with a text in it",
    "nan": "the reward nan",
    "wordy": "what is no trajectory: Expected `float`, got `str`",
    "component": "a component of the reward",
    "many": "4000 trajectories",
    "few": "asked for tokens of trajectory 3 and did not return it",
    "forged": "tokens that the policy did not sample there",
    "swapped": "did not sample|not the policy's|not how it ended",
    "boasts": "log-probs that are not the policy's",
    "trains": "did not sample there",
    "floods": "trajectory 0 has 0 sampled tokens; it has",
    "again": "it has [0-9]+",
    "greedy": "asks for 1000000000 tokens of trajectory 62, which has room for 12",
    "beyond": "asks for tokens of a trajectory 64; a group has at most 64",
    "huge": "10000000 characters",
    "negative": "cannot answer Decode|OverflowError|bytes must be|ValueError",
    "garbage": "is no message",
    "long_frame": "announced a frame",
}


def test_every_deed_has_a_cause() -> None:
    assert sorted(CAUSES) == sorted(set(DEEDS) - {"well"})


@pytest.mark.parametrize("name", CAUSES)
def test_what_an_environment_does_wrong_costs_its_own_group_and_has_a_name(
    name: str, bad: Environment, engine: DreamEngine, settings: PolicySettings
) -> None:
    hurry(bad, name)
    jobs = [job(bad, deed("well")), job(bad, deed(name)), job(bad, deed("well"))]
    before, failed, after = run(settings, engine, jobs)
    assert isinstance(failed, EnvironmentFailed)
    assert str(failed).startswith("The environment toy-bad failed: ")
    assert_matches(CAUSES[name], str(failed))
    expected = run(settings, DreamEngine(), jobs[:1])[0]
    assert isinstance(expected, list)
    assert before == expected
    assert isinstance(after, list)


def assert_matches(pattern: str, text: str) -> None:
    with pytest.raises(EnvironmentFailed, match=pattern):
        raise EnvironmentFailed(text)


@pytest.mark.parametrize("name", ["dies", "hangs", "raises"])
def test_a_replay_over_which_it_fails_refuses_that_group_only(
    name: str, bad: Environment, engine: DreamEngine, settings: PolicySettings
) -> None:
    one = job(bad, deed("well"))
    (made,) = run(settings, engine, [one])
    assert isinstance(made, list)
    hurry(bad, name)
    evil = bad.task(bytes([deed(name)]) * 32, 0)
    with pytest.raises(RemoteError) as refused:
        replay(bad, evil, group_of(made), settings, 1e-6)
    assert refused.value.code is Code.ENVIRONMENT_FAILED
    assert replay(bad, one.task, group_of(made), settings, 1e-6) == made


def test_innocent_groups_begin_anew_with_what_was_sampled_for_them(
    bad: Environment, engine: DreamEngine, settings: PolicySettings
) -> None:
    run(settings, engine, [job(bad, deed("dies")), *[job(bad, deed("well"))] * 7])
    assert [len(batch) for batch in engine.batches] == [32]


def test_groups_that_others_end_again_and_again_are_lost_and_not_to_blame(
    bad: Environment, engine: DreamEngine, settings: PolicySettings
) -> None:
    first, second, *others = run(
        settings, engine, [*[job(bad, deed("dies"))] * 2, *[job(bad, deed("well"))] * 2]
    )
    assert not isinstance(first, Interrupted)
    assert not isinstance(second, Interrupted)
    assert "exit code 3" in str(second)
    assert {type(one) for one in others} == {Interrupted}
    assert "ended 2 times while it was at work. The last time over toy-bad" in str(others[0])


def test_what_waits_for_the_policy_when_another_group_dies_is_not_asked_for_twice(
    foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    brittle = registry.make("toy-brittle", {}, TRUSTED)
    failed, *others = run(settings, engine, [job(brittle, 1), *[job(brittle, 0)] * 3])
    assert "exit code 4" in str(failed)
    assert all(isinstance(one, list) for one in others)
    assert [len(batch) for batch in engine.batches] == [12]


def test_a_process_that_cannot_start_is_nobodys_fault(
    foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    bad = registry.make("toy-bad", {}, Access(trusted=("toy-bad",), memory=3 << 30))  # its own process
    one = job(bad, deed("well"))
    (made,) = run(settings, engine, [one])
    assert isinstance(made, list)
    process = bad._process
    process.close()
    process.launch = dataclasses.replace(process.launch, module="no_such_module")
    with pytest.raises(Exception, match="cannot be started here") as failed:
        replay(bad, one.task, group_of(made), settings, 1e-6)
    assert not isinstance(failed.value, RemoteError)


def test_a_batch_may_have_a_loop_of_its_own(
    foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    environment = registry.make("toy-duel", {}, TRUSTED)
    first = run(settings, engine, [job(environment, 1)])
    assert run(settings, engine, [job(environment, 1)]) == first


def test_what_the_engine_raises_ends_the_batch_and_leaves_the_process_usable(
    foreign: Path, engine: DreamEngine, settings: PolicySettings
) -> None:
    environment = registry.make("toy-guess", {}, TRUSTED)

    def broken(requests: Sequence[EngineRequest]) -> list[Completion]:
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError):
        run(settings, broken, [job(environment, 1), job(environment, 2)])
    assert isinstance(environment, HeldOut)
    assert environment.prompt(environment.held_out(3)[2]) == "which digit is 2?"
    assert isinstance(run(settings, engine, [job(environment, 1)])[0], list)


def test_held_out_answers_are_scored_there(foreign: Path) -> None:
    environment = registry.make("toy-guess", {}, TRUSTED)
    assert isinstance(environment, HeldOut)
    task = environment.held_out(8)[7]
    assert environment.score(task, "7", True) == (1.0, {"correct": 1.0})
    remote.close_all()
    assert environment.score(task, "7", False) == (0.0, {"correct": 0.0})
    assert environment.levels == 4
    assert environment.task(bytes(32), 9).level == 4


def test_a_scorer_that_hangs_is_ended_at_its_deadline(foreign: Path) -> None:
    environment = registry.make("toy-guess", {}, TRUSTED)
    environment._process.seconds = 0.3
    task = environment.held_out(1)[0]
    with pytest.raises(EnvironmentFailed, match=r"toy-guess failed.*within 0\.3 s"):
        environment.score(task, "hang", True)
    environment._process.seconds = CALL_S
    assert environment.score(task, "0", True).reward == 1.0


def test_environments_without_held_out_tasks_have_none_here(foreign: Path) -> None:
    assert not isinstance(registry.make("toy-duel", {}, TRUSTED), HeldOut)


def test_a_bad_config_keeps_its_own_sentence(foreign: Path) -> None:
    with pytest.raises(BadConfig, match="`bias` is the only setting"):
        registry.make("toy-guess", {"size": 3}, TRUSTED)


def test_the_process_of_one_distribution_is_shared(foreign: Path) -> None:
    one, other = registry.make("toy-guess", {}, TRUSTED), registry.make("toy-duel", {}, TRUSTED)
    assert one._process is other._process
    assert isinstance(one._process, HostProcess)


@pytest.mark.parametrize("name", ["toy-missing", "toy-empty", "toy-misnamed"])
def test_what_is_no_environment_is_named(name: str, foreign: Path) -> None:
    with pytest.raises(BrokenEnvironment, match=r"toy_worlds:|Missing"):
        registry.facts(name, Access(trusted=(name,)))
