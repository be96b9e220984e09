"""What `nous-node status` says of a prepared home."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from nous_node.node.advice import ADVICE, advice
from nous_node.node.create import create_run
from nous_node.node.home import Home
from nous_node.node.outbox import Outbox
from nous_node.node.plan import RunPlan, with_environments
from nous_node.node.runfolder import RunFolder
from nous_node.node.status import (
    BrokenStatus,
    JoinedStatus,
    TrainedStatus,
    joined_status,
    lines,
    print_status,
    statuses,
)
from nous_node.node.store import Journal, StoredCheckpoint
from nous_node.protocol.envelope import Kind, seal, unseal
from nous_node.protocol.errors import Code
from nous_node.protocol.identity import Identity
from nous_node.protocol.receipts import Receipt, Standing
from nous_node.protocol.rollouts import Engine

KEY = Identity.from_seed(bytes(32))
NOW = 1_700_000_000_000


@pytest.fixture(scope="module")
def template(tmp_path_factory: pytest.TempPathFactory) -> RunFolder:
    """A run, made once: saving its base checkpoint takes a second."""
    path = tmp_path_factory.mktemp("run") / "runs" / "demo"
    return create_run(path, "demo", KEY, with_environments(RunPlan(), []), NOW)


def joined(home: Path, run: RunFolder) -> Path:
    folder = home / "joined" / run.run.hex()[:16]
    folder.mkdir(parents=True)
    (folder / "run.envelope").write_bytes(run.envelope)
    return folder


def filled(folder: Path, run: RunFolder) -> None:
    """Four groups: one accepted, two refused, one waiting."""
    with Outbox.open(folder / "outbox.sqlite") as outbox:
        ids = []
        for number in range(4):
            data = seal(KEY, Kind.ROLLOUT, run.run, b"body%d" % number, seq=number, ts=NOW + number)
            outbox.put(data, checkpoint=bytes(32), version=7, counter=number)
            ids.append(unseal(data).id)
        outbox.acknowledge(
            [
                Receipt(ids[0], KEY.key, "accepted", "", None, None, 512),
                Receipt(ids[1], KEY.key, "refused", "logprob-mismatch", 0.25, 1e-4, 0),
                Receipt(ids[2], KEY.key, "refused", "logprob-mismatch", 0.5, 1e-4, 0),
            ],
            b"proof",
        )


def test_joined_run_tells_totals_and_the_last_figure_of_each_refusal(
    tmp_path: Path, template: RunFolder
) -> None:
    folder = joined(tmp_path, template)
    filled(folder, template)
    status = joined_status(folder, NOW / 1000)
    assert (status.accepted, status.waiting, status.credit, status.version) == (1, 1, 512, 7)
    (refusal,) = status.refused
    assert (refusal.code, refusal.groups, refusal.measured) == ("logprob-mismatch", 2, 0.5)
    text = "\n".join(lines(status, NOW / 1000 + 90))
    for wanted in (
        "demo",
        "512",
        "2 x logprob-mismatch",
        "last: 0.5, limit 0.0001",
        "nous-node doctor",
        "1 min 29",
        "the trainer has not said yet",
        "next        Groups made here are far from what the run computes (measured 0.5, limit 0.0001)",
    ):
        assert wanted in text


def test_the_trainers_word_is_told_with_rank_debit_and_time(tmp_path: Path, template: RunFolder) -> None:
    folder = joined(tmp_path, template)
    with Outbox.open(folder / "outbox.sqlite") as outbox:
        outbox.note_engine(Engine("nous-torch", "1", "float32", "cuda:0"))
        outbox.note_standing(Standing(KEY.key, "active", 120, 3, 5000, 40, 3, 12, 0), NOW - 90_000, b"proof")
    status = joined_status(folder, NOW / 1000)
    assert status.word is not None
    assert (status.word.rank, status.word.of, status.word.said) == (3, 12, (NOW - 90_000) / 1000)
    text = "\n".join(lines(status, NOW / 1000))
    assert "standing    active, rank 3 of 12" in text
    assert "5,000 trained tokens less 40 for tasks that never came, 120 accepted and 3 refused" in text
    assert "1 min 30 s ago" in text
    assert "float32 on cuda:0" in text


def test_status_reads_while_a_node_writes(tmp_path: Path, template: RunFolder) -> None:
    folder = joined(tmp_path, template)
    filled(folder, template)
    with Home.open(tmp_path).lock(), Outbox.open(folder / "outbox.sqlite") as outbox:
        outbox.counters(bytes(32))
        assert joined_status(folder, NOW / 1000).accepted == 1


def test_run_without_a_group_yet_is_told(tmp_path: Path, template: RunFolder) -> None:
    folder = joined(tmp_path, template)
    assert "no group made yet" in "\n".join(lines(joined_status(folder, NOW / 1000), NOW / 1000))


def test_trained_run_tells_its_last_checkpoint(template: RunFolder) -> None:
    with Journal.open(template.journal) as journal:
        for version, figures in ((0, {"greedy": 0.4}), (1, {})):
            journal.publish(StoredCheckpoint(version, bytes([version]) * 32, b"", "x", NOW, {}, figures), [])
    (status,) = statuses(template.path.parent.parent)
    assert isinstance(status, TrainedStatus)
    assert (status.version, status.checkpoint, status.greedy) == (1, "01" * 32, 0.4)
    assert "version 1 0101010101010101, 10 s ago, held-out greedy 40 %" in "\n".join(
        lines(status, NOW / 1000 + 10)
    )


def test_damaged_state_is_told_and_hides_no_other_run(tmp_path: Path, template: RunFolder) -> None:
    folder = joined(tmp_path, template)
    filled(folder, template)
    damaged = tmp_path / "joined" / "0000"
    damaged.mkdir()
    (damaged / "run.envelope").write_bytes(template.envelope)
    (damaged / "outbox.sqlite").write_bytes(b"no database" * 100)
    broken = tmp_path / "runs" / "broken"
    broken.mkdir(parents=True)
    (broken / "run.envelope").write_bytes(b"no run")
    for place in ("runs", "joined"):
        (tmp_path / place / "empty").mkdir()
    found = list(statuses(tmp_path))
    assert [type(one) for one in found] == [BrokenStatus, JoinedStatus, BrokenStatus]
    assert "cannot be read" in lines(found[0], 0.0)[0]


def test_status_as_json_is_one_line_a_run(
    tmp_path: Path, template: RunFolder, capsys: pytest.CaptureFixture[str]
) -> None:
    filled(joined(tmp_path, template), template)
    print_status(tmp_path, json=True)
    (line,) = capsys.readouterr().out.splitlines()
    told = json.loads(line)
    assert (told["role"], told["credit"]) == ("joined", 512)
    assert told["refused"][0]["advice"] == advice("logprob-mismatch")


def test_empty_home_says_how_to_begin(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    print_status(tmp_path, json=False)
    assert "nous-node init" in capsys.readouterr().out


def test_every_code_has_advice_that_is_a_sentence() -> None:
    assert set(ADVICE) == set(Code)
    assert all(text.endswith(".") for text in ADVICE.values())
    assert "Update nous-node" in advice("a-code-of-next-year")
