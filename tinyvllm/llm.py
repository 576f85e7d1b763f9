"""Text in, text out: prompts answered in one call, streamed, or served to many readers at once.

Built, step by step, in notebooks/15_llm.ipynb.
"""

import asyncio
import dataclasses
import itertools
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tinyvllm.config import EngineConfig
from tinyvllm.cuda_graphs import make_engine
from tinyvllm.engine import Engine
from tinyvllm.request import (
    CompletionOutput,
    GenerationOutput,
    Request,
    SamplingParams,
    check_request_id,
    is_integer,
)
from tinyvllm.tokenizer import CompletionText, LogprobText, Tokenizer

Prompt = str | list[int] | dict  # dict: {"prompt": str} or {"prompt_token_ids": list[int]}


def is_token_ids(prompt: object) -> bool:
    """Whether `prompt` is a list of integers."""
    return isinstance(prompt, list | tuple) and all(is_integer(i) for i in prompt)


def as_prompt_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """One prompt or a list of them, as a list. `[]` is a list of no prompts."""
    if isinstance(prompts, str | dict) or (is_token_ids(prompts) and prompts):
        return [prompts]
    if not isinstance(prompts, list | tuple):
        raise TypeError(
            "prompts must be a string, a list of token ids, a dict, or a list of these, got "
            f"{prompts!r:.80}"
        )
    return list(prompts)


def make_request(
    tokenizer: Tokenizer,
    prompt: Prompt,
    params: SamplingParams,
    request_id: str,
    name: str = "prompt",
) -> Request:
    """A request with token ids for its prompt, which errors call `name`, and for its bad words.

    Raises TypeError or ValueError for what is no prompt, or a bad word without tokens. What
    only the engine can judge, such as a prompt that is too long, is left to it.
    """
    fields = {"prompt" if isinstance(prompt, str) else "prompt_token_ids": prompt}
    if isinstance(prompt, dict):
        fields = prompt
    text, token_ids = fields.get("prompt"), fields.get("prompt_token_ids")
    if token_ids is None and isinstance(text, str):
        try:
            token_ids = tokenizer.encode(text)
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from error
    known = fields.keys() <= {"prompt", "prompt_token_ids"}
    if not known or not is_token_ids(token_ids) or not isinstance(text, str | None):
        raise TypeError(
            f"{name} must be a string, a list of token ids, or a dict with 'prompt' or "
            f"'prompt_token_ids' and nothing else, got {prompt!r:.80}"
        )
    request = Request(request_id, token_ids, params, prompt=text)
    if params.bad_words:
        forbidden = tokenizer.bad_words_token_ids(params.bad_words)
        request = dataclasses.replace(request, bad_words_token_ids=forbidden)
    return request


class OutputProcessor:
    """Between the engine and the readers: writes the text of every output, ends what a stop string
    ends, and knows which inbox an output is for. vLLM: `vllm/v1/engine/output_processor.py`.

    Attributes:
        inboxes: of each live request, what its output shall come back with.
        outputs: of each live request, its output.
        texts: of those that want text, its continuations' and its prompt's.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        self.engine = engine
        self.tokenizer = tokenizer
        self.inboxes: dict[str, Any] = {}
        self.outputs: dict[str, GenerationOutput] = {}
        self.texts: dict[str, tuple[list[CompletionText], LogprobText]] = {}

    def add_request(self, request: Request, inbox: Any):
        """Hand a request to the engine. Raises ValueError if its id is in use."""
        self.outputs[request.request_id] = self.engine.add_request(request)
        self.inboxes[request.request_id] = inbox
        params = request.sampling_params
        if params.detokenize:
            texts = [CompletionText(self.tokenizer, params) for _ in range(params.n)]
            self.texts[request.request_id] = texts, LogprobText(self.tokenizer)

    def process(self, output: GenerationOutput) -> tuple[Any, GenerationOutput]:
        """Bring an output's text up to its tokens; returns (inbox, output)."""
        texts, prompt_text = self.texts.get(output.request_id, ([], None))
        if prompt_text is not None and output.prompt_logprobs is not None:
            prompt_text.update(output.prompt_token_ids, output.prompt_logprobs)
        for completion, text in zip(output.outputs, texts, strict=False):
            stop = text.update(completion)
            if stop is not None:
                self.engine.stop(output, completion.index, stop)
        inbox = self.inboxes[output.request_id]
        if output.finished:
            self.forget(output.request_id)
        return inbox, output

    def forget(self, request_id: str):
        """Let go of a request that is over."""
        self.inboxes.pop(request_id, None)
        self.outputs.pop(request_id, None)
        self.texts.pop(request_id, None)

    def step(self) -> list[tuple[Any, GenerationOutput]]:
        """One step of the engine; returns (inbox, output) for the outputs that changed."""
        changed = {output.request_id: output for output in self.engine.step()}
        # An observer may have aborted a request: it is finished, and no step mentions it.
        changed |= {i: output for i, output in self.outputs.items() if output.finished}
        return [self.process(output) for i, output in changed.items() if i in self.inboxes]

    def abort(self, request_id: str) -> tuple[Any, GenerationOutput] | None:
        """End a request early; returns its inbox and its output so far, if it was alive."""
        output = self.engine.abort(request_id)
        if output is not None and request_id in self.inboxes:
            return self.process(output)
        self.forget(request_id)
        return None


