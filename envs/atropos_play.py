"""An Atropos environment in play. Imports the library; `atropos` has the rules."""

from __future__ import annotations

import asyncio
import copy
import importlib
import os
import random
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any, Final

from nous_node.protocol.rollouts import Trajectory
from nous_node.protocol.runs import Setting

# There is no network here, and without these the libraries would look for it again and again. They are read
# when the libraries are imported, hence above them.
os.environ.update(HF_HUB_OFFLINE="1", HF_DATASETS_OFFLINE="1", WANDB_MODE="disabled", TQDM_DISABLE="1")

import numpy as np
import pydantic
import transformers
from atroposlib.envs.base import BaseEnv

from .atropos_labels import Worth, worths
from .atropos_server import PolicyServer, bound, server_config
from .atropos_speech import Speech
from .atropos_tokenizer import PolicyTokenizer
from .conversation import Conversations, Player
from .environment import EnvironmentInfo, Policy, Task, small_seed
from .errors import BadConfig, BrokenEnvironment, EnvironmentFailed
from .random_streams import Streams

MAX_TOLD: Final = 400
"""Characters of somebody else's error in a sentence of ours."""

OWN: Final = "nous."
"""How our keys of the config begin."""

FIXED: Final = ("group_size", "use_wandb", "data_path_to_save_groups", "data_dir_to_save_evals")
"""Fields of the env config that a run does not choose: the group is the run's, and nothing is written."""

MAX_ITEMS: Final = 100_000
"""Items that are passed over to reach a task: at some ten microseconds each, a second."""

_speech: ContextVar[Speech] = ContextVar("speech")
"""Of the group for which an environment is being made."""


class Played:
    """One class with its config."""

    levels: int = 0

    def __init__(self, info: EnvironmentInfo, member: str, config: Mapping[str, Setting]) -> None:
        self.info = info
        self._class = _loaded(info.id, member)
        self._counter = config.get(f"{OWN}counter")
        self._items = config.get(f"{OWN}items", 1)
        fields = {key: value for key, value in config.items() if not key.startswith(OWN)}
        _check_choices(info.id, config)
        self._config = _env_config(info.id, self._class, fields)
        self._lock = asyncio.Lock()
        self._models: dict[tuple[int, int], Any] = {}
        """The environment after `setup`, of which every group gets a copy; None: each makes its own. By the
        rules of the policy that it was made for: those who evaluate have groups of one."""

    def task(self, seed: bytes, level: int) -> Task:
        """The item comes with the group: to find it needs the event loop. [ATR-2]"""
        return Task(seed, 0, None)

    async def collect_trajectories(self, task: Task, policy: Policy) -> list[Trajectory]:
        """Raises EnvironmentFailed."""
        conversations = Conversations(policy, 1)

        async def episode(player: Player) -> list[Worth]:
            return await Streams(task.seed).start(self._played(task, Speech(player, policy)))

        (found,) = await conversations.play(episode)
        sessions = sorted(
            (session for player in conversations.players for session in player.sessions if session.sampled),
            key=lambda session: session.trajectory,
        )
        if len(sessions) != len(found):
            raise EnvironmentFailed(
                f"{self.info.id} stopped waiting for an answer: what happens in a group must not depend on "
                "time. Take longer time-outs, or none."
            )
        return [
            session.finish(worth.reward, worth.components, worth.advantages, worth.advantage)
            for session, worth in zip(sessions, found, strict=True)
        ]

    async def _played(self, task: Task, speech: Speech) -> list[Worth]:
        environment = await self._environment(task.seed, speech)
        item = await self._item(environment, task.seed)
        try:
            groups, _ = await environment.collect_trajectories(item)  # its backlog: other tasks come anyway
            groups = await environment.postprocess_histories(groups)
        except Exception as error:
            raise self._failed("failed", speech.failure or error) from error
        if speech.failure is not None:
            raise self._failed("failed", speech.failure)
        if not speech.spoken:
            raise EnvironmentFailed(
                f"{self.info.id} asked the policy for nothing, or its prompt leaves no room in a context of "
                f"{speech.policy.context} tokens: take shorter tasks, or a model with more context."
            )
        scored = [group for group in (groups if isinstance(groups, list) else [groups]) if group is not None]
        if not all(isinstance(group, Mapping) for group in scored):
            raise EnvironmentFailed(f"{self.info.id} returned something that is no scored group.")
        return worths(scored, speech.lines(), speech.policy.tokenizer.decode)

    # --- the environment of one group ------------------------------------------------------------

    async def _environment(self, seed: bytes, speech: Speech) -> Any:
        """One in the state in which `setup` leaves it, with random generators of the task's. [ATR-2]"""
        rules = speech.policy.group, speech.policy.context
        async with self._lock:
            if rules not in self._models:
                model = await Streams(bytes(32)).start(self._made(speech))
                self._models[rules] = await self._learnt(model, speech)
        model = self._models[rules]
        if model is None:
            made = await Streams(bytes(32)).start(self._made(speech))
        else:
            made = _copied(model, speech)
        _reseed(made, small_seed(seed))
        return made

    async def _made(self, speech: Speech) -> Any:
        """Made and set up, from nothing."""
        _speech.set(speech)
        config = self._config.model_copy(deep=True)
        config.group_size = speech.policy.group
        config.max_token_length = min(config.max_token_length, speech.policy.context)
        try:
            made = _offline(self._class)(config, [server_config()], slurm=False, testing=False)
            made.tokenizer = (
                made.tokenizer if isinstance(made.tokenizer, PolicyTokenizer) else PolicyTokenizer(speech)
            )
            made.server = bound(made.server, speech)
            await made.setup()
        except (Exception, SystemExit) as error:
            raise self._failed("cannot be set up", error) from error
        return made

    async def _learnt(self, model: Any, speech: Speech) -> Any:
        """The model, None if it cannot be copied. Finds which counter `get_next_item` steps."""
        kept = tried = model
        try:
            tried = _copied(model, speech)
        except Exception:  # locks, clients and the like
            kept = None
        if self._counter is None:
            before = _numbers(tried)
            await Streams(bytes(32)).start(self._next(tried))
            stepped = [
                name for name, value in _numbers(tried).items() if before.get(name, value) + 1 == value
            ]
            self._counter = stepped[0] if len(stepped) == 1 else ""
        return kept

    async def _item(self, environment: Any, seed: bytes) -> Any:
        """The item of a seed. [ATR-2]"""
        number = int.from_bytes(seed[:8], "little")
        if self._counter:
            setattr(environment, str(self._counter), number >> 33)
        else:
            for _ in range(number % int(str(self._items))):
                await self._next(environment)
        return await self._next(environment)

    async def _next(self, environment: Any) -> Any:
        try:
            item = await environment.get_next_item()
        except Exception as error:
            raise self._failed("has no item", error) from error
        if item is None:
            raise EnvironmentFailed(f"{self.info.id} has no item for this task.")
        return item

    def _failed(self, what: str, error: BaseException) -> EnvironmentFailed:
        if isinstance(error, EnvironmentFailed):
            return error
        text = f"{type(error).__name__}: {error}"[:MAX_TOLD].rstrip(".: ")
        return EnvironmentFailed(f"{self.info.id} {what}: {text}.")


