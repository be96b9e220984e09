"""Ops of the default model, and of groups played again with it as their run's model. [MDL-1] [VER-3]"""

from __future__ import annotations

import functools
import hashlib
from typing import TYPE_CHECKING, Final

from nous_node.envs.environment import PolicySettings
from nous_node.envs.replay import replay
from nous_node.envs.sort_digits import SortDigits
from nous_node.protocol.rollouts import RolloutGroup

from .adapter_policy import default_tokenizer
from .adapter_question import Answer, Ask, Ops, Raw, run_manifest

if TYPE_CHECKING:
    from nous_node.trainer.policy import Policy


class Text(Ask, frozen=True):
    text: str


def logits(ask: Text) -> Answer:
    import torch

    from nous_node.trainer.decoder import make_decoder

    policy, weights = _policy()
    tokens = policy.tokenizer.encode(ask.text)
    found = make_decoder(policy).prefill(torch.tensor([tokens]), torch.tensor([0]))[0]
    return {"weights": weights, "tokens": tokens, "logits": found.tolist()}


@functools.cache
def _policy() -> tuple[Policy, str]:
    """The default model, and the hash of its tensors in the order of their names."""
    from nous_node.trainer.policy import DEFAULT_FOLDER, Policy

    policy = Policy.load(DEFAULT_FOLDER, "float32")
    tensors = policy.tensors()
    data = b"".join(tensors[name].numpy().astype("<f4").tobytes() for name in sorted(tensors))
    return policy, hashlib.sha256(data).hexdigest()


class Group(Ask, frozen=True):
    manifest: Raw
    body: Raw
    seed: Raw
    length: int
    level: int


def replayed(ask: Group) -> Answer:
    manifest = run_manifest(ask.manifest)
    environment = SortDigits({"length": ask.length})
    settings = PolicySettings.of(manifest, default_tokenizer())
    group = RolloutGroup.from_bytes(ask.body)
    task = environment.task(ask.seed, ask.level)
    made = replay(environment, task, group, settings, manifest.thresholds.reward)
    return {"rewards": [one.reward for one in made]}


OPS: Final[Ops] = {"nous-default": logits, "replays": replayed}
