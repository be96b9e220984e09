"""Episodes on an OpenEnv server. Imports the library; `openenv` has the rules."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, Final, NamedTuple, cast
from weakref import WeakKeyDictionary

import httpx
from openenv.core.generic_client import GenericEnvClient

from nous_node.protocol.rollouts import Role, Trajectory

from .environment import EnvironmentInfo, Message, Policy, Task, small_seed
from .errors import BrokenEnvironment, EnvironmentFailed
from .openenv import OBSERVATION, Settings
from .openenv_words import Field, action_field, action_of, words
from .session import Session
from .single_turn import Place, Wording

ANSWER_S: Final = 30.0
"""Seconds that a server may take for one answer."""

MAX_MESSAGE_MB: Final = 4
"""Of one answer of a server: a hundred times a long text."""

MAX_SCHEMA: Final = 1 << 20
"""Bytes of a server's description of its actions."""

SEATS: Final = 64
"""Sessions on one server at a time, where it has room for as many."""

TRIES: Final = 12
PAUSE_S: Final = 0.05
"""A full server is asked again after 0.05 s, then after twice as long each time, up to 2 s: some 15 s in all.
It gives the place of a session that ended back a moment after it."""

MAX_TOLD: Final = 400
"""Characters of somebody else's error in a sentence of ours."""

_REFUSED: Final = ("VALIDATION_ERROR", "EXECUTION_ERROR")
"""What a server says of an action that it does not take, or that its environment fails at."""

_FULL: Final = "CAPACITY_REACHED"


class _Outcome(NamedTuple):
    """What became of an episode."""

    reward: float
    components: dict[str, float]


class Seats:
    """Sessions that a server has room for: as many as it took until it said that it is full."""

    def __init__(self, limit: int = SEATS) -> None:
        self.limit = limit
        self.taken = 0
        self._waiting: deque[asyncio.Future[None]] = deque()

    async def take(self) -> None:
        while self.taken >= self.limit:
            turn = asyncio.get_running_loop().create_future()
            self._waiting.append(turn)
            await turn
        self.taken += 1

    def give(self, full: bool = False) -> None:
        """`full`: the server said so."""
        self.taken -= 1
        if full:
            self.limit = max(1, self.taken)
        while self._waiting and self.taken < self.limit:
            turn = self._waiting.popleft()
            if not turn.done():
                turn.set_result(None)
                break


class Served:
    """One server, with settings."""

    levels: int = 0

    def __init__(self, info: EnvironmentInfo, settings: Settings) -> None:
        self.info = info
        self._settings = settings
        self._field = action_field(_action_schema(info.id, settings.server), settings.action)
        self._seats: WeakKeyDictionary[asyncio.AbstractEventLoop, Seats] = WeakKeyDictionary()

    def task(self, seed: bytes, level: int) -> Task:
        """`payload` is the number that the server is reset with. [OPE-1]"""
        return Task(seed, 0, small_seed(seed))

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """Raises EnvironmentFailed."""
        sessions = [Session(policy, number) for number in range(policy.group)]
        episodes = [asyncio.ensure_future(self._episode(session, task, policy)) for session in sessions]
        try:
            outcomes = await asyncio.gather(*episodes)
        finally:
            for episode in episodes:
                episode.cancel()
            await asyncio.gather(*episodes, return_exceptions=True)
        return [session.finish(*outcome) for session, outcome in zip(sessions, outcomes, strict=True)]

    async def _episode(self, session: Session, task: Task, policy: Policy) -> _Outcome:
        async with self._begun(task) as (client, first):
            episode = _Episode(client, session, policy, self._settings, self._field)
            await episode.play(first)
        if not session.sampled:
            raise EnvironmentFailed(
                f"{self.info.id} is over before its first turn, or its first observation leaves no room in a "
                f"context of {policy.context} tokens: choose fields by `observation`."
            )
        return episode.outcome()

    @asynccontextmanager
    async def _begun(self, task: Task) -> AsyncIterator[tuple[GenericEnvClient, Any]]:
        """A session of the server of our own, and its first observation."""
        seats = self._seats.setdefault(asyncio.get_running_loop(), Seats())
        client, first = await self._seated(seats, task)
        try:
            yield client, first
        finally:
            await _closed(client)
            seats.give()

    async def _seated(self, seats: Seats, task: Task) -> tuple[GenericEnvClient, Any]:
        for number in range(TRIES):
            await seats.take()
            client = GenericEnvClient(
                base_url=self._settings.server,
                message_timeout_s=ANSWER_S,
                max_message_size_mb=MAX_MESSAGE_MB,
                mode="simulation",
            )
            try:
                await client.connect()
                return client, await client.reset(seed=task.payload, **self._settings.reset)
            except Exception as error:  # of the network and of the server
                await _closed(client)
                seats.give(full := _FULL in str(error))
                if not full:
                    raise EnvironmentFailed(
                        f"The server of {self.info.id} failed: {_told(error)}."
                    ) from error
            except asyncio.CancelledError:
                await _closed(client)
                seats.give()
                raise
            await asyncio.sleep(min(PAUSE_S * 2**number, 2.0))
        raise EnvironmentFailed(f"The server of {self.info.id} is full: let it take more sessions.")


