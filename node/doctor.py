"""`nous-node doctor`: what this machine can do, and what to mend before it takes part.

A check says how it stands and what to do; none changes anything. Heavy libraries are imported by the checks
that need them, so that a broken torch is a line of the table and not the end of it.
"""

from __future__ import annotations

import os
import platform
import shutil
import socket
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

import msgspec
import psutil

from nous_node.protocol.checkpoints import files_hash
from nous_node.protocol.errors import NousError, RemoteError
from nous_node.protocol.runs import Thresholds

from .calibration import EMBEDDED, EMBEDDED_NAME, read_calibration
from .cli_exit import Exit
from .config import DEFAULT_PORT, parse_device
from .device import devices, missing
from .home import Home, HomeBusyError
from .plan import DEFAULT_MODEL, DEFAULT_MODEL_HASH, LOOSE_BF16, LOOSE_FP32
from .statistics import Figures, check_figures
from .wording import plural, printable, size
from .worker_messages import FIRST_GROUPS

NEEDED_PYTHON = (3, 11)
LOW_DISK = 2 << 30
"""Below this a larger model's checkpoints may not fit; the embedded default needs some megabytes."""
NO_DISK = 50 << 20
"""Below this not even the embedded default's checkpoints and journal fit for long."""
LOW_MEMORY = 1 << 30
"""A worker with torch takes some 400 MiB before it has a model."""
CLOCK_SLACK_S = 120.0
"""Files of ours from the future by more than this show a clock that went back."""
SELF_TEST_GROUPS, SELF_TEST_TOKENS = 64, 16
"""Some 300 tokens: enough that a wrong kernel shows, few enough for a second on one core."""

State = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the table; only a problem makes the exit code 1."""

    name: str
    state: State
    text: str


def checks(home: Path, device: str = "cpu") -> Iterator[Check]:
    """All checks, one after the other. One that fails unexpectedly is a problem itself."""
    tests: list[tuple[str, Callable[[], Check]]] = [
        ("python", check_python),
        ("memory", check_memory),
        ("home", lambda: check_home(home)),
        ("disk", lambda: check_disk(home)),
        ("clock", lambda: check_clock(home)),
        ("port", check_port),
        ("libp2p", check_libp2p),
        ("torch", lambda: check_torch(device)),
        ("default policy", check_default_policy),
        ("reproducibility", lambda: check_reproducibility(device)),
        ("bfloat16", lambda: check_reproducibility(device, "bfloat16")),
        ("first groups", check_join),
        ("sandbox", check_sandbox),
        ("environments", check_environments),
    ]
    for name, test in tests:
        try:
            yield test()
        except NousError as error:
            yield Check(name, "problem", str(error))
        except Exception as error:
            yield Check(name, "problem", f"failed: {type(error).__name__}: {error}")


def print_checks(home: Path, named: str | None, *, json: bool) -> int:
    """Prints each check as it is done; the exit code. `named`: a device, where one was."""
    device = "cpu" if named is None else parse_device(named)
    from rich.console import Console
    from rich.text import Text

    console, problems = Console(), 0
    styles = {"ok": "green", "note": "yellow", "problem": "bold red"}
    for check in checks(home, device):
        problems += check.state == "problem"
        if json:
            fields = {"name": check.name, "state": check.state, "text": check.text}
            print(msgspec.json.encode(fields).decode(), flush=True)
            continue
        line = Text.assemble(
            (f"{check.state:8}", styles[check.state]), f"{check.name:16}", printable(check.text)
        )
        console.print(line, soft_wrap=True)
    if not json:
        console.print(plural(problems, "problem") if problems else "This machine is fit to take part.")
    return Exit.FAILED if problems else Exit.OK


def check_python() -> Check:
    text = f"{platform.python_version()} on {platform.system()} {platform.machine()}"
    if sys.version_info < NEEDED_PYTHON:
        return Check("python", "problem", f"{text}; 3.11 or newer is needed.")
    return Check("python", "ok", text)


def check_memory() -> Check:
    memory = psutil.virtual_memory()
    text = f"{size(memory.available)} of {size(memory.total)} free, {os.cpu_count()} cores"
    if memory.available < LOW_MEMORY:
        return Check("memory", "note", f"{text}; close something, or the worker may be ended by the system.")
    return Check("memory", "ok", text)


def check_home(home: Path) -> Check:
    opened = Home.open(home)
    try:
        with opened.lock():
            busy = ""
    except HomeBusyError:
        busy = ", a node is running"
    if not opened.identity_file.exists():
        return Check("home", "ok", f"{home} can be written{busy}; an identity is made on first start")
    return Check("home", "ok", f"{home} can be written{busy}; identity {opened.identity().peer_id}")


def check_disk(home: Path) -> Check:
    place = next(folder for folder in (home, *home.parents) if folder.exists())
    free = shutil.disk_usage(place).free
    if free < NO_DISK:
        return Check("disk", "problem", f"only {size(free)} free at {place}; make room.")
    state: State = "note" if free < LOW_DISK else "ok"
    return Check("disk", state, f"{size(free)} free at {place}")


def check_clock(home: Path) -> Check:
    """Against our own files only: no server is asked."""
    newest = max((path.stat().st_mtime for path in (Path(__file__), *_files(home))), default=0.0)
    ahead = newest - time.time()
    if ahead > CLOCK_SLACK_S:
        return Check("clock", "problem", f"{ahead:.0f} s behind this node's own files; set it by NTP.")
    return Check("clock", "ok", f"{time.strftime('%Y-%m-%d %H:%M:%S %Z')}, not behind this node's own files")


def check_port() -> Check:
    """Whether the default port can be listened on; another is a flag away."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("0.0.0.0", DEFAULT_PORT))
        except OSError as error:
            text = f"TCP {DEFAULT_PORT} cannot be listened on ({error.strerror}); another: --listen MULTIADDR"
            return Check("port", "note", text)
    return Check("port", "ok", f"TCP {DEFAULT_PORT} is free")


