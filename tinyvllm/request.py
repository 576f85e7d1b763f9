"""What was asked, and what is given back: requests, sampling parameters and outputs.

Built, step by step, in notebooks/01_request.ipynb.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from numbers import Integral, Real

INT64_MIN, INT64_MAX = -(2**63), 2**63 - 1
INT32_MIN, INT32_MAX = -(2**31), 2**31 - 1
GREEDY_BELOW = 1e-5  # vLLM's threshold: a smaller temperature means argmax
MAX_N = 16384  # vLLM's limit too: one request must not bring a million sequences
FLOAT32_RANGE = (1.2e-38, 3.4e38)  # the positive numbers that the sampler can work with


def is_integer(value: object) -> bool:
    """Whether `value` is an integer, and no bool: `max_tokens=True` is a mistake, not a 1."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def shown(value: object) -> str:
    """Its `repr`, for a message; Python has none for integers of thousands of digits."""
    try:
        return repr(value)
    except ValueError:
        return "an integer of thousands of digits"


def check_integer(name: str, value: object, low: int, high: float = inf) -> None:
    """Raise a ValueError that names field, value and range unless `low <= value <= high`, and
    `value` fits into 64 bits, as in all arrays."""
    if is_integer(value) and value > INT64_MAX:
        high = min(high, INT64_MAX)
    if not is_integer(value) or not low <= value <= high:
        allowed = f"an integer >= {low}" if high == inf else f"an integer from {low} to {high}"
        raise ValueError(f"{name} must be {allowed}, got {shown(value)}")


def check_real(name: str, value: object, low: float, high: float, above: bool = False) -> None:
    """Raise a ValueError that names field, value and range unless `low <= value <= high`, or
    `low < value <= high` with `above`.

    NaN compares false with everything, so the question is asked in this direction.
    """
    is_real = isinstance(value, Real) and not isinstance(value, bool)
    if not is_real or not low <= value <= high or (above and value == low):
        allowed = f"above {low} and at most {high}" if above else f"from {low} to {high}"
        raise ValueError(f"{name} must be a number {allowed}, got {shown(value)}")


def check_flag(name: str, value: object) -> None:
    """Raise a ValueError that names field and value unless `value` is True or False."""
    if not isinstance(value, bool):
        raise ValueError(f"{name} must be True or False, got {shown(value)}")


