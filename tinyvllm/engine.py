"""Plan, execute, update, and tell: the loop that serves many requests at once, and knows tokens but
no text.

Built, step by step, in notebooks/07_engine.ipynb.
"""

import random
import time
from collections.abc import Callable
from dataclasses import dataclass
from hashlib import blake2b
from typing import Protocol

import numpy as np

from tinyvllm.config import EngineConfig
from tinyvllm.execution_batch import ExecutionBatch, ModelRunnerOutput, TokenLogprobs, flatten
from tinyvllm.kv_cache import KVCacheManager
from tinyvllm.request import (
    INT64_MAX,
    INT64_MIN,
    CompletionOutput,
    GenerationOutput,
    Logprob,
    Request,
    check_integer,
    check_request_id,
    is_token_id,
    shown,
)
from tinyvllm.scheduler import Scheduler, SchedulerOutput
from tinyvllm.sequence import Sequence


class Runner(Protocol):
    """What the engine asks of a model: tensors in, tokens out, no policy.

    Attributes:
        vocab_size: token ids are below it.
        max_model_len: the most tokens of a sequence that the model can take.
        num_blocks: blocks of its KV cache, the null block included.
        block_size: tokens that a block holds.
    """

    vocab_size: int
    max_model_len: int
    num_blocks: int
    block_size: int

    def execute(self, batch: ExecutionBatch) -> ModelRunnerOutput:
        """Run the model over the batch and sample the rows of `batch.logits_indices`."""


class MockModelRunner:
    """A model without a network: the next token is a hash of the tokens that came before.

    It is honest about memory. Every token and its position is stored by `slot_mapping`, and
    the context is read back through `block_table` alone, so a wrong slot, table or position,
    or a block that is shared by mistake, changes the answer. It is always sure: it knows no
    probabilities but 1.

    Args:
        vocab_size: ids are drawn from 0 to vocab_size - 1.
        num_blocks, block_size: of the KV cache.
        max_model_len: the most tokens of a sequence.
    """

    def __init__(
        self,
        vocab_size: int = 1000,
        num_blocks: int = 64,
        block_size: int = 16,
        max_model_len: int = 1024,
    ):
        self.vocab_size = vocab_size
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.max_model_len = max_model_len
        self.slots = np.full((num_blocks, block_size, 2), -1, np.int64)  # (token, position)

    def _answer(self, context: np.ndarray) -> int:
        digest = blake2b(context.tobytes(), digest_size=8).digest()
        return int.from_bytes(digest, "little") % self.vocab_size

    def next_token(self, token_ids: list[int]) -> int:
        """The token that follows these: the oracle, without any cache."""
        return self._answer(np.stack([token_ids, np.arange(len(token_ids))], 1, dtype=np.int64))

    def execute(self, batch: ExecutionBatch) -> ModelRunnerOutput:
        """Store the batch's tokens, then answer each sampled row from what its table reads."""
        flat = self.slots.reshape(-1, 2)
        flat[batch.slot_mapping] = np.stack([batch.input_ids, batch.positions], axis=1)
        sampled = []
        for row in np.searchsorted(batch.query_start_loc, batch.logits_indices, "right") - 1:
            context = self.slots[batch.block_table[row]].reshape(-1, 2)[: batch.seq_lens[row]]
            sampled.append(self._answer(context))
        reported = np.array(sampled, np.int64)[batch.sampling.logprob_rows]
        return ModelRunnerOutput(
            sampled, self._certain(reported), self._certain(batch.prompt_targets)
        )

    def _certain(self, token_ids: np.ndarray) -> TokenLogprobs:
        """Each token with probability 1."""
        ones = np.ones(len(token_ids), np.int64)
        return TokenLogprobs(token_ids[:, None], np.zeros((len(ones), 1), np.float32), ones)


