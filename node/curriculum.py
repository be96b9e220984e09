"""When an environment's tasks get harder: levels go up once the policy does well at the present one."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

WINDOW = 256
"""Groups over which the mean reward is taken; the level rises only on a full window of its own tasks."""


@dataclass(slots=True)
class Curriculum:
    """Levels of a run's environments. They stand in each checkpoint manifest, so that everybody derives
    the same tasks."""

    levels: dict[str, int]
    highest: dict[str, int]
    raise_at: float
    """Mean reward from which the level goes up by one."""
    _recent: dict[str, deque[float]] = field(default_factory=dict)

    def note(self, environment: str, level: int, reward: float) -> None:
        """A verified group's mean reward; groups of an older level do not count."""
        if level == self.levels.get(environment, 0):
            self._recent.setdefault(environment, deque(maxlen=WINDOW)).append(reward)

    def go_back(self, levels: dict[str, int]) -> None:
        """To the levels of an earlier version; rewards of later ones do not count."""
        self.levels = dict(levels)
        self._recent.clear()

    def advance(self) -> dict[str, int]:
        """The levels of the next checkpoint."""
        for environment, rewards in self._recent.items():
            level = self.levels.get(environment, 0)
            good = len(rewards) == WINDOW and sum(rewards) / WINDOW >= self.raise_at
            if good and level < self.highest.get(environment, 0):
                self.levels[environment] = level + 1
                rewards.clear()
        return dict(self.levels)
