"""What was asked, and what is given back: requests, sampling parameters and outputs.

Built, step by step, in notebooks/01_request.ipynb.
"""

from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real


def check_integer(name: str, value: object, low: int, high: int | None = None) -> None:
    """Raise a ValueError that names field, value and range unless `low <= value <= high`.

    `True` and `False` are not integers here: `max_tokens=True` is a mistake, not a 1.
    """
    allowed = f"an integer >= {low}" if high is None else f"an integer from {low} to {high}"
    if not isinstance(value, Integral) or isinstance(value, bool):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_real(name: str, value: object, low: float, high: float) -> None:
    """Raise a ValueError that names field, value and range unless `low <= value <= high`.

    An infinite `high` still means a finite number, and NaN compares false with everything.
    """
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    if not is_number or not low <= value <= high or value == inf:
        allowed = f"a finite number >= {low}" if high == inf else f"a number from {low} to {high}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise a ValueError that names field and value unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
GREEDY_BELOW = 1e-5  # vLLM's threshold: a smaller temperature means argmax


@dataclass
class SamplingParams:
    """How the next tokens of a request are chosen, and when to stop.

    Names, defaults and ranges are those of vLLM (`vllm/sampling_params.py`), except that
    `cache_salt` and `priority`, which vLLM takes beside the prompt, are fields here.

    Attributes:
        n: sequences to generate from one prompt; sequence i draws with `seed + i`.
        temperature: 0 is greedy (argmax); larger values flatten the distribution.
        seed: makes the draws a function of this number alone. None: the engine picks one.
        max_tokens: the most tokens to generate. None: up to `max_model_len`.
        ignore_eos: go on after the model's end-of-sequence token.
        stop_token_ids: further token ids that end a sequence; they stay in `token_ids`.
        detokenize: turn the tokens into text.
        skip_special_tokens: leave tokens such as the end-of-sequence one out of the text.
        cache_salt: requests share cached prefixes only with requests of the same salt.
        priority: smaller is served earlier under `scheduling_policy="priority"`.

    Raises:
        ValueError: a field is out of range; the message names field, value and range.
    """

    n: int = 1
    temperature: float = 1.0
    seed: int | None = None
    max_tokens: int | None = 16
    ignore_eos: bool = False
    stop_token_ids: list[int] | None = None
    detokenize: bool = True
    skip_special_tokens: bool = True
    cache_salt: str | None = None
    priority: int = 0

    def __post_init__(self):
        check_integer("n", self.n, 1)
        check_real("temperature", self.temperature, 0.0, inf)
        if self.seed is not None:
            check_integer("seed", self.seed, INT64_MIN, INT64_MAX)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        check_flag("ignore_eos", self.ignore_eos)
        check_flag("detokenize", self.detokenize)
        check_flag("skip_special_tokens", self.skip_special_tokens)
        self.stop_token_ids = list(self.stop_token_ids or [])
        for token_id in self.stop_token_ids:
            check_integer("stop_token_ids", token_id, 0)
        if self.cache_salt is not None and (
            not isinstance(self.cache_salt, str) or not self.cache_salt
        ):
            raise ValueError(
                f"cache_salt must be None or a non-empty string, got {self.cache_salt!r}"
            )
        check_integer("priority", self.priority, -(2**31), 2**31 - 1)

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the logits rather than a draw."""
        return self.temperature < GREEDY_BELOW


@dataclass
class Request:
    """One prompt and how to continue it, as the engine receives it.

    Attributes:
        request_id: unique among the requests that the engine holds.
        prompt_token_ids: the prompt, already tokenized.
        sampling_params: how to continue, and when to stop.
        prompt: the text the token ids came from, if there was one.
        arrival_time: seconds on the engine's monotonic clock, for metrics.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prompt: str | None = None
    arrival_time: float = 0.0

    def __post_init__(self):
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError(f"request_id must be a non-empty string, got {self.request_id!r}")
        if not isinstance(self.sampling_params, SamplingParams):
            raise ValueError(
                f"sampling_params must be a SamplingParams, got {self.sampling_params!r}"
            )
        self.prompt_token_ids = list(self.prompt_token_ids)


@dataclass
class CompletionOutput:
    """One continuation of a prompt; the fields of vLLM's class of this name (`vllm/outputs.py`).

    Attributes:
        index: which of the request's `n` continuations this is.
        text: the generated text, without the prompt.
        token_ids: the generated ids, a final end-of-sequence token included.
        cumulative_logprob: sum of the log-probabilities of `token_ids`, where asked for.
        logprobs: per token, where asked for.
        finish_reason: "stop", "length" or "abort"; None while the sequence runs.
        stop_reason: the stop token id or stop string that ended it; None after an
            end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        """Whether no further token will come."""
        return self.finish_reason is not None


@dataclass
class GenerationOutput:
    """All that is known of a request so far; the fields of vLLM's `RequestOutput` and `error`.

    Attributes:
        request_id, prompt, prompt_token_ids: as in the request.
        prompt_logprobs: per prompt token, where asked for.
        outputs: one `CompletionOutput` for each of the `n` continuations, by index.
        finished: whether every continuation is finished.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        metrics: times of the request's life, where kept.
        error: why the request was refused; None for a request that was served.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: object | None = None
    error: str | None = None
