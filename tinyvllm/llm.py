"""Offline inference: any number of prompts in, their continuations out, whole or as they grow.

Built, step by step, in notebooks/15_llm.ipynb.
"""

import dataclasses
import itertools
import signal
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from numbers import Integral
from pathlib import Path

from tqdm import tqdm

from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine
from tinyvllm.model_runner import ModelRunner
from tinyvllm.request import CompletionOutput, GenerationOutput, Request, SamplingParams
from tinyvllm.tokenizer import IncrementalDetokenizer, Tokenizer

Prompt = str | list[int] | dict  # dict: {"prompt": str} or {"prompt_token_ids": list[int]}


def is_token_ids(prompt: object) -> bool:
    """Whether `prompt` is a list of integers."""
    return isinstance(prompt, list | tuple) and all(isinstance(i, Integral) for i in prompt)


def as_prompt_list(prompts: Prompt | list[Prompt]) -> list[Prompt]:
    """One prompt or a list of them, as a list. `[]` is a list of no prompts."""
    if isinstance(prompts, str | dict) or (prompts and is_token_ids(prompts)):
        return [prompts]
    return list(prompts)


def text_token_ids(completion: CompletionOutput, start: int = 0) -> list[int]:
    """The ids from `start` on that become text: all but a token that ended the sequence.

    The end-of-sequence token, or a stop token, stays in `token_ids` and out of `text`, as in
    vLLM.
    """
    stop = -1 if completion.finish_reason == "stop" else None
    return completion.token_ids[start:stop]


class DeltaStream:
    """Turns the growing output of one request into pieces that hold only what is new."""

    def __init__(self, tokenizer: Tokenizer, params: SamplingParams):
        self.detokenize = params.detokenize
        skip = params.skip_special_tokens
        self.detokenizers = [IncrementalDetokenizer(tokenizer, skip) for _ in range(params.n)]
        # Per continuation, what was given out: the number of tokens, and the finish reason.
        self.seen = [(0, None)] * params.n

    def delta(self, output: GenerationOutput) -> GenerationOutput:
        """What `output` holds beyond the last call, without continuations that have no news."""
        pieces = []
        for completion in output.outputs:
            state = (len(completion.token_ids), completion.finish_reason)
            if state != self.seen[completion.index]:
                pieces.append(self.completion_delta(completion))
                self.seen[completion.index] = state
        return dataclasses.replace(output, outputs=pieces)

    def completion_delta(self, completion: CompletionOutput) -> CompletionOutput:
        """The new tokens of one continuation, and the text that they complete."""
        start, _ = self.seen[completion.index]
        text, new_ids = "", completion.token_ids[start:]
        if self.detokenize:
            ids = text_token_ids(completion, start)
            detokenizer = self.detokenizers[completion.index]
            text = detokenizer.decode(ids, final=completion.finished)
        return dataclasses.replace(completion, text=text, token_ids=new_ids)


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


class LLM:
    """A model, its tokenizer and an engine: the door for offline use, named as in vLLM.

    Args:
        model: a folder or hub id of a GPT-2; None is the model that ships with the package.
        tokenizer: a folder or hub id of another tokenizer; None is the model's own.
        engine_args: the fields of `EngineConfig`.

    Attributes:
        engine: serves the requests; its observers see every step.
        tokenizer: text to token ids and back.
        inboxes: where the outputs of each live request go, one inbox for each call.

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
        config = EngineConfig(model=None if model is None else str(model), **engine_args)
        runner = ModelRunner(config)
        self.engine = Engine(config, runner, eos_token_id=runner.eos_token_id)
        self.tokenizer = Tokenizer.from_pretrained(tokenizer or model)
        self.request_counter = itertools.count()
        self.inboxes: dict[str, dict[str, GenerationOutput]] = {}

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
        if len(sampling_params) != len(prompts):
            raise ValueError(
                f"sampling_params must be one for all or one per prompt, got "
                f"{len(sampling_params)} for {len(prompts)} prompts"
            )
        parsed = [self.parse_prompt(i, prompt) for i, prompt in enumerate(prompts)]
        return [
            Request(str(next(self.request_counter)), token_ids, params, prompt=text)
            for (text, token_ids), params in zip(parsed, sampling_params, strict=True)
        ]

    def parse_prompt(self, i: int, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text, if there is one, and the token ids of the prompt at position `i`."""
        text, token_ids = None, prompt
        if isinstance(prompt, str):
            text, token_ids = prompt, None
        elif isinstance(prompt, dict):
            text, token_ids = prompt.get("prompt"), prompt.get("prompt_token_ids")
        if token_ids is None and isinstance(text, str):
            try:
                token_ids = self.tokenizer.encode(text)
            except ValueError as error:
                raise ValueError(f"prompts[{i}]: {error}") from error
        if not is_token_ids(token_ids):
            raise TypeError(
                f"prompts[{i}] must be a string, a list of token ids, or a dict with "
                f"'prompt' or 'prompt_token_ids', got {prompt!r:.80}"
            )
        return text, [int(token_id) for token_id in token_ids]

    def run(self, requests: list[Request]) -> Iterator[GenerationOutput]:
        """Step the engine until the requests are finished; yields the outputs that grew.

        Whatever ends it early (`close`, an exception, Ctrl-C) aborts what is left.
        """
        inbox: dict[str, GenerationOutput] = {}
        unfinished = {request.request_id for request in requests}
        self.inboxes.update(dict.fromkeys(unfinished, inbox))
        try:
            with uninterrupted():
                for request in requests:
                    self.engine.add_request(request)
            while unfinished and (inbox or self.engine.has_unfinished_requests()):
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
                    self.engine.abort(request_id)
                for request in requests:
                    del self.inboxes[request.request_id]

    def step(self):
        """One step of the engine; each output that grew goes to the call that waits for it."""
        with uninterrupted():
            for output in self.engine.step():
                if output.request_id in self.inboxes:
                    self.inboxes[output.request_id][output.request_id] = output

    def deltas(self, requests: list[Request]) -> Iterator[GenerationOutput]:
        """Yield what each step adds to the requests."""
        streams = {
            request.request_id: DeltaStream(self.tokenizer, request.sampling_params)
            for request in requests
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
        for request in requests:
            params = request.sampling_params
            if not params.detokenize:
                continue
            for completion in finished[request.request_id].outputs:
                completion.text = self.tokenizer.decode(
                    text_token_ids(completion), params.skip_special_tokens
                )
        return [finished[request.request_id] for request in requests]
