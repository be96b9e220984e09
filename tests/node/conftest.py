"""A small run of the embedded default, and conversations with its two child processes inside this one.

`worked` asks a worker and `taught` a learner: both are the real loops, over pipes in memory.
"""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from nous_node.node.create import create_run
from nous_node.node.learning import learning_text
from nous_node.node.pipe import ParentPipe
from nous_node.node.plan import EnvironmentPlan, RunPlan
from nous_node.node.runfolder import RunFolder
from nous_node.protocol.identity import Identity

CREATED = 1_750_000_000_000
ROOT = Identity.from_seed(b"r" * 32)
GROUP = 4


@pytest.fixture(scope="session")
def root() -> Identity:
    """The trainer of `make_folder`'s runs."""
    return ROOT


@pytest.fixture(scope="session")
def base_run(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """To be read only."""
    plan = RunPlan(environments={"sort-digits": EnvironmentPlan()}, group=GROUP)
    return create_run(tmp_path_factory.mktemp("base") / "run", "run", ROOT, plan, CREATED)


@pytest.fixture(scope="session")
def base_policy(base_run: RunFolder) -> Any:
    """The embedded default. To be read only."""
    from nous_node.trainer.policy import Policy

    return Policy.load(base_run.checkpoint(0), "float32")


@pytest.fixture(scope="session")
def other_weights(base_run: RunFolder, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint folder with other weights than the embedded default's: one percent larger."""
    from nous_node.trainer.checkpoint import save_checkpoint
    from nous_node.trainer.policy import Policy

    policy = Policy.load(base_run.checkpoint(0), "float32")
    policy.load_tensors({name: tensor * 1.01 for name, tensor in policy.tensors().items()})
    folder = tmp_path_factory.mktemp("other") / "weights"
    save_checkpoint(policy, folder)
    return folder


@pytest.fixture
def make_folder(tmp_path: Path, base_run: RunFolder) -> Callable[..., RunFolder]:
    """A run of one's own, which is measured never and learns as told."""

    def make(**learning: bool | int | float | str) -> RunFolder:
        path = shutil.copytree(base_run.path, tmp_path / "run")
        chosen = {"evaluate_every": 0, "evaluate_tasks": 4, **learning}
        (path / "learning.toml").write_text(learning_text(chosen, embedded=True))
        return RunFolder.open(path)

    return make


def converse(serve: Callable[[Any], None], asked: Any, answered: Any, messages: Sequence[Any]) -> list[Any]:
    """All that `serve` says to these messages, until its pipe is closed."""
    there, back = io.BytesIO(), io.BytesIO()
    writing: ParentPipe[Any, Any] = ParentPipe(io.BytesIO(), there, asked)
    for message in messages:
        writing.send(message)
    there.seek(0)
    serve(ParentPipe(there, back, asked))
    back.seek(0)
    reading: ParentPipe[Any, Any] = ParentPipe(back, io.BytesIO(), answered)
    return list(iter(reading.receive, None))


@pytest.fixture(scope="session")
def worked() -> Callable[..., list[Any]]:
    from nous_node.node.worker import serve
    from nous_node.node.worker_messages import FromWorker, ToWorker

    return lambda *messages: converse(serve, ToWorker, FromWorker, messages)


@pytest.fixture(scope="session")
def taught() -> Callable[..., list[Any]]:
    from nous_node.node.learner import serve
    from nous_node.node.learner_messages import FromLearner, ToLearner

    return lambda *messages: converse(serve, ToLearner, FromLearner, messages)


@dataclass
class Volunteers:
    """Honest answers, made by a worker."""

    worked: Callable[..., list[Any]]

    def candidates(
        self,
        folder: RunFolder,
        count: int,
        *,
        first: int = 0,
        version: int = 0,
        weights: Path | None = None,
        levels: dict[str, int] | None = None,
        key: bytes = b"v" * 32,
    ) -> list[Any]:
        """Groups of counters from `first` on, under a checkpoint that is called `version` times 32."""
        from nous_node.node.learner_messages import Candidate
        from nous_node.node.worker_messages import Generate, Load, Order
        from nous_node.protocol.tasks import task_seed

        checkpoint, beacon = bytes([version]) * 32, b"b" * 32
        place = str(folder.checkpoint(version) if weights is None else weights)
        load = Load(place, checkpoint, "cpu", 1, folder.manifest.to_bytes())
        orders = [
            Order(counter, task_seed(folder.run, checkpoint, beacon, key, counter), levels or {})
            for counter in range(first, first + count)
        ]
        made = self.worked(load, Generate(orders))[-1]
        return [
            Candidate(
                bytes([version]) * 16 + group.counter.to_bytes(16),
                group.body,
                key,
                version,
                checkpoint,
                beacon,
                levels or {},
                False,
            )
            for group in made.groups
        ]


@pytest.fixture(scope="session")
def volunteers(worked: Callable[..., list[Any]]) -> Volunteers:
    return Volunteers(worked)


@pytest.fixture(scope="session")
def recorded(
    tmp_path_factory: pytest.TempPathFactory,
    base_run: RunFolder,
    other_weights: Path,
    worked: Callable[..., list[Any]],
) -> Any:
    """A `records.Record`, to be copied."""
    from .records import Recorder

    path = shutil.copytree(base_run.path, tmp_path_factory.mktemp("recorded") / "run")
    shutil.copytree(other_weights, path / "checkpoints" / "000001")
    return Recorder(path, ROOT, worked).make()


@pytest.fixture
def record(recorded: Any, tmp_path: Path) -> Any:
    """A `records.Record` of one's own."""
    from .records import Record

    path = shutil.copytree(recorded.path, tmp_path / "run")
    return Record(RunFolder.open(path), recorded.envelopes, recorded.receipts)


@pytest.fixture
def audited(capsys: pytest.CaptureFixture[str]) -> Callable[..., Any]:
    """Runs an audit; its exit code, its groups, its last line, and what else it said."""
    from nous_node.node.audit import run_audit

    def run(path: Path, checkpoint: Path | None = None, manifest: Path | None = None) -> Any:
        code = run_audit(path, checkpoint, manifest, json=True)
        events = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
        groups = [event for event in events if event["event"] == "group"]
        notes = [event["text"] for event in events if event["event"] == "note"]
        assert events[-1]["event"] == "audit"
        return code, groups, events[-1], notes

    return run


@pytest.fixture
def school(make_folder: Callable[..., RunFolder], root: Identity) -> Any:
    """A `school.School`."""
    from .school import UPDATE, School

    school = School(make_folder(groups=UPDATE), root)
    yield school
    school.journal.__exit__()


@pytest.fixture
def start_press(make_folder: Callable[..., RunFolder], root: Identity) -> Any:
    """Starts a `press.Press` of the same run again and again; the one before is stopped."""
    from .press import Press

    folder, running = make_folder(), []

    def started(**choices: Any) -> Press:
        for press in running:
            press.journal.__exit__()
        running[:] = [Press(folder, root, **choices)]
        return running[0]

    yield started
    for press in running:
        press.journal.__exit__()
