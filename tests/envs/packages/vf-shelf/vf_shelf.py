"""A shop's shelf: tools look things up and move them; every conversation has a shelf of its own."""

import verifiers as vf
from datasets import Dataset

STOCK = {"apples": 3, "pears": 5, "plums": 0}


def look_up(item: str) -> str:
    """Says how many there are.

    Args:
        item: Name of a fruit.
    """
    return f"{STOCK[item]} {item}"


def take(item: str, count: int, shelf: dict) -> str:
    """Takes some off the shelf.

    Args:
        item: Name of a fruit.
        count: How many.
        shelf: The shelf.
    """
    shelf[item] = shelf[item] - count
    return f"{shelf[item]} {item} left"


class ShelfEnv(vf.StatefulToolEnv):
    def __init__(self, **kwargs):
        super().__init__(tools=[look_up], **kwargs)
        self.add_tool(take, args_to_skip=["shelf"])

    async def setup_state(self, state):
        state["shelf"] = dict(STOCK)

    def update_tool_args(self, tool_name, tool_args, messages, state, **kwargs):
        return {**tool_args, "shelf": state["shelf"]} if tool_name == "take" else tool_args


def taken(state) -> float:
    return float(sum(STOCK.values()) - sum(state["shelf"].values()))


def load_environment(max_turns: int = 4) -> vf.Environment:
    rows = [
        {"question": "Take two pears off the shelf.", "answer": ""},
        {"question": "Are there plums?", "answer": ""},
    ]
    return ShelfEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[taken]), max_turns=max_turns)
