"""An OpenEnv server: a vault is opened by its digits, one after the other.

python vault_server.py [SESSIONS]     prints its port, serves on 127.0.0.1
"""

import random
import socket
import sys

import uvicorn
from openenv.core.env_server import Action, Environment, Observation, State, create_app


class VaultAction(Action):
    move: str


class VaultObservation(Observation):
    text: str = ""
    clicks: int = 0


class VaultEnvironment(Environment):
    """The vault's digits are drawn from the seed of a reset."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State()

    def reset(self, seed=None, episode_id=None, digits: int = 2, **kwargs):
        rng = random.Random(seed)
        self._digits = [rng.randrange(10) for _ in range(digits)]
        self._state = State(episode_id=episode_id, step_count=0)
        return VaultObservation(text=f"The vault has {digits} digits. Say the first.")

    def step(self, action: VaultAction, timeout_s=None, **kwargs):
        self._state.step_count += 1
        if action.move == "jam":
            raise RuntimeError("the dial is stuck")
        if not action.move.isdigit():
            return VaultObservation(text="Digits only.", reward=-0.1)
        if int(action.move) == self._digits[0]:
            self._digits.pop(0)
            return VaultObservation(text="Click.", clicks=1, reward=1.0, done=not self._digits)
        return VaultObservation(
            text="Higher." if int(action.move) < self._digits[0] else "Lower.", reward=0.0
        )

    @property
    def state(self) -> State:
        return self._state


def main(sessions: int = 8) -> None:
    app = create_app(
        VaultEnvironment, VaultAction, VaultObservation, env_name="vault", max_concurrent_envs=sessions
    )
    listening = socket.create_server(("127.0.0.1", 0))
    print(listening.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="error")).run(sockets=[listening])


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
