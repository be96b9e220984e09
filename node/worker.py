"""The volunteer's worker process: environments and inference, and nothing else.

It may crash, hang or run out of memory; the node gives up the groups in work and starts another one. It
reads orders from a pipe and writes groups back, and has neither keys nor network.

    python -m nous_node.node.worker
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import cast

from nous_node.envs.batcher import LINGER_S, Batcher, EngineRequest, Job, Outcome
from nous_node.envs.environment import Completion, Environment
from nous_node.envs.errors import EnvironmentFailed, Interrupted
from nous_node.envs.registry import make_entry
from nous_node.protocol.constants import MAX_MANIFEST
from nous_node.protocol.encoding import read
from nous_node.protocol.errors import NousError, RemoteError
from nous_node.protocol.rollouts import Engine, RolloutGroup, trained_tokens
from nous_node.protocol.runs import RunManifest
from nous_node.protocol.structure import check_structure
from nous_node.protocol.tasks import assign
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import Policy

from .niceness import step_back
from .pipe import ParentPipe
from .policy_settings import policy_settings
from .preparing import Preparing, check_weights
from .replays import Replays
from .selfcheck import SelfCheck, UnfitError
from .versions import folder_tensors
from .worker_messages import (
    ENGINE,
    Checking,
    Failed,
    FromWorker,
    Generate,
    Group,
    Load,
    Loaded,
    Made,
    Order,
    Prepare,
    Progress,
    ToWorker,
    Unfit,
)

LINGER_SHARE = 0.05
"""Of the last call of the engine, how long requests wait for those of slower environments: a call for few
takes nearly as long as one for all."""

PROGRESS_SECONDS = 0.5
"""Between signs of life: often enough for a live view, too rare to cost anything."""


class Ready:
    """A loaded policy and the environments of its run."""

    def __init__(self, policy: Policy, load: Load) -> None:
        self.policy = policy
        self.device = load.device
        self.folder = Path(load.folder)
        self.checkpoint = load.checkpoint
        self.manifest = read(load.manifest, RunManifest, MAX_MANIFEST)
        self.settings = policy_settings(self.manifest, policy.tokenizer, self.folder)
        self._access = load.access
        self.preparing = Preparing(policy, load.memory)
        self.environments: dict[int, Environment] = {}
        self.engine_seconds = 0.0
        """Wall time of the engine for the orders in work."""
        self.call_seconds = 0.0
        """Of its last call."""
        self.selfcheck: SelfCheck | None = None
        self.replays: Replays | None = None
        if load.first is not None:
            self.replays = Replays(load.first, self.manifest, self.settings, self.environment)
            self.selfcheck = SelfCheck(
                load.first, self.manifest, self.settings, self.environment, load.memory
            )

    @property
    def said(self) -> Engine:
        dtype = str(self.policy.dtype).removeprefix("torch.")
        return Engine(ENGINE, metadata.version("nous-node"), dtype, self.device)

    def take(self, load: Load) -> bool:
        """Another checkpoint of the run; whether it was prepared. One that cannot be loaded changes
        nothing."""
        folder, weights = Path(load.folder), self.preparing.take(load.checkpoint)
        if weights is None:
            check_weights(folder, load.tensors)
            self.policy.load_tensors(folder_tensors(folder))
        else:
            self.policy.swap_tensors(weights)
        self.folder, self.checkpoint = folder, load.checkpoint
        for check in (self.selfcheck, self.replays):
            if check is not None and load.first is not None:
                check.renew(load.first)
        return weights is not None

    def environment(self, index: int) -> Environment:
        if index not in self.environments:
            self.environments[index] = make_entry(self.manifest.environments[index], self._access)
        return self.environments[index]

    def sample(self, requests: Sequence[EngineRequest], heartbeat: Tell) -> list[Completion]:
        wanted = [
            Request(one.request.tokens, one.key, one.request.start, one.request.max_tokens)
            for one in requests
        ]
        rules = self.manifest.sampling
        began = time.monotonic()
        made = generate(self.policy, wanted, rules.temperature, rules.stop, heartbeat)
        self.call_seconds = time.monotonic() - began
        self.engine_seconds += self.call_seconds
        return [Completion(one.tokens, one.logprobs.tolist(), one.finish) for one in made]


class Tell:
    """Says how many tokens were sampled, now and then."""

    def __init__(self, pipe: ParentPipe[FromWorker, ToWorker]) -> None:
        self._pipe = pipe
        self._tokens, self._told = 0, time.monotonic()

    def __call__(self, tokens: int) -> None:
        self._tokens += tokens
        if time.monotonic() - self._told > PROGRESS_SECONDS:
            self.flush()

    def alive(self) -> None:
        """A sign of life without a token: an environment is at work, and has a deadline of its own."""
        self._pipe.send(Progress(0))

    def flush(self) -> None:
        if self._tokens:
            self._pipe.send(Progress(self._tokens))
        self._tokens, self._told = 0, time.monotonic()


class Inbox:
    """What the node says, one message after the other. Each Prepare is acted upon when it comes, also while
    the message before it is worked on."""

    def __init__(self, pipe: ParentPipe[FromWorker, ToWorker]) -> None:
        self.preparing: Preparing | None = None
        self._pipe = pipe
        self._messages: queue.SimpleQueue[Load | Generate | None] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Load | Generate]:
        threading.Thread(target=self._read, daemon=True).start()
        while (message := self._messages.get()) is not None:
            yield message

    def _read(self) -> None:
        try:
            while (message := self._pipe.receive()) is not None:
                if not isinstance(message, Prepare):
                    self._messages.put(message)
                elif self.preparing is not None:
                    self.preparing.begin(Path(message.folder), message.checkpoint, message.tensors)
        finally:
            self._messages.put(None)


def serve(pipe: ParentPipe[FromWorker, ToWorker]) -> None:
    """Until the node closes the pipe."""
    tell = Tell(pipe)
    ready: Ready | None = None
    inbox = Inbox(pipe)
    for message in inbox:
        try:
            match message:
                case Load():
                    ready, prepared = _loaded(ready, message)
                    inbox.preparing = ready.preparing
                    said, crowded = ready.said, ready.preparing.crowded
                    pipe.send(Loaded(said.name, said.version, said.dtype, said.device, prepared, crowded))
                case Generate(orders) if ready is not None:
                    began, ready.engine_seconds = time.monotonic(), 0.0
                    groups = _made(ready, orders, tell)
                    if ready.replays is not None:
                        groups = ready.replays.checked(ready.checkpoint, orders, groups, tell.alive)
                    took = time.monotonic() - began
                    tell.flush()
                    _check(ready, orders, groups, pipe)
                    pipe.send(Made(groups, took, max(0.0, took - ready.engine_seconds)))
                case Generate():
                    pipe.send(Failed("The worker was asked to generate before it had a policy."))
        except UnfitError as error:
            pipe.send(Unfit(str(error)))
        except NousError as error:
            pipe.send(Failed(str(error)))


def _loaded(ready: Ready | None, load: Load) -> tuple[Ready, bool]:
    if ready is None:
        check_weights(Path(load.folder), load.tensors)
        manifest = read(load.manifest, RunManifest, MAX_MANIFEST)
        policy = Policy.load(load.folder, manifest.model.dtype, load.device, load.threads)
        return Ready(policy, load), False
    return ready, ready.take(load)


def _check(
    ready: Ready, orders: Sequence[Order], groups: Sequence[Group], pipe: ParentPipe[FromWorker, ToWorker]
) -> None:
    """Verifies the first groups of this process before they leave it. Raises UnfitError."""
    if ready.selfcheck is None:
        return
    pipe.send(Checking())
    told = ready.selfcheck.check(ready.policy, ready.folder, ready.checkpoint, orders, groups)
    if told is not None:
        pipe.send(told)
    if not ready.selfcheck.left:
        ready.selfcheck = None


def _made(ready: Ready, orders: Sequence[Order], tell: Tell) -> list[Group]:
    """A group, or a failure, for each order; environments that raise lose only their own."""
    groups: list[Group] = []
    jobs: list[Job] = []
    started: list[Order] = []
    for order in orders:
        assignment = assign(order.seed, ready.manifest.weights)
        name = ready.manifest.environments[assignment.environment].id
        try:
            if assignment.environment not in ready.environments:
                tell.alive()  # its library may take a while to import
            environment = ready.environment(assignment.environment)
            task = environment.task(assignment.task_seed, order.levels.get(name, 0))
        except Exception as error:  # an environment's own code
            groups.append(Group(order.counter, b"", 0, f"The environment {name} failed: {error}", name))
            continue
        jobs.append(Job(environment, task, assignment))
        started.append(order)
    linger = max(LINGER_S, LINGER_SHARE * ready.call_seconds)
    engine = partial(ready.sample, heartbeat=tell)
    with Batcher(ready.settings, engine, linger=linger, alive=tell.alive) as batcher:
        outcomes = batcher.run(jobs)
    for order, job, outcome in zip(started, jobs, outcomes, strict=True):
        groups.append(_group(ready, order, job, outcome))
    return groups


def _group(ready: Ready, order: Order, job: Job, outcome: Outcome) -> Group:
    name = ready.manifest.environments[job.assignment.environment].id
    if isinstance(outcome, EnvironmentFailed):
        guilty = "" if isinstance(outcome, Interrupted) else name
        return Group(order.counter, b"", 0, str(outcome), guilty)
    group = RolloutGroup(ready.checkpoint, order.counter, name, ready.said, outcome)
    try:
        check_structure(group, ready.manifest)
    except RemoteError as error:
        failure = f"The environment {name} made a group that the run's rules refuse: {error}"
        return Group(order.counter, b"", 0, failure, name)
    return Group(order.counter, group.to_bytes(), sum(map(trained_tokens, outcome)), environment=name)


def main() -> None:
    step_back(int(os.environ.get("NOUS_NODE_WORKER_NICE", "0")))
    received = cast("type[ToWorker]", ToWorker)
    pipe: ParentPipe[FromWorker, ToWorker] = ParentPipe.take_over(received)
    serve(pipe)


if __name__ == "__main__":
    main()
