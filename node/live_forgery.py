"""What the kit sends as a member of a run: envelopes that are right, and such that are wrong in one way."""

from __future__ import annotations

import itertools
import os
from dataclasses import dataclass, field
from typing import Any

import msgspec

from nous_node.protocol.constants import DOMAIN_ENVELOPE, PROTOCOL
from nous_node.protocol.encoding import encode
from nous_node.protocol.envelope import Kind
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Hello
from nous_node.protocol.references import cut, pack
from nous_node.protocol.rollouts import (
    Engine,
    Role,
    RolloutGroup,
    Segment,
    Trajectory,
    pack_floats,
    pack_tokens,
)
from nous_node.protocol.runs import RunManifest, Topics, shard_of

from .following import now_ms

LIFETIME_MS = 60_000
AGENT = "nous-node-conformance"
ENGINE = Engine(AGENT, "1", "float32", "cpu")
SEQ_BYTES = 6
"""Of the first sequence number, which is random: a key may speak for the kit several times. [ENV-9]"""
SHARD_TRIES = 200_000
"""Keys that are made to find one of a shard: more than three times as many as there can be shards."""


def new_identity() -> Identity:
    """One that nobody has seen before."""
    return Identity.from_seed(os.urandom(32))


@dataclass
class Member:
    """A key of the kit's in a run; `seal` signs whatever it is told to."""

    run: bytes
    manifest: RunManifest
    identity: Identity = field(default_factory=new_identity)
    _seq: itertools.count[int] = field(
        default_factory=lambda: itertools.count(int.from_bytes(os.urandom(SEQ_BYTES)))
    )

    @classmethod
    def of_shard(cls, run: bytes, manifest: RunManifest, shard: int) -> Member:
        """One whose key belongs to a shard."""
        for _ in range(SHARD_TRIES):
            member = cls(run, manifest)
            if member.shard == shard:
                return member
        return member

    @property
    def shard(self) -> int:
        return shard_of(self.identity.key, self.manifest.shards)

    @property
    def topic(self) -> str:
        return Topics(self.run).rollouts(self.shard)

    def signed(self, kind: str, body: bytes, /, **changes: Any) -> bytes:
        """The signed part. `changes`: fields that are not what they should be."""
        now = now_ms()
        fields = {"v": PROTOCOL, "kind": kind, "run": self.run, "from": self.identity.key}
        fields |= {"seq": next(self._seq), "ts": now, "exp": now + LIFETIME_MS, "body": body}
        return encode({**fields, **changes})

    def sealed(self, signed: bytes, sig: bytes | None = None) -> bytes:
        return encode({"sig": sig or self.identity.sign(DOMAIN_ENVELOPE + signed), "signed": signed})

    def seal(self, kind: str, body: bytes, /, **changes: Any) -> bytes:
        return self.sealed(self.signed(kind, body, **changes))

    def hello(self, **changes: Any) -> bytes:
        return self.seal(Kind.HELLO, Hello(AGENT, ENGINE).to_bytes(), **changes)

    def group(self, checkpoint: bytes, counter: int, **changes: Any) -> bytes:
        """Content of a rollout of the right shape, as many trajectories as the run wants; its tokens are
        nobody's. `changes`: fields of the group."""
        tokens = [0, 1, 2, self.manifest.sampling.stop[0]]
        one = Trajectory(
            tokens=pack_tokens(tokens),
            segments=[Segment(2, Role.USER, False), Segment(2, Role.ASSISTANT, True)],
            logprobs=pack_floats([-1.0, -1.0], self.manifest.sampling.logprobs),
            reward=0.0,
            finish="stop",
        )
        environment = self.manifest.environments[0].id
        fields: dict[str, Any] = {
            "checkpoint": checkpoint,
            "counter": counter,
            "env": environment,
            "engine": ENGINE,
            "trajectories": [one] * self.manifest.group,
        }
        return RolloutGroup(**{**fields, **changes}).to_bytes()

    def rollout(self, checkpoint: bytes, counter: int = 0, **changes: Any) -> bytes:
        """An envelope around such a group."""
        return self.seal(Kind.ROLLOUT, self.group(checkpoint, counter), **changes)

    def reference(
        self, checkpoint: bytes, content: bytes, **changes: Any
    ) -> tuple[bytes, dict[bytes, bytes]]:
        """An envelope that names a group instead of holding it, and the chunks that it names. `changes`:
        fields of the reference that are not what they should be."""
        counter = RolloutGroup.from_bytes(content).counter
        named, frame = pack(checkpoint, counter, content, self.manifest.rollout_envelope_limit)
        named = msgspec.structs.replace(named, **changes)
        return self.seal(Kind.REFERENCE, named.to_bytes()), dict(cut(named, frame))
