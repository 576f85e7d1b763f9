"""Streams for servers: many consumers of one engine, which a thread steps.

Built, step by step, in notebooks/15_llm.ipynb.
"""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from traceback import format_exception_only

from tinyvllm.engine import Engine
from tinyvllm.llm import OutputProcessor, Prompt, load_engine, make_request, part_of
from tinyvllm.request import GenerationOutput, Request, SamplingParams, check_request_id
from tinyvllm.tokenizer import Tokenizer


class EngineDeadError(RuntimeError):
    """The engine serves no more: it was shut down, or died of what `__cause__` is."""


class Mailbox:
    """Holds the newest output of one request until its consumer comes for it.

    It has one place, so a slow consumer costs no memory and holds nobody up; what it was too
    slow for is in the next output as well. vLLM: `RequestOutputCollector`.
    """

    def __init__(self, request_id: str):
        self.request_id = request_id
        self.newest: GenerationOutput | Exception | None = None
        self.filled = asyncio.Event()
        self.complete = False  # nothing will follow the newest

    def put(self, item: GenerationOutput | Exception):
        """Replace what lies there, unless that was the last."""
        if not self.complete:
            self.newest = item
            self.complete = isinstance(item, Exception) or item.finished
            self.filled.set()

    async def get(self) -> GenerationOutput:
        """Wait for something new and take it; raises it if it is an error."""
        await self.filled.wait()
        self.filled.clear()
        if isinstance(self.newest, Exception):
            raise self.newest
        return self.newest


def snapshot(output: GenerationOutput) -> GenerationOutput:
    """A copy of an output that does not grow when the output does."""
    outputs = [part_of(completion) for completion in output.outputs]
    prompt_logprobs = output.prompt_logprobs and list(output.prompt_logprobs)
    return dataclasses.replace(output, outputs=outputs, prompt_logprobs=prompt_logprobs)


