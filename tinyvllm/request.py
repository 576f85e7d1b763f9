"""What was asked, and what is given back: requests, sampling parameters and outputs.

Built, step by step, in notebooks/01_request.ipynb.
"""

from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
GREEDY_BELOW = 1e-5  # vLLM's threshold: a smaller temperature means argmax
MAX_N = 16384  # vLLM's limit too: one request must not bring a million sequences


def is_integer(value: object) -> bool:
    """Whether `value` is an integer, and no bool: `max_tokens=True` is a mistake, not a 1."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def check_integer(name: str, value: object, low: int, high: float = inf) -> None:
    """Raise a ValueError that names field, value and range unless `low <= value <= high`."""
    if not is_integer(value) or not low <= value <= high:
        allowed = f"an integer >= {low}" if high == inf else f"an integer from {low} to {high}"
        raise ValueError(f"{name} must be {allowed}, got {value!r}")


def check_real(name: str, value: object, low: float, high: float) -> None:
    """Raise a ValueError that names field, value and range unless `low <= value <= high`.

    NaN compares false with everything, so the question is asked in this direction.
    """
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high:
        raise ValueError(f"{name} must be a number from {low} to {high}, got {value!r}")


def check_flag(name: str, value: object) -> None:
    """Raise a ValueError that names field and value unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {value!r}")


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of a request are chosen, and when to stop.

    Names, defaults and ranges are vLLM's (`vllm/sampling_params.py`), except that `cache_salt`
    and `priority`, which vLLM takes beside the prompt, are fields here. Frozen, so one object
    can serve many requests; `dataclasses.replace` makes a changed copy and checks it.

    Attributes:
        n: sequences to generate from one prompt; sequence i draws with `seed + i`.
        temperature: 0 is greedy (argmax); larger values, up to 2, flatten the distribution.
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
        self._check_numbers()
        self._check_the_rest()

    def _check_numbers(self):
        check_integer("n", self.n, 1, MAX_N)
        check_real("temperature", self.temperature, 0.0, 2.0)
        if self.seed is not None:
            check_integer("seed", self.seed, INT64_MIN, INT64_MAX)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)

    def _check_the_rest(self):
        for name in ("ignore_eos", "detokenize", "skip_special_tokens"):
            check_flag(name, getattr(self, name))
        check_integer("priority", self.priority, -(2**31), 2**31 - 1)
        ids = [] if self.stop_token_ids is None else self.stop_token_ids
        is_list = isinstance(ids, list | tuple | set)
        if not is_list or not all(is_integer(i) and i >= 0 for i in ids):
            raise ValueError(f"stop_token_ids must be None or a list of integers >= 0, got {ids!r}")
        # A frozen dataclass is still written to once, here: the field always holds a list.
        object.__setattr__(self, "stop_token_ids", list(ids))
        salt = self.cache_salt
        if salt is not None and (not isinstance(salt, str) or not salt):
            raise ValueError(f"cache_salt must be None or a non-empty string, got {salt!r}")

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the logits rather than a draw."""
        return self.temperature < GREEDY_BELOW


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it, as the engine receives it.

    Attributes:
        request_id: unique among the requests that the engine holds.
        prompt_token_ids: the prompt, already tokenized; the engine judges the ids.
        sampling_params: how to continue, and when to stop.
        prompt: the text the token ids came from, if there was one.
        arrival_time: seconds on the engine's monotonic clock, for metrics.

    Raises:
        ValueError: a field has the wrong type; the message names field and value.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prompt: str | None = None
    arrival_time: float = 0.0

    def __post_init__(self):
        if not isinstance(self.request_id, str) or not self.request_id:
            raise ValueError(f"request_id must be a non-empty string, got {self.request_id!r}")
        ids, params = self.prompt_token_ids, self.sampling_params
        if not isinstance(ids, list | tuple):
            raise ValueError(f"prompt_token_ids must be a list of integers, got {ids!r}")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {params!r}")
        object.__setattr__(self, "prompt_token_ids", list(ids))


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

    One object a request: the engine appends to it, so copy what must not change.

    Attributes:
        request_id, prompt, prompt_token_ids: as in the request.
        prompt_logprobs: per prompt token, where asked for.
        outputs: one `CompletionOutput` for each of the `n` continuations, by index.
        finished: whether no continuation will get a further token.
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
