"""The next step that a volunteer's operator is told, by state, refusals, engine and manifest."""

from __future__ import annotations

from importlib import metadata

import msgspec
import pytest

from nous_node.node.guidance import Guidance
from nous_node.node.outbox import SentGroup
from nous_node.node.runfolder import RunFolder
from nous_node.node.wording import moment
from nous_node.protocol.errors import Code
from nous_node.protocol.receipts import Standing, State
from nous_node.protocol.rollouts import Engine

NOW = 1_800_000_000_000
VERSION = metadata.version("nous-node")
CPU = Engine("nous-torch", VERSION, "float32", "cpu")


def refused(code: str, measured: float | None = None, threshold: float | None = None) -> SentGroup:
    return SentGroup(bytes(32), bytes(32), 3, 0, NOW, "refused", code, measured, threshold, 0)


ACCEPTED = SentGroup(bytes(32), bytes(32), 3, 0, NOW, "accepted", "", None, None, 40)
WAITING = msgspec.structs.replace(ACCEPTED, state="waiting", credit=0)


def standing(state: State, accepted: int = 5, until: int = 0) -> Standing:
    return Standing(b"k" * 32, state, accepted, 1, 100, 0, 1, 2, until)


def guidance(
    run: RunFolder,
    *history: SentGroup,
    engine: Engine | None = CPU,
    word: Standing | None = None,
    installed: str = "1",
) -> Guidance:
    return Guidance(run.manifest, engine, word, list(history), lambda entry: installed)


@pytest.mark.parametrize(
    ("state", "text"),
    [
        (standing("probation"), "on probation: 5 of 16 groups"),
        (standing("probation", accepted=80), "on probation, until 16 groups of two versions"),
        (standing("active"), "active"),
        (standing("throttled"), "throttled: an eighth of the run's rate, all groups audited"),
        (standing("quarantine", until=NOW), "quarantine is over"),
        (standing("banned"), "banned"),
        (None, "the trainer has not said yet"),
    ],
)
def test_the_state_in_words(state: Standing | None, text: str, base_run: RunFolder) -> None:
    assert text in guidance(base_run, word=state).state(NOW)


def test_a_quarantine_is_told_with_its_end_and_what_to_mend(base_run: RunFolder) -> None:
    until = NOW + 180_000
    known = guidance(base_run, refused("stale", 6, 4), word=standing("quarantine", until=until))
    assert known.state(NOW) == f"in quarantine until {moment(until)} (in 3 min 00 s)"
    step = known.next_step(NOW)
    assert step.startswith(f"Wait until {moment(until)} (for 3 min 00 s): ")
    assert "Meanwhile: groups are 6 versions old when they arrive, 4 are allowed" in step
    assert known.next_step(until).startswith("Groups are 6 versions old")


def test_a_banned_key_is_told_so(base_run: RunFolder) -> None:
    step = guidance(base_run, refused("drift"), word=standing("banned")).next_step(NOW)
    assert "can take no part in the run any more" in step


ENGINE_STEPS = {
    "Your dtype is bfloat16 but the run is calibrated for float32: start again with --device cpu": Engine(
        "other", "9", "bfloat16", "cuda:0"
    ),
    "Groups made on cuda:0 are not what the run computes (measured 0.0003, limit 0.0001): start again "
    "with --device cpu": Engine("nous-torch", VERSION, "float32", "cuda:0"),
    f"The groups were made by nous-node 0.0.1; start again with {VERSION}": Engine(
        "nous-torch", "0.0.1", "float32", "cpu"
    ),
    "The engine here computes slightly other numbers (measured 0.0003, limit 0.0001): run `nous-node "
    "doctor`": CPU,
}


@pytest.mark.parametrize("text", ENGINE_STEPS)
def test_a_mismatch_is_explained_by_what_is_known_of_the_engine(text: str, base_run: RunFolder) -> None:
    known = guidance(base_run, refused("logprob-mismatch", 3e-4, 1e-4), engine=ENGINE_STEPS[text])
    assert known.next_step(NOW).startswith(text)


def test_numbers_that_are_far_off_point_to_other_weights(base_run: RunFolder) -> None:
    step = guidance(base_run, refused("sampling-mismatch", 0.2, 1e-5)).next_step(NOW)
    assert "remove the folder `checkpoints`" in step


def test_another_environment_version_is_named(base_run: RunFolder) -> None:
    refusal = refused("prompt-mismatch", 4.0)
    entry = base_run.manifest.environments[0]
    step = guidance(base_run, refusal, installed="0.9").next_step(NOW)
    assert step.startswith(f"sort-digits 0.9 is installed here and the run uses {entry.version}")
    same = guidance(base_run, refusal, installed=entry.version).next_step(NOW)
    assert same == "Install exactly the environment version that the run names."
    assert guidance(base_run, refusal, installed="").next_step(NOW) == same


@pytest.mark.parametrize(
    ("refusal", "text"),
    [
        (refused("future-dated", 45_000, 30_000), "45 s before their own time: set this machine's clock"),
        (refused("withheld", 7, 3), "Of the tasks of this key 7 never arrived"),
        (refused("rate"), "Slow down: the run takes 400 groups a second"),
        (refused("copied", 60, 40), "Run one node a key"),
        (refused("code-of-next-year"), "Update nous-node"),
    ],
)
def test_each_refusal_asks_for_something(refusal: SentGroup, text: str, base_run: RunFolder) -> None:
    assert text in guidance(base_run, refusal).next_step(NOW)


def test_every_code_gives_a_sentence(base_run: RunFolder) -> None:
    for code in Code:
        for figures in ((None, None), (5.0, 4.0)):
            step = guidance(base_run, refused(code, *figures)).next_step(NOW)
            assert step[0].isupper()
            assert step.endswith(".")


def test_a_fault_says_more_than_what_happens_to_honest_nodes(base_run: RunFolder) -> None:
    history = [refused("stale", 5, 4)] * 60 + [refused("reward-mismatch", 0.5, 1e-6)] + [ACCEPTED] * 10
    assert "environment version" in guidance(base_run, *history).next_step(NOW)


def test_a_few_stale_groups_and_old_faults_ask_for_nothing(base_run: RunFolder) -> None:
    history = [*[refused("stale", 5, 4)] * 20, *[ACCEPTED] * 80, refused("drift", 21, 20)]
    assert guidance(base_run, *history).next_step(NOW) == "Nothing: 80 of the last 100 groups were accepted."


def test_a_node_without_a_receipt_is_told_to_wait(base_run: RunFolder) -> None:
    assert guidance(base_run, WAITING).next_step(NOW).startswith("Nothing yet")
    assert guidance(base_run, engine=None).next_step(NOW).startswith("Let the node run")
