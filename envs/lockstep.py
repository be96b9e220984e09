"""The samples of one task, played at the same time by somebody else's asynchronous code.

    lockstep = Lockstep(policy, seed)
    results = await lockstep.play(count, play)      play(sample) asks with `await sample.ask(messages)`

Each sample runs as a task of its own. What they ask for goes to the policy in one call as soon as every
sample that still plays waits for an answer, in the order of samples and, within one, of its questions. So
requests and the numbers of trajectories depend on nothing but the seed and the policy's tokens, however the
event loop orders what happens between. [VFR-4]

`random` and `numpy.random` are streams of the sample's own in everything that it runs. They begin alike for
all samples: what the environment draws belongs to the task. [VFR-3]
"""

from __future__ import annotations

import asyncio
import functools
import hashlib
from collections.abc import Awaitable, Callable, Coroutine, Generator, Sequence
from contextvars import ContextVar, copy_context
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, TypeVar

from nous_node.protocol.rollouts import Role

from .determinism import Rng
from .environment import Completion, Message, Policy, Tool, small_seed
from .session import Session

T = TypeVar("T")

DOMAIN: Final = b"nous/lockstep/1\0"

_QUIET: Final = 3
"""Passes of the loop without a new question before those that wait go to the policy: a task that foreign
code starts for its question asks one or two passes after it."""

PARAGRAPH: Final = "\n\n"
"""Between messages that are put as plain text: what completion clients of these libraries write."""


def stream_seed(seed: bytes) -> int:
    """Where the random streams of a task's samples begin. [VFR-3]"""
    return small_seed(hashlib.sha256(DOMAIN + seed).digest())


class NoRoom(Exception):
    """Nothing more can be sampled in this conversation: a limit of the run is reached."""


class Answer(NamedTuple):
    """What the policy said."""

    message: Message
    prompt: list[int]
    """Everything before it, in tokens."""
    completion: Completion
    number: int
    """0, 1, 2, ... among the answers of its sample."""


class Turn(NamedTuple):
    """Where an answer stands."""

    answer: int
    """Its number."""
    tokens: int
    """How many were sampled."""


@dataclass(eq=False)
class Line:
    """One trajectory: a conversation that only ever grew."""

    session: Session
    heard: list[Message]
    """All messages so far, answers included."""
    tools: tuple[Tool, ...]
    plain: bool
    busy: bool = False
    """Whether an answer is asked for."""
    turns: list[Turn] = field(default_factory=list)
    """The answers in it."""

    def goes_on(self, question: _Question) -> bool:
        """Whether a question begins with all that was said here, and adds to it."""
        known = len(self.heard)
        return (
            not self.busy
            and known < len(question.messages)
            and (self.tools, self.plain) == (question.tools, question.plain)
            and self.heard == question.messages[:known]
        )

    def hear(self, messages: Sequence[Message], policy: Policy) -> None:
        """Puts messages behind what is there, in tokens."""
        if self.plain:
            text = PARAGRAPH.join([message.content for message in messages])
            text = PARAGRAPH + text if self.heard else text
            self.session.append(policy.tokenizer.encode(text), Role.RAW)
        else:
            self.session.converse(messages, self.tools)
        self.heard.extend(messages)

    def take(self, message: Message, turn: Turn) -> None:
        """An answer."""
        self.busy = False
        self.heard.append(message)
        self.turns.append(turn)


@dataclass
class _Question:
    messages: list[Message]
    tools: tuple[Tool, ...]
    max_tokens: int | None
    plain: bool
    answer: asyncio.Future[Answer]

    def succeed(self, answer: Answer) -> None:
        if not self.answer.done():
            self.answer.set_result(answer)

    def fail(self, error: Exception) -> None:
        if not self.answer.done():
            self.answer.set_exception(error)


class Sample:
    """One sample of the task, as the code that plays it sees it."""

    def __init__(self, lockstep: Lockstep, number: int) -> None:
        self.number = number
        self.lines: list[Line] = []
        """Its trajectories, in the order in which they began."""
        self.answers = 0
        """Answers so far."""
        self.waiting: list[_Question] = []
        self._lockstep = lockstep

    async def ask(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool] = (),
        max_tokens: int | None = None,
        plain: bool = False,
    ) -> Answer:
        """The policy's answer to a conversation, the whole of which is given each time.

        One that goes on where an answer of this sample ended is put behind its tokens; any other one begins a
        trajectory. `plain`: as text, without the model's conversation format. Raises NoRoom.
        """
        answer: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()
        self.waiting.append(_Question(list(messages), tuple(tools), max_tokens, plain, answer))
        self._lockstep.settle()
        return await answer


class _Open(NamedTuple):
    """A question that goes to the policy."""

    sample: Sample
    question: _Question
    line: Line


