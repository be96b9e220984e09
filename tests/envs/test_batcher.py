"""Many tasks, one engine call."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest

from nous_node.envs.batcher import Batcher, Engine, EngineRequest, Job, Outcome
from nous_node.envs.environment import Completion, Environment, Policy, PolicySettings, Task
from nous_node.envs.errors import EnvironmentFailed
from nous_node.envs.sort_digits import SortDigits
from nous_node.protocol.errors import LocalError
from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.tasks import assign


def job(environment: Environment, number: int) -> Job:
    assignment = assign(bytes([number]) * 32, [1])
    return Job(environment, environment.task(assignment.task_seed, 0), assignment)


def run(settings: PolicySettings, engine: Engine, jobs: list[Job]) -> list[Outcome]:
    with Batcher(settings, engine) as batcher:
        return batcher.run(jobs)


def test_one_engine_call_serves_all_tasks_in_their_order(engine, settings: PolicySettings) -> None:
    jobs = [job(SortDigits({}), number) for number in range(5)]
    outcomes = run(settings, engine, jobs)
    assert all(isinstance(outcome, list) and len(outcome) == 4 for outcome in outcomes)
    assert len(engine.batches) == 1
    assert [asked.key for asked in engine.batches[0]] == [
        one.assignment.sampler_key(sample) for one in jobs for sample in range(4)
    ]


def test_multi_turn_tasks_and_single_turn_tasks_share_batches(engine, settings, toys) -> None:
    jobs = [job(toys.guess, 3), job(SortDigits({}), 1), job(toys.guess, 7)]
    outcomes = run(settings, engine, jobs)
    assert all(isinstance(outcome, list) for outcome in outcomes)
    assert len(engine.batches) <= 3
    assert len(engine.batches[0]) == 12


def test_samples_that_an_environment_runs_concurrently_share_a_batch(engine, settings, toys) -> None:
    run(settings, engine, [job(toys.duel, 1), job(toys.duel, 2)])
    assert [len(batch) for batch in engine.batches] == [8, 8]


def test_a_task_gets_the_same_alone_and_in_company(engine, settings, toys) -> None:
    jobs = [job(toys.guess, 1), job(toys.duel, 2), job(SortDigits({}), 3)]
    together = run(settings, engine, jobs)
    assert [run(settings, engine, [one])[0] for one in jobs] == together


def test_a_failing_task_does_not_hurt_the_others(engine, settings, toys) -> None:
    outcomes = run(settings, engine, [job(toys.failing, 1), job(toys.guess, 2)])
    assert isinstance(outcomes[0], EnvironmentFailed)
    assert "failing failed: ZeroDivisionError: a bug in the scorer" in str(outcomes[0])
    assert isinstance(outcomes[1], list)


def test_each_outcome_is_told_as_soon_as_it_is_known(engine, settings, toys) -> None:
    told: list[int] = []
    jobs = [job(toys.guess, 1), job(toys.failing, 1), job(SortDigits({}), 3)]
    with Batcher(settings, engine) as batcher:
        batcher.run(jobs, lambda index, outcome: told.append(index))
    assert sorted(told) == [0, 1, 2]
    assert told[-1] == 0


def test_a_task_that_waits_for_something_else_delays_and_is_given_up(engine, settings, toys) -> None:
    with Batcher(settings, engine, linger=0.01, patience=0.05) as batcher:
        outcomes = batcher.run([job(toys.stuck, 1), job(toys.guess, 2)])
    assert isinstance(outcomes[0], EnvironmentFailed)
    assert "given up" in str(outcomes[0])
    assert isinstance(outcomes[1], list)


def test_what_the_engine_raises_ends_the_run(settings: PolicySettings, toys) -> None:
    def broken(requests: Sequence[EngineRequest]) -> list[Completion]:
        raise MemoryError("out of memory")

    with pytest.raises(MemoryError, match="out of memory"):
        run(settings, broken, [job(toys.guess, 1), job(toys.duel, 1)])


def test_an_engine_that_answers_too_little_is_an_error(settings: PolicySettings, toys) -> None:
    with pytest.raises(LocalError, match="0 completions for 4"):
        run(settings, lambda requests: [], [job(toys.guess, 1)])


def test_no_jobs_are_no_work(engine, settings: PolicySettings) -> None:
    assert run(settings, engine, []) == []


def test_a_request_that_its_environment_abandons_is_not_generated(engine, settings, toys) -> None:
    class Hasty(type(toys.guess)):
        async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
            asking = asyncio.ensure_future(super().collect_trajectories(task, policy))
            await asyncio.sleep(0)
            asking.cancel()
            return []

    jobs = [job(Hasty({}), 1), job(toys.guess, 2)]
    assert run(settings, engine, jobs)[0] == []
    keys = {jobs[1].assignment.sampler_key(sample) for sample in range(4)}
    assert {asked.key for batch in engine.batches for asked in batch} == keys


def test_a_batch_that_waits_for_an_environment_gives_signs_of_life(engine, settings, toys) -> None:
    signs: list[int] = []
    with Batcher(settings, engine, patience=0.05, alive=lambda: signs.append(1)) as batcher:
        batcher.run([job(toys.stuck, 1)])
    assert len(signs) > 2