def check_libp2p() -> Check:
    version = metadata.version("libp2p")
    wanted = [line for line in metadata.requires("nous-node") or [] if line.startswith("libp2p==")]
    if wanted and wanted[0].split(";")[0].strip() != f"libp2p=={version}":
        return Check("libp2p", "problem", f"{version} is installed; this release needs {wanted[0]}.")
    return Check("libp2p", "ok", version)


def check_torch(device: str = "cpu") -> Check:
    import torch

    text = f"{torch.__version__}, {torch.get_num_threads()} threads, {', '.join(devices())}"
    problem = missing(device)
    return Check("torch", "problem" if problem else "ok", f"{text}. {problem}" if problem else text)


def check_default_policy() -> Check:
    from .create import folder_entries

    digest = files_hash(folder_entries(DEFAULT_MODEL)).hex()
    if digest != DEFAULT_MODEL_HASH:
        return Check(
            "default policy", "problem", f"{DEFAULT_MODEL} is not what was released; install nous-node again."
        )
    return Check("default policy", "ok", f"complete, files hash {digest[:16]}")


def check_reproducibility(device: str = "cpu", dtype: str = "float32") -> Check:
    """What a volunteer samples here is what a trainer recomputes: the embedded default against itself, as a
    join does with the first groups of its run."""
    name = "reproducibility" if dtype == "float32" else dtype
    if missing(device):
        return Check(name, "problem", f"not measured: there is no {device} here.")
    measured, limits = self_test(device, dtype), _limits(dtype)
    text = (
        f"log-probs differ by {measured.logprob:.1e} (limit {limits.logprobs.limit:.2g}), draws by "
        f"{measured.distance:.1e} in the mean ({limits.distances.limit:.2g}) and "
        f"{measured.largest:.1e} at most ({limits.distance_max:.2g})"
    )
    try:
        check_figures(measured, limits, "group")
    except RemoteError:
        step = "rollouts made here would be refused: try --device cpu, or another build of torch."
        return Check(name, "problem", f"{text}; {step}")
    return Check(name, "ok", text)