def part_of(completion: CompletionOutput, num_tokens=0, num_characters=0) -> CompletionOutput:
    """A copy of what a continuation holds beyond so many tokens and characters of its text."""
    logprobs = completion.logprobs
    return dataclasses.replace(
        completion,
        text=completion.text[num_characters:],
        token_ids=completion.token_ids[num_tokens:],
        logprobs=None if logprobs is None else logprobs[num_tokens:],
    )


class DeltaStream:
    """Turns the growing output of one request into pieces that hold only what is new."""

    def __init__(self, n: int):
        # Per continuation, what was given out: tokens, characters, and the finish reason.
        self.seen = [(0, 0, None)] * n
        self.num_prompt_logprobs = 0

    def delta(self, output: GenerationOutput) -> GenerationOutput:
        """What `output` holds beyond the last call, without continuations that have no news."""
        pieces = []
        for completion in output.outputs:
            state = (len(completion.token_ids), len(completion.text), completion.finish_reason)
            seen = self.seen[completion.index]
            if state != seen:
                pieces.append(part_of(completion, *seen[:2]))
                self.seen[completion.index] = state
        prompt_logprobs = output.prompt_logprobs
        if prompt_logprobs is not None:
            prompt_logprobs = prompt_logprobs[self.num_prompt_logprobs :]
            self.num_prompt_logprobs += len(prompt_logprobs)
        return dataclasses.replace(output, outputs=pieces, prompt_logprobs=prompt_logprobs)


@contextmanager
def uninterrupted():
    """Let Ctrl-C wait until the block is done, so that it never cuts a step in half.

    Only the main thread is ever interrupted. A handler that is not Python's is left alone.
    """
    handler = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return
    caught = []
    signal.signal(signal.SIGINT, lambda *args: caught.append(args))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
        if caught:
            handler(*caught[0])


def load_engine(
    model: str | Path | None, tokenizer: str | Path | None, engine_args: dict[str, Any]
) -> tuple[Engine, Tokenizer]:
    """An engine for a model, and the tokenizer that goes with it; see `LLM` for the arguments."""
    config = EngineConfig(model=None if model is None else str(model), **engine_args)
    return make_engine(config), Tokenizer.from_pretrained(tokenizer or model)


