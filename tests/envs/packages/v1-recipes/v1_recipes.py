"""A taskset of the v1 interface: recipes are scaled with a tool, and the list is handed in."""

import random
import re
from collections.abc import Iterable

import verifiers.v1 as vf
from pydantic import Field

ITEMS = ("flour", "milk", "eggs")


class RecipeData(vf.TaskData):
    item: str
    amount: int
    people: int


class RecipeState(vf.State):
    looked_up: list[str] = Field(default_factory=list)


class ShelfConfig(vf.ToolsetConfig):
    unit: str = "g"


class Shelf(vf.Toolset[ShelfConfig, RecipeState]):
    async def setup_task(self, task: RecipeData) -> None:
        self.amounts = {task.item: task.amount}

    @vf.tool
    async def amount(self, item: str) -> str:
        """How much of an item one person needs."""
        self.state.looked_up.append(item)
        return f"{self.amounts[item]} {self.config.unit}"


class RecipeTaskConfig(vf.TaskConfig):
    shelf: ShelfConfig = ShelfConfig()
    bonus: float = 0.5


class RecipeTask(vf.Task[RecipeData, RecipeState, RecipeTaskConfig]):
    @classmethod
    def toolsets(cls, config: RecipeTaskConfig) -> list[vf.Toolset]:
        return [Shelf(config.shelf)]

    async def setup(self, trace: vf.Trace, runtime: vf.Runtime) -> None:
        await runtime.write("note.txt", self.data.item.encode())
        trace.info["luck"] = random.random()

    @vf.stop
    async def looked_too_often(self, trace: vf.Trace) -> bool:
        return len(trace.state.looked_up) > 2

    @vf.reward(weight=2.0)
    async def right(self, trace: vf.Trace) -> float:
        found = re.findall(r"\d+", trace.last_reply or "")
        return float(bool(found) and int(found[-1]) == self.data.amount * self.data.people)

    @vf.reward
    async def used_the_shelf(self, trace: vf.Trace) -> float:
        return self.config.bonus if self.data.item in trace.state.looked_up else 0.0

    @vf.metric
    async def note(self, runtime: vf.Runtime) -> float:
        return float((await runtime.read("note.txt")).decode() == self.data.item)

    @vf.metric
    async def luck(self, trace: vf.Trace) -> float:
        return trace.info["luck"]


class RecipesConfig(vf.TasksetConfig):
    task: RecipeTaskConfig = RecipeTaskConfig()
    count: int = 16
    seed: int = 0


class Recipes(vf.Taskset[RecipeTask, RecipesConfig]):
    def load(self) -> Iterable[RecipeTask]:
        rng = random.Random(self.config.seed)
        for _ in range(self.config.count):
            item, amount, people = rng.choice(ITEMS), rng.randrange(1, 9), rng.randrange(2, 9)
            prompt = f"How much {item} do {people} people need? Ask the shelf what one needs."
            data = RecipeData(
                prompt=prompt, system_prompt="You cook.", item=item, amount=amount, people=people
            )
            yield RecipeTask(data, self.config.task)


__all__ = ["Recipes"]
