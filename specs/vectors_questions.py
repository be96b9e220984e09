"""Vectors of environments of one question (prompts, where answers stand, held-out seeds) and of games."""

from __future__ import annotations

from typing import Any, cast

from vectors_games import gymnasium_games
from vectors_puzzles import puzzles
from vectors_world import case

from nous_node.envs.expressions import is_formula
from nous_node.envs.gymnasium_text import read_action, turn_advantages
from nous_node.envs.gymnasium_words import GAMES
from nous_node.envs.single_turn import Place, Wording, held_out_seed, read_wording

QUESTION = "What is 3 + 4? {question}"


def questions() -> list[dict[str, Any]]:
    return [*_prompts(), *_answers(), *_formulas(), *_held_out(), *puzzles()]


def _formulas() -> list[dict[str, Any]]:
    texts = [
        "85*52/13 + 13",
        "-4*(-2*x - 8)**(3/2)/3 + C",
        "x*log(x) - x + C",
        "2**x + x**(-1)",
        "(x + 1)**64",
        "x**65",
        "x**9**9**9",
        "(((9**64)**64)**64)**64",
        "1e999999",
        "log(x, y)",
        "Integral(x, x)",
        "x.real",
        "__import__('os')",
        "1\n+ 2",
        "2 x",
        "",
    ]
    return [
        case(repr(text), "RGY-10", "valid formula", said=text, formula=is_formula(text)) for text in texts
    ]


def _prompts() -> list[dict[str, Any]]:
    rows: list[tuple[str, dict[str, Any], bool]] = [
        *(
            (f"{place}, {how}", {"answer": place}, how == "chat")
            for place in ("tags", "last-line", "number", "whole")
            for how in ("chat", "plain")
        ),
        ("a template of the run", {"template": "Q: {question}\nA:"}, False),
        ("the same in a conversation", {"template": "Q: {question}\nA:"}, True),
    ]
    return [
        case(
            comment,
            "RGY-4",
            "valid prompt",
            config=config,
            chat=chat,
            question=QUESTION,
            text=read_wording(config)[0].text(QUESTION, chat),
        )
        for comment, config, chat in rows
    ]


def _answers() -> list[dict[str, Any]]:
    rows = [
        ("between tags", "tags", "3 + 4 is <answer>7</answer>"),
        ("white space around it", "tags", "<answer>\n 7\t</answer>"),
        ("the last pair counts", "tags", "<answer>6</answer> no: <answer>7</answer>."),
        ("the last opening tag before the last closing one", "tags", "an <answer> is <answer>7</answer>"),
        ("an opening tag after the last pair", "tags", "<answer>7</answer> <answer>"),
        ("empty tags are an answer", "tags", "<answer></answer>"),
        ("no closing tag", "tags", "<answer>7"),
        ("closed before it is opened", "tags", "</answer>7<answer>"),
        ("no tags", "tags", "7"),
        ("the last line", "last-line", "3 + 4 is\n 7 \n\n"),
        ("one line", "last-line", "7"),
        ("a line separator of Unicode", "last-line", "three\u2028seven"),
        ("blank lines only", "last-line", " \n\t\n"),
        ("the last number", "number", "6 + 8 = 14.\nthat is all"),
        ("a sign and a fraction", "number", "it is -2.50!"),
        ("a sign that is a minus", "number", "8-3"),
        ("digits of another script", "number", "\u0663"),
        ("everything", "whole", "\n it is 7 "),
        ("nothing", "whole", ""),
    ]
    return [
        case(
            comment,
            "RGY-5",
            "valid answer",
            place=place,
            said=said,
            answer=Wording(answer=cast(Place, place)).find(said),
        )
        for comment, place, said in rows
    ]


def _held_out() -> list[dict[str, Any]]:
    return [
        case(
            f"held-out task {index}",
            "RGY-7",
            "valid held-out",
            id="reasoning-gym/chain_sum",
            index=index,
            seed=held_out_seed("reasoning-gym/chain_sum", index).hex(),
        )
        for index in (0, 1, 255, 256)
    ]


def games() -> list[dict[str, Any]]:
    return [*_actions(), *_advantages(), *gymnasium_games()]


def _actions() -> list[dict[str, Any]]:
    rows: list[tuple[str, str, Place, str]] = [
        ("the name", "FrozenLake-v1", "last-line", "left"),
        ("upper case and a full stop", "FrozenLake-v1", "last-line", "LEFT."),
        ("the order of the cliff", "CliffWalking-v1", "last-line", "left"),
        ("the last line", "FrozenLake-v1", "last-line", "the hole is left, so\nup!\n"),
        ("words around it", "FrozenLake-v1", "last-line", "go left"),
        ("a number", "FrozenLake-v1", "last-line", "0"),
        ("another game's action", "Taxi-v4", "last-line", "hit"),
        ("between tags", "Taxi-v4", "tags", "there: <answer>pickup</answer>"),
        ("no tags", "Taxi-v4", "tags", "pickup"),
        ("all of it", "Blackjack-v1", "whole", " stick "),
        ("more than the action", "Blackjack-v1", "whole", "I\nstick"),
        ("nothing", "Blackjack-v1", "whole", ""),
    ]
    return [
        case(
            comment,
            "GYM-4",
            "valid action",
            game=game,
            place=place,
            said=said,
            action=read_action(Wording(answer=place), GAMES[game], said),
        )
        for comment, game, place, said in rows
    ]


def _advantages() -> list[dict[str, Any]]:
    rows: list[tuple[str, list[list[float]]]] = [
        ("one sample", [[-1.0, -1.0, 20.0]]),
        ("one reaches the goal, one falls early", [[0.0, 0.0, 1.0], [0.0]]),
        ("steps cost", [[-1.0, -100.0], [-1.0, -1.0, -1.0, -1.0], [-1.0]]),
    ]
    return [
        case(comment, "GYM-7", "valid advantages", rewards=rewards, advantages=turn_advantages(rewards))
        for comment, rewards in rows
    ]