class LLM:
    """A model, its tokenizer and an engine: the door for offline use, named as in vLLM.

    Args:
        model: a folder or hub id of a GPT-2; None is the model that ships with the package.
        tokenizer: a folder or hub id of another tokenizer; None is the model's own.
        engine_args: the fields of `EngineConfig`.

    Attributes:
        engine: serves the requests; its observers see every step.
        tokenizer: text to token ids and back.
        output_processor: steps the engine and writes the text of its outputs.

    Raises:
        TypeError: an engine argument that does not exist.
        ValueError: an engine argument out of range.
        ModelLoadError: a model or tokenizer that is missing or cannot be used.
    """

    def __init__(
        self,
        model: str | Path | None = None,
        *,
        tokenizer: str | Path | None = None,
        **engine_args,
    ):
        self.engine, self.tokenizer = load_engine(model, tokenizer, engine_args)
        self.output_processor = OutputProcessor(self.engine, self.tokenizer)
        self.request_counter = itertools.count()

    def make_requests(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None,
    ) -> list[Request]:
        """Tokenize the prompts and pair each with its sampling parameters."""
        prompts = as_prompt_list(prompts)
        if sampling_params is None:
            sampling_params = SamplingParams()
        if isinstance(sampling_params, SamplingParams):
            sampling_params = [sampling_params] * len(prompts)
        if not isinstance(sampling_params, list | tuple):
            raise TypeError(
                "sampling_params must be a SamplingParams or a list of them, got "
                f"{sampling_params!r:.80}"
            )
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params must be one for all or one per prompt, got "
                f"{len(sampling_params)} for {len(prompts)} prompts"
            )
        pairs = enumerate(zip(prompts, sampling_params, strict=True))
        return [
            make_request(
                self.tokenizer, prompt, params, str(next(self.request_counter)), f"prompts[{i}]"
            )
            for i, (prompt, params) in pairs
        ]

    def run(self, requests: list[Request]) -> Iterator[GenerationOutput]:
        """Step the engine until the requests are finished; yields the outputs that grew.

        Whatever ends it early (`close`, an exception, Ctrl-C) aborts what is left.
        """
        inbox: dict[str, GenerationOutput] = {}
        unfinished: set[str] = set()
        try:
            with uninterrupted():
                for request in requests:
                    self.output_processor.add_request(request, inbox)
                    unfinished.add(request.request_id)
            while unfinished:
                if not inbox:
                    self.step()
                    continue
                output = inbox.pop(next(iter(inbox)))
                if output.finished:
                    unfinished.remove(output.request_id)
                yield output
        finally:
            with uninterrupted():
                for request_id in unfinished:
                    self.output_processor.abort(request_id)

    def step(self):
        """One step of the engine; each output that grew goes to the call that waits for it."""
        with uninterrupted():
            for inbox, output in self.output_processor.step():
                inbox[output.request_id] = output

    def deltas(self, requests: list[Request]) -> Iterator[GenerationOutput]:
        """Yield what each step adds to the requests."""
        streams = {
            request.request_id: DeltaStream(request.sampling_params.n) for request in requests
        }
        with closing(self.run(requests)) as outputs:
            for output in outputs:
                yield streams[output.request_id].delta(output)

    def stream(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
    ) -> Iterator[GenerationOutput]:
        """Continue every prompt; yields outputs that hold only new text and token ids.

        The pieces of a request add up to its output from `generate`. Leaving the loop early
        aborts the requests that are not finished. Streams may be interleaved; each step
        serves them all.
        """
        return self.deltas(self.make_requests(prompts, sampling_params))

    def generate(
        self,
        prompts: Prompt | list[Prompt],
        sampling_params: SamplingParams | list[SamplingParams] | None = None,
        use_tqdm: bool = True,
    ) -> list[GenerationOutput]:
        """Continue every prompt to its end; the outputs come in the order of the prompts.

        `sampling_params` is one for all prompts or a list with one for each. A prompt that
        cannot be served (empty, too long, an id out of range) has an output with `error` set;
        the others are not affected.
        """
        requests = self.make_requests(prompts, sampling_params)
        finished = {}
        with (
            closing(self.run(requests)) as outputs,
            tqdm(total=len(requests), desc="Prompts", disable=not use_tqdm) as progress,
        ):
            for output in outputs:
                if output.finished:
                    finished[output.request_id] = output
                    progress.update()
        return [finished[request.request_id] for request in requests]


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
        mailboxes: by request id, of the consumers that have not had their last output.
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
        outputs += self.output_processor.step()
        return errors + [(mailbox, snapshot(output)) for mailbox, output in outputs]

    def _close(self, cause: BaseException | None):
        """Tell every consumer, end the thread, and give back what the requests hold."""
        self.dead = "was shut down" if cause is None else f"died: {cause!r}"
        self._cause = cause
        for mailbox in self.mailboxes.values():
            mailbox.put(self._dead_error())
        self._thread.shutdown()
        with suppress(Exception):  # an engine that died need not be in order
            for request_id in list(self.output_processor.inboxes):
                self.output_processor.abort(request_id)

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
