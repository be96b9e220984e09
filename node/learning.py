"""How a trainer learns: `learning.toml` in a run's folder. Its own matter, no part of the protocol.

It may be changed while the trainer is stopped. The optimizer's and the loss's settings are those of
`trainer.step.UpdateConfig`, flat and without torch, so that `init` and `--help` need none.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import msgspec
from msgspec import Meta

from nous_node.protocol.errors import LocalError

if TYPE_CHECKING:
    from nous_node.trainer.step import UpdateConfig

Positive = Annotated[float, Meta(gt=0)]
Share = Annotated[float, Meta(ge=0, le=1)]
Count = Annotated[int, Meta(ge=1)]
Natural = Annotated[int, Meta(ge=0)]


class Learning(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The settings, with the embedded default's values. `EXPLAINED` says what each means."""

    groups: Count = 32
    evaluate_every: Natural = 20
    evaluate_tasks: Count = 256
    raise_level_at: Share = 0.98
    keep_checkpoints: Annotated[int, Meta(ge=2)] = 8
    full_every: Annotated[int, Meta(ge=1, le=64)] = 32
    advantage: Literal["grpo", "dr-grpo", "rloo", "reinforce"] = "grpo"
    aggregation: Literal["token", "sequence", "fixed"] = "token"
    anchor: Literal["behaviour", "proximal"] = "behaviour"
    rate: Annotated[float, Meta(gt=0, lt=1)] = 1e-3
    warmup: Natural = 10
    hold: Natural = 50
    beta1: Share = 0.9
    beta2: Share = 0.95
    weight_decay: Annotated[float, Meta(ge=0)] = 0.0
    gradient_clip: Positive = 1.0
    clip_low: Share = 0.2
    clip_high: Positive = 0.28
    clip_cap: Positive = 4.0
    importance_cap: Positive = 2.0
    minibatches: Count = 1
    epochs: Count = 1
    token_budget: Count = 4096
    count_flat: bool = False
    audit: Share = 1.0
    peer_share: Annotated[float, Meta(gt=0, le=1)] = 0.5
    probation_share: Annotated[float, Meta(gt=0, le=1)] = 0.25
    collapse: Share = 0.5

    def update_config(self, temperature: float, max_tokens: int) -> UpdateConfig:
        """The trainer's form of it; the run's sampling rules complete it. Imports torch."""
        from nous_node.trainer.advantage import AdvantageKind
        from nous_node.trainer.loss import Aggregation, Anchor, ClipRange
        from nous_node.trainer.optim import OptimizerConfig
        from nous_node.trainer.step import UpdateConfig

        return UpdateConfig(
            advantage=AdvantageKind(self.advantage),
            aggregation=Aggregation(self.aggregation),
            anchor=Anchor(self.anchor),
            clip=ClipRange(self.clip_low, self.clip_high, self.clip_cap, self.importance_cap),
            optimizer=OptimizerConfig(
                self.rate,
                self.warmup,
                self.hold,
                (self.beta1, self.beta2),
                self.weight_decay,
                self.gradient_clip,
            ),
            temperature=temperature,
            minibatches=self.minibatches,
            epochs=self.epochs,
            fixed_length=max_tokens,
            token_budget=self.token_budget,
            count_flat=self.count_flat,
        )


LARGER_MODEL: Mapping[str, object] = {
    "groups": 8,  # 8 x 8 answers of 256 tokens: minutes of generation for a few volunteers
    "hold": 0,
    "rate": 2e-5,  # SmolLM2 went from 28 % to 84 % with it in 20 steps; higher rates were not tried
    "evaluate_every": 5,
    "evaluate_tasks": 64,
}
"""What other models than the embedded default begin with."""

EXPLAINED: Mapping[str, str] = {
    "groups": "rollout groups of one update, which makes one version",
    "evaluate_every": "versions between measurements of held-out greedy accuracy; 0: never",
    "evaluate_tasks": "held-out tasks of one measurement",
    "raise_level_at": "mean reward from which the curriculum gets harder; 1: never in practice",
    "keep_checkpoints": "versions kept on disk, the base not counted; --keep and --disk go over it",
    "full_every": "versions after which one is published in full, not as a delta; 1: each of them",
    "advantage": "grpo, dr-grpo, rloo or reinforce",
    "aggregation": "how token losses become one number: token, sequence or fixed (Dr. GRPO)",
    "anchor": "whose log-probs the clip lies around: behaviour (of who sampled) or proximal (decoupled PPO)",
    "rate": "learning rate of AdamW, reached after the warm-up",
    "warmup": "steps of linear warm-up",
    "hold": "steps at full rate before it falls with the inverse square root; 0: it never falls",
    "beta1": "decay of AdamW's mean of gradients",
    "beta2": "decay of AdamW's mean of squared gradients",
    "weight_decay": "decoupled weight decay",
    "gradient_clip": "largest norm of a gradient",
    "clip_low": "PPO: the ratio is not pushed below 1 - clip_low",
    "clip_high": "PPO: nor above 1 + clip_high (DAPO's clip-higher: unlikely tokens may grow)",
    "clip_cap": "two-sided clip: largest ratio that pulls a bad token back",
    "importance_cap": "largest weight that corrects for the age of a rollout",
    "minibatches": "optimizer steps over the groups of an update",
    "epochs": "times the groups are gone through",
    "token_budget": "tokens of one forward pass; lower it if memory runs out",
    "audit": "share of an active key's groups whose tokens are recomputed; all of any other key's are",
    "peer_share": "largest share of an update that one key has, where five or more take part",
    "probation_share": "largest share of an update that keys on probation have together, where others are",
    "collapse": "below this share of the best held-out accuracy (or mean reward, without held-out tasks) "
    "the best version is taken up again, at half the rate; 0: never",
    "count_flat": "whether groups without signal count in the mean of the loss",
}


def learning_text(overrides: Mapping[str, object], *, embedded: bool) -> str:
    """The content of a new learning.toml. LocalError where an override is no setting or out of range."""
    chosen: dict[str, object] = {**({} if embedded else LARGER_MODEL), **overrides}
    learning = _converted(chosen, "[learning]")
    lines = ["# How this trainer learns. Change it while the trainer is stopped; see the README.", ""]
    for field in msgspec.structs.fields(learning):
        lines += [f"# {EXPLAINED[field.name]}", f"{field.name} = {_toml(getattr(learning, field.name))}", ""]
    return "\n".join(lines)


def read_learning(path: Path) -> Learning:
    """The settings in a run's folder. LocalError says which line is wrong."""
    try:
        text = path.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise LocalError(
            f"The learning settings {path} cannot be read ({error}); an empty file takes the defaults."
        ) from error
    try:
        values = msgspec.toml.decode(text, type=dict[str, object])
    except msgspec.DecodeError as error:
        raise LocalError(f"{path} is not TOML: {error}.") from error
    return _converted(values, str(path))


def _converted(values: Mapping[str, object], where: str) -> Learning:
    try:
        return msgspec.convert(values, Learning)
    except msgspec.ValidationError as error:
        raise LocalError(
            f"The learning settings in {where} are not right: {error}. It takes {', '.join(EXPLAINED)}."
        ) from error


def _toml(value: object) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    return f'"{value}"' if isinstance(value, str) else str(value)
