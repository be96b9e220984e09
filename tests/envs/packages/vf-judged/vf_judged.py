"""Scored by a model, or by a server: neither can be computed again."""

import urllib.request

import openai
import verifiers as vf
from datasets import Dataset


async def asks_a_judge(judge, prompt, completion, answer, state) -> float:
    return float("yes" in await judge(prompt, completion, answer, state))


def asks_a_server(completion) -> float:
    with urllib.request.urlopen("http://127.0.0.1:9/score") as answer:
        return float(answer.read())


def load_environment(judge: bool = True, key: str = "") -> vf.Environment:
    rows = Dataset.from_list([{"question": "Say something nice.", "answer": "nice"}])
    if not judge:
        return vf.SingleTurnEnv(dataset=rows, rubric=vf.Rubric(funcs=[asks_a_server]))
    client = openai.AsyncOpenAI(api_key=key) if key else None
    rubric = vf.JudgeRubric(judge_client=client)
    rubric.add_reward_func(asks_a_judge)
    return vf.SingleTurnEnv(dataset=rows, rubric=rubric)
