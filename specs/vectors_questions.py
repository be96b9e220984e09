"""Vectors of environments of one question: prompts, where answers stand, held-out seeds."""

from __future__ import annotations

from typing import Any, cast

from vectors_world import case

from nous_node.envs.single_turn import Place, Wording, held_out_seed, read_wording

QUESTION = "What is 3 + 4? {question}"


def questions() -> list[dict[str, Any]]:
    return [*_prompts(), *_answers(), *_held_out()]


def _prompts() -> list[dict[str, Any]]:
    rows: list[tuple[str, dict[str, Any], bool]] = [
        *(
            (f"{place}, {how}", {"answer": place}, how == "chat")
            for place in ("tags", "last-line", "whole")
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
            index=index,
            seed=held_out_seed("reasoning-gym", index).hex(),
        )
        for index in (0, 1, 255, 256)
    ]
