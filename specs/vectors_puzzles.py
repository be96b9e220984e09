"""Vectors of reasoning-gym's datasets: what the library makes and pays in the release that these name.

The adapter plays, as a client of another author would with its own: what is compared are its prompts and
rewards. Datasets whose tasks hang on the order of a set have no vectors: a process has to fix its hash seed.
"""

from __future__ import annotations

import hashlib
from importlib.metadata import version
from typing import Any

from vectors_world import case

from nous_node.envs.errors import BadConfig, UnknownEnvironment
from nous_node.envs.reasoning_gym import Puzzle, Puzzles, ReasoningGym
from nous_node.envs.reasoning_gym_facts import DATASETS, REFUSED

LIBRARY = "reasoning-gym"
RELEASES = {LIBRARY: "0.1.25"}
SEEDS = [hashlib.sha256(b"puzzle " + bytes([number])).digest() for number in range(3)]


def puzzles() -> list[dict[str, Any]]:
    assert version(LIBRARY) == RELEASES[LIBRARY], f"install {LIBRARY} {RELEASES[LIBRARY]} to make its vectors"
    return [*_tasks(), *_levels(), *_rewards(), *_settings(), *_datasets()]


def _case(
    comment: str,
    rules: str,
    dataset: str,
    config: dict[str, Any],
    seed: bytes,
    level: int,
    replies: list[str],
) -> dict[str, Any]:
    """`{answer}` in a reply stands for the right answer; `...` behind it for a reply that was cut off."""
    environment = ReasoningGym.make(dataset, config)
    assert isinstance(environment, Puzzles)
    task = environment.task(seed, level)
    assert isinstance(task.payload, Puzzle)
    right = str(task.payload.entry["answer"])
    said = [
        {"said": one.removesuffix("...").replace("{answer}", right), "ended": not one.endswith("...")}
        for one in replies
    ]
    scores = [environment.score(task, str(one["said"]), bool(one["ended"])) for one in said]
    return case(
        comment,
        rules,
        "valid task",
        releases=RELEASES,
        dataset=dataset,
        config=config,
        seed=seed.hex(),
        level=level,
        replies=said,
        prompt=environment.prompt(task),
        scores=[{"reward": one.reward, "components": one.components} for one in scores],
    )


RIGHT = "<answer>{answer}</answer>"


def _tasks() -> list[dict[str, Any]]:
    datasets = [
        "chain_sum",
        "leg_counting",
        "number_sorting",
        "letter_counting",
        "calendar_arithmetic",
        "caesar_cipher",
        "spell_backward",
        "simple_equations",
        "figlet_font",
    ]
    made = [
        _case(f"a task of {dataset}", "RGY-1", dataset, {}, SEEDS[number % 3], 0, [RIGHT])
        for number, dataset in enumerate(datasets)
    ]
    again = _case(
        "the first task once more, after others", "RGY-1 EVM-5", "chain_sum", {}, SEEDS[0], 0, [RIGHT]
    )
    other = _case("another seed", "RGY-1", "chain_sum", {}, SEEDS[1], 0, [RIGHT])
    fewer = {"min_terms": 2, "max_terms": 2}
    return [
        *made,
        again,
        other,
        _case("the dataset's own settings", "RGY-1 RGY-2", "chain_sum", fewer, SEEDS[0], 0, [RIGHT]),
    ]


def _levels() -> list[dict[str, Any]]:
    hard = {"curriculum": True}
    rows: list[tuple[str, dict[str, Any], int]] = [
        ("without a curriculum there is one level", {}, 3),
        ("the lowest level of a curriculum", hard, 0),
        ("a higher level", hard, 2),
        ("a level above the highest counts as the highest", hard, 1000),
        ("a setting of the config stays at all levels", {**hard, "max_terms": 2, "min_terms": 2}, 2),
    ]
    return [
        _case(comment, "RGY-3", "chain_sum", config, SEEDS[2], level, [RIGHT])
        for comment, config, level in rows
    ]