def check_join() -> Check:
    """What is done of this with a run's own model."""
    return Check(
        "first groups",
        "ok",
        f"a join verifies its first {FIRST_GROUPS} groups like this, with its run's model and limits, on the "
        "CPU in the dtype that the trainer recomputes in, and publishes none if one would be refused",
    )


def _limits(dtype: str) -> Thresholds:
    """Calibrated for the embedded default in this dtype; where nobody did, loose ones, which still show an
    engine that is broken: a run of that dtype brings its own."""
    file = EMBEDDED.with_name(f"{EMBEDDED_NAME}-{dtype}.json")
    if file.exists():
        return read_calibration(file).thresholds
    return LOOSE_FP32 if dtype == "float32" else LOOSE_BF16


def self_test(device: str = "cpu", dtype: str = "float32") -> Figures:
    """Generates seeded tokens with the embedded default in `dtype` and recomputes them by prefill, on the CPU
    in float32 as most trainers would."""
    import numpy as np

    from nous_node.trainer.generate import Request, generate, uniforms
    from nous_node.trainer.policy import Policy
    from nous_node.trainer.prefill import Recorded, prefill

    policy = Policy.load(DEFAULT_MODEL, dtype, device)
    alike = device == "cpu" and dtype == "float32"
    verifier = policy if alike else Policy.load(DEFAULT_MODEL, "float32")
    prompts = [policy.tokenizer.encode(f"sort {3141 + 577 * n}=") for n in range(SELF_TEST_GROUPS)]
    keys = [bytes([n]) * 32 for n in range(SELF_TEST_GROUPS)]
    wanted = [Request(prompt, key, 0, SELF_TEST_TOKENS) for prompt, key in zip(prompts, keys, strict=True)]
    made = generate(policy, wanted, 1.0, [policy.tokenizer.eos_id])
    recorded = [
        Recorded(
            np.array([*prompt, *one.tokens], np.int64),
            np.array([False] * len(prompt) + [True] * len(one.tokens)),
            uniforms(key, 0, len(one.tokens)),
        )
        for prompt, key, one in zip(prompts, keys, made, strict=True)
    ]
    results = prefill(verifier, recorded, 1.0)
    return Figures.together(
        [
            Figures.of(one.logprobs, found.logprobs, found.distances)
            for one, found in zip(made, results, strict=True)
        ]
    )


def check_sandbox() -> Check:
    """Whether code that we did not write can be kept apart from this machine."""
    from nous_node.envs import sandbox

    if (problem := sandbox.unavailable()) is not None:
        refused = "environments of third parties, and those that execute answers, are refused"
        return Check("sandbox", "note", f"{problem} Without it {refused} unless --trust-env names them.")
    if (problem := sandbox.unfiltered()) is not None:
        kept = "the rest of it holds, but more of the kernel is in reach"
        return Check("sandbox", "note", f"bubblewrap works without seccomp: {problem}; {kept}")
    return Check("sandbox", "ok", "bubblewrap works, with seccomp")


def check_environments() -> Check:
    from nous_node.envs import registry
    from nous_node.envs.errors import EnvError

    good, broken = [], []
    for name in registry.entries():
        try:
            found = registry.ids(name)
            good.append(name if found == [name] else f"{name} ({plural(len(found), 'environment')})")
        except EnvError as error:
            broken.append(str(error))
    text = ", ".join(good) or "none"
    return Check("environments", "note" if broken else "ok", "; ".join([text, *broken]))


def _files(home: Path) -> Iterator[Path]:
    yield from home.glob("*")
    yield from home.glob("*/*/*.sqlite*")
