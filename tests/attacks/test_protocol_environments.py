"""Scorers that somebody else wrote: what they can be made to do, and which of several tasks is whose."""

from __future__ import annotations

import importlib
from collections.abc import Iterator
from typing import Any

import msgspec
import pytest

from nous_node.envs import registry
from nous_node.envs.environment import Completion
from nous_node.node.plan import EnvironmentPlan
from nous_node.protocol.errors import Code
from nous_node.protocol.rollouts import RolloutGroup
from nous_node.protocol.tasks import assign, task_seed

from .cheats import Completions, Requests
from .edits import tokens_with

pytestmark = pytest.mark.slow

NAIVE = "naive-{}"
RAISES, KILLS = 1, 2
"""Bytes that the scorers fail over."""

COUNTERS = 16
"""Among so many tasks both environments come up."""

MODULE = '''
import os
import sys

from nous_node.envs.environment import EnvironmentInfo, Task
from nous_node.envs.session import Session, sample_all
from nous_node.protocol.rollouts import Role


class Naive:
    """Pays for sevens, raises over one byte, and ends the learner over another."""

    info = EnvironmentInfo(
        id="NAME", version="1", reproducible="exact", scorer="pure", network=False, max_turns=1, agents=1
    )
    levels = 0

    def __init__(self, config):
        pass

    def task(self, seed, level):
        return Task(seed, level, seed[:2].hex())

    async def collect_trajectories(self, task, policy):
        sessions = [Session(policy, index) for index in range(policy.group)]
        for session in sessions:
            session.append(policy.tokenizer.encode(f"{self.info.id} {task.payload}="), Role.RAW)
        trajectories = []
        for session, made in zip(sessions, await sample_all(policy, sessions)):
            answer = policy.tokenizer.decode(made.tokens)
            if "\\x01" in answer:
                raise ValueError("what is that?")
            if "\\x02" in answer and "pytest" not in sys.modules:
                os._exit(3)
            trajectories.append(session.finish(float(answer.count("7")), {}))
        return trajectories
'''


@pytest.fixture(scope="module")
def fair(make_arena: Any, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """A run with two environments of a package of its own, installed for the trainer and its learner."""
    folder = tmp_path_factory.mktemp("package")
    names = [NAIVE.format(number) for number in (1, 2)]
    entries = []
    for number, name in enumerate(names, 1):
        (folder / f"naive_environment_{number}.py").write_text(MODULE.replace("NAME", name))
        entries.append(f"{name} = naive_environment_{number}:Naive")
    facts = folder / "naive-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: naive\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("\n".join(["[nous.envs]", *entries, ""]))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.setenv("PYTHONPATH", str(folder), prepend=":")
        importlib.invalidate_caches()
        registry._installed.cache_clear()
        rules = {"environments": {name: EnvironmentPlan() for name in names}}
        with make_arena({"groups": 1000}, rules=rules) as arena:
            yield arena
    registry._installed.cache_clear()


def first_of(fair: Any, forger: Any, environment: int) -> int:
    """The first counter whose task is of this environment."""
    head = fair.head
    for counter in range(COUNTERS):
        place = (fair.folder.run, head.hash, head.manifest.beacon, forger.identity.key, counter)
        if assign(task_seed(*place), forger.manifest.weights).environment == environment:
            return counter
    raise AssertionError("no such task")


def answering(fair: Any, forger: Any, answer: str) -> RolloutGroup:
    """A group whose first answer is this one, with log-probs that are true."""

    def engine(requests: Requests) -> Completions:
        tokens = [*forger.policy.tokenizer.encode(answer), forger.manifest.sampling.stop[0]]
        made = forger.sample(requests)
        made[0] = Completion(tokens, [-1.0] * len(tokens), "stop")
        return forger.scored(requests, made)

    group: RolloutGroup = forger.group(fair.head, first_of(fair, forger, 0), engine)
    return group


def with_byte(group: RolloutGroup, byte: int) -> RolloutGroup:
    """In place of the first sampled token: what the scorer makes of it is not seen here."""
    prompt = group.trajectories[0].segments[0].length
    return tokens_with(group, prompt, byte)


def accepts_honest(fair: Any, name: str) -> None:
    forger = fair.known(name)
    group = forger.group(fair.head, first_of(fair, forger, 0))
    receipt = fair.outcome(forger, group.to_bytes())
    assert receipt.verdict == "accepted", receipt


@pytest.mark.attack("chosen environment", "wrong-environment")
def test_task_is_of_the_environment_that_was_drawn(fair: Any) -> None:
    """Both are of the run."""
    forger = fair.known("chooser")
    counter = first_of(fair, forger, 1)
    group = forger.group(fair.head, first_of(fair, forger, 0))
    fair.refuses(forger, msgspec.structs.replace(group, counter=counter).to_bytes(), Code.WRONG_ENVIRONMENT)


@pytest.mark.attack("reward by exploiting a scorer", "sampling-mismatch")
def test_scorer_that_pays_for_nonsense_is_paid_by_nobody(fair: Any) -> None:
    forger = fair.known("seven")
    group = answering(fair, forger, "7777777")
    assert group.trajectories[0].reward == 7
    fair.refuses(forger, group.to_bytes(), Code.SAMPLING_MISMATCH)


@pytest.mark.attack("answer that breaks a scorer", "environment-failed")
def test_scorer_that_raises_refuses_its_group_only(fair: Any) -> None:
    """Half a fault: it broke over the same tokens before they were sent."""
    forger = fair.known("quizmaster")
    group = with_byte(answering(fair, forger, "?"), RAISES)
    fair.refuses(forger, group.to_bytes(), Code.ENVIRONMENT_FAILED)
    assert fair.standing(forger) == "probation"
    accepts_honest(fair, "after the quiz")


@pytest.mark.attack("answer that kills the learner", "environment-failed")
def test_group_over_which_the_learner_dies_is_refused_and_others_go_on(fair: Any) -> None:
    """It dies twice: the first time others may have been in its batch."""
    forger = fair.known("killer")
    group = with_byte(answering(fair, forger, "!"), KILLS)
    fair.refuses(forger, group.to_bytes(), Code.ENVIRONMENT_FAILED)
    accepts_honest(fair, "after the murder")
