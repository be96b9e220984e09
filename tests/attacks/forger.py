"""A volunteer that lies: an honest engine, and every way to make something else of what it says."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from nous_node.envs.batcher import Batcher, EngineRequest, Job
from nous_node.envs.environment import Completion, PolicySettings
from nous_node.envs.registry import make_entry
from nous_node.node.following import Head
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.constants import DOMAIN_ENVELOPE
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello
from nous_node.protocol.rollouts import Engine, RolloutGroup
from nous_node.protocol.runs import Topics, shard_of
from nous_node.protocol.tasks import assign, task_seed
from nous_node.trainer.generate import Request, generate
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import Recorded, prefill


@dataclass
class Forger:
    """A volunteer's key, an honest engine, and every way to make something else of it.

    `group` makes what (checkpoint, key, counter) asks for; `engine` may replace the sampling.
    """

    identity: Identity
    folder: RunFolder
    policy: Policy
    counters: dict[bytes, int] = field(default_factory=dict)
    seq: int = 1

    def __post_init__(self) -> None:
        self.manifest = self.folder.manifest
        self.environment = make_entry(self.manifest.environments[0])
        self.settings = PolicySettings.of(self.manifest, self.policy.tokenizer)
        self.shard = shard_of(self.identity.key, self.manifest.shards)
        self.topic = Topics(self.folder.run).rollouts(self.shard)

    def counter(self, head: Head) -> int:
        """The next one that was not used."""
        self.counters[head.hash] = self.counters.get(head.hash, -1) + 1
        return self.counters[head.hash]

    def sample(
        self, requests: Sequence[EngineRequest], heat: float = 1.0, policy: Policy | None = None
    ) -> list[Completion]:
        """As the worker samples. `heat`: times the run's temperature; `policy`: other weights."""
        rules = self.manifest.sampling
        wanted = [Request(r.request.tokens, r.key, r.request.start, r.request.max_tokens) for r in requests]
        made = generate(policy or self.policy, wanted, heat * rules.temperature, rules.stop)
        return [Completion(one.tokens, one.logprobs.tolist(), one.finish) for one in made]

    def scored(self, requests: Sequence[EngineRequest], made: list[Completion]) -> list[Completion]:
        """The same tokens with the log-probs that the checkpoint really gives them."""
        recorded = []
        for request, one in zip(requests, made, strict=True):
            tokens = np.array([*request.request.tokens, *one.tokens], np.int64)
            trained = np.arange(len(tokens)) >= len(request.request.tokens)
            recorded.append(Recorded(tokens, trained, np.zeros(len(one.tokens))))
        recomputed = prefill(self.policy, recorded, self.manifest.sampling.temperature)
        return [
            one._replace(logprobs=true.logprobs.tolist()) for one, true in zip(made, recomputed, strict=True)
        ]

    def group(
        self,
        head: Head,
        counter: int | None = None,
        engine: Callable[[Sequence[EngineRequest]], list[Completion]] | None = None,
    ) -> RolloutGroup:
        """An honest group of the next counter, unless told otherwise."""
        counter = self.counter(head) if counter is None else counter
        beacon = head.manifest.beacon
        seed = task_seed(self.folder.run, head.hash, beacon, self.identity.key, counter)
        assignment = assign(seed, self.manifest.weights)
        name = self.manifest.environments[0].id
        task = self.environment.task(assignment.task_seed, head.manifest.levels.get(name, 0))
        with Batcher(self.settings, engine or self.sample) as batcher:
            (made,) = batcher.run([Job(self.environment, task, assignment)])
        assert isinstance(made, list), made
        return RolloutGroup(head.hash, counter, name, Engine("forger", "1", "float32", "cpu"), made)

    def seal(self, body: bytes, kind: str = Kind.ROLLOUT, **changes: Any) -> bytes:
        """A signed envelope. `changes`: fields of the signed part that are not what they should be."""
        self.seq += 1
        now = time.time_ns() // 1_000_000
        fields = {"v": 1, "kind": str(kind), "run": self.folder.run, "from": self.identity.key}
        fields |= {"seq": self.seq, "ts": now, "exp": now + 60_000, "body": body, **changes}
        return self.sign(encode(fields))

    def sign(self, signed: bytes) -> bytes:
        return encode({"sig": self.identity.sign(DOMAIN_ENVELOPE + signed), "signed": signed})

    def hello(self) -> bytes:
        return self.seal(Hello("forger", Engine("forger", "1", "float32", "cpu")).to_bytes(), Kind.HELLO)
