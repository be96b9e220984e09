"""How the vectors of environments that ship with the node are driven."""

from __future__ import annotations

from typing import Any

from nous_node.envs import (
    gymnasium_text,
    gymnasium_words,
    openenv_words,
    random_streams,
    single_turn,
    verifiers_v0,
)

Case = dict[str, Any]


def drive_question(case: Case) -> None:
    if "index" in case:
        assert single_turn.held_out_seed(case["id"], case["index"]).hex() == case["seed"]
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
    seed = bytes.fromhex(case["seed"])
    if "row" in case:
        assert verifiers_v0.row_of(seed, case["rows"]) == case["row"]
    else:
        assert random_streams.stream_seed(seed) == case["start"]


def drive_openenv(case: Case) -> None:
    if "observation" in case:
        assert openenv_words.words(case["observation"], case["shown"]) == case["text"]
        return
    field = openenv_words.action_field(case["schema"], case["named"])
    if "answer" in case:
        assert openenv_words.action_of(case["answer"], field) == case["action"]
    else:
        assert (field.name, field.takes_text) == (case["field"], case["text"])
