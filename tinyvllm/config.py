"""The engine's settings, checked where they are made.

Built, step by step, in notebooks/03_scheduler.ipynb.
"""

import re
from dataclasses import dataclass, replace

from tinyvllm.request import (
    INT64_MAX,
    INT64_MIN,
    check_flag,
    check_integer,
    check_real,
    make_plain,
    shown,
)

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = r"auto|cpu|cuda(:[0-9]+)?"
SCHEDULING_POLICIES = ("fcfs", "priority")
LOGPROBS_MODES = ("raw_logprobs", "processed_logprobs")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is told besides its requests. Names are vLLM's engine arguments.

    Raises:
        ValueError: a field is out of range; the message names field, value and range.
    """

    model: str | None = None  #: a folder or hub id of a GPT-2; None: the one in the package
    dtype: str = "auto"  #: of weights and KV cache; "auto" is float32 on a CPU
    device: str = "auto"  #: "auto", "cpu", "cuda" or "cuda:N"
    seed: int = 0  #: requests without a seed of their own get theirs from it
    max_model_len: int | None = None  #: most tokens of a sequence; None: the model's limit
    block_size: int = 16  #: tokens a KV block holds
    num_gpu_blocks_override: int | None = None  #: KV blocks, null block included, on any device
    kv_cache_memory_bytes: int | None = None  #: to spend on KV blocks; None: sized from memory
    gpu_memory_utilization: float = 0.9  #: share of the device's memory the engine may use
    enable_prefix_caching: bool = True  #: reuse the blocks of equal prefixes
    max_num_batched_tokens: int = 2048  #: the budget of a step, in tokens
    max_num_seqs: int = 256  #: most sequences that run at once
    enable_chunked_prefill: bool = True  #: let a prompt be computed over several steps
    scheduling_policy: str = "fcfs"  #: "fcfs" or "priority"
    long_prefill_token_threshold: int = 0  #: most tokens a step gives one of several; 0: off
    scheduler_reserve_full_isl: bool = True  #: admit only what fits whole, not its first chunk
    logprobs_mode: str = "raw_logprobs"  #: before or, "processed_logprobs", after sampling params
    enforce_eager: bool = False  #: on a GPU, launch kernel by kernel, without CUDA graphs
    async_scheduling: bool = False  #: prepare a step while the one before it runs

    def __post_init__(self):
        self._check_fields()

    def _check_fields(self):
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ValueError(f"model must be None or a non-empty string, got {shown(self.model)}")
        check_choice("dtype", self.dtype, DTYPES)
        if not isinstance(self.device, str) or not re.fullmatch(DEVICES, self.device):
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {shown(self.device)}")
        check_integer("seed", self.seed, INT64_MIN, INT64_MAX)
        for name in ("max_model_len", "kv_cache_memory_bytes"):
            if getattr(self, name) is not None:
                check_integer(name, getattr(self, name), 1)
        if self.num_gpu_blocks_override is not None:
            check_integer("num_gpu_blocks_override", self.num_gpu_blocks_override, 2)
        for name in ("block_size", "max_num_batched_tokens", "max_num_seqs"):
            check_integer(name, getattr(self, name), 1)
        check_real("gpu_memory_utilization", self.gpu_memory_utilization, 0.01, 1.0)
        check_choice("scheduling_policy", self.scheduling_policy, SCHEDULING_POLICIES)
        check_choice("logprobs_mode", self.logprobs_mode, LOGPROBS_MODES)
        check_integer("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        for name in (
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "scheduler_reserve_full_isl",
            "enforce_eager",
            "async_scheduling",
        ):
            check_flag(name, getattr(self, name))
        make_plain(self)

    def resolve(self, model_limit: int) -> "EngineConfig":
        """Return the config with `max_model_len` filled in from the model's limit in tokens.

        Raises:
            ValueError: `max_model_len` exceeds the model's limit, or a whole prompt would not
                fit into a step although chunked prefill is off.
        """
        max_model_len = model_limit if self.max_model_len is None else self.max_model_len
        check_integer("max_model_len", max_model_len, 1, model_limit)
        if not self.enable_chunked_prefill and self.max_num_batched_tokens < max_model_len:
            raise ValueError(
                f"max_num_batched_tokens must be at least max_model_len ({max_model_len}) "
                f"without chunked prefill, got {self.max_num_batched_tokens}"
            )
        return replace(self, max_model_len=max_model_len)


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ValueError that names field, value and choices unless `value` is one of them."""
    if not isinstance(value, str) or value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {shown(value)}")
