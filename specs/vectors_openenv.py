"""Vectors of OpenEnv servers: answers as actions, observations as text."""

from __future__ import annotations

from typing import Any

from vectors_world import case

from nous_node.envs.openenv_words import action_field, action_of, words

MESSAGE = {
    "properties": {"metadata": {"type": "object"}, "message": {"type": "string"}},
    "required": ["message"],
}
MOVE = {
    "properties": {
        "column": {"type": "integer"},
        "comment": {"anyOf": [{"type": "string"}, {"type": "null"}]},
        "metadata": {"type": "object"},
    },
    "required": ["column"],
}
PAIR = {
    "properties": {"row": {"type": "integer"}, "column": {"type": "integer"}},
    "required": ["row", "column"],
}
ODD = {"properties": {"value": {"enum": ["a", "b"]}}}
MANY = {"properties": {"value": {"type": ["string", "integer"]}}}


def openenv() -> list[dict[str, Any]]:
    return [*_fields(), *_actions(), *_words(), *_configs()]


def _fields() -> list[dict[str, Any]]:
    rows = [
        ("the only field", MESSAGE, ""),
        ("the only required field", MOVE, ""),
        ("a field that is named", MOVE, "comment"),
        ("two required fields: the whole action", PAIR, ""),
        ("no schema", {}, ""),
        ("a name without a schema", {}, "message"),
    ]
    return [
        case(
            comment,
            "OPE-3",
            "valid field",
            schema=schema,
            named=named,
            field=action_field(schema, named).name,
            text=action_field(schema, named).takes_text,
        )
        for comment, schema, named in rows
    ]


def _actions() -> list[dict[str, Any]]:
    rows = [
        ("text", MESSAGE, "", "hello"),
        ("text that looks like a number", MESSAGE, "", "42"),
        ("a number", MOVE, "", "3"),
        ("no number", MOVE, "", "left"),
        ("text that may be missing", MOVE, "comment", "3"),
        ("a whole action", PAIR, "", '{"row": 1, "column": 2}'),
        ("a whole action that is no object", PAIR, "", "[1, 2]"),
        ("a whole action that is no JSON", PAIR, "", "row 1"),
        ("a field without a type", ODD, "", "a"),
        ("a field of several types", MANY, "", "7"),
    ]
    return [
        case(
            comment,
            "OPE-3",
            "valid action",
            schema=schema,
            named=named,
            answer=answer,
            action=action_of(answer, action_field(schema, named)),
        )
        for comment, schema, named, answer in rows
    ]


def _words() -> list[dict[str, Any]]:
    rows: list[tuple[str, dict[str, Any], list[str]]] = [
        ("the only field, text", {"echoed": "höh", "metadata": {}}, []),
        ("the only field, no text", {"board": [[0, 1], [1, 0]], "metadata": {}}, []),
        ("all fields", {"text": "Ärger", "left": 2, "metadata": {"x": 1}}, []),
        ("no field", {"metadata": {}}, []),
        ("one field that is named", {"text": "Higher.", "left": 2}, ["text"]),
        ("two fields in the config's order", {"text": "Higher.", "left": 2}, ["left", "text"]),
        ("metadata where it is named", {"text": "x", "metadata": {"hint": "y"}}, ["metadata"]),
    ]
    return [
        case(
            comment,
            "OPE-4",
            "valid words",
            observation=observation,
            shown=shown,
            text=words(observation, shown),
        )
        for comment, observation, shown in rows
    ]


def _configs() -> list[dict[str, Any]]:
    valid: list[tuple[str, dict[str, Any]]] = [
        ("nothing", {}),
        ("everything", {
            "format": "chat", "system": "Be brief.", "template": "You see: {observation}", "action": "move",
            "answer": "tags", "observation": ["text", "left"], "reward": "last", "max_turns": 256,
            "reset.level": 3,
        }),
    ]  # fmt: skip
    invalid: list[tuple[str, dict[str, Any]]] = [
        ("an unknown key", {"rewards": "sum"}),
        ("a template without an observation", {"template": "Go on."}),
        ("a template with two", {"template": "{observation}{observation}"}),
        ("another reward", {"reward": "mean"}),
        ("no turns", {"max_turns": 0}),
        ("too many turns", {"max_turns": 257}),
        ("a field that is no name", {"observation": [1]}),
        ("a seed", {"reset.seed": 1}),
    ]
    return [
        *(case(comment, "OPE-1", "valid config", config=config) for comment, config in valid),
        *(
            case(comment, "OPE-1", "invalid config", config=config, refused=True)
            for comment, config in invalid
        ),
    ]
