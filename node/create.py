"""Makes a run: its signed manifest, its base checkpoint and the trainer's learning settings.

    plan + model folder -> base checkpoint -> manifest -> signed -> RunFolder

A run's rules are part of its id, so they are complete and checked before anything is written. The signed
manifest is written last: a folder without it holds no run, and `init` may be repeated.
"""

from __future__ import annotations

import hmac
import json
import os
import shlex
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from nous_node.envs import registry
from nous_node.envs.access import NONE, Access
from nous_node.envs.chat import TEMPLATE, ModelChat, load_chat
from nous_node.envs.chat_tokens import template_source
from nous_node.envs.errors import BadChat
from nous_node.protocol.checkpoints import FileEntry, file_entry, files_hash, weights_hash
from nous_node.protocol.constants import CHUNK, DOMAIN_BEACON, MAX_MANIFEST, PROTOCOL
from nous_node.protocol.encoding import read
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import LocalError, RemoteError
from nous_node.protocol.identity import Identity
from nous_node.protocol.runs import (
    EnvironmentEntry,
    Limits,
    ModelFacts,
    RunManifest,
    SamplingRules,
    Thresholds,
    run_id,
)
from nous_node.trainer.model_folder import CONFIG_FILE, model_facts, read_config, weight_files

from .calibration import find_thresholds
from .home import default_home, disk_errors
from .learning import learning_text
from .model_source import model_folder
from .plan import (
    DEFAULT_GROUPS_PER_SECOND,
    DEFAULT_MAX_TOKENS,
    DEFAULT_MODEL,
    DTYPES,
    EMBEDDED_GROUPS_PER_SECOND,
    EMBEDDED_MAX_TOKENS,
    LOOSE_BF16,
    LOOSE_FP32,
    Dtype,
    EnvironmentPlan,
    RunPlan,
)
from .runfolder import RunFolder, check_name

GENERATION_FILE = "generation_config.json"
BASE = "000000"


@dataclass(frozen=True, slots=True)
class BaseModel:
    """The model that a run begins with."""

    source: Path
    embedded: bool
    """Whether it is the embedded default."""
    dtype: Dtype
    """What inference computes in."""
    context: int

    @classmethod
    def of(cls, source: Path, plan: RunPlan) -> BaseModel:
        """Reads a model folder without loading it; ModelError says what it lacks."""
        facts = model_facts(source)
        embedded = source.resolve() == DEFAULT_MODEL.resolve()
        dtype = plan.dtype or ("float32" if embedded else DTYPES[facts.dtype])
        return cls(source, embedded, dtype, facts.context)


def create_run(
    path: Path,
    name: str,
    identity: Identity,
    plan: RunPlan,
    now: int,
    access: Access = NONE,
    tell: Callable[[str], object] = str,
) -> RunFolder:
    """A new run in `path`, trained by `identity`. `now`: Unix milliseconds; `tell` hears what a person should
    know of it.

    Raises LocalError, ModelError or an EnvError with what to change; nothing is left behind then
    that would hinder another try.
    """
    check_name(name)
    if (path / "run.envelope").exists():
        raise LocalError(f"{path} already holds a run; give the new one another name.")
    source = model_folder(plan.model) if plan.model else DEFAULT_MODEL
    base = BaseModel.of(source, plan)
    environments = [_environment(key, entry, access) for key, entry in plan.environments.items()]
    form, chat = _chat(source, plan.chat, now, tell)
    sampling = _sampling(plan, base, stop_ids(source, chat))
    learning = learning_text(plan.learning, embedded=base.embedded)
    folder = path / "checkpoints" / BASE
    with disk_errors(path):
        _save_base(base, folder)
    thresholds = plan_thresholds(plan, base, weights_hash(base_tensors(folder)), path.parent.parent)
    manifest = RunManifest(
        name=name,
        created=now,
        protocol=[PROTOCOL, PROTOCOL],
        root=identity.key,
        trainers=[identity.key],
        base=files_hash(folder_entries(folder)),
        model=_facts(folder, base.dtype),
        environments=environments,
        sampling=sampling,
        group=plan.group,
        staleness=plan.staleness,
        shards=plan.shards,
        thresholds=thresholds,
        limits=_limits(plan, base),
        chat=form,
    )
    body = manifest.to_bytes()
    _check(body)
    data = seal(identity, Kind.RUN, run_id(body), body, seq=0, ts=now, limit=MAX_MANIFEST)
    with disk_errors(path):
        return RunFolder.create(path, unseal(data, MAX_MANIFEST), data, learning)


def folder_entries(folder: Path) -> list[FileEntry]:
    """The files of a checkpoint folder as its manifest lists them, sorted by path."""
    paths = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    return [file_entry(path, _blocks(folder / path)) for path in paths]


def stop_ids(folder: Path, chat: ModelChat | None = None) -> list[int]:
    """Every end-of-sequence id that config.json and generation_config.json name, sorted, and what closes an
    answer in the run's conversation format: not every model names it, and turns would never end by
    themselves."""
    found: set[int] = set() if chat is None else {chat.close}
    configs = [read_config(folder)]
    if (folder / GENERATION_FILE).is_file():
        configs.append(read_json(folder / GENERATION_FILE))
    for config in configs:
        value = config.get("eos_token_id")
        found.update(i for i in (value if isinstance(value, list) else [value]) if isinstance(i, int))
    if not found:
        raise LocalError(f"The model in {folder} names no eos_token_id; add it to its {CONFIG_FILE}.")
    return sorted(found)