def _copied(model: Any, speech: Speech) -> Any:
    """A copy that speaks in another group, as does what it has of the tokenizer and the server."""
    server, tokenizer = bound(model.server, speech), PolicyTokenizer(speech)
    return copy.deepcopy(model, {id(model.server): server, id(model.tokenizer): tokenizer})


def _reseed(environment: Any, seed: int) -> None:
    """Generators that the environment keeps go on from the task's seed."""
    for name, value in vars(environment).items():
        if isinstance(value, random.Random | np.random.RandomState):
            value.seed(seed)
        elif isinstance(value, np.random.Generator):
            setattr(environment, name, np.random.default_rng(seed))


def _numbers(environment: Any) -> dict[str, int]:
    return {name: value for name, value in vars(environment).items() if type(value) is int}


def _offline(kind: Any) -> Any:
    """The class with our server; its name, module and methods stay."""
    return type(kind.__name__, (kind,), {"server_cls": PolicyServer, "__module__": kind.__module__})


def _tokenizer(*_: Any, **__: Any) -> PolicyTokenizer:
    return PolicyTokenizer(_speech.get())


transformers.AutoTokenizer.from_pretrained = staticmethod(_tokenizer)  # whatever name it is asked for


def _loaded(name: str, member: str) -> Any:
    module, _, attribute = member.partition(":")
    try:
        found = getattr(importlib.import_module(module), attribute)
    except (Exception, SystemExit) as error:  # somebody else's code
        text = f"{type(error).__name__}: {error}"[:MAX_TOLD].rstrip(".: ")
        raise BrokenEnvironment(
            f"{name} cannot be imported ({text}). Add its package with `nous-node env install atropos --with "
            "PACKAGE`."
        ) from error
    if not isinstance(found, type) or not issubclass(found, BaseEnv):
        raise BrokenEnvironment(f"{member} is no Atropos environment: it does not subclass BaseEnv.")
    return found


def _check_choices(name: str, config: Mapping[str, Setting]) -> None:
    for key in config:
        if key.startswith(OWN) and key not in (f"{OWN}counter", f"{OWN}items"):
            raise BadConfig(f"{name} has no setting {key!r}; ours are {OWN}counter and {OWN}items.")
        if key in FIXED:
            raise BadConfig(f"{key!r} of {name} is not a run's to choose.")
    items, counter = config.get(f"{OWN}items", 1), config.get(f"{OWN}counter", "")
    if type(items) is not int or not 1 <= items <= MAX_ITEMS:
        raise BadConfig(f"{OWN}items of {name} is a whole number from 1 to {MAX_ITEMS}.")
    if not isinstance(counter, str) or (counter and not counter.isidentifier()):
        raise BadConfig(f"{OWN}counter of {name} names an attribute, or is empty for none.")


def _env_config(name: str, kind: Any, fields: Mapping[str, Setting]) -> Any:
    """The env config of the class with the run's fields over it."""
    try:
        config, _ = kind.config_init()
    except (Exception, SystemExit) as error:
        raise BrokenEnvironment(f"config_init of {name} failed: {type(error).__name__}: {error}.") from error
    known = type(config).model_fields
    for key in fields:
        if key not in known:
            raise BadConfig(f"{name} has no setting {key!r}; it takes {', '.join(sorted(known))[:1000]}.")
    fixed = {key: value for key, value in (("use_wandb", False), ("include_messages", False)) if key in known}
    try:
        return type(config)(**{**config.model_dump(), **fields, **fixed, "data_path_to_save_groups": None})
    except pydantic.ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise BadConfig(f"{place} of {name}: {first['msg']}.") from error
