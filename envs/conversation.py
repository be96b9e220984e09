"""Environments that speak of conversations, on sessions: whole lists of messages in, tokens kept as sampled.

    async def episode(player: Player) -> float:
        reply = await player.say([Message("user", "2 + 2?")])
        return float(reply.message.content == "4")

    conversations = Conversations(policy)
    rewards = await conversations.play(episode)
    return conversations.finish(rewards)

A call brings its whole history, as in most libraries. The session that it goes on with is extended by what
is new; where there is none, because the history was rewritten or is new, a session begins. [CHT-8]

Players go in rounds. A round begins when every player that still plays has asked for something, and takes
what was asked in the order of players, then of their calls; a session that begins in it gets the next index.
So indices depend on what players do, never on how long it takes them. A player that makes several calls at
once must do so without waiting for anything else in between. [CHT-9]
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Final, NamedTuple, TypeVar

from nous_node.protocol.rollouts import Trajectory

from .environment import Completion, GenerateRequest, Message, Policy, Tool
from .errors import EnvironmentFailed
from .session import Session
from .transcripts import Ask, Reply, Said, Transcript, begun

T = TypeVar("T")

MAX_CALLS: Final = 4096
"""Calls of one player, against episodes that go on asking where no token is left to be sampled."""

_QUIET: Final = 64
"""Passes of the loop without a new call before a round begins: when a player asks for many things at once,
some calls reach us passes after the others."""


class Player:
    """One sample of a task, as its episode sees it."""

    def __init__(self, conversations: Conversations, sample: int) -> None:
        self.sample = sample
        """Number of the sample, from 0."""
        self.transcripts: list[Transcript] = []
        """Its sessions and what it knows of them, in the order in which they began."""
        self._conversations = conversations
        self._calls = 0

    @property
    def sessions(self) -> list[Session]:
        return [transcript.session for transcript in self.transcripts]

    async def say(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        agent: str = "",
    ) -> Reply:
        """The answer to a conversation. `agent`: who speaks; each has sessions of its own. Raises
        EnvironmentFailed."""
        ask = Ask(tuple(messages), True, tuple(tools), 1, max_tokens, tuple(stop), agent)
        return (await self.ask(ask))[0]

    async def go_on(
        self,
        prompt: str | Sequence[int],
        *,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        agent: str = "",
    ) -> Reply:
        """What follows text or tokens, without a conversation format; the message has only content."""
        said: Said = prompt if isinstance(prompt, str) else tuple(prompt)
        return (await self.ask(Ask(said, False, (), 1, max_tokens, tuple(stop), agent)))[0]

    async def ask(self, ask: Ask) -> list[Reply]:
        """`ask.count` answers, each in a session of its own."""
        self._calls += 1
        if self._calls > MAX_CALLS or ask.count < 1:
            raise EnvironmentFailed(
                f"Sample {self.sample} asks for {ask.count} answers in its call {self._calls}; mend the "
                "environment."
            )
        return await self._conversations.answered(self, ask)

    def find(self, ask: Ask, taken: set[Transcript]) -> Transcript | None:
        """The session that a call goes on with: the one of which it knows most, the first of these."""
        fitting = [one for one in self.transcripts if one not in taken and one.goes_on(ask)]
        return max(fitting, key=lambda one: len(one.session.tokens), default=None)


class _Call(NamedTuple):
    player: Player
    ask: Ask
    answer: asyncio.Future[list[Reply]]


class Conversations:
    """The samples of one task. `samples`: how many play, all of `policy.group` where it is not given."""

    def __init__(self, policy: Policy, samples: int | None = None) -> None:
        count = policy.group if samples is None else samples
        self.players = [Player(self, sample) for sample in range(count)]
        self._policy = policy
        self._begun = 0
        self._playing: set[Player] = set()
        self._calls: list[_Call] = []
        self._round: asyncio.Task[None] | None = None
        self._settling = False

    async def play(self, episode: Callable[[Player], Awaitable[T]]) -> list[T]:
        """What the episode of each player returns. The first that raises ends all of them."""
        self._playing = set(self.players)
        tasks = [asyncio.ensure_future(self._played(episode, player)) for player in self.players]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            left = [task for task in (*tasks, self._round) if task is not None]
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    def finish(
        self, rewards: Sequence[float], components: Sequence[Mapping[str, float]] | None = None
    ) -> list[Trajectory]:
        """The group's trajectories by index: each has the reward and the components of its sample. Raises
        EnvironmentFailed."""
        ended: dict[int, Trajectory] = {}
        for player, reward in zip(self.players, rewards, strict=True):
            told = None if components is None else components[player.sample]
            for session in player.sessions:
                ended[session.trajectory] = session.finish(reward, told)
        return [ended[index] for index in range(self._begun)]

    async def answered(self, player: Player, ask: Ask) -> list[Reply]:
        """Waits for the round that answers a player's call."""
        call = _Call(player, ask, asyncio.get_running_loop().create_future())
        self._calls.append(call)
        self._settle()
        return await call.answer

    async def _played(self, episode: Callable[[Player], Awaitable[T]], player: Player) -> T:
        try:
            return await episode(player)
        finally:
            self._playing.discard(player)
            self._settle()

    def _settle(self) -> None:
        """Watches the loop until nothing new is asked for, once at a time."""
        if not self._settling and self._round is None:
            self._settling = True
            asyncio.get_running_loop().call_soon(self._look, len(self._calls), 0)

    def _look(self, before: int, quiet: int) -> None:
        now = len(self._calls)
        quiet = quiet + 1 if now == before else 0
        if quiet < _QUIET:
            asyncio.get_running_loop().call_soon(self._look, now, quiet)
            return
        self._settling = False
        if self._calls and self._playing <= {call.player for call in self._calls}:
            calls = sorted(self._calls, key=lambda call: call.player.sample)
            self._calls = []
            self._round = asyncio.ensure_future(self._run(calls))
            self._round.add_done_callback(self._over)

    def _over(self, _: asyncio.Task[None]) -> None:
        self._round = None
        self._settle()

    async def _run(self, calls: Sequence[_Call]) -> None:
        """One round: one call of the policy for all that was asked."""
        taken: set[Transcript] = set()
        going: list[tuple[_Call, list[_Turn]]] = []
        for call in calls:
            try:
                going.append((call, [self._turn(call, taken) for _ in range(call.ask.count)]))
            except EnvironmentFailed as error:  # of this call alone
                _fail(call, error)
        requests = [turn.request for _, turns in going for turn in turns if turn.request is not None]
        try:
            completions = iter(await self._policy.generate(requests) if requests else [])
            for call, turns in going:
                replies = [_replied(turn, call.ask, completions) for turn in turns]
                if not call.answer.done():
                    call.answer.set_result(replies)
        except Exception as error:
            for call, _ in going:
                _fail(call, error)

    def _turn(self, call: _Call, taken: set[Transcript]) -> _Turn:
        """The session of one answer, with what is new in it."""
        transcript = call.player.find(call.ask, taken)
        if transcript is not None:
            try:
                transcript.add(call.ask)
            except EnvironmentFailed:  # what may begin a conversation need not go on with one
                transcript = None
        if transcript is None:
            transcript = begun(self._policy, self._begun, call.ask)
            if transcript is None:
                if not call.player.transcripts:
                    raise EnvironmentFailed(
                        f"The first prompt of sample {call.player.sample} does not fit the context of "
                        f"{self._policy.context} tokens; give the environment shorter tasks."
                    )
                return _Turn(None, None)
            call.player.transcripts.append(transcript)
            self._begun += 1
        taken.add(transcript)
        session = transcript.session
        return _Turn(transcript, session.request(call.ask.max_tokens) if session.room else None)


class _Turn(NamedTuple):
    """One answer of a round: `request` is None where there is no room for it."""

    transcript: Transcript | None
    request: GenerateRequest | None


def _replied(turn: _Turn, ask: Ask, completions: Iterator[Completion]) -> Reply:
    if turn.transcript is None:
        return Reply(Message("assistant"), "length", [], [], [], None)
    if turn.request is None:
        nothing = Completion([], [], "length")
        return turn.transcript.reply(ask, turn.transcript.session.tokens, nothing)
    completion = next(completions)
    turn.transcript.session.take(completion)
    return turn.transcript.reply(ask, turn.request.tokens, completion)


def _fail(call: _Call, error: Exception) -> None:
    if not call.answer.done():
        call.answer.set_exception(error)
