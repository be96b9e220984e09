"""What the error-rate bench collects, in which order, and the collector.

A set is made of chunks: a few groups generated together, then recomputed by the verifiers that the set names.
Chunks of honest sets differ in batch size and in how rows are mixed, so that padding and shapes vary.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

import numpy as np
from errors_attacks import edited, other_prompt
from errors_engines import SAMPLERS, quantize, recompute, sampling_as
from errors_prompts import task_texts
from errors_store import GROUP, Check, Rollouts, chunk_path, joined, load_check, load_rollouts, save
from safetensors.torch import load_file, save_file
from smollm2 import chat_prompts, smollm2_folder

from nous_node.node.plan import DEFAULT_MODEL, EMBEDDED_MAX_TOKENS
from nous_node.trainer.advantage import Baseline
from nous_node.trainer.generate import Completion, Request, generate, uniforms
from nous_node.trainer.optim import Optimizer, OptimizerConfig
from nous_node.trainer.policy import Policy
from nous_node.trainer.prefill import TOKEN_BUDGET, Recorded
from nous_node.trainer.step import Group, Trajectory, UpdateConfig, update

NODE_CHECK = "node"
"""The verifier name of a prefill by the node's own model, in the node's dtype."""
NODE_BUDGET = 1500
"""Places of such a forward pass: another batch shape than the verifier's."""
SLOW_CHUNK = 7
"""Of an honest set, generated in the smallest batches: some rows one by one, the others by eight."""
UPDATE_RATE = 2e-5
"""Learning rate of the update that makes the next checkpoint: the smallest step that has to be noticed."""
UPDATE_GROUPS = 8
"""Groups of the batch that makes the next checkpoint."""


@dataclass(frozen=True)
class Model:
    """A model under test: the node computes in `node_dtype`, the verifier in float32 over the same weights.
    `chunk` groups are generated together; `batches` are the rows of a generation batch, chunk after chunk."""

    name: str
    node_dtype: str
    max_tokens: int
    chunk: int
    batches: tuple[int, ...]

    @property
    def folder(self) -> Path:
        return DEFAULT_MODEL if self.name == "embedded" else smollm2_folder()

    def prompts(self, label: str, count: int, policy: Policy) -> list[list[int]]:
        """`count` token prompts of a set."""
        if self.name != "embedded":
            return chat_prompts(task_texts(label, count))
        draw = np.random.default_rng(list(label.encode()))
        digits = ["".join(map(str, draw.integers(0, 10, 4 + number % 5))) for number in range(count)]
        return [policy.tokenizer.encode(f"sort {text}=") for text in digits]


MODELS = {
    "smollm2": Model("smollm2", "bfloat16", 96, 8, (64, 32, 64, 16, 64, 32, 64, 16)),
    "embedded": Model("embedded", "float32", EMBEDDED_MAX_TOKENS, 64, (8, 64, 296, 512)),
}


@dataclass(frozen=True)
class Job:
    """Chunks `first` to `last` of set `name`. `weights` are those of the generating engine, `sampler` its
    draw. `checks` name the verifiers: "base" and "next" are the true checkpoint and the one after it in
    float32, "single" the true one trajectory by trajectory, "node" it in the node's dtype, "int8" and "int4"
    the cheat's own prefill; a word after the name tells processes apart.
    `source`: the honest set that the rollouts of set "edited" or "other prompt" are made from."""

    name: str
    first: int
    last: int
    sampler: str = "seeded"
    weights: str = "base"
    checks: tuple[str, ...] = ("base",)
    hidden: bool = False
    varied: bool = False
    source: str = ""


@lru_cache(maxsize=4)
def policy_of(model: Model, weights: str, dtype: str) -> Policy:
    """The model with "base", "int8", "int4" or "next" weights."""
    policy = Policy.load(model.folder, dtype)
    if weights in ("int8", "int4"):
        quantize(policy, weights)
    return policy


def next_policy(model: Model, root: Path) -> Policy:
    """The checkpoint after one update from the first calibration groups, as its files store it."""
    policy = policy_of(model, "next", "float32")
    file = root / model.name / "next.safetensors"
    if not file.exists():
        learner = Policy.load(model.folder, model.node_dtype)
        optimizer = Optimizer(learner, OptimizerConfig(rate=UPDATE_RATE, warmup=0))
        report = update(
            learner, optimizer, _lessons(model, root), UpdateConfig(token_budget=1024), Baseline()
        )
        print(f"update: {report}", flush=True)
        save_file({name: t.contiguous() for name, t in learner.tensors().items()}, file)
    policy.load_tensors(load_file(file))
    return policy


def _lessons(model: Model, root: Path) -> list[Group]:
    """Groups with a reward that every trajectory gets a share of: how few of its tokens it repeats."""
    rollouts = load_rollouts(chunk_path(root, model.name, "calibration", 0))
    recorded, tokens = recorded_of(rollouts, rollouts.keys), rollouts.token_list()
    reported = rollouts.split(rollouts.reported)
    groups = []
    for start in range(0, UPDATE_GROUPS * GROUP, GROUP):
        members = range(start, start + GROUP)
        rewards = [len(set(tokens[i].tolist())) / len(tokens[i]) for i in members]
        taught = [Trajectory(recorded[i].tokens, recorded[i].trained, reported[i]) for i in members]
        groups.append(Group(taught, rewards, 0))
    return groups


def sampler_key(name: str, trajectory: int) -> bytes:
    """The 32-byte key of a set's trajectory."""
    return hashlib.sha256(f"{name}/{trajectory}".encode()).digest()


