"""Additions with an answer in XML tags."""

import random

import verifiers as vf
from datasets import Dataset

SYSTEM = "Add the numbers. Think in <think> tags, then write the sum in <answer> tags."


def load_environment(num_examples: int = 64, digits: int = 2, seed: int = 0) -> vf.Environment:
    rng = random.Random(seed)
    rows = []
    for _ in range(num_examples):
        left, right = rng.randrange(10**digits), rng.randrange(10**digits)
        rows.append(
            {"question": f"{left} + {right} = ?", "answer": str(left + right), "info": {"left": left}}
        )

    parser = vf.XMLParser(["think", "answer"], answer_field="answer")

    def correct(parser, completion, answer) -> float:
        return 1.0 if parser.parse_answer(completion) == answer else 0.0

    async def digits_right(parser, completion, answer, info) -> float:
        said = parser.parse_answer(completion) or ""
        assert "left" in info
        return sum(a == b for a, b in zip(said, answer, strict=False)) / len(answer)

    def spread(completions, states) -> list[float]:
        """Compares the samples of one question with each other."""
        lengths = [sum(len(str(m.content)) for m in completion) for completion in completions]
        longest = max(lengths) or 1
        return [1.0 - length / longest for length in lengths]

    rubric = vf.Rubric(
        funcs=[correct, digits_right, parser.get_format_reward_func(), spread],
        weights=[1.0, 0.25, 0.2, 0.05],
        parser=parser,
    )
    return vf.SingleTurnEnv(
        dataset=Dataset.from_list(rows), system_prompt=SYSTEM, parser=parser, rubric=rubric
    )