@dataclass(frozen=True)
class SamplingParams:
    """How the next tokens of a request are chosen, and when to stop.

    Names, defaults and ranges are vLLM's (`vllm/sampling_params.py`); `cache_salt` and
    `priority`, there beside the prompt, are fields here. Frozen, so one object can serve many
    requests; `dataclasses.replace` makes a changed copy and checks it.

    Raises:
        ValueError: a field is out of range; the message names field, value and range.
    """

    n: int = 1  #: continuations of the prompt; number i draws with `seed + i`
    temperature: float = 1.0  #: 0 is greedy (argmax); up to 2, larger flattens the distribution
    top_p: float = 1.0  #: draw from the likeliest tokens that together have this probability
    top_k: int = 0  #: draw from the k likeliest tokens; 0 or -1: from all
    min_p: float = 0.0  #: draw from tokens at least this likely, relative to the likeliest
    presence_penalty: float = 0.0  #: off the logits of tokens generated before; -2 to 2
    frequency_penalty: float = 0.0  #: the same, once for each time they were; -2 to 2
    repetition_penalty: float = 1.0  #: above 1 makes tokens of prompt and output less likely
    seed: int | None = None  #: the draws are a function of it; None: the engine picks one
    stop: str | list[str] | None = None  #: text that ends a sequence
    stop_token_ids: list[int] | None = None  #: ids that end a sequence; they stay in `token_ids`
    ignore_eos: bool = False  #: go on after the model's end-of-sequence token
    max_tokens: int | None = 16  #: the most tokens to generate; None: up to `max_model_len`
    min_tokens: int = 0  #: before so many tokens nothing but its length ends a sequence
    logprobs: int | None = None  #: report each token and the k likeliest there; -1: all tokens
    prompt_logprobs: int | None = None  #: the same for the tokens of the prompt
    logit_bias: dict[int, float] | None = None  #: added to the logits of these ids; -100 to 100
    allowed_token_ids: list[int] | None = None  #: nothing else is generated
    bad_words: list[str] | None = None  #: words that are never generated
    detokenize: bool = True  #: turn the tokens into text
    skip_special_tokens: bool = True  #: leave the end-of-sequence token and its like out of it
    include_stop_str_in_output: bool = False  #: leave the stop string in the text that it ended
    cache_salt: str | None = None  #: cached prefixes are shared within a salt only
    priority: int = 0  #: smaller is served earlier under `scheduling_policy="priority"`

    def __post_init__(self):
        self._check_fields()

    def _check_fields(self):
        self._check_distribution()
        self._check_lengths()
        self._check_collections()
        self._check_the_rest()
        make_plain(self)

    def _check_distribution(self):
        check_real("temperature", self.temperature, 0.0, 2.0)
        check_real("top_p", self.top_p, 0.0, 1.0, above=True)
        check_integer("top_k", self.top_k, -1, INT32_MAX)
        check_real("min_p", self.min_p, 0.0, 1.0)
        check_real("presence_penalty", self.presence_penalty, -2.0, 2.0)
        check_real("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        check_real("repetition_penalty", self.repetition_penalty, *FLOAT32_RANGE)
        if self.seed is not None:
            check_integer("seed", self.seed, INT64_MIN, INT64_MAX)

    def _check_lengths(self):
        check_integer("n", self.n, 1, MAX_N)
        if self.max_tokens is not None:
            check_integer("max_tokens", self.max_tokens, 1)
        limit = inf if self.max_tokens is None else self.max_tokens
        check_integer("min_tokens", self.min_tokens, 0, limit)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), -1)

    def _check_collections(self):
        """A frozen dataclass is still written to once, here: these fields always hold lists."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop
        for name, value, is_item, items in (
            ("stop", stop, is_text, "non-empty strings of valid Unicode"),
            ("bad_words", self.bad_words, is_text, "non-empty strings of valid Unicode"),
            ("stop_token_ids", self.stop_token_ids, is_token_id, "integers >= 0"),
        ):
            object.__setattr__(self, name, as_list(name, value, is_item, items))
        if self.allowed_token_ids is not None:
            allowed = as_list(
                "allowed_token_ids", self.allowed_token_ids, is_token_id, "integers >= 0"
            )
            if not allowed:
                raise ValueError(
                    "allowed_token_ids must be None or hold at least one id, got "
                    f"{self.allowed_token_ids!r}"
                )
            object.__setattr__(self, "allowed_token_ids", allowed)
        if self.stop and self.detokenize is False:
            raise ValueError(f"stop must be None with detokenize=False, got {self.stop!r}")

    def _check_the_rest(self):
        bias = {} if self.logit_bias is None else self.logit_bias
        if not isinstance(bias, dict) or not all(map(is_token_id, bias)):
            raise ValueError(f"logit_bias must be None or a dict by token id, got {shown(bias)}")
        for token_id, value in bias.items():
            check_real(f"logit_bias[{token_id}]", value, -100.0, 100.0)
        bias = {int(token_id): float(value) for token_id, value in bias.items()}
        object.__setattr__(self, "logit_bias", bias)
        for name in (
            "ignore_eos",
            "detokenize",
            "skip_special_tokens",
            "include_stop_str_in_output",
        ):
            check_flag(name, getattr(self, name))
        check_integer("priority", self.priority, INT32_MIN, INT32_MAX)
        if self.cache_salt is not None and not is_text(self.cache_salt):
            raise ValueError(
                "cache_salt must be None or a non-empty string of valid Unicode, got "
                f"{shown(self.cache_salt)}"
            )

    @property
    def greedy(self) -> bool:
        """Whether the next token is the argmax of the logits rather than a draw."""
        return self.temperature < GREEDY_BELOW

    @property
    def penalizes(self) -> bool:
        """Whether a token's logit depends on the tokens before it."""
        neutral = (1.0, 0.0, 0.0)
        return neutral != (self.repetition_penalty, self.frequency_penalty, self.presence_penalty)

    @property
    def edits_logits(self) -> bool:
        """Whether the model's logits are changed in any way before a token is chosen."""
        restricts = self.allowed_token_ids is not None or self.bad_words or self.min_tokens
        return bool(restricts or self.logit_bias or self.penalizes)


def plain(value: object) -> object:
    """A NumPy integer as Python's: the engine adds, shifts and hashes without limits."""
    return int(value) if is_integer(value) else value


def make_plain(frozen: object) -> None:
    """Make the integers in the fields of a frozen dataclass Python's."""
    for name in frozen.__dataclass_fields__:
        object.__setattr__(frozen, name, plain(getattr(frozen, name)))


def is_token_id(value: object) -> bool:
    """Whether `value` can be a token id; how many there are only the model knows."""
    return is_integer(value) and 0 <= value <= INT64_MAX


def is_text(value: object) -> bool:
    """Whether `value` is a string that is not empty, of characters that UTF-8 can encode."""
    if not isinstance(value, str):
        return False
    return bool(value) and not any("\ud800" <= char <= "\udfff" for char in value)


