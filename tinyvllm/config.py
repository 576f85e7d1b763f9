"""The engine's settings, checked where they are made.

Built, step by step, in notebooks/03_scheduler.ipynb.
"""

import dataclasses
from dataclasses import dataclass

from tinyvllm.request import INT64_MAX, INT64_MIN, check_flag, check_integer, check_real

DTYPES = ("auto", "float32", "float16", "bfloat16")
DEVICES = ("auto", "cpu", "cuda")
SCHEDULING_POLICIES = ("fcfs", "priority")


def check_choice(name: str, value: object, choices: tuple[str, ...]) -> None:
    """Raise a ValueError that names field, value and choices unless `value` is one of them."""
    if value not in choices:
        raise ValueError(f"{name} must be one of {', '.join(choices)}, got {value!r}")


@dataclass(frozen=True)
class EngineConfig:
    """Everything an engine is told besides its requests. Names are vLLM's engine arguments.

    Attributes:
        model: a folder or hub id of a GPT-2; None is the model that ships with the package.
        dtype: of weights and KV cache; "auto" is float32 on a CPU.
        device: "auto", "cpu", "cuda" or "cuda:N".
        seed: of the engine; requests without a seed of their own get theirs from it.
        max_model_len: most tokens of a sequence, prompt + output. None: the model's limit.
        block_size: tokens a KV block holds.
        num_gpu_blocks_override: KV blocks to allocate (one of them is the null block),
            on any device. None: sized from memory.
        kv_cache_memory_bytes: bytes to spend on KV blocks. None: sized from memory.
        gpu_memory_utilization: share of the device's memory the engine may use.
        max_num_batched_tokens: the budget of a step, in tokens.
        max_num_seqs: most sequences that run at once.
        enable_prefix_caching: reuse the blocks of equal prefixes.
        enable_chunked_prefill: let a prompt be computed over several steps.
        scheduling_policy: "fcfs" or "priority".
        long_prefill_token_threshold: most tokens of one sequence in a step while others
            want some too. 0: no such cap.
        scheduler_reserve_full_isl: admit a sequence only if all its tokens fit in the free
            blocks, not only the first chunk.

    Raises:
        ValueError: a field is out of range; the message names field, value and range.
    """

    model: str | None = None
    dtype: str = "auto"
    device: str = "auto"
    seed: int = 0
    max_model_len: int | None = None
    block_size: int = 16
    num_gpu_blocks_override: int | None = None
    kv_cache_memory_bytes: int | None = None
    gpu_memory_utilization: float = 0.9
    max_num_batched_tokens: int = 2048
    max_num_seqs: int = 256
    enable_prefix_caching: bool = True
    enable_chunked_prefill: bool = True
    scheduling_policy: str = "fcfs"
    long_prefill_token_threshold: int = 0
    scheduler_reserve_full_isl: bool = True

    def __post_init__(self):
        if self.model is not None and (not isinstance(self.model, str) or not self.model):
            raise ValueError(f"model must be None or a non-empty string, got {self.model!r}")
        check_choice("dtype", self.dtype, DTYPES)
        if not isinstance(self.device, str) or self.device.split(":")[0] not in DEVICES:
            raise ValueError(f"device must be auto, cpu, cuda or cuda:N, got {self.device!r}")
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
        check_integer("long_prefill_token_threshold", self.long_prefill_token_threshold, 0)
        for name in (
            "enable_prefix_caching",
            "enable_chunked_prefill",
            "scheduler_reserve_full_isl",
        ):
            check_flag(name, getattr(self, name))

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
        return dataclasses.replace(self, max_model_len=max_model_len)
