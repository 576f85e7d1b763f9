"""A sequence: the tokens of one continuation, and how many of them the KV cache holds.

Built, step by step, in notebooks/02_sequence.ipynb.
"""

from enum import Enum

from tinyvllm.request import Request

FINISH_REASONS = ("stop", "length", "abort")


class SequenceStatus(Enum):
    """Where a sequence is in its life. The value of a finished status is its `finish_reason`."""

    WAITING = "waiting"
    RUNNING = "running"
    PREEMPTED = "preempted"
    FINISHED_STOPPED = "stop"
    FINISHED_LENGTH = "length"
    FINISHED_ABORTED = "abort"

    @property
    def finished(self) -> bool:
        """Whether the sequence has left the scheduler for good."""
        return self.value in FINISH_REASONS


class Sequence:
    """One continuation of one request: what the scheduler moves around.

    A request with `n > 1` has n sequences. There are no phases: a step lets
    `num_computed_tokens` (tokens with keys and values in the cache) catch up with
    `num_tokens` (tokens known). Follows `vllm/v1/request.py`.

    Args:
        seq_id: unique among the sequences that the scheduler holds.
        request: the request that this sequence continues.
        index: which of the request's continuations this is.
        arrival: position in the order of arrival; breaks ties between equal priorities.
        seed: what this sequence's draws are a function of.
    """

    # Slots: the scheduler reads these attributes for every sequence in every step.
    __slots__ = (
        "arrival",
        "block_hashes",
        "edits_logits",
        "index",
        "num_cached_tokens",
        "num_computed_tokens",
        "num_preemptions",
        "num_prompt_tokens",
        "num_tokens",
        "params",
        "request",
        "seed",
        "seq_id",
        "skip_reading_prefix_cache",
        "status",
        "stop_reason",
        "token_ids",
    )

    def __init__(
        self, seq_id: str, request: Request, index: int = 0, arrival: int = 0, seed: int = 0
    ):
        self.seq_id = seq_id
        self.request = request
        self.params = request.sampling_params
        self.index = index
        self.arrival = arrival
        self.seed = seed
        self.status = SequenceStatus.WAITING
        self.stop_reason: int | str | None = None
        self.edits_logits = self.params.edits_logits
        # Only a token that is computed can be scored. One continuation scores the prompt for all.
        self.skip_reading_prefix_cache = self.params.prompt_logprobs is not None and index == 0

        self.token_ids = list(request.prompt_token_ids)  # prompt + output
        self.num_prompt_tokens = len(self.token_ids)
        self.num_tokens = len(self.token_ids)
        self.num_computed_tokens = 0
        self.num_cached_tokens = -1  # -1: never admitted yet
        self.num_preemptions = 0
        self.block_hashes: list[bytes] = []  # one per full block; survive preemption

    def __repr__(self) -> str:
        return (
            f"Sequence({self.seq_id!r}, {self.status.value}, "
            f"{self.num_computed_tokens}/{self.num_tokens} tokens computed)"
        )

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far."""
        return self.num_tokens - self.num_prompt_tokens

    @property
    def output_token_ids(self) -> list[int]:
        """The ids generated so far, as a new list."""
        return self.token_ids[self.num_prompt_tokens :]

    def append(self, token_id: int):
        """Add a sampled token. Its keys and values are not computed yet."""
        self.token_ids.append(token_id)
        self.num_tokens += 1

    def check_stop(self, eos_token_id: int | None, max_model_len: int) -> bool:
        """Apply the stop rules to the newest token; True if the sequence has just finished.

        The order matters where two rules hold at once: a token ends the sequence before a
        length does (`vllm/v1/core/sched/utils.py`, `check_stop`).
        """
        params = self.params
        token_id = self.token_ids[-1]
        if token_id == eos_token_id and not params.ignore_eos:
            self.status = SequenceStatus.FINISHED_STOPPED
            return True
        # With `ignore_eos` a user may still list the end-of-sequence id as a stop token.
        if token_id in params.stop_token_ids:
            self.status = SequenceStatus.FINISHED_STOPPED
            self.stop_reason = token_id
            return True
        num_output_tokens = self.num_tokens - self.num_prompt_tokens
        if num_output_tokens == params.max_tokens or self.num_tokens >= max_model_len:
            self.status = SequenceStatus.FINISHED_LENGTH
            return True
        return False

    @property
    def finish_reason(self) -> str | None:
        """Why the sequence ended: "stop", "length" or "abort"; None while it is alive."""
        return self.status.value if self.status.finished else None