def as_list(name: str, value: object, is_item: Callable[[object], bool], items: str) -> list:
    """`value` as a new list without repetitions; None is an empty one.

    Raises a ValueError that names field and value if it is no list, or an item is wrong.
    """
    if value is None:
        return []
    if not isinstance(value, list | tuple | set) or not all(map(is_item, value)):
        raise ValueError(f"{name} must be None or a list of {items}, got {shown(value)}")
    return [plain(item) for item in dict.fromkeys(value)]


def check_request_id(value: object) -> None:
    """Raise a ValueError unless `value` can be a request's id."""
    if not isinstance(value, str) or not value:
        raise ValueError(f"request_id must be a non-empty string, got {shown(value)}")


def as_words(name: str, value: object) -> list[list[int]] | None:
    """`value` as new lists; a ValueError unless it is None or a list of words of some token ids."""

    def is_word(word: object) -> bool:
        return isinstance(word, list | tuple) and bool(word) and all(map(is_token_id, word))

    if value is None:
        return None
    if not isinstance(value, list | tuple) or not all(map(is_word, value)):
        raise ValueError(f"{name} must be None or a list of lists of token ids, got {shown(value)}")
    return [[plain(token_id) for token_id in word] for word in value]


@dataclass(frozen=True)
class Request:
    """One prompt and how to continue it, as the engine receives it.

    Attributes:
        request_id: unique among the requests that the engine holds.
        prompt_token_ids: the prompt, already tokenized; the engine judges the ids.
        sampling_params: how to continue, and when to stop.
        prompt: the text the token ids came from, if there was one.
        arrival_time: seconds on the engine's monotonic clock, for metrics.
        bad_words_token_ids: `bad_words` as token ids; the text layer translates them.

    Raises:
        ValueError: a field has the wrong type; the message names field and value.
    """

    request_id: str
    prompt_token_ids: list[int]
    sampling_params: SamplingParams
    prompt: str | None = None
    arrival_time: float = 0.0
    bad_words_token_ids: list[list[int]] | None = None

    def __post_init__(self):
        check_request_id(self.request_id)
        ids, params = self.prompt_token_ids, self.sampling_params
        if not isinstance(ids, list | tuple):
            raise ValueError(f"prompt_token_ids must be a list of integers, got {shown(ids)}")
        if not isinstance(params, SamplingParams):
            raise ValueError(f"sampling_params must be a SamplingParams, got {shown(params)}")
        if self.prompt is not None and not isinstance(self.prompt, str):
            raise ValueError(f"prompt must be None or a string, got {shown(self.prompt)}")
        check_real("arrival_time", self.arrival_time, 0.0, inf)
        object.__setattr__(self, "prompt_token_ids", [plain(token_id) for token_id in ids])
        words = as_words("bad_words_token_ids", self.bad_words_token_ids)
        if words and not params.bad_words:
            raise ValueError(f"bad_words_token_ids need bad_words, got {words!r}")
        object.__setattr__(self, "bad_words_token_ids", words)


@dataclass
class Logprob:
    """The log-probability of a token where it stands; vLLM's class (`vllm/logprobs.py`).

    Attributes:
        logprob: natural logarithm of its probability.
        rank: 1 for the likeliest token there, 2 for the next.
        decoded_token: its text.
    """

    logprob: float
    rank: int
    decoded_token: str | None = None


@dataclass
class CompletionOutput:
    """One continuation of a prompt; the fields of vLLM's class of this name (`vllm/outputs.py`).

    Attributes:
        index: which of the request's `n` continuations this is.
        text: the generated text, without the prompt.
        token_ids: the generated ids, a final end-of-sequence token included.
        cumulative_logprob: sum of the log-probabilities of `token_ids`, where asked for.
        logprobs: for each of `token_ids` a dict from token id to `Logprob`, where asked for.
        finish_reason: "stop", "length" or "abort"; None while the sequence runs.
        stop_reason: the stop token id or stop string that ended it; None after an
            end-of-sequence token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
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
        prompt_logprobs: for each prompt token a dict from token id to `Logprob`, where asked
            for; None for the first token, which nothing predicts.
        outputs: one `CompletionOutput` for each of the `n` continuations, by index.
        finished: whether no continuation will get a further token.
        num_cached_tokens: prompt tokens whose keys and values came from the prefix cache.
        metrics: times of the request's life, where kept.
        error: why the request was refused; None for a request that was served.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    outputs: list[CompletionOutput] = field(default_factory=list)
    finished: bool = False
    num_cached_tokens: int = 0
    metrics: object | None = None
    error: str | None = None
