"""A run with an environment of a third party: made, played by a worker, and verified, each in the sandbox."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from nous_node.envs import registry, remote, sandbox
from nous_node.envs.access import Access
from nous_node.envs.errors import CannotStart, UnknownEnvironment
from nous_node.node.create import create_run
from nous_node.node.joined import playable
from nous_node.node.learner_messages import Candidate
from nous_node.node.plan import EnvironmentPlan, RunPlan
from nous_node.node.policy_settings import policy_settings
from nous_node.node.runfolder import RunFolder
from nous_node.node.verification import Verifier
from nous_node.node.worker_messages import Generate, Load, Order
from nous_node.protocol.errors import Code, LocalError, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.tasks import task_seed

from ..envs.foreign import install_worlds

ACCESS = Access() if sandbox.unavailable() is None else Access(trusted=("toy-guess",))
CHECKPOINT, BEACON, KEY = bytes(32), b"b" * 32, b"v" * 32


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("foreign")
    install_worlds(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        importlib.invalidate_caches()
        registry._installed.cache_clear()
        yield folder
    remote.close_all()
    registry._installed.cache_clear()


@pytest.fixture(scope="module")
def run(installed: Path, tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    plan = RunPlan(group=4, environments={"toy-guess": EnvironmentPlan(config={"bias": 0.5})})
    path = tmp_path_factory.mktemp("run") / "run"
    return create_run(path, "run", Identity.from_seed(b"s" * 32), plan, 1_750_000_000_000, ACCESS)


@pytest.fixture(scope="module")
def groups(run: RunFolder, volunteers: Any) -> list[Candidate]:
    load = Load(str(run.checkpoint(0)), CHECKPOINT, "cpu", 1, run.manifest.to_bytes(), access=ACCESS)
    seeds = [task_seed(run.run, CHECKPOINT, BEACON, KEY, counter) for counter in range(3)]
    orders = [Order(counter, seed, {}) for counter, seed in enumerate(seeds)]
    made = volunteers.worked(load, Generate(orders))[-1]
    assert not any(one.failure for one in made.groups)
    return [
        Candidate(bytes([one.counter]) * 32, one.body, KEY, 0, CHECKPOINT, BEACON, {}, False)
        for one in made.groups
    ]


@pytest.fixture
def verifier(run: RunFolder) -> Verifier:
    environments = [registry.make_entry(entry, ACCESS) for entry in run.manifest.environments]
    return Verifier(run.run, run.manifest, environments)


def test_the_run_names_the_release_that_it_was_made_with(run: RunFolder) -> None:
    (entry,) = run.manifest.environments
    assert entry.version == registry.version("toy-guess", {"bias": 0.5}, ACCESS)
    assert entry.version != registry.version("toy-guess", {"bias": 0.25}, ACCESS)
    assert run.manifest.chat == ""


def test_what_a_worker_makes_is_what_a_trainer_makes_again(
    run: RunFolder, base_policy: Any, groups: list[Candidate], verifier: Verifier
) -> None:
    settings = policy_settings(run.manifest, base_policy.tokenizer, run.checkpoint(0))
    checked = [verifier.check(one, settings) for one in groups]
    assert {len(one.trajectories) for one in checked} == {4}
    assert {reward - 0.5 for one in checked for reward in one.rewards} <= {0.0, 1.0}


def test_a_false_reward_is_refused(
    run: RunFolder, base_policy: Any, groups: list[Candidate], verifier: Verifier
) -> None:
    settings = policy_settings(run.manifest, base_policy.tokenizer, run.checkpoint(0))
    group = RolloutGroup.from_bytes(groups[0].body)
    first = msgspec.structs.replace(group.trajectories[0], reward=9.0)
    body = msgspec.structs.replace(group, trajectories=[first, *group.trajectories[1:]]).to_bytes()
    with pytest.raises(RemoteError) as refused:
        verifier.check(msgspec.structs.replace(groups[0], body=body), settings)
    assert refused.value.code is Code.REWARD_MISMATCH


def test_a_trainer_that_cannot_start_its_process_blames_nobody(
    run: RunFolder,
    base_policy: Any,
    groups: list[Candidate],
    verifier: Verifier,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    settings = policy_settings(run.manifest, base_policy.tokenizer, run.checkpoint(0))
    remote.close_all()
    monkeypatch.setattr("nous_node.envs.host_process.Child", _none_left)
    with pytest.raises(CannotStart, match="cannot be started here"):
        verifier.check(groups[0], settings)


def _none_left(*_: object) -> None:
    raise OSError(11, "Resource temporarily unavailable")


def test_another_release_is_not_played(run: RunFolder, installed: Path) -> None:
    other = msgspec.structs.replace(run.manifest.environments[0], version="3-0000000000000000")
    manifest = msgspec.structs.replace(run.manifest, environments=[other])
    with pytest.raises(LocalError, match=r"toy-worlds 1\.2"):
        playable(manifest, (), lambda event: None, ACCESS)
    assert playable(run.manifest, (), lambda event: None, ACCESS) == {"toy-guess"}


def test_without_a_sandbox_it_is_not_played_unless_it_is_trusted(
    run: RunFolder, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "unavailable", lambda: "bubblewrap is not installed.")
    with pytest.raises(UnknownEnvironment, match="--trust-env toy-guess"):
        registry.make_entry(run.manifest.environments[0])
    trusted = Access(trusted=("toy-guess",))
    assert playable(run.manifest, (), lambda event: None, trusted) == {"toy-guess"}


def test_what_cannot_be_verified_makes_no_run(installed: Path, tmp_path: Path) -> None:
    plan = RunPlan(environments={"toy-far": EnvironmentPlan()})
    access = Access(trusted=("toy-far",))
    with pytest.raises(LocalError, match="cannot be recomputed by a trainer"):
        create_run(tmp_path / "run", "run", Identity.from_seed(b"s" * 32), plan, 1, access)
