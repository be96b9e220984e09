"""A reader with a short memory: each turn sees only the task and its own last note."""

import verifiers as vf
from datasets import Dataset


class NotesEnv(vf.MultiTurnEnv):
    async def get_prompt_messages(self, state: vf.State) -> vf.Messages:
        if not state["trajectory"]:
            return state["prompt"]
        note = str(state["trajectory"][-1]["completion"][-1].content)[-40:]
        page = state["info"]["pages"][len(state["trajectory"])]
        return [*state["prompt"], vf.UserMessage(content=f"Your note: {note}\nNext page: {page}")]

    async def env_response(self, messages, state, **kwargs):
        raise NotImplementedError

    @vf.stop
    async def read_all(self, state: vf.State) -> bool:
        return len(state["trajectory"]) >= len(state["info"]["pages"])


def last_word(completion, answer) -> float:
    return float(str(completion[-1].content).strip().endswith(answer))


def load_environment() -> vf.Environment:
    rows = [{"question": "Read and remember.", "answer": "z", "info": {"pages": ["x", "y", "z"]}}]
    return NotesEnv(dataset=Dataset.from_list(rows), rubric=vf.Rubric(funcs=[last_word]))
