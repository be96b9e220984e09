"""How the vectors of textarena's games are driven: none needs the library."""

from __future__ import annotations

from typing import Any

import pytest

from nous_node.envs.errors import BadConfig
from nous_node.envs.textarena import read_rules
from nous_node.envs.textarena_words import Told, components, heard, meant, plain, reward

Case = dict[str, Any]


def drive_textarena(case: Case) -> None:
    if "told" in case:
        assert heard(case["player"], [Told(*message) for message in case["told"]]) == case["text"]
    elif "heard" in case:
        assert plain(case["player"], case["heard"], case["first"]) == case["text"]
    elif "move" in case:
        assert meant(case["said"], case["ended"]) == case["move"]
    elif "given" in case:
        earned = reward(case["given"])
        assert earned == case["reward"]
        assert components(earned, case["invalid"], case["turns"], case["unfinished"]) == case["components"]
    else:
        _drive_settings(case["game"], case["config"], case["settings"])


def _drive_settings(game: str, config: dict[str, Any], settings: dict[str, Any] | None) -> None:
    if settings is None:
        with pytest.raises(BadConfig):
            read_rules(game, config)
        return
    rules = read_rules(game, config)
    assert (rules.players, rules.max_turns) == (settings["players"], settings["max_turns"])
    assert rules.turn_tokens == settings.get("turn_tokens")
    assert rules.options == settings["game"]
