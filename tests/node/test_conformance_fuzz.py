"""Mutations: always the same ones, our reader's own errors only, and readers that differ are found."""

from __future__ import annotations

import shlex
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random

import msgspec
import pytest

from nous_node.node import adapter
from nous_node.node.cli_exit import Exit
from nous_node.node.conformance import Choice, answers, run_adapter
from nous_node.node.conformance_cases import Json, load_cases
from nous_node.node.conformance_compare import Kind, kind_of
from nous_node.node.conformance_fuzz import Mutations, disagreement, encoded, fuzz_rows, inputs_of, supported
from nous_node.node.conformance_json import is_json, mutated_json
from nous_node.node.conformance_layers import INPUTS, frame, unframed
from nous_node.node.conformance_mutations import COUNTS, mutated
from nous_node.node.conformance_process import Fault
from nous_node.node.conformance_table import Outcome
from nous_node.node.conformance_trees import Branch, parsed, written
from nous_node.protocol.encoding import encode
from nous_node.protocol.errors import LocalError

CASES = load_cases()
INPUTS_OF_ALL = inputs_of(CASES)
SCRIPT = Path(__file__).parent / "broken_adapter.py"


def test_each_op_that_takes_bytes_is_mutated_as_deep_as_it_goes() -> None:
    reached = {(one.case.op.name, one.path[0], one.chain) for one in INPUTS_OF_ALL}
    names = {case.op.name for case in CASES if not case.refused}
    for op, paths in INPUTS.items():
        for path, chains in paths.items():
            for chain in chains if op in names else ():
                assert (op, path.partition(".")[0], chain) in reached, (op, path, chain)


def test_inputs_that_are_closed_again_unchanged_are_taken() -> None:
    """So what refuses a mutation is the mutation."""
    closed = set()
    for one in INPUTS_OF_ALL:
        if (one.case.op.name, one.chain) in closed or not one.chain:
            continue
        closed.add((one.case.op.name, one.chain))
        question = one.question(Random(0), [], lambda data, *_: data)
        (answer,) = answers([encoded(question)])
        assert kind_of(answer) is Kind.OK, (one.name, answer)


def test_reader_answers_every_mutation_with_a_code() -> None:
    mutations = Mutations(INPUTS_OF_ALL, 1)
    kinds: Counter[Kind] = Counter()
    for number in range(1_200):
        chosen, question = mutations.make(number)
        (answer,) = answers([encoded(question)])
        assert disagreement(chosen.case, answer, answer) is None, (number, answer)
        kinds[kind_of(answer)] += 1
    assert kinds[Kind.OK] > 120  # they get past the outside
    assert kinds[Kind.ERROR] > 120


