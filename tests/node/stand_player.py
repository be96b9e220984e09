"""A volunteer that is played in the test's own process: honest, until a test has it do something else."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import msgspec
import numpy as np

from nous_node.envs.batcher import Batcher, EngineRequest, Job
from nous_node.envs.environment import Completion, PolicySettings
from nous_node.envs.registry import make_entry
from nous_node.node.following import now_ms
from nous_node.node.stand_run import StandRun, Version
from nous_node.node.stand_witness import Group, Witness
from nous_node.protocol.envelope import Kind
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello
from nous_node.protocol.rollouts import Engine, RolloutGroup, pack_floats, unpack_floats
from nous_node.protocol.runs import shard_of
from nous_node.protocol.tasks import assign, task_seed
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recorded, prefill

ENGINE = Engine("player", "1", "float32", "cpu")
Sampler = Callable[[Sequence[EngineRequest]], list[Completion]]


@dataclass
class Player:
    """Says to a witness what a volunteer says to a trainer."""

    run: StandRun
    witness: Witness
    identity: Identity
    policy: Policy
    """Of the version that its groups are of."""
    base: Policy
    """Of version 0."""
    seq: int = 1
    sent: list[bytes] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.witness.key = self.identity.key
        self.settings = PolicySettings.of(self.run.manifest, self.policy.tokenizer)
        self.environment = make_entry(self.run.manifest.environments[0])

    def say(self, kind: Kind, body: bytes, shard: int | None = None, **changes: Any) -> Group | None:
        """An envelope, judged; a new group is verified at once."""
        self.seq += 1
        fields = {"seq": self.seq, **changes}
        by = fields.pop("by", self.identity)
        self.sent.append(self.run.seal(kind, body, by, **fields))
        return self.repeat(self.sent[-1], shard)

    def repeat(self, data: bytes, shard: int | None = None) -> Group | None:
        own = shard_of(self.identity.key, self.run.manifest.shards)
        group = self.witness.hear(own if shard is None else shard, data, 0.0, now_ms())
        if group is not None:
            self.witness.verify(group)
        return group

    def hello(self, **changes: Any) -> None:
        self.say(Kind.HELLO, Hello("player/1", ENGINE).to_bytes(), **changes)

    def enter(self) -> None:
        """A hello, and its answer."""
        self.hello()
        self.witness.answered = True

    def publish(self, *groups: RolloutGroup, **changes: Any) -> None:
        for group in groups:
            self.say(Kind.ROLLOUT, group.to_bytes(), **changes)

    def group(
        self,
        version: Version,
        counter: int,
        sampler: Sampler | None = None,
        task: int | None = None,
        level: int | None = None,
    ) -> RolloutGroup:
        """What (version, key, counter) asks for; `task`, `level`: what it is really made for."""
        head = version.head
        wanted = counter if task is None else task
        seed = task_seed(self.run.run, head.hash, head.manifest.beacon, self.identity.key, wanted)
        assignment = assign(seed, self.run.manifest.weights)
        name = self.run.manifest.environments[0].id
        hard = head.manifest.levels.get(name, 0) if level is None else level
        made_for = self.environment.task(assignment.task_seed, hard)
        with Batcher(self.settings, sampler or self.sample) as batcher:
            (made,) = batcher.run([Job(self.environment, made_for, assignment)])
        assert isinstance(made, list), made
        return RolloutGroup(head.hash, counter, name, ENGINE, made)

    def sample(self, requests: Sequence[EngineRequest], policy: Policy | None = None) -> list[Completion]:
        rules = self.run.manifest.sampling
        wanted = [Request(r.request.tokens, r.key, r.request.start, r.request.max_tokens) for r in requests]
        made = generate(policy or self.policy, wanted, rules.temperature, rules.stop)
        return [Completion(one.tokens, one.logprobs.tolist(), one.finish) for one in made]

    def edit(self, requests: Sequence[EngineRequest]) -> list[Completion]:
        """Honest samples but for the first token of each, with the log-probs that the policy really gives."""
        made = self.sample(requests)
        recorded = []
        for number, (request, one) in enumerate(zip(requests, made, strict=True)):
            prompt = request.request.tokens
            digit = ord("0") if one.tokens[0] != ord("0") else ord("9")
            made[number] = one._replace(tokens=[digit, *one.tokens[1:]])
            tokens = np.array([*prompt, *made[number].tokens], np.int64)
            trained = np.arange(len(tokens)) >= len(prompt)
            recorded.append(Recorded(tokens, trained, np.zeros(len(one.tokens))))
        found = prefill(self.policy, recorded, self.run.manifest.sampling.temperature)
        return [one._replace(logprobs=true.logprobs.tolist()) for one, true in zip(made, found, strict=True)]


def edited(group: RolloutGroup, **changes: Any) -> RolloutGroup:
    """The group with another first trajectory."""
    first, *others = group.trajectories
    return msgspec.structs.replace(group, trajectories=[msgspec.structs.replace(first, **changes), *others])


def shifted(group: RolloutGroup, by: float) -> RolloutGroup:
    """The group with other log-probs in its first trajectory."""
    values = unpack_floats(group.trajectories[0].logprobs)
    return edited(group, logprobs=pack_floats([min(0.0, value - by) for value in values]))