def plan_thresholds(plan: RunPlan, base: BaseModel, weights: bytes, home: Path) -> Thresholds:
    """The plan's own, those calibrated for these weights, or loose ones where the plan accepts that."""
    found = plan.thresholds or find_thresholds(weights, base.dtype, home)
    if found is not None:
        return found
    if not plan.uncalibrated:
        raise LocalError(
            f"The verification thresholds were not calibrated for {base.source} in {base.dtype}: run "
            f"`{_calibrate_command(plan, base, home)}` first, or add --uncalibrated to start with loose ones."
        )
    return LOOSE_FP32 if base.dtype == "float32" else LOOSE_BF16


def _calibrate_command(plan: RunPlan, base: BaseModel, home: Path) -> str:
    """What measures the run that was wanted, and leaves it where `init` finds it."""
    told = ["nous-node", "calibrate", str(base.source), "--dtype", base.dtype]
    told += [part for name in plan.environments for part in ("--env", name)]
    told += [] if plan.max_tokens is None else ["--max-tokens", str(plan.max_tokens)]
    told += [] if home == default_home(os.environ) else ["--home", str(home)]
    return shlex.join(told)


def base_tensors(folder: Path) -> dict[str, bytes]:
    """SHA-256 of each tensor of a checkpoint folder, from however many files. Imports torch."""
    from nous_node.trainer.checkpoint import tensor_hashes

    return {name: digest for file in weight_files(folder) for name, digest in tensor_hashes(file).items()}


def first_beacon(identity: Identity, run: bytes) -> bytes:
    """Of version 0: the same for a trainer key at any time, and nobody else can know it before. [TSK-6]"""
    return hmac.digest(identity.seed, DOMAIN_BEACON + run, "sha256")


def read_json(path: Path) -> dict[str, object]:
    """A JSON object of a model folder; LocalError where it is none."""
    try:
        value = json.loads(path.read_bytes())
    except ValueError as error:
        raise LocalError(f"{path} is not JSON ({error}); copy the folder again from its source.") from error
    if not isinstance(value, dict):
        raise LocalError(f"{path} is not a JSON object; copy the folder again from its source.")
    return value


def _chat(
    source: Path, wanted: str | None, now: int, tell: Callable[[str], object]
) -> tuple[str, ModelChat | None]:
    """The conversation format of the run: what the plan says, else the model's template where it has one that
    can be extended token by token."""
    if wanted is not None:
        return wanted, load_chat(source, wanted, now) if wanted else None
    try:
        return (TEMPLATE, load_chat(source, TEMPLATE, now)) if template_source(source) else ("", None)
    except BadChat as error:
        tell(f"There is no conversation format: {error}")
        return "", None


def _environment(name: str, plan: EnvironmentPlan, access: Access) -> EnvironmentEntry:
    """Checked by making it once. One whose rewards cannot be recomputed is refused."""
    facts = registry.facts(name, access)
    if not facts.verifiable:
        raise LocalError(
            f"The environment {name!r} cannot be recomputed by a trainer (reproducible: "
            f"{facts.reproducible}, scorer: {facts.scorer}), so nothing could be "
            "verified; take another one."
        )
    registry.make(name, plan.config, access)
    version = registry.version(name, plan.config, access)
    return EnvironmentEntry(name, version, plan.weight, plan.config, plan.advantages)


def _sampling(plan: RunPlan, base: BaseModel, stop: list[int]) -> SamplingRules:
    max_tokens = plan.max_tokens or (EMBEDDED_MAX_TOKENS if base.embedded else DEFAULT_MAX_TOKENS)
    if max_tokens >= base.context:
        raise LocalError(
            f"{max_tokens} sampled tokens and a prompt do not fit the model's context of {base.context}; "
            "lower --max-tokens."
        )
    return SamplingRules(
        mode=plan.sampling,
        temperature=plan.temperature,
        max_tokens=max_tokens,
        stop=stop,
        # f16 would add 4e-4 to the mean difference: nothing beside bf16's .04, too much beside fp32's 1e-5.
        logprobs=plan.logprobs or ("f32" if base.dtype == "float32" else "f16"),
    )


def _limits(plan: RunPlan, base: BaseModel) -> Limits:
    usual = EMBEDDED_GROUPS_PER_SECOND if base.embedded else DEFAULT_GROUPS_PER_SECOND
    return Limits(plan.limits.groups_per_second or usual, plan.limits.inline_bytes)


def _facts(folder: Path, dtype: Dtype) -> ModelFacts:
    facts = model_facts(folder)
    return ModelFacts(
        family=facts.model_type or "unknown",
        parameters=facts.parameters,
        bytes=facts.weight_bytes,
        vocabulary=facts.vocab_size,
        context=facts.context,
        dtype=dtype,
    )


def _save_base(base: BaseModel, target: Path) -> None:
    """Version 0, saved like all that follow: the same files and tensor names, in the dtype of the run.

    Loading it here also shows that it can be loaded, before anybody downloads it.
    """
    from nous_node.trainer.checkpoint import save_checkpoint
    from nous_node.trainer.policy import Policy

    target.parent.mkdir(parents=True, exist_ok=True)
    save_checkpoint(Policy.load(base.source, base.dtype), target)


def _blocks(path: Path) -> Iterator[bytes]:
    with path.open("rb") as file:
        while block := file.read(CHUNK):
            yield block


def _check(body: bytes) -> None:
    """The reader's rules hold for what we write: a value out of range is found here, not by volunteers."""
    try:
        read(body, RunManifest, MAX_MANIFEST)
    except RemoteError as error:
        raise LocalError(f"These settings make no valid run: {error} See `nous-node init --help`.") from error
