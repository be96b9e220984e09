"""Runs with environments of others, by real nodes: what works is learnt from, what does not is named.

The nodes run in the sandbox, each environment in a process of its library, as everywhere.
"""

from __future__ import annotations

import shutil
import sqlite3
from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from nous_node.envs import sandbox
from nous_node.node.cli_exit import Exit
from nous_node.node.events import TrainerStatus, VolunteerStatus
from nous_node.protocol.constants import MAX_ENVELOPE, MAX_REFERENCED
from nous_node.protocol.envelope import unseal
from nous_node.protocol.rollouts import Role, RolloutGroup

from ..envs.chat_worlds import STYLES, write_folder

PACKAGE = Path(__file__).parent / "packages" / "village-worlds"

sandboxed = pytest.mark.skipif(sandbox.unavailable() is not None, reason=str(sandbox.unavailable()))


@pytest.fixture(scope="session")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The distribution `village-worlds`, in a folder that can be put on the path."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copy(PACKAGE / "village_worlds.py", folder)
    facts = folder / "village_worlds-1.0.dist-info"
    facts.mkdir()
    shutil.copy(PACKAGE / "entry_points.txt", facts)
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: village-worlds\nVersion: 1.0\n")
    return folder


@pytest.fixture(autouse=True)
def installed(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For every node that is started, with deadlines that cost seconds."""
    monkeypatch.setenv("PYTHONPATH", str(package))
    monkeypatch.setenv("NOUS_NODE_ENV_SECONDS", "2")
    monkeypatch.setenv("NOUS_NODE_ENV_MEMORY", "1GiB")


@pytest.fixture
def make(village: Any, tmp_path: Path) -> Callable[..., None]:
    """Makes a run by the command line, from a plan."""

    def made(plan: str, *flags: str) -> None:
        path = tmp_path / "plan.toml"
        path.write_text(plan)
        maker = village.start("trainer", "init", "run", "--config", str(path), *flags)
        assert maker.exit_code(60) == 0, maker.told()

    return made


MIXED = """
group = 4
max_tokens = 24

[environments.sort-digits]

[environments."reasoning-gym/leg_counting"]
config = {format = "plain", answer = "whole"}

[environments."gymnasium/FrozenLake-v1"]
advantages = true
config = {advantages = true, answer = "whole", steps = 3, turn_tokens = 4}

[environments."textarena/KuhnPoker-v0-raw"]
config = {game_max_rounds = 1, turn_tokens = 4, max_turns = 4}

[environments."village/good"]
weight = 2

[learning]
groups = 24
evaluate_every = 0
evaluate_tasks = 1
"""


@pytest.mark.slow
@sandboxed
def test_a_run_mixes_environments_of_all_kinds(village: Any, make: Any) -> None:
    """One of ours, three of libraries, one of a third party: single turns, turns with an advantage each, and
    two players."""
    make(MIXED)
    trainer = village.train()
    node = village.join("node", trainer.invite())
    trainer.version(2)
    found = kept(village, {"accepted", "used"}, lambda found: len(found) == 5, node)
    assert found["village/good"] > 0
    assert not refusals(node, trainer)
    ends_well(node, trainer)


def kept(village: Any, states: set[str], enough: Callable[[Counter[str]], bool], node: Any) -> Counter[str]:
    """Groups by environment that the trainer has in one of these states, as soon as there are enough."""
    found: Counter[str] = Counter()

    def look() -> bool:
        found.clear()
        found.update(group.env for group, state in groups(village) if state in states)
        return enough(found)

    node.until(look)
    return found


def groups(village: Any) -> list[tuple[RolloutGroup, str]]:
    """Those in the trainer's journal, with their states."""
    path = village.home("trainer") / "runs" / "run" / "journal.sqlite"
    with closing(sqlite3.connect(path, timeout=10)) as connection:
        query = "SELECT data, state FROM groups JOIN envelopes USING(arrival)"
        rows = connection.execute(query).fetchall()
    contents = [(unseal(data, MAX_ENVELOPE).content(MAX_REFERENCED), state) for data, state in rows]
    return [(RolloutGroup.from_bytes(content), state) for content, state in contents]


def refusals(node: Any, trainer: Any) -> dict[str, int]:
    """Groups that were refused so far, by code, in the words of both."""
    told = [event for event in trainer.events if isinstance(event, TrainerStatus)][-1]
    return {**told.refused, **node.statuses()[-1].refused}


def ends_well(*nodes: Any) -> None:
    """Ctrl-C, and a clean end."""
    for node in nodes:
        node.interrupt()
        assert node.exit_code() == 0, node.told()


CHATS = """
model = "MODEL"
chat = "template"
group = 4
max_tokens = 16
uncalibrated = true

[environments."village/chatty"]

[environments."reasoning-gym/leg_counting"]
config = {format = "plain", answer = "whole"}

[environments.sort-digits]

[learning]
groups = 12
evaluate_every = 0
evaluate_tasks = 1
"""


@pytest.fixture(scope="session")
def chat_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama of a few thousand random weights that speaks ChatML in bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = write_folder(tmp_path_factory.mktemp("chat") / "model", "bytes", STYLES["chatml"])
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=258,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        max_position_embeddings=1024,
        eos_token_id=256,
        initializer_range=0.3,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
@sandboxed
def test_conversations_and_plain_prompts_are_learnt_from_together(
    village: Any, make: Any, chat_model: Path
) -> None:
    make(CHATS.replace("MODEL", str(chat_model)))
    trainer = village.train(flags=["--uncalibrated"])
    node = village.join("node", trainer.invite())
    trainer.version(1)
    used = kept(village, {"used"}, lambda found: len(found) == 3, node)
    assert used["village/chatty"] > 0
    assert {chats(group) for group, _ in groups(village) if group.env == "village/chatty"} == {True}
    assert {chats(group) for group, _ in groups(village) if group.env != "village/chatty"} == {False}
    assert not refusals(node, trainer)
    ends_well(node, trainer)


def chats(group: RolloutGroup) -> bool:
    """Whether it has the roles of a conversation."""
    return {part.role for one in group.trajectories for part in one.segments} == {Role.USER, Role.ASSISTANT}


BAD = {
    "raises": "ZeroDivisionError: a bug in the scorer",
    "hangs": "did not end within 2 s",
    "dies": "ended",
    "nan": "nan",
    "few": "trajector",
    "forged": "token",
    "texts": "a list with a text in it",
    "hungry": "MemoryError",
    "fickle": "prompt-mismatch",
    "moody": "reward-mismatch",
}
"""What each is given up for, in a few words of it."""

WORSE = """
group = 4

[environments.sort-digits]
weight = 4

[environments."village/good"]
weight = 4

[environments."village/noisy"]
weight = 2

BAD
[learning]
groups = 24
evaluate_every = 0
evaluate_tasks = 1
"""


@sandboxed
def test_bad_environments_are_paused_and_the_others_go_on(village: Any, make: Any) -> None:
    """Beside them in one process: what works is played and accepted, and the trainer refuses nothing."""
    make(WORSE.replace("BAD", "".join(f'[environments."village/{name}"]\n\n' for name in BAD)))
    trainer = village.train()
    node = village.join("node", trainer.invite())
    for name, words in BAD.items():
        told = node.note(f"village/{name} keeps failing here and is paused for 10 min")
        assert "the others go on" in told.text
        assert words in told.text, told.text
    before = kept(village, {"accepted", "used"}, lambda found: len(found) == 3, node)
    kept(village, {"accepted", "used"}, lambda found: all(found[one] > before[one] for one in before), node)
    assert set(before) == {"sort-digits", "village/good", "village/noisy"}
    assert not refusals(node, trainer)
    told = village.start("node", "status")
    assert told.exit_code() == 0
    for name, words in BAD.items():
        (line,) = [line for line in told.lines if f"environment village/{name} gave up" in line]
        assert "is paused until" in line
        assert words in line
    ends_well(node, trainer)


LATE = {"stale", "unknown-checkpoint"}
"""Of a node that is slower than another one on a busy machine."""

TRAPPED = """
group = 4

[environments.sort-digits]
weight = 3

[environments."village/trap"]

[learning]
groups = 24
evaluate_every = 0
evaluate_tasks = 1
"""


@pytest.mark.slow
@sandboxed
def test_a_trainer_whose_environment_hangs_over_a_group_refuses_it_and_goes_on(
    village: Any, make: Any, package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The volunteer's copy of the environment says that it is the same and does not hang."""
    make(TRAPPED)
    trainer = village.train()
    invite = trainer.invite()
    tame = tmp_path / "tame"
    shutil.copytree(package, tame)
    source = (tame / "village_worlds.py").read_text()
    (tame / "village_worlds.py").write_text(source.replace("TRAPPED = True", "TRAPPED = False"))
    monkeypatch.setenv("PYTHONPATH", str(tame))
    node = village.join("node", invite)
    node.wait(VolunteerStatus, lambda status: status.refused.get("environment-failed"))
    honest = village.join("honest", invite, "--env", "sort-digits")
    honest.accepted(8)
    assert set(refusals(node, trainer)) - LATE == {"environment-failed"}
    ends_well(honest, node, trainer)


@pytest.fixture
def nowhere(tmp_path: Path) -> str:
    """A PATH without any program."""
    (tmp_path / "bin").mkdir()
    return str(tmp_path / "bin")


@pytest.mark.slow
@sandboxed
def test_without_a_sandbox_others_code_is_played_only_where_it_is_trusted(
    village: Any, make: Any, nowhere: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    make(THEIRS)
    trainer = village.train()
    invite = trainer.invite()
    monkeypatch.setenv("PATH", nowhere)
    refused = village.join("node", invite)
    assert refused.exit_code() == Exit.INPUT, refused.told()
    for words in ("bubblewrap is not installed", "apt", "--trust-env village"):
        assert words in refused.sentence()
    village.join("node", invite, "--trust-env", "village").accepted(2)


THEIRS = """
group = 4

[environments."village/good"]

[learning]
groups = 24
evaluate_every = 0
evaluate_tasks = 1
"""


@pytest.mark.slow
@sandboxed
def test_an_environment_that_the_trainer_plays_otherwise_is_paused_and_its_key_recovers(
    village: Any, make: Any
) -> None:
    """It repeats its first groups, so that nothing is found before the trainer finds it. What was in work
    then may be enough for a first quarantine, of a minute; after it the others go on."""
    make(TRAPPED.replace("trap", "late"))
    trainer = village.train()
    node = village.join("node", trainer.invite())
    told = node.note("village/late keeps failing here and is paused for 10 min")
    assert "prompt-mismatch" in told.text
    node.accepted(200, seconds=150.0)  # more than were in work
    assert {*refusals(node, trainer)} - LATE - {"quarantined"} == {"prompt-mismatch"}
    ends_well(node, trainer)
