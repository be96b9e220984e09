"""`pytest` in this folder."""

import pytest
from nous_env_countdown import Countdown

from nous_node.envs.errors import BadConfig


@pytest.mark.parametrize(("answer", "reward"), [("54321", 1.0), ("5432", 0.8), ("12345", 0.2), ("", 0.0)])
def test_right_digits_are_paid(answer, reward):
    environment = Countdown({"least": 5})
    seeds = (bytes([number]) * 32 for number in range(256))
    task = next(task for seed in seeds if (task := environment.task(seed, 0)).payload == 5)
    assert environment.score(task, answer, True).reward == reward
    assert environment.score(task, answer, False).components["correct"] == 0.0


def test_other_settings_are_refused():
    with pytest.raises(BadConfig):
        Countdown({"most": 3})
