"""The loop of this node's own adapter: each line has an answer, whatever it holds."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest

from nous_node.node import adapter
from nous_node.node.adapter import BAD_QUESTION, MAX_LINE, answered, serve
from nous_node.node.conformance_cases import load_cases
from nous_node.node.conformance_compare import judge

CLIENT = b'{"op": "client"}'


def served(questions: bytes) -> list[dict[str, Any]]:
    answers = io.BytesIO()
    serve(io.BytesIO(questions), answers)
    return [msgspec.json.decode(line) for line in answers.getvalue().splitlines()]


def test_it_says_who_answers() -> None:
    (answer,) = served(CLIENT)
    assert answer["ok"]["name"] == "nous-node"
    assert answer["ok"]["version"]


def test_the_last_line_needs_no_end() -> None:
    assert len(served(CLIENT + b"\n" + CLIENT)) == 2


@pytest.mark.parametrize(
    "line",
    [
        b"",
        b"garbage",
        b"\xff\xfe",
        b"null",
        b"[1]",
        b'"client"',
        b"{}",
        b'{"op": 1}',
        b"[" * 100_000,
        b'{"op": "encoding"}',
        b'{"op": "encoding", "bytes": 1}',
        b'{"op": "encoding", "bytes": "0"}',
        b'{"op": "encoding", "bytes": "0 0"}',
        b'{"op": "encoding", "bytes": "xy"}',
        b'{"op": "encoding", "bytes": [["00", -1]]}',
        b'{"op": "encoding", "bytes": [["00", 99999999999]]}',
        b'{"op": "encoding", "bytes": [["00", 1e99]]}',
        b'{"op": "encoding", "bytes": [1]}',
        b'{"op": "shards", "key": "00", "shards": 0}',
        b'{"op": "uniforms", "key": "", "start": 0, "count": 99999999999}',
        b'{"op": "streams", "message": "no-such", "frame": ""}',
        b'{"op": "gossip", "run": "", "manifest": "", "known": [], "banned": [], "quarantined": [], '
        b'"throttled": [], "steps": []}',
    ],
)
def test_a_broken_question_is_told_and_the_next_one_answered(line: bytes) -> None:
    broken, answer = served(line + b"\n" + CLIENT)
    assert broken["error"] == BAD_QUESTION
    assert broken["note"].endswith(".")
    assert "ok" in answer


def test_a_question_that_is_too_long_is_told_and_the_next_one_answered() -> None:
    broken, answer = served(b"0" * (MAX_LINE + 1) + b"\n" + CLIENT)
    assert broken["error"] == BAD_QUESTION
    assert "ok" in answer


@pytest.mark.parametrize("breakdown", [BAD_QUESTION, adapter.FAILED])
def test_what_an_adapter_fails_at_is_no_refusal(breakdown: str) -> None:
    refused = [case for case in load_cases() if case.refused and "code" not in case.fields]
    assert len(refused) > 50
    for case in refused:
        assert judge(case, {"error": "anything"}) is None
        assert judge(case, {"error": breakdown}) is not None


def test_an_op_that_nobody_knows_is_unsupported() -> None:
    assert answered(b'{"op": "telepathy"}') == {"unsupported": True}


def test_a_release_that_is_not_installed_is_unsupported() -> None:
    question = b'{"op": "gymnasium-config", "game": "Taxi-v4", "config": {}, "releases": {"gymnasium": "0"}}'
    assert answered(question)["unsupported"]


def test_a_refusal_brings_its_figures() -> None:
    answer = answered(b'{"op": "encoding", "bytes": "c0c0c0", "limit": 2}')
    assert (answer["error"], answer["measured"], answer["threshold"]) == ("oversize", 3, 2)


def test_a_bug_is_an_answer_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def buggy(_: adapter.Ask) -> adapter.Answer:
        raise ZeroDivisionError("oh")

    monkeypatch.setattr(adapter, "OPS", {"buggy": buggy})
    assert answered(b'{"op": "buggy"}') == {"error": adapter.FAILED, "note": "ZeroDivisionError: oh"}


class Gone(io.BytesIO):
    """A reader that has left."""

    def write(self, data: Any, /) -> int:
        raise BrokenPipeError


def test_it_ends_when_nobody_reads_the_answers() -> None:
    questions = io.BytesIO((CLIENT + b"\n") * 3)
    serve(questions, Gone())
    assert questions.tell() == len(CLIENT) + 1
