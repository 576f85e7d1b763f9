"""Text in, text out: prompts answered in one call, streamed, or served to many readers at once.

Built, step by step, in notebooks/15_llm.ipynb.
"""

import dataclasses
import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from tqdm import tqdm

from tinyvllm.config import EngineConfig
from tinyvllm.cuda_graphs import make_engine
from tinyvllm.engine import Engine
from tinyvllm.request import CompletionOutput, GenerationOutput, Request, SamplingParams, is_integer
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
        """End a request early, if it has not ended; returns its inbox, for the caller to deliver
        to, and its output so far. None if that was returned before."""
        self.engine.abort(request_id)
        output = self.outputs.get(request_id)
        return None if output is None else self.process(output)


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
        self._busy = False
        self._abandoned: list[str] = []  # ids of requests whose reader has gone

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
            with self.exclusive():
                for request in requests:
                    self.output_processor.add_request(request, inbox)
                    unfinished.add(request.request_id)
            while unfinished:
                if not inbox:
                    lost = unfinished - self.output_processor.inboxes.keys()
                    if lost:
                        raise RuntimeError(f"requests {sorted(lost)} ended, and were not delivered")
                    self.step()
                    continue
                output = inbox.pop(next(iter(inbox)))
                if output.finished:
                    # It may have ended between two steps, or in one that an error cut short.
                    self.output_processor.abort(output.request_id)
                    unfinished.remove(output.request_id)
                yield output
        finally:
            self._abandoned += unfinished
            if not self._busy:
                with self.exclusive():
                    pass

    @contextmanager
    def exclusive(self):
        """The engine is ours: Ctrl-C waits until the block is done, and so do the aborts of
        streams that the garbage collector closes meanwhile."""
        with uninterrupted():
            self._busy = True
            try:
                yield
            finally:
                while self._abandoned:
                    self.output_processor.abort(self._abandoned.pop())
                self._busy = False

    def step(self):
        """One step of the engine; each output that grew goes to the call that waits for it."""
        with self.exclusive():
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