def recorded_of(rollouts: Rollouts, keys: np.ndarray) -> list[Recorded]:  # type: ignore[type-arg]
    """The trajectories as a verifier takes them, with the uniforms of `keys`."""
    prompts = rollouts.prompt_list()
    return [
        Recorded(
            np.concatenate([prompts[i // GROUP], tokens]).astype(np.int64),
            np.arange(len(prompts[i // GROUP]) + len(tokens)) >= len(prompts[i // GROUP]),
            uniforms(bytes(keys[i]), 0, len(tokens)),
        )
        for i, tokens in enumerate(rollouts.token_list())
    ]


def derive(model: Model, root: Path, job: Job, chunk: int) -> Rollouts:
    """Makes one chunk of an attack from the same chunk of an honest set."""
    honest = load_rollouts(chunk_path(root, model.name, job.source, chunk))
    if job.name == "other prompt":
        return other_prompt(honest)
    policy = policy_of(model, "base", model.node_dtype)
    return edited(policy, honest, recorded_of(honest, honest.keys), chunk)


def make(model: Model, job: Job, chunk: int) -> Rollouts:
    """Generates one chunk."""
    policy = policy_of(model, job.weights, model.node_dtype)
    groups = range(chunk * model.chunk, (chunk + 1) * model.chunk)
    prompts = model.prompts(job.name, groups.stop, policy)[groups.start :]
    wanted = [
        Request(prompts[i // GROUP], sampler_key(job.name, groups.start * GROUP + i), 0, model.max_tokens)
        for i in range(len(groups) * GROUP)
    ]
    order, rows = _layout(model, job, chunk, len(wanted))
    made: dict[int, Completion] = {}
    size = np.zeros(len(wanted), np.int32)
    with sampling_as(SAMPLERS[job.sampler]):
        start = 0
        for count in rows:
            part = order[start : start + count]
            done = generate(policy, [wanted[i] for i in part], 1.0, [policy.tokenizer.eos_id])
            made.update(zip(part, done, strict=True))
            size[part] = count
            start += count
    finished = [made[i] for i in range(len(wanted))]
    return Rollouts(
        np.concatenate(prompts).astype(np.int32),
        np.array([len(p) for p in prompts]),
        np.concatenate([one.tokens for one in finished]).astype(np.int32),
        np.concatenate([one.logprobs for one in finished]),
        np.array([len(one.tokens) for one in finished]),
        np.array([list(ask.key) for ask in wanted], np.uint8),
        np.array([one.finish == "stop" for one in finished]),
        size,
    )


def _layout(model: Model, job: Job, chunk: int, count: int) -> tuple[list[int], list[int]]:
    """The order of the rows, and the sizes of the generation batches that they are cut into."""
    order = list(range(count))
    if not job.varied:
        return order, [count]
    if chunk % 2:
        np.random.default_rng(chunk).shuffle(order)
    size, singles = model.batches[chunk % len(model.batches)], 0
    if chunk == SLOW_CHUNK:
        size, singles = GROUP, GROUP
    return order, [1] * singles + [min(size, count - start) for start in range(singles, count, size)]


def check(model: Model, root: Path, rollouts: Rollouts, verifier: str, job: Job) -> Check:
    """What one verifier makes of a chunk; of an honest set also with other sampler keys."""
    kind = verifier.split()[0]
    if kind == "next":
        policy = next_policy(model, root)
    elif kind in ("base", "single"):
        policy = policy_of(model, "base", "float32")
    else:
        policy = policy_of(model, "base" if kind == NODE_CHECK else kind, model.node_dtype)
    recorded = recorded_of(rollouts, rollouts.keys)
    if kind == "single":
        return joined([recompute(policy, [one]) for one in recorded])
    strange = None
    if job.varied and kind == "base":
        others = np.array([list(hashlib.sha256(bytes(key)).digest()) for key in rollouts.keys], np.uint8)
        strange = [one.uniforms for one in recorded_of(rollouts, others)]
    budget = TOKEN_BUDGET if kind in ("base", "next") else NODE_BUDGET
    return recompute(policy, recorded, strange, 1.0, job.hidden, budget)


def run(model: Model, root: Path, jobs: list[Job], makes: Callable[[int], bool] = lambda chunk: True) -> None:
    """Does what is not there yet, and says what each chunk took. Other processes make the chunks that this
    one does not; what is not made is not checked."""
    for job in jobs:
        for chunk in range(job.first, job.last):
            path = chunk_path(root, model.name, job.name, chunk)
            if not path.exists() and makes(chunk):
                began, cpu = time.perf_counter(), time.process_time()
                save(path, derive(model, root, job, chunk) if job.source else make(model, job, chunk))
                _told(path, load_rollouts(path), began, cpu, "made")
            if path.exists():
                _check_chunk(model, root, job, chunk)


def _check_chunk(model: Model, root: Path, job: Job, chunk: int) -> None:
    rollouts = load_rollouts(chunk_path(root, model.name, job.name, chunk))
    for verifier in job.checks:
        path = chunk_path(root, model.name, job.name, chunk, verifier)
        if path.exists():
            continue
        began, cpu = time.perf_counter(), time.process_time()
        save(path, check(model, root, rollouts, verifier, job))
        _told(path, rollouts, began, cpu, _figures(rollouts, load_check(path)))


def _figures(rollouts: Rollouts, judged: Check) -> str:
    r = np.abs(rollouts.reported - judged.logprobs).mean()
    return f"mad {r:.3g} d {judged.distances.mean():.3g} max {judged.distances.max():.3g}"


def _told(path: Path, rollouts: Rollouts, began: float, cpu: float, what: str) -> None:
    spent, used = time.perf_counter() - began, time.process_time() - cpu
    tokens = len(rollouts.tokens)
    name = f"{path.parent.name}/{path.stem}"
    print(f"{name} {tokens} tokens {spent:.0f}s {used:.0f} cpu {tokens / used:.0f}/s {what}", flush=True)