@dataclass(frozen=True)
class StepEvent:
    """What one step did, for traces, figures and metrics. All ids are sequence ids.

    Attributes:
        step: number of the step, from 0.
        time: seconds on the monotonic clock when the step ended.
        scheduled: (id, start position, number of tokens), in execution order.
        new, resumed, preempted: ids.
        hits: tokens found in the prefix cache, of each admitted sequence.
        sampled: the token that each sequence got.
        finished: finish reason of each sequence that ended in this step.
        block_ids: block table of each scheduled sequence, as the model saw it.
        num_running, num_waiting, free_blocks: after the step.
    """

    step: int
    time: float
    scheduled: list[tuple[str, int, int]]
    new: list[str]
    resumed: list[str]
    preempted: list[str]
    hits: dict[str, int]
    sampled: dict[str, int]
    finished: dict[str, str]
    block_ids: dict[str, list[int]]
    num_running: int
    num_waiting: int
    free_blocks: int


class Engine:
    """Serves many requests at once, all that are scheduled in each `step`; vllm/v1/engine/core.py.

    Args:
        config: the settings; `max_model_len` may still be open.
        runner: executes batches; it owns the KV cache.
        eos_token_id: the model's end-of-sequence token; None if it has none.

    Attributes:
        observers: called with a `StepEvent` after every step.
        num_steps: steps so far.
    """

    def __init__(self, config: EngineConfig, runner: Runner, eos_token_id: int | None = None):
        self.config = config.resolve(runner.max_model_len)
        check_integer("block_size", config.block_size, runner.block_size, runner.block_size)
        if eos_token_id is not None:
            check_integer("eos_token_id", eos_token_id, 0, runner.vocab_size - 1)
        self.runner = runner
        self.kv = KVCacheManager(
            runner.num_blocks, self.config.block_size, self.config.enable_prefix_caching
        )
        self.scheduler = Scheduler(self.config, self.kv, eos_token_id)
        self.observers: list[Callable[[StepEvent], None]] = []
        self.num_steps = 0
        self._outputs: dict[str, GenerationOutput] = {}  # of requests that are alive
        self._sequences: dict[str, list[Sequence]] = {}
        self._undelivered: dict[str, GenerationOutput] = {}  # refused, or held back by an error
        self._num_arrived = 0
        self._seeds = random.Random(self.config.seed)

    def _refusal(self, request: Request) -> str | None:
        """Why a request can never be served; None if it can."""
        prompt, max_model_len = request.prompt_token_ids, self.config.max_model_len
        if not prompt:
            return "prompt_token_ids must hold at least one token, got none"
        for token_id in prompt:
            if not is_token_id(token_id) or token_id >= self.runner.vocab_size:
                largest = self.runner.vocab_size - 1
                return (
                    f"prompt_token_ids must be integers from 0 to {largest}, got {shown(token_id)}"
                )
        if len(prompt) + 1 > max_model_len:
            return (
                f"prompt_token_ids must hold at most {max_model_len - 1} tokens "
                f"(max_model_len {max_model_len} less one to generate), got {len(prompt)}"
            )
        params = request.sampling_params
        return self._wish_refusal(request) or self._memory_refusal(len(prompt), params.max_tokens)

    def _wish_refusal(self, request: Request) -> str | None:
        """Why no token could be chosen as the request wishes; None if one can."""
        params, bad_words = request.sampling_params, request.bad_words_token_ids
        if params.bad_words and bad_words is None:
            return f"bad_words need a tokenizer, which the engine has not, got {params.bad_words!r}"
        bad_words = bad_words or []
        for name, token_ids in (
            ("stop_token_ids", params.stop_token_ids),
            ("logit_bias", params.logit_bias),
            ("allowed_token_ids", params.allowed_token_ids or []),
            ("bad_words", [token_id for word in bad_words for token_id in word]),
        ):
            unknown = [i for i in token_ids if not 0 <= i < self.runner.vocab_size]
            if unknown:
                largest = self.runner.vocab_size - 1
                return f"{name} must hold token ids from 0 to {largest}, got {unknown[0]}"
        allowed = params.allowed_token_ids or range(self.runner.vocab_size)
        banned = {word[0] for word in bad_words if len(word) == 1}
        if params.min_tokens:
            banned |= {*params.stop_token_ids, self.scheduler.eos_token_id}
        if banned.issuperset(allowed):
            return "allowed_token_ids, bad_words and min_tokens leave no token to generate"
        return None

    def _memory_refusal(self, num_prompt: int, max_tokens: int | None) -> str | None:
        """Why a request could outgrow the whole KV cache; None if it cannot."""
        limit = self.config.max_model_len
        longest = limit if max_tokens is None else min(num_prompt + max_tokens, limit)
        # The last token of a sequence needs no slot: nothing comes after it.
        needed, usable = self.kv.num_blocks_for(longest - 1), self.kv.num_usable_blocks
        if needed <= usable:
            return None
        fitting = usable * self.config.block_size + 1 - num_prompt
        advice = f"max_tokens of at most {fitting}" if fitting > 0 else "a shorter prompt"
        return (
            f"max_tokens {max_tokens} after a prompt of {num_prompt} tokens may need {needed} "
            f"KV blocks, the cache has {usable}: ask for {advice}, or give the cache more blocks"
        )

    def add_request(self, request: Request) -> GenerationOutput:
        """Accept a request. One that can never be served does not raise and harms nobody: the
        next `step` returns its output with `error` set.

        Returns:
            The request's output, which will grow.

        Raises:
            ValueError: the request id is in use.
        """
        request_id, params = request.request_id, request.sampling_params
        ids = [request_id] if params.n == 1 else [f"{i}_{request_id}" for i in range(params.n)]
        in_use = request_id in self._outputs or request_id in self._undelivered
        if in_use or any(i in self.scheduler.sequences for i in ids):
            raise ValueError(f"request_id {request_id!r} is in use")
        output = GenerationOutput(request_id, request.prompt, request.prompt_token_ids)
        output.error = self._refusal(request)
        if output.error is not None:
            output.finished = True
            self._undelivered[request_id] = output
            return output
        seed = params.seed
        if seed is None:
            seed = self._seeds.randint(INT64_MIN, INT64_MAX)
        output.outputs = [CompletionOutput(index) for index in range(params.n)]
        if params.logprobs is not None:
            for completion in output.outputs:
                completion.logprobs, completion.cumulative_logprob = [], 0.0
        if params.prompt_logprobs is not None:
            output.prompt_logprobs = [None]  # nothing predicts the first token
        self._outputs[request_id], self._sequences[request_id] = output, []
        for index, seq_id in enumerate(ids):
            seq = Sequence(seq_id, request, index, self._num_arrived, as_int64(seed + index))
            self._num_arrived += 1
            self._sequences[request_id].append(seq)
            self.scheduler.add(seq)
        return output

    def has_unfinished_requests(self) -> bool:
        """Whether a further `step` has anything to do or to deliver."""
        return bool(self._outputs or self._undelivered)

    def step(self) -> list[GenerationOutput]:
        """Advance every scheduled sequence, and return the outputs that changed.

        An output is the request's own and grows from step to step; copy what must not change.
        """
        # What an observer's error held back may end at a stop string: it goes before more tokens.
        held_back = any(output.error is None for output in self._undelivered.values())
        changed = self._advance() if self._outputs and not held_back else []
        undelivered, self._undelivered = self._undelivered, {}
        return list(undelivered.values()) + changed

    def _advance(self) -> list[GenerationOutput]:
        """Plan, execute, update: one step of everything that is alive."""
        plan, out = self._plan_and_execute()
        # A sequence may have been aborted while the model ran; its token is dropped.
        sampled = [
            (seq, token_id)
            for seq, token_id in zip(plan.sampling, out.sampled_token_ids, strict=True)
            if not seq.status.finished
        ]
        # The tables as the model saw them: `update` takes away those of finished sequences.
        block_ids = {}
        if self.observers:
            block_ids = {seq.seq_id: self.kv.block_ids(seq) for seq, _, _ in plan.scheduled}
        self._record_logprobs(plan, out)
        finished = self.scheduler.update(plan, out.sampled_token_ids)
        changed = self._record(sampled, finished)
        self.num_steps += 1
        try:
            self._notify(plan, sampled, finished, block_ids)
        except BaseException:  # an observer's error: the outputs go out with the next step
            self._undelivered |= {output.request_id: output for output in changed}
            raise
        return changed

    def _plan_and_execute(self) -> tuple[SchedulerOutput, ModelRunnerOutput]:
        """The step's plan, and what the model made of it."""
        plan = self.scheduler.schedule()
        return plan, self._execute(plan)

    def _execute(self, plan: SchedulerOutput) -> ModelRunnerOutput:
        """Run the model over the plan; one token for each sequence in `plan.sampling`."""
        if not plan.scheduled:  # under priority a step may do nothing but preempt
            return ModelRunnerOutput([])
        try:
            return self.runner.execute(flatten(plan, self.kv, self.scheduler.eos_token_id))
        except BaseException:  # an interrupt too: no block may promise what it does not hold
            self.scheduler.rollback(plan)
            raise

    def _record(
        self, sampled: list[tuple[Sequence, int]], finished: list[Sequence]
    ) -> list[GenerationOutput]:
        """Write the step's tokens into the outputs; return those that changed, once each."""
        changed = {}
        for seq, token_id in sampled:
            output = self._outputs[seq.request.request_id]
            output.outputs[seq.index].token_ids.append(token_id)
            if seq.index == 0:
                output.num_cached_tokens = seq.num_cached_tokens
            changed[output.request_id] = output
        for seq in finished:
            output = self._outputs[seq.request.request_id]
            completion = output.outputs[seq.index]
            completion.finish_reason = seq.finish_reason
            completion.stop_reason = seq.stop_reason
            output.finished = all(completion.finished for completion in output.outputs)
            if output.finished:
                self._forget(output.request_id)
        return list(changed.values())

    def _forget(self, request_id: str):
        del self._outputs[request_id]
        del self._sequences[request_id]

    def _record_logprobs(self, plan: SchedulerOutput, out: ModelRunnerOutput):
        """Write the log-probabilities of sampled and of prompt tokens into the outputs."""
        reporting = [seq for seq in plan.sampling if seq.params.logprobs is not None]
        for row, seq in enumerate(reporting):
            if not seq.status.finished:
                completion = self._outputs[seq.request.request_id].outputs[seq.index]
                entries = logprob_dict(out.logprobs, row, seq.params.logprobs)
                completion.logprobs.append(entries)
                completion.cumulative_logprob += float(out.logprobs.logprobs[row, 0])
        row = 0
        for seq, start, num in plan.scheduled:
            if seq.skip_reading_prefix_cache:
                for position in range(start + 1, min(start + num + 1, seq.num_prompt_tokens)):
                    self._record_prompt_logprob(seq, position, out.prompt_logprobs, row)
                    row += 1

    def _record_prompt_logprob(self, seq: Sequence, position: int, scores: TokenLogprobs, row: int):
        output = self._outputs.get(seq.request.request_id)
        if not seq.status.finished and position == len(output.prompt_logprobs):
            output.prompt_logprobs.append(logprob_dict(scores, row, seq.params.prompt_logprobs))

    def _notify(
        self,
        plan: SchedulerOutput,
        sampled: list[tuple[Sequence, int]],
        finished: list[Sequence],
        block_ids: dict[str, list[int]],
    ):
        if not self.observers:
            return
        scheduled = [(seq.seq_id, start, num) for seq, start, num in plan.scheduled]
        admitted = {seq.seq_id for seq in plan.new + plan.resumed}
        event = StepEvent(
            step=self.num_steps - 1,
            time=time.monotonic(),
            scheduled=scheduled,
            new=[seq.seq_id for seq in plan.new],
            resumed=[seq.seq_id for seq in plan.resumed],
            preempted=[seq.seq_id for seq in plan.preempted],
            hits={seq_id: start for seq_id, start, _ in scheduled if seq_id in admitted},
            sampled={seq.seq_id: token_id for seq, token_id in sampled},
            finished={seq.seq_id: seq.finish_reason for seq in finished},
            block_ids=block_ids,
            num_running=len(self.scheduler.running),
            num_waiting=len(self.scheduler.waiting),
            free_blocks=self.kv.num_free_blocks,
        )
        for observer in self.observers:
            observer(event)

    def abort(self, request_id: str) -> GenerationOutput | None:
        """End a request early, in whatever state it is; no later `step` mentions it.

        Returns its output so far, or None if no such request is alive (abort it twice, or
        after it finished, and nothing happens).
        """
        check_request_id(request_id)
        undelivered = self._undelivered.pop(request_id, None)
        output = self._outputs.get(request_id)
        if output is None:
            return undelivered  # refused, or finished in a step that failed; else None
        for seq in self._sequences[request_id]:
            if not seq.status.finished:
                self.scheduler.abort(seq.seq_id)
                output.outputs[seq.index].finish_reason = seq.finish_reason
        output.finished = True
        self._forget(request_id)
        return output

    def stop(self, output: GenerationOutput, index: int, stop_reason: str):
        """End one continuation because of its text, which holds the stop string `stop_reason`.

        That is its finish reason even if the token that completed the string has also ended it
        for another. In vLLM, too, the front end finds stop strings.
        """
        completion = output.outputs[index]
        completion.finish_reason, completion.stop_reason = "stop", stop_reason
        if self._outputs.get(output.request_id) is output:
            seq = self._sequences[output.request_id][index]
            if not seq.status.finished:
                self.scheduler.abort(seq.seq_id)
            output.finished = all(completion.finished for completion in output.outputs)
            if output.finished:
                self._forget(output.request_id)

    def explain(self, request_id: str) -> str:
        """Say where a request is and what it waits for, a line for each live sequence.

        Raises:
            KeyError: no such request is alive.
        """
        check_request_id(request_id)
        if request_id not in self._sequences:
            raise KeyError(f"no request {request_id!r} is alive")
        seq_ids = [seq.seq_id for seq in self._sequences[request_id] if not seq.status.finished]
        return "\n".join(f"{seq_id}: {self.scheduler.explain(seq_id)}" for seq_id in seq_ids)

    def check_invariants(self):
        """Raise an AssertionError that names the first broken rule. Call it between steps."""
        self.scheduler.check_invariants()
        self.kv.check_invariants(self.scheduler.running)
        served = {seq.request.request_id for seq in self.scheduler.sequences.values()}
        if served != self._outputs.keys():
            raise AssertionError(f"{sorted(self._outputs)} are alive, {sorted(served)} are served")


def as_int64(number: int) -> int:
    """Wrap around like a 64-bit integer: after the largest seed comes the smallest."""
    return (number - INT64_MIN) % 2**64 + INT64_MIN


def logprob_dict(scores: TokenLogprobs, row: int, num_logprobs: int) -> dict[int, Logprob]:
    """The token at this place and the `num_logprobs` likeliest (-1: all), by token id."""
    ids, logprobs = scores.token_ids[row].tolist(), scores.logprobs[row].tolist()
    end = len(ids) if num_logprobs == -1 else min(1 + num_logprobs, len(ids))
    entries = {ids[0]: Logprob(logprobs[0], int(scores.ranks[row]))}
    for rank in range(1, end):
        entries.setdefault(ids[rank], Logprob(logprobs[rank], rank))
    return entries