def _rewards() -> list[dict[str, Any]]:
    whole = {"answer": "whole"}
    rows: list[tuple[str, str, dict[str, Any], list[str]]] = [
        ("right, wrong, nowhere, cut off", "chain_sum", {}, [RIGHT, "<answer>x</answer>", "{answer}", RIGHT + "..."]),
        ("an answer that is too long", "chain_sum", whole, ["{answer}" + "0" * 16_400, "1" * 16_384]),
        ("an answer at which the grader raises", "prime_factorization", whole, ["{answer}", "x", "()"]),
        ("an answer that comes near", "prime_factorization", whole, ["{answer}", "4"]),
        ("the same where right answers alone are paid", "prime_factorization", {**whole, "reward": "correct"}, ["{answer}", "4"]),
        ("formulas, and an answer that is none", "countdown", whole, ["{answer}", "1 + 1", "__import__('os')", "2**65"]),
        ("a literal is read, an expression is not", "n_queens", whole, ["{answer}", "[[1, 2]]", "exit()"]),
    ]  # fmt: skip
    return [
        _case(
            comment,
            "RGY-6" + (" RGY-10" if "formula" in comment or "literal" in comment else ""),
            dataset,
            config,
            SEEDS[1],
            0,
            replies,
        )
        for comment, dataset, config, replies in rows
    ]


def _settings() -> list[dict[str, Any]]:
    valid: list[tuple[str, str, str, dict[str, Any]]] = [
        ("nothing", "RGY-2", "chain_sum", {}),
        ("dates are text", "RGY-2", "time_intervals", {"min_date": "2000-01-01", "max_date": "2001-01-01"}),
        ("the wording beside the dataset's own", "RGY-2", "chain_sum", {"max_terms": 3, "answer": "number", "format": "chat", "system": "Add."}),
        ("full scores alone", "RGY-2", "chain_sum", {"reward": "correct"}),
        ("levels of a curriculum", "RGY-3", "chain_sum", {"curriculum": True}),
        ("no curriculum", "RGY-3", "chain_sum", {"curriculum": False}),
    ]  # fmt: skip
    refused: list[tuple[str, str, str, dict[str, Any]]] = [
        ("a key that the dataset does not have", "RGY-2", "chain_sum", {"terms": 3}),
        ("a seed", "RGY-2", "chain_sum", {"seed": 1}),
        ("a size", "RGY-2", "chain_sum", {"size": 2}),
        ("a number as text", "RGY-2", "chain_sum", {"max_terms": "3"}),
        ("a date in another order", "RGY-2", "time_intervals", {"min_date": "31.12.2000"}),
        ("what the dataset itself refuses", "RGY-2", "chain_sum", {"min_terms": 5, "max_terms": 2}),
        ("another reward", "RGY-2", "chain_sum", {"reward": "most"}),
        ("a reward that is a truth value", "RGY-2", "chain_sum", {"reward": True}),
        ("a template without its question", "RGY-2", "chain_sum", {"template": "What is it?"}),
        ("a template with two", "RGY-2", "chain_sum", {"template": "{question}{question}"}),
        ("a system message in plain format", "RGY-2", "chain_sum", {"format": "plain", "system": "Add."}),
        ("a fraction for a whole number", "RGY-2", "chain_sum", {"max_terms": 2.5}),
        ("another place for the answer", "RGY-2", "chain_sum", {"answer": "first-line"}),
        ("a curriculum that is a number", "RGY-3", "chain_sum", {"curriculum": 1}),
        ("a curriculum that the dataset does not have", "RGY-3", "list_functions", {"curriculum": True}),
    ]
    return [
        *(
            case(comment, rule, "valid settings", releases=RELEASES, dataset=dataset, config=config, levels=ReasoningGym.make(dataset, config).levels)
            for comment, rule, dataset, config in valid
        ),
        *(_setting_refused(*row) for row in refused),
    ]  # fmt: skip


def _setting_refused(comment: str, rule: str, dataset: str, config: dict[str, Any]) -> dict[str, Any]:
    try:
        ReasoningGym.make(dataset, config)
    except BadConfig:
        return case(
            comment, rule, "invalid settings", releases=RELEASES, dataset=dataset, config=config, refused=True
        )
    raise AssertionError(f"{dataset} takes {config}")


def _datasets() -> list[dict[str, Any]]:
    facts = [(name, ReasoningGym.facts(name)) for name in DATASETS if name not in REFUSED]
    odd = [(name, one) for name, one in facts if (one.reproducible, one.scorer) != ("exact", "pure")]
    usual = [pair for pair in facts if pair[0] in ("chain_sum", "game_of_life", "zebra_puzzles")]
    return [
        *(
            case(f"{name} is offered", "RGY-9", "valid dataset", dataset=name, reproducible=one.reproducible, scorer=one.scorer)
            for name, one in [*odd, *usual]
        ),
        *(_not_offered(name) for name in [*REFUSED, "no_such_dataset"]),
    ]  # fmt: skip


def _not_offered(name: str) -> dict[str, Any]:
    try:
        ReasoningGym.facts(name)
    except UnknownEnvironment:
        return case(f"{name} is not offered", "RGY-8", "invalid dataset", dataset=name, refused=True)
    raise AssertionError(f"{name} is offered")