def test_mutations_reach_limits_and_stay_small() -> None:
    """Counts at limits, numbers and headers in longer forms, and never much more than there was."""
    data = encode({"a": [{"b": 1, "c": "d"}] * 3, "e": b"f", "g": "h" * 40, "i": 70_000, "j": [1]})
    counts, heads = set(), set()
    for seed in range(2_500):
        made = mutated(data, Random(seed), [data])
        assert len(made) < 1 << 19
        tree = parsed(made)
        if tree is not None and tree.items:
            counts |= {len(node.items) // node.step for node in tree.items if isinstance(node, Branch)}
        heads |= {
            head for head in (b"\xcf\0\0\0\0\0\1\x11\x70", b"\xd9\x28", b"\xc5\0\1", b"\xdc") if head in made
        }
    assert len(counts & set(COUNTS)) > 14
    assert max(counts) > 16_000
    assert len(heads) == 4


def test_same_seed_and_number_give_the_same_mutation() -> None:
    one, other = Mutations(INPUTS_OF_ALL, 7), Mutations(inputs_of(CASES), 7)
    for number in range(0, 300, 3):
        assert encoded(one.make(number)[1]) == encoded(other.make(number)[1])
    assert one.make(0)[1] != Mutations(INPUTS_OF_ALL, 8).make(0)[1]


def test_question_of_a_vector_is_not_changed_by_its_mutations() -> None:
    before = [encoded(case.question()) for case in CASES]
    mutations = Mutations(INPUTS_OF_ALL, 3)
    for number in range(300):
        mutations.make(number)
    assert [encoded(case.question()) for case in CASES] == before


def lenient(questions: Sequence[bytes]) -> list[Json | Fault]:
    """Takes a message with bytes behind it."""
    told = answers(questions)
    for index, line in enumerate(questions):
        question = msgspec.json.decode(line)
        if question["op"] == "encoding" and told[index].get("note", "").endswith("behind the message."):
            told[index] = {"ok": {"value": None, "bytes": question["bytes"]}}
    return told


def dropping(questions: Sequence[bytes]) -> list[Json | Fault]:
    """Forgets what a hello says."""
    told = answers(questions)
    return [{"ok": {"body": "80"}} if "body" in one.get("ok", {}) else one for one in told]


def raising(questions: Sequence[bytes]) -> list[Json | Fault]:
    return [{"error": adapter.FAILED, "note": "ZeroDivisionError"} for _ in questions]


def hanging(questions: Sequence[bytes]) -> list[Json | Fault]:
    return [Fault("gave no answer within 10 s") for _ in questions]


@pytest.mark.parametrize(
    ("op", "theirs", "note"),
    [
        ("encoding", lenient, "this node refused it with"),
        (
            "hellos",
            dropping,
            "both took it, the results differ (expected: what this node says): body: expected",
        ),
        ("hellos", raising, "answered with an error that is no code"),
        ("hellos", hanging, "the client gave no answer within 10 s"),
    ],
)
def test_client_that_answers_otherwise_is_found(
    op: str, theirs: Callable[[Sequence[bytes]], list[Json | Fault]], note: str
) -> None:
    mutations = Mutations([one for one in INPUTS_OF_ALL if one.case.op.name == op], 1)
    steps: list[int] = []
    rows = list(fuzz_rows(mutations, range(400), answers, theirs, steps.append))
    failed = [row for row in rows if row.outcome is Outcome.FAIL]
    assert note in failed[0].note
    assert "--seed 1 --fuzz-case " in failed[0].note
    assert rows[-1].check == f"mutations of {op}"
    assert rows[-1].outcome is Outcome.FAIL
    assert sum(steps) == 400
    assert len(failed) <= 101


def test_ops_that_a_client_lacks_are_left_out() -> None:
    def other(questions: Sequence[bytes]) -> list[Json | Fault]:
        lacking = b'"op":"gossip"'
        return [{"unsupported": True} if lacking in line else {"error": "stale"} for line in questions]

    left = {one.case.op.name for one in supported(INPUTS_OF_ALL, (answers, other))}
    assert left == {one.case.op.name for one in INPUTS_OF_ALL} - {"gossip"}


def test_mutations_of_a_seed_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    """`duplicates` takes a key twice; the case is found, and found again by its number."""
    broken = [sys.executable, "-P", str(SCRIPT), "duplicates"]
    assert run_adapter(Choice(broken, only="streams", fuzz=400, seconds=60.0), None, None) == Exit.FAILED
    told = capsys.readouterr().out
    assert 'this node refused it with "not-canonical", the client took it' in told
    number = int(told.partition("--fuzz-case ")[2].partition(";")[0])
    again = Choice(broken, only="streams", fuzz_case=number, seconds=60.0)
    assert run_adapter(again, None, None) == Exit.FAILED
    assert f"fail: mutation {number} of streams" in capsys.readouterr().out


def test_two_clients_are_named_where_they_differ(capsys: pytest.CaptureFixture[str]) -> None:
    broken, own = ([sys.executable, "-P", str(SCRIPT), fault] for fault in ("duplicates", "code"))
    choice = Choice(broken, only="streams", fuzz=150, seconds=60.0, against=shlex.join(own))
    assert run_adapter(choice, None, None) == Exit.FAILED
    told = capsys.readouterr().out
    assert 'the other adapter refused it with "not-canonical", the client took it' in told
    assert "this node" not in told


def test_two_clients_are_compared_without_this_node(capsys: pytest.CaptureFixture[str]) -> None:
    deaf = [sys.executable, "-I", "-S", str(SCRIPT.with_name("hostile_adapter.py")), "stay"]
    with pytest.raises(LocalError, match="nothing to mutate"):
        run_adapter(Choice(deaf, only="hellos", fuzz=1, against=shlex.join(deaf)), None, None)
    assert run_adapter(Choice(deaf, only="hellos", fuzz=1, against="/no/such"), None, None) == Exit.FAILED
    assert "cannot be started" in capsys.readouterr().out


def test_trees_are_written_as_they_were_read() -> None:
    value = {"a": [1, -1, 300, 2**40, 0.5, None, True, "é" * 300, b"x" * 70_000], "b": {}, "c": [[]] * 20}
    data = encode(value)
    tree = parsed(data)
    assert tree is not None
    assert written(tree) == data
    for cut in range(1, 100):
        assert parsed(data[:-cut]) is None


def test_frames_of_raw_blocks_unfold() -> None:
    for size in (0, 1, 131_072, 131_073, 400_000):
        assert unframed(frame(b"x" * size)) == b"x" * size


@pytest.mark.parametrize("data", [b"", b"\0", b"\x80", b"{}", b'{"a": [1, 2.5, "x"]}', bytes(range(256))])
def test_any_bytes_can_be_mutated(data: bytes) -> None:
    entropy = Random(1)
    made = {mutated(data, entropy, [b"other", b""]) for _ in range(300)}
    assert len(made) > 20
    assert is_json(data) == data.startswith(b"{")
    assert len({mutated_json(b'{"a": 1}', entropy, 2) for _ in range(300)}) > 50