class AsyncEngine:
    """Serves many consumers on one event loop, each with the outputs of its own request.

    A thread of its own steps the engine, and meanwhile nothing else touches it: consumers
    leave commands, which the thread applies between two steps, and find snapshots in their
    mailboxes, so no lock is needed. It belongs to the event loop of its first request. Use it
    with `async with`, or await `shutdown` at the end. Follows `vllm/v1/engine/async_llm.py`.

    Args:
        engine: serves the requests; its observers are called in the thread.
        tokenizer: text to token ids and back.

    Attributes:
        mailboxes: by request id, of the consumers that have not left.
        dead: why the engine serves no more; None while it does.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine = engine
        self.tokenizer = tokenizer
        self.output_processor = OutputProcessor(engine, tokenizer)
        self.mailboxes: dict[str, Mailbox] = {}
        self.dead: str | None = None
        self._cause: BaseException | None = None
        self._commands: list[tuple[Mailbox, Request | None]] = []  # None: abort
        self._wake_up = asyncio.Event()
        self._closing = False
        self._thread = ThreadPoolExecutor(1, "tinyvllm-engine")
        self._task: asyncio.Task | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # of the task

    @classmethod
    def from_engine_args(
        cls, model: str | Path | None = None, *, tokenizer: str | Path | None = None, **engine_args
    ) -> "AsyncEngine":
        """The engine for a model; arguments and errors are those of `LLM`."""
        return cls(*load_engine(model, tokenizer, engine_args))

    async def generate(
        self, prompt: Prompt, sampling_params: SamplingParams, request_id: str
    ) -> AsyncIterator[GenerationOutput]:
        """Continue a prompt; yields all there is so far, whenever there is more.

        It begins when the first output is asked for. A cancelled task and `aclose` abort it. So
        does a `break`, as soon as nothing refers to the generator (`contextlib.aclosing` does
        not wait for that). A prompt that cannot be served has one output, with `error` set.

        Raises:
            TypeError, ValueError: no prompt, a bad word without tokens, no id, or one in use.
            EngineDeadError: the engine serves no more.
            RuntimeError: it serves another event loop.
        """
        mailbox, output = self._enter(prompt, sampling_params, request_id), None
        try:
            while output is None or not output.finished:
                output = await mailbox.get()
                yield output
        finally:
            del self.mailboxes[request_id]
            if not mailbox.complete:
                self._command(mailbox, None)

    async def abort(self, request_id: str):
        """End a request early: its consumer gets what there is, with the reason "abort". Nothing
        happens if no such request is alive. RuntimeError: the engine serves another event loop."""
        check_request_id(request_id)
        if request_id in self.mailboxes:
            self._check_loop()
            self._command(self.mailboxes[request_id], None)

    def _enter(self, prompt: Prompt, params: SamplingParams, request_id: str) -> Mailbox:
        if self.dead is not None:
            raise self._dead_error()
        request = make_request(self.tokenizer, prompt, params, request_id)
        if request_id in self.mailboxes:
            raise ValueError(f"request_id {request_id!r} is in use")
        if self._task is None:
            self._loop = asyncio.get_running_loop()
            self._task = self._loop.create_task(self._run())
            # A task that is cancelled before it begins runs nothing, not even its `finally`.
            self._task.add_done_callback(lambda task: self.dead or self._close(None))
        self._check_loop()
        mailbox = self.mailboxes[request_id] = Mailbox(request_id)
        self._command(mailbox, request)
        return mailbox

    def _check_loop(self):
        """An event that another loop's task waits for cannot be set from here."""
        if self._loop is not asyncio.get_running_loop():
            raise RuntimeError("this AsyncEngine serves another event loop: make one for each loop")

    def _command(self, mailbox: Mailbox, request: Request | None):
        self._commands.append((mailbox, request))
        self._wake_up.set()

    async def _run(self):
        """Step and deliver until the end; sleep while there is nothing to do."""
        try:
            while not self._closing:
                self._wake_up.clear()
                if not self._commands and not self.engine.has_unfinished_requests():
                    await self._wake_up.wait()
                    continue
                commands, self._commands = self._commands, []
                news = await self._loop.run_in_executor(self._thread, self._advance, commands)
                for mailbox, item in news:
                    mailbox.put(item)
        except BaseException as error:
            self._close(error)
            if not isinstance(error, Exception):
                raise
        else:
            self._close(None)

    def _advance(
        self, commands: list[tuple[Mailbox, Request | None]]
    ) -> list[tuple[Mailbox, GenerationOutput | Exception]]:
        """Apply the commands in their order and make one step; what the thread does."""
        outputs, errors = [], []
        for mailbox, request in commands:
            if request is None:
                aborted = self.output_processor.abort(mailbox.request_id)
                outputs += [] if aborted is None else [aborted]
                continue
            try:
                self.output_processor.add_request(request, mailbox)
            except ValueError as error:
                errors.append((mailbox, error))
        try:
            outputs += self.output_processor.step()
        except StopIteration as error:  # no future can hold one, as no generator can (PEP 479)
            raise RuntimeError("a step raised StopIteration") from error
        return errors + [(mailbox, snapshot(output)) for mailbox, output in outputs]

    def _close(self, cause: BaseException | None):
        """Tell every consumer, end the thread, and give back what the requests hold."""
        self._cause, self.dead = cause, "was shut down"
        if cause is not None:
            self.dead = "died: " + "".join(format_exception_only(cause)).strip()
        self._thread.shutdown()
        with suppress(Exception):  # an engine that died need not be in order
            for request_id in list(self.output_processor.inboxes):
                self.output_processor.abort(request_id)
        for mailbox in self.mailboxes.values():
            with suppress(RuntimeError):  # its event loop is closed, and nobody waits any more
                mailbox.put(self._dead_error())

    def _dead_error(self) -> EngineDeadError:
        error = EngineDeadError(f"the engine {self.dead}")
        error.__cause__ = self._cause
        return error

    async def shutdown(self):
        """End it all: no thread and no task is left, and whoever waits gets EngineDeadError.

        Once is enough, twice does no harm. RuntimeError: the engine serves another event loop.
        """
        if self._task is None or self._task.done() or self._loop.is_closed():
            if self.dead is None:
                self._close(None)
            return
        self._check_loop()
        self._closing = True
        self._wake_up.set()
        await asyncio.wait([self._task])

    async def __aenter__(self) -> "AsyncEngine":
        return self

    async def __aexit__(self, *exception):
        await self.shutdown()