class _Episode:
    """One episode: what is shown, answered and rewarded."""

    def __init__(
        self, client: GenericEnvClient, session: Session, policy: Policy, settings: Settings, field: Field
    ) -> None:
        self._client, self._session, self._policy = client, session, policy
        self._settings, self._field = settings, field
        self._place = Wording(answer=cast(Place, settings.answer))
        self._plain = settings.format == "plain" or (policy.chat is None and not settings.format)
        self._rewards: list[float] = []
        self._turns = 0
        self._done = self._refused = False

    async def play(self, first: Any) -> None:
        result = first
        self._done = bool(result.done)
        while not self._done and not self._refused and self._turns < self._settings.max_turns:
            self._show(words(result.observation, self._settings.observation))
            said = await self._said() if self._session.room else None
            if said is None:  # a limit of the run cut it off
                break
            self._turns += 1
            result = await self._stepped(said) or result
            self._done = bool(result.done)

    def outcome(self) -> _Outcome:
        rewards = self._rewards if self._settings.reward == "sum" else self._rewards[-1:]
        told = {"turns": self._turns, "done": self._done, "refused": self._refused}
        return _Outcome(sum(rewards), {name: float(value) for name, value in told.items()})

    def _show(self, seen: str) -> None:
        first = not self._session.tokens
        text = self._settings.template.replace(OBSERVATION, seen) if first else seen
        if self._plain:
            self._session.append(
                self._policy.tokenizer.encode(text if first else f"\n\n{text}\n\n"), Role.RAW
            )
        else:
            system = [Message("system", self._settings.system)] if first and self._settings.system else []
            self._session.converse([*system, Message("user", text)])

    async def _said(self) -> str | None:
        """The policy's reply, without thinking; None where it has no end."""
        tokens, _, finish = await self._session.sample()
        if finish != "stop":
            return None
        if self._plain or self._policy.chat is None:
            return self._policy.tokenizer.decode(tokens[:-1])
        return self._policy.chat.parse(tokens).content

    async def _stepped(self, said: str) -> Any:
        """The server's answer to the action; None where there is none, or it does not take it."""
        answer = self._place.find(said)
        action = None if answer is None else action_of(answer, self._field)
        if action is None:
            self._refused = True
            return None
        try:
            result = await self._client.step(action)
        except Exception as error:  # of the network and of the server
            self._refused = isinstance(error, RuntimeError) and any(code in str(error) for code in _REFUSED)
            if not self._refused:
                raise EnvironmentFailed(f"The server failed at a step: {_told(error)}.") from error
            return None
        if result.reward is not None:
            self._rewards.append(float(result.reward))
        return result


async def _closed(client: GenericEnvClient) -> None:
    with suppress(Exception):
        await client.close()


def _action_schema(name: str, server: str) -> dict[str, Any]:
    """What the server says of its actions. Raises BrokenEnvironment."""
    url = "http" + server.removeprefix("ws") if server.startswith("ws") else server
    try:
        with (
            httpx.Client(timeout=ANSWER_S, trust_env=False) as client,
            client.stream("GET", f"{url}/schema") as got,
        ):
            got.raise_for_status()
            body = b""
            for part in got.iter_bytes():
                body += part
                if len(body) > MAX_SCHEMA:
                    raise ValueError(f"its schema has more than {MAX_SCHEMA:,} bytes")
        schema = json.loads(body)["action"]
        if not isinstance(schema, dict):
            raise TypeError("its schema is no object")
    except (httpx.HTTPError, ValueError, KeyError, TypeError) as error:
        raise BrokenEnvironment(
            f"The server of {name} at {url} cannot be used: {_told(error)}. Start it, or name another one "
            f"with --env-server {name}=URL."
        ) from error
    return schema


def _told(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}"[:MAX_TOLD].rstrip(".: ")
