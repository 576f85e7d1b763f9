"""The machine side of the engine: it owns the model and the KV memory, and runs a batch.

Built, step by step, in notebooks/11_model_runner.ipynb.
"""

import numpy as np
import torch

from tinyvllm.attention import PagedKVCache
from tinyvllm.execution_batch import ExecutionBatch, ModelRunnerOutput
from tinyvllm.gpt2 import GPT2, Attend, load_model, resolve_device, resolve_dtype
from tinyvllm.sampler import sample, score_prompt

# What a CPU engine takes for the KV cache unless it is told: a share of the memory that is
# available now, at most 4 GiB.
CPU_KV_SHARE = 0.25
CPU_KV_LIMIT = 4 << 30


class ModelRunner:
    """Runs `ExecutionBatch`es on a GPT-2; decides nothing.

    Args:
        config: an `EngineConfig`; `max_model_len` None becomes the model's limit.
        model: a loaded model; None loads `config.model`.

    Raises:
        ValueError: the config is impossible for this model or the KV cache does not fit in
            memory. `ModelLoadError` (a `ValueError`): the checkpoint cannot be used.

    vLLM: `v1/worker/gpu_model_runner.py`, `v1/worker/cpu_model_runner.py`.
    """

    def __init__(self, config, model: GPT2 | None = None):
        if model is None:
            device = resolve_device(config.device)
            model = load_model(config.model, resolve_dtype(config.dtype, device), device)
        self.model, self.device = model, model.device
        self.config = config.resolve(model.config.n_positions)
        self.num_blocks = self.size_kv_cache()
        self.cache = self.make_cache(self.num_blocks)

    def make_cache(self, num_blocks: int) -> PagedKVCache:
        """Memory for the keys and values of this many blocks."""
        shape, block_size = self.model.config, self.config.block_size
        sizes = (shape.n_layer, num_blocks, block_size, shape.n_head, shape.head_size)
        return PagedKVCache(*sizes, self.model.dtype, self.device)

    @property
    def vocab_size(self) -> int:
        """Number of token ids; valid ids are below it."""
        return self.model.config.vocab_size

    @property
    def block_size(self) -> int:
        """Tokens that a block of the KV cache holds."""
        return self.config.block_size

    @property
    def max_model_len(self) -> int:
        """Most tokens a sequence may have, prompt and output."""
        return self.config.max_model_len

    @property
    def eos_token_id(self) -> int | None:
        """The token that ends a text; None if the model's vocabulary has none."""
        token_id = self.model.config.eos_token_id
        return token_id if token_id is not None and token_id < self.vocab_size else None

    def free_memory(self) -> int:
        """Bytes that the device could give now."""
        if self.device.type == "cuda":
            return torch.cuda.mem_get_info(self.device)[0]
        import psutil  # not above: a GPU tells by itself what is free

        return psutil.virtual_memory().available

    def kv_memory(self) -> tuple[int, str]:
        """Bytes that the KV cache may take when the config does not say, and what they are."""
        free = self.free_memory()
        if self.device.type == "cuda":
            total = torch.cuda.mem_get_info(self.device)[1]
            budget = max(0, int(free - (1 - self.config.gpu_memory_utilization) * total))
        else:
            budget = min(int(free * CPU_KV_SHARE), CPU_KV_LIMIT)
        return budget, f"the {budget} bytes of memory that may be used"

    def size_kv_cache(self) -> int:
        """How many blocks to allocate, the null block included."""
        config, shape = self.config, self.model.config
        block_bytes = PagedKVCache.bytes_per_block(
            shape.n_layer, config.block_size, shape.n_head, shape.head_size, self.model.dtype
        )
        longest = -(-config.max_model_len // config.block_size)  # blocks of one full sequence
        if config.num_gpu_blocks_override is not None:
            source = f"num_gpu_blocks_override={config.num_gpu_blocks_override}"
            num_blocks, needed = config.num_gpu_blocks_override, 2
        elif config.kv_cache_memory_bytes is not None:
            source = f"kv_cache_memory_bytes={config.kv_cache_memory_bytes}"
            num_blocks, needed = config.kv_cache_memory_bytes // block_bytes, longest + 1
        else:
            # More than all running sequences at full length would only ever hold old prefixes.
            budget, source = self.kv_memory()
            num_blocks = min(budget // block_bytes, config.max_num_seqs * longest + 1)
            needed = longest + 1
        if num_blocks < needed:
            raise ValueError(
                f"{source} holds {num_blocks} KV blocks of {block_bytes} bytes, but one sequence "
                f"of max_model_len={config.max_model_len} needs {needed} (one is the null block); "
                f"at least {needed * block_bytes} bytes are needed, or a smaller max_model_len"
            )
        if num_blocks * block_bytes > self.free_memory():
            raise ValueError(
                f"{source} asks for {num_blocks * block_bytes} bytes of KV cache, "
                f"but {self.free_memory()} bytes of memory are free"
            )
        return num_blocks

    def to_device(self, batch: ExecutionBatch) -> dict[str, torch.Tensor]:
        """The batch's arrays by name, as tensors where the model is."""
        arrays = step_arrays(batch).items()
        return {name: torch.from_numpy(array).to(self.device) for name, array in arrays}

    def attention(self, batch: ExecutionBatch, tensors: dict[str, torch.Tensor]) -> Attend:
        """What the model calls in every layer of this step; `tensors` are `to_device`'s."""
        from tinyvllm.cpu_attention import PagedAttention  # not above: a GPU needs no numba

        return PagedAttention(self.cache, batch)

    @torch.inference_mode()
    def run(self, batch: ExecutionBatch) -> tuple[torch.Tensor, ModelRunnerOutput]:
        """Compute the batch's tokens, store their keys and values, sample and score the rows
        asked for. Returns the sampled ids int64 `[R]`, still where the model is, and the rest."""
        tensors = self.to_device(batch)
        attend = self.attention(batch, tensors)
        hidden = self.model.forward(tensors["input_ids"], tensors["positions"], attend)  # [T, d]
        token_ids, out = torch.empty(0, dtype=torch.int64), ModelRunnerOutput([])
        if len(batch.logits_indices):  # not only unfinished chunks, where nobody gets a token
            # Rows first, vocabulary after: the projection costs as much as several layers.
            logits = self.model.compute_logits(hidden[tensors["logits_indices"]])
            token_ids, out.logprobs = sample(logits, batch.sampling, self.config.logprobs_mode)
        if len(batch.prompt_logits_indices):
            out.prompt_logprobs = score_prompt(
                self.model.compute_logits,
                hidden[tensors["prompt_logits_indices"]],
                tensors["prompt_targets"],
                batch.num_prompt_logprobs,
            )
        return token_ids, out

    def execute(self, batch: ExecutionBatch) -> ModelRunnerOutput:
        """Run one step of the model; returns when its tokens are here."""
        token_ids, out = self.run(batch)
        out.sampled_token_ids = token_ids.tolist()
        return out


def step_arrays(batch: ExecutionBatch) -> dict[str, np.ndarray]:
    """A batch's arrays by name, without those of its sampling."""
    return {name: part for name, part in vars(batch).items() if isinstance(part, np.ndarray)}
