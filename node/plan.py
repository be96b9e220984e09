"""What a person decides about a new run, and the defaults that fit its model.

A TOML file under `init --config` holds a `RunPlan`; flags go over it. Thresholds are measured for a model
(`calibrations`): a run with another one needs its own, or an explicit word that they are loose.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from nous_node.protocol.constants import MAX_ENVELOPE
from nous_node.protocol.errors import LocalError
from nous_node.protocol.runs import Bound, Setting, Thresholds
from nous_node.trainer import model_folder

DEFAULT_ENVIRONMENT = "sort-digits"
DEFAULT_MODEL = Path(model_folder.__file__).parent / "default"
"""The embedded default policy."""
DEFAULT_MODEL_HASH = "bd9e5f30f63f6a43114bbdc816cab6cbb2b627e19e31ca574cccbf94552e8217"
"""Its files hash (`checkpoints.files_hash`) as released: thresholds and the demo's figures belong to it."""

Dtype = Literal["float32", "bfloat16"]

DTYPES: dict[str, Dtype] = {
    "F64": "float32",
    "F32": "float32",
    "BF16": "bfloat16",
    "F16": "bfloat16",  # half precision is not computed in on a CPU; bfloat16 has its size
}
"""What inference computes in, by how the weights are stored."""

LOOSE_FP32 = Thresholds(
    # Ten times the embedded default's, by analogy only: a larger model sums longer rows.
    logprobs=Bound(1e-4, 1e-4, 1e-3),
    distances=Bound(1e-5, 1e-5, 1e-4),
    distance_max=1e-2,
    tokens=64,
    drift_slack=3.0,
    drift_limit=1e3,
    stop_probability=1e-9,
    reward=1e-6,
    verifier="float32",
    calibrated="not calibrated",
)

LOOSE_BF16 = Thresholds(
    # SmolLM2-135M in bf16: honest rollouts reach .10, so half as much again.
    logprobs=Bound(0.04, 0.01, 0.15),
    # Honest rollouts reach 3.2e-3; temperature 0.9 has a median of 5.5e-3, so this is no sharp check.
    distances=Bound(1.3e-3, 5e-4, 6e-3),
    # Honest tokens reach 4e-2; what cheats shows far more often in the mean than in one token.
    distance_max=0.25,
    tokens=64,
    drift_slack=3.0,
    drift_limit=1e3,
    stop_probability=1e-9,
    reward=1e-6,
    verifier="float32",
    calibrated="not calibrated",
)

EMBEDDED_MAX_TOKENS = 16
"""Twelve digits, the hardest level of sort-digits, and the end-of-sequence fit."""
DEFAULT_MAX_TOKENS = 256
"""For other models: a short answer with some reasoning, seconds on a laptop."""

EMBEDDED_GROUPS_PER_SECOND = 400.0
"""A core generates about 300 of the embedded default's groups in a second."""
DEFAULT_GROUPS_PER_SECOND = 20.0
"""For other models: more than one GPU makes, few enough to bound a flood."""

MAX_WEIGHT = 1_000_000
"""As in the manifest (`runs.EnvironmentEntry`)."""
MAX_PLAN_BYTES = 1 << 20
"""A plan is written by hand."""


class EnvironmentPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[environments.NAME]` of a plan."""

    weight: Annotated[int, Meta(ge=1, le=MAX_WEIGHT)] = 1
    config: dict[str, Setting] = {}
    advantages: bool = False


class LimitsPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`[limits]` of a plan; None takes what suits the model."""

    groups_per_second: Annotated[float, Meta(gt=0)] | None = None
    inline_bytes: Annotated[int, Meta(ge=1024, le=MAX_ENVELOPE)] = MAX_ENVELOPE


class RunPlan(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a person decides about a run: a TOML file, with flags over it. None takes what suits the model."""

    model: str | None = None
    """Folder of the base model; None is the embedded default."""
    group: Annotated[int, Meta(ge=2, le=1024)] = 8
    """Samples of one task. Eight give a usable baseline at the cost of eight."""
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    temperature: Annotated[float, Meta(gt=0, le=10)] = 1.0
    sampling: Literal["seeded", "free"] = "seeded"
    dtype: Dtype | None = None
    logprobs: Literal["f32", "f16"] | None = None
    chat: str | None = None
    """Conversation format: `template` for the model's own, empty for none; None: the model's own where it has
    one that can be extended token by token."""
    staleness: Annotated[int, Meta(ge=0, le=8)] = 4
    """Versions that a rollout may be behind: within four, off-policy correction is harmless."""
    shards: Annotated[int, Meta(ge=1, le=65_536)] = 1
    uncalibrated: bool = False
    """Accept loose thresholds for a model that nobody calibrated."""
    thresholds: Thresholds | None = None
    limits: LimitsPlan = LimitsPlan()
    environments: dict[str, EnvironmentPlan] = {}
    learning: dict[str, bool | int | float | str] = {}
    """Overrides for learning.toml."""


def read_plan(path: Path | None) -> RunPlan:
    """The plan in a TOML file, or the defaults. LocalError says which key is wrong and why."""
    if path is None:
        return RunPlan()
    try:
        if path.stat().st_size > MAX_PLAN_BYTES:
            raise LocalError(f"{path} is larger than {MAX_PLAN_BYTES} bytes: not a run's settings.")
        return msgspec.toml.decode(path.read_bytes(), type=RunPlan)
    except OSError as error:
        raise LocalError(
            f"The settings {path} cannot be read ({error.strerror}); give a TOML file."
        ) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise LocalError(
            f"The settings {path} are not right: {error}. See `nous-node init --help`."
        ) from error


def with_environments(plan: RunPlan, flags: Sequence[str]) -> RunPlan:
    """The plan with `--env NAME[=WEIGHT]` over it: flags choose the set, the plan keeps their config."""
    chosen: dict[str, EnvironmentPlan] = {}
    for flag in flags:
        name, _, weight = flag.partition("=")
        known = plan.environments.get(name, EnvironmentPlan())
        if weight:
            if not (weight.isascii() and weight.isdigit() and 1 <= int(weight) <= MAX_WEIGHT):
                raise LocalError(f"The weight in --env {flag!r} is a whole number from 1 to {MAX_WEIGHT:,}.")
            known = msgspec.structs.replace(known, weight=int(weight))
        chosen[name] = known
    environments = chosen or plan.environments or {DEFAULT_ENVIRONMENT: EnvironmentPlan()}
    return msgspec.structs.replace(plan, environments=environments)
