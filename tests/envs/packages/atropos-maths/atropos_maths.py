"""Environments as authors of Atropos write them: nothing in here knows of this project."""

import asyncio
import random
from typing import TypedDict

from atroposlib.envs.base import APIServerConfig, BaseEnv, BaseEnvConfig, ScoredDataGroup, ScoredDataItem
from atroposlib.type_definitions import Item
from atroposlib.utils.tokenize_for_trainer import tokenize_for_trainer

SYSTEM = "You add numbers. Answer with the number alone."


class Row(TypedDict):
    question: str
    answer: int


class SumsConfig(BaseEnvConfig):
    largest: int = 50


class Sums(BaseEnv):
    """One turn: text in, text out, tokens from the trainer's tokenizer."""

    name = "sums"
    env_config_cls = SumsConfig

    def __init__(self, config, server_configs, slurm=True, testing=False):
        super().__init__(config, server_configs, slurm, testing)
        self.percent_correct_buffer = []

    @classmethod
    def config_init(cls) -> tuple[SumsConfig, list[APIServerConfig]]:
        config = SumsConfig(
            tokenizer_name="Qwen/Qwen3-8B",
            group_size=8,
            use_wandb=True,
            max_token_length=512,
            wandb_name="sums",
        )
        return config, [APIServerConfig(model_name="Qwen/Qwen3-8B", base_url="http://localhost:9001/v1")]

    async def setup(self):
        self.train: list[Row] = []
        for _ in range(200):
            first, second = random.randint(1, self.config.largest), random.randint(1, self.config.largest)
            self.train.append({"question": f"{first} + {second} = ?", "answer": first + second})
        random.shuffle(self.train)
        self.iter = 0

    async def get_next_item(self) -> Row:
        row = self.train[self.iter % len(self.train)]
        self.iter += 1
        return row

    async def evaluate(self, *args, **kwargs):
        pass

    async def collect_trajectories(self, item: Row) -> tuple[ScoredDataGroup | None, list[Item]]:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item["question"]}]
        prompt = self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        completions = await self.server.completion(
            prompt=prompt, n=self.config.group_size, max_tokens=self.config.max_token_length, temperature=0.9
        )
        scored = ScoredDataGroup(tokens=[], masks=[], scores=[])
        for choice in completions.choices:
            chat = [*messages, {"role": "assistant", "content": choice.text}]
            out = tokenize_for_trainer(self.tokenizer, chat, finish_reason=choice.finish_reason)
            scored["tokens"].append(out["tokens"])
            scored["masks"].append(out["masks"])
            scored["scores"].append(self.score(item, choice.text, choice.finish_reason))
        self.percent_correct_buffer += [max(score, 0) for score in scored["scores"]]
        if all(score == scored["scores"][0] for score in scored["scores"]):
            return None, []
        return scored, []

    def score(self, item: Row, text: str, finish: str) -> float:
        if finish == "length":
            return -1.0
        digits = [int(one) for one in text if one.isdigit()]
        return float(sum(digits) % 10 == item["answer"] % 10)


class Chats(Sums):
    """One turn a sample through chat_completion; some samples by chance untrained."""

    async def collect_trajectory(self, item: Row) -> tuple[ScoredDataItem | None, list[Item]]:
        messages = [{"role": "user", "content": item["question"]}]
        completion = await self.server.chat_completion(messages=messages, n=1, max_tokens=6)
        content = completion.choices[0].message.content
        out = tokenize_for_trainer(self.tokenizer, [*messages, {"role": "assistant", "content": content}])
        item = ScoredDataItem(tokens=out["tokens"], masks=out["masks"], scores=float(len(content)))
        item["overrides"] = {"set_advantage_to_zero": random.random() < 0.5}
        return item, []

    collect_trajectories = BaseEnv.collect_trajectories


class Guesses(Sums):
    """Many turns, tracked by the managed server: higher or lower."""

    async def get_next_item(self) -> Row:
        return {"question": "Guess my digit.", "answer": random.randrange(10)}

    async def collect_trajectories(self, item: Row) -> tuple[ScoredDataGroup | None, list[Item]]:
        scored = ScoredDataGroup(tokens=[], masks=[], scores=[], inference_logprobs=[], advantages=[])
        for _ in range(self.config.group_size):
            await self.play(item, scored)
        return scored, [item]

    async def play(self, item: Row, scored: dict) -> None:
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": item["question"]}]
        reward = 0.0
        async with self.server.managed_server(tokenizer=self.tokenizer) as managed:
            for turn in range(3):
                completion = await managed.chat_completion(
                    messages=messages, n=1, max_tokens=8, temperature=1.0
                )
                text = completion.choices[0].message.content
                messages.append({"role": "assistant", "content": text})
                guess = int(text[0]) if text[:1].isdigit() else -1
                if guess == item["answer"]:
                    reward = 1.0 - 0.1 * turn
                    break
                messages.append({"role": "user", "content": "lower" if guess > item["answer"] else "higher"})
            (node,) = managed.get_state()["nodes"]
        scored["tokens"].append(node.tokens)
        scored["masks"].append(node.masked_tokens)
        scored["inference_logprobs"].append(node.logprobs)
        scored["scores"].append(reward)
        scored["advantages"].append([0.0 if label == -100 else reward - 0.5 for label in node.masked_tokens])


class Invents(Sums):
    """Trains an answer that it wrote itself."""

    async def collect_trajectories(self, item: Row) -> tuple[ScoredDataGroup | None, list[Item]]:
        completion = await self.server.completion(prompt=item["question"], n=1, max_tokens=4)
        tokens = self.tokenizer.encode(item["question"] + f" {item['answer']}!")
        assert completion.choices
        return ScoredDataGroup(tokens=[tokens], masks=[tokens], scores=[1.0]), []


class Hurries(Sums):
    """Does not wait for its answers."""

    async def collect_trajectories(self, item: Row) -> tuple[ScoredDataGroup | None, list[Item]]:
        asked = asyncio.ensure_future(self.server.completion(prompt="1 + 1 =", n=1, max_tokens=4))
        for _ in range(5):
            await asyncio.sleep(0)
        asked.cancel()
        await self.server.completion(prompt=item["question"], n=1, max_tokens=4)
        return None, []
