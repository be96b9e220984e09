"""How the vectors of environments that ship with the node are driven."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, Final

import msgspec
import pytest

from nous_node.envs import (
    atropos_labels,
    expressions,
    gymnasium_text,
    gymnasium_words,
    openenv,
    openenv_words,
    random_streams,
    registry,
    single_turn,
    verifiers_v0,
    verifiers_v0_config,
    verifiers_v1,
)
from nous_node.envs.distributions import normal
from nous_node.envs.environment import Completion, EnvironmentInfo, GenerateRequest, small_seed
from nous_node.envs.errors import BadConfig, EnvironmentFailed
from nous_node.envs.ledger import Ledger
from nous_node.node.evaluation import held_out_seed
from nous_node.protocol.rollouts import Trajectory

Case = dict[str, Any]


def drive_atropos(case: Case) -> None:
    lines = [
        atropos_labels.Line(one["tokens"], [(a, b) for a, b in one["spans"]], one["logprobs"])
        for one in case["lines"]
    ]
    if "worths" not in case:
        with pytest.raises(EnvironmentFailed):
            atropos_labels.worths(case["groups"], lines, written_alike)
        return
    found = atropos_labels.worths(case["groups"], lines, written_alike)
    told = [(one["reward"], one["advantages"], one["advantage"], one["components"]) for one in case["worths"]]
    assert [(one.reward, one.advantages, one.advantage, one.components or {}) for one in found] == told


def written_alike(tokens: Sequence[int]) -> str:
    """Text in which 68 looks like 67."""
    return "".join(chr(67 if token == 68 else token) for token in tokens)


def drive_question(case: Case) -> None:
    if "index" in case:
        assert single_turn.held_out_seed(case["id"], case["index"]).hex() == case["seed"]
    elif "formula" in case:
        assert expressions.is_formula(case["said"]) == case["formula"]
    elif "said" in case:
        assert single_turn.Wording(answer=case["place"]).find(case["said"]) == case["answer"]
    else:
        wording, _ = single_turn.read_wording(case["config"])
        assert wording.text(case["question"], case["chat"]) == case["text"]


def drive_game(case: Case) -> None:
    if "said" in case:
        wording = single_turn.Wording(answer=case["place"])
        words = gymnasium_words.GAMES[case["game"]]
        assert gymnasium_text.read_action(wording, words, case["said"]) == case["action"]
    else:
        assert gymnasium_text.turn_advantages(case["rewards"]) == case["advantages"]


def drive_package(case: Case) -> None:
    if "config" in case:
        v0 = case["requires"] == ["VFR-1"]
        read = verifiers_v0_config.read_choices if v0 else verifiers_v1.read_config
        if "settings" in case:
            assert read(case["config"])[1] == case["settings"]
        else:
            with pytest.raises(BadConfig):
                read(case["config"])
        return
    seed = bytes.fromhex(case["seed"])
    if "row" in case:
        assert verifiers_v0.row_of(seed, case["rows"]) == case["row"]
    else:
        assert random_streams.stream_seed(seed) == case["start"]


def drive_openenv(case: Case) -> None:
    if "config" in case:
        with nullcontext() if "valid" in case["flags"] else pytest.raises(BadConfig):
            openenv.read_settings({**case["config"], "server": "http://127.0.0.1:1"})
        return
    if "observation" in case:
        assert openenv_words.words(case["observation"], case["shown"]) == case["text"]
        return
    field = openenv_words.action_field(case["schema"], case["named"])
    if "answer" in case:
        assert openenv_words.action_of(case["answer"], field) == case["action"]
    else:
        assert (field.name, field.takes_text) == (case["field"], case["text"])


def drive_version(case: Case) -> None:
    info = EnvironmentInfo(case["id"], case["own"], "exact", "pure", False, 1, 1)
    pinned = {normal(name): release for name, release in case["distributions"].items()}
    assert registry.version_of(info, case["config"], pinned) == case["version"]
    if pinned:
        assert registry.material(info, case["config"], pinned) == bytes.fromhex(case["material"])


def drive_facts(case: Case) -> None:
    if "id" in case:
        assert registry.split(case["id"]) == (case["family"], case["member"])
        return
    info = EnvironmentInfo("x", "1", case["reproducible"], case["scorer"], False, 1, 1)
    assert info.verifiable is case["verifiable"]


def drive_seed(case: Case) -> None:
    seed = bytes.fromhex(case["seed"])
    assert small_seed(seed) == case["small"]
    if "id" in case:
        assert held_out_seed(case["id"], case["index"]) == seed


class Told:
    """A policy that answers what a case says."""

    tokenizer: Any = None
    chat = None
    logprob_format: Final = "f32"

    def __init__(self, case: Case) -> None:
        self.group, self.max_tokens, self.context = case["group"], case["max_tokens"], case["context"]
        self.answers = [one["answer"] for one in case["asks"] if "answer" in one]

    async def generate(self, requests: Sequence[GenerateRequest]) -> list[Completion]:
        answers, self.answers = self.answers[: len(requests)], self.answers[len(requests) :]
        return [Completion(**one) for one in answers]


def drive_handout(case: Case) -> None:
    if not case["refused"]:
        asyncio.run(handed_out(case))
        return
    with pytest.raises(EnvironmentFailed):
        asyncio.run(handed_out(case))


async def handed_out(case: Case) -> None:
    ledger = Ledger(Told(case), case["players"])
    for one in case["asks"]:
        request = GenerateRequest(one["tokens"], one["trajectory"], one["start"], one["max_tokens"])
        if "answer" in one:
            await ledger.generate([request])
        else:
            ledger.admit([request])
    if "trajectories" in case:
        packed = bytes.fromhex(case["trajectories"])
        ledger.check(msgspec.msgpack.decode(packed, type=list[Trajectory]))
