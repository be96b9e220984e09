"""Text that a base model goes on with: no roles, no template."""

import verifiers as vf
from datasets import Dataset


def vowels(completion) -> float:
    text = str(completion[-1].content)
    return sum(letter in "aeiou" for letter in text) / max(1, len(text))


def load_environment() -> vf.Environment:
    starts = ["Once upon a time", "It was a dark night", "Call me"]
    rows = [{"prompt": [{"role": "text", "content": start}]} for start in starts]
    return vf.SingleTurnEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[vowels]))