class Lockstep:
    """The samples of one task."""

    def __init__(self, policy: Policy, seed: bytes) -> None:
        self._policy = policy
        self._start = stream_seed(seed)
        self._playing: dict[Sample, asyncio.Task[Any]] = {}
        self._asking: asyncio.Task[None] | None = None
        self._settling = False
        self._lines = 0
        self._context = copy_context()
        """Ours, without the streams of whichever sample happens to run."""

    async def play(self, count: int, play: Callable[[Sample], Awaitable[T]]) -> list[tuple[Sample, T]]:
        """Plays `count` samples; what each returned, in their order. The first failure ends all of them."""
        samples = [Sample(self, number) for number in range(count)]
        tasks = [self.start(play(sample)) for sample in samples]
        self._playing = dict(zip(samples, tasks, strict=True))
        for sample, task in self._playing.items():
            task.add_done_callback(functools.partial(self._left, sample))
        try:
            await _first_failure(tasks)
            return [(sample, task.result()) for sample, task in zip(samples, tasks, strict=True)]
        finally:
            await _ended([*tasks, *([self._asking] if self._asking else [])])

    def start(self, work: Awaitable[T]) -> asyncio.Task[T]:
        """A task with random streams of its own. [VFR-3]"""
        loop = asyncio.get_running_loop()
        inner = loop.get_task_factory()
        if not isinstance(inner, _Factory):
            loop.set_task_factory(_Factory(inner))
        before = _stream.set(Rng(self._start))
        try:
            return asyncio.ensure_future(_awaited(work))
        finally:
            _stream.reset(before)

    def settle(self) -> None:
        """Looks, until nothing new is asked for, whether everybody waits."""
        if not self._settling:
            self._settling = True
            self._look_soon(self._asked(), 0)

    def _look_soon(self, before: int, quiet: int) -> None:
        asyncio.get_running_loop().call_soon(self._look, before, quiet, context=self._context)

    def _look(self, before: int, quiet: int) -> None:
        now = self._asked()
        quiet = quiet + 1 if now == before else 0
        if quiet < _QUIET:
            self._look_soon(now, quiet)
            return
        self._settling = False
        if self._playing and self._asking is None and all(sample.waiting for sample in self._playing):
            self._asking = asyncio.ensure_future(self._answer_all())

    def _asked(self) -> int:
        return sum(len(sample.waiting) for sample in self._playing)

    def _left(self, sample: Sample, _: asyncio.Task[Any]) -> None:
        self._playing.pop(sample, None)
        self.settle()

    async def _answer_all(self) -> None:
        """One call of the policy for all questions that wait."""
        asked = [(sample, question) for sample in self._playing for question in sample.waiting]
        for sample in self._playing:
            sample.waiting = []
        try:
            await self._sample(
                [
                    _Open(sample, question, line)
                    for sample, question in asked
                    if (line := self._line(sample, question)) is not None
                ]
            )
        except Exception as error:
            for _, question in asked:
                question.fail(error)
        finally:
            self._asking = None
            self.settle()

    async def _sample(self, open_: Sequence[_Open]) -> None:
        prompts = [one.line.session.tokens for one in open_]
        requests = [one.line.session.request(one.question.max_tokens) for one in open_]
        completions = await self._policy.generate(requests) if requests else []
        for (sample, question, line), prompt, completion in zip(open_, prompts, completions, strict=True):
            line.session.take(completion)
            message = self._said(completion, line.plain)
            line.take(message, Turn(sample.answers, len(completion.tokens)))
            question.succeed(Answer(message, prompt, completion, sample.answers))
            sample.answers += 1

    def _said(self, completion: Completion, plain: bool) -> Message:
        tokens, _, finish = completion
        chat = None if plain else self._policy.chat
        if chat is not None:
            return chat.parse(tokens)
        return Message(
            "assistant", self._policy.tokenizer.decode(tokens[:-1] if finish == "stop" else tokens)
        )

    def _line(self, sample: Sample, question: _Question) -> Line | None:
        """The trajectory that a question goes on with, or a new one; None where there is no room for it."""
        line = max(
            (line for line in sample.lines if line.goes_on(question)),
            key=lambda line: len(line.heard),
            default=None,
        )
        if line is None:
            line = Line(Session(self._policy, self._lines), [], question.tools, question.plain)
            line.hear(question.messages, self._policy)
            if line.session.room:
                sample.lines.append(line)
                self._lines += 1
        elif line.session.room:
            line.hear(question.messages[len(line.heard) :], self._policy)
        if line.session.room == 0:
            question.fail(NoRoom())
            return None
        line.busy = True
        return line


_stream: ContextVar[Rng | None] = ContextVar("stream", default=None)
"""The random streams of the sample for which the present task works."""


class _Streamed(Coroutine[Any, Any, T]):
    """A coroutine that draws from a stream of its own whenever it runs."""

    def __init__(self, work: Coroutine[Any, Any, T], rng: Rng) -> None:
        self._work = work
        self._rng = rng

    def __await__(self) -> Generator[Any, Any, T]:
        return self._work.__await__()

    def send(self, value: Any) -> Any:
        with self._rng:
            return self._work.send(value)

    def throw(self, *error: Any) -> Any:
        with self._rng:
            return self._work.throw(*error)

    def close(self) -> None:
        self._work.close()


class _Factory:
    """A task factory around the loop's own: what a sample starts draws from its streams too."""

    def __init__(self, inner: Callable[..., Any] | None) -> None:
        self._inner = inner

    def __call__(
        self,
        loop: asyncio.AbstractEventLoop,
        work: Coroutine[Any, Any, T] | Generator[Any, None, T],
        **options: Any,
    ) -> Any:
        context = options.get("context")
        rng = _stream.get() if context is None else context.get(_stream)
        if rng is not None and isinstance(work, Coroutine):
            work = _Streamed(work, rng)
        if self._inner is not None:
            return self._inner(loop, work, **options)
        return asyncio.Task(work, loop=loop, **options)


async def _awaited(work: Awaitable[T]) -> T:
    return await work


async def _first_failure(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Waits for all tasks, or raises what the first of them raised that failed."""
    if tasks:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
    for task in tasks:
        if task.done() and (error := task.exception()) is not None:
            raise error


async def _ended(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
