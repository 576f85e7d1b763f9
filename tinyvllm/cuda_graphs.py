"""The runner of a GPU: one copy and one launch, or two, for a whole decode step, which can be
prepared while the last one runs.

Built, step by step, in notebooks/13_cuda_graphs.ipynb.
"""

from contextlib import nullcontext

import numpy as np
import torch
from torch import Tensor

from tinyvllm.block_pool import NULL_BLOCK_ID
from tinyvllm.engine import Engine
from tinyvllm.execution_batch import ExecutionBatch, ModelRunnerOutput, SamplingBatch
from tinyvllm.gpt2 import GPT2, Attend, resolve_device
from tinyvllm.model_runner import ModelRunner, step_arrays
from tinyvllm.overlap import OverlappedEngine
from tinyvllm.request import GREEDY_BELOW
from tinyvllm.sampler import (
    draw,
    row_keys,
    sample,
    scale,
    sort_descending,
    token_keys,
    truncation_bars,
)

ALIGNMENT = 16  # bytes; for a pointer that is no multiple of 16, Triton compiles a kernel anew


def starts_of(arrays: dict[str, np.ndarray]) -> tuple[dict[str, int], int]:
    """Where each array begins in one buffer that holds them all, and the buffer's size, in bytes."""
    starts, end = {}, 0
    for name, array in arrays.items():
        starts[name] = end
        end += -(-array.nbytes // ALIGNMENT) * ALIGNMENT
    return starts, end


def pack(arrays: dict[str, np.ndarray], pinned: bool) -> Tensor:
    """All arrays end to end, uint8 `[bytes]` on the host; `pinned` memory can be copied to a GPU
    while the program goes on, and PyTorch does not reuse it before that is done."""
    starts, size = starts_of(arrays)
    buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned)
    numbers = buffer.numpy()
    for name, array in arrays.items():
        part = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        numbers[starts[name] : starts[name] + array.nbytes] = part
    return buffer


def unpack(buffer: Tensor, arrays: dict[str, np.ndarray]) -> dict[str, Tensor]:
    """Views of a packed buffer, wherever it is, with the arrays' names, types and shapes."""
    views, (starts, _) = {}, starts_of(arrays)
    for name, array in arrays.items():
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        part = buffer[starts[name] : starts[name] + array.nbytes]
        views[name] = part.view(dtype).view(array.shape)
    return views


def padding_rows(size: int, table_width: int) -> dict[str, np.ndarray]:
    """The inputs of `size` decodes that are nobody's: the token 0 at position 0, greedy, whose
    key and value go to the null block and are read from there."""
    return {
        "input_ids": np.zeros(size, np.int64),
        "positions": np.zeros(size, np.int64),
        "query_start_loc": np.arange(size + 1, dtype=np.int32),
        "seq_lens": np.ones(size, np.int32),
        "block_table": np.full((size, table_width), NULL_BLOCK_ID, np.int32),
        "slot_mapping": np.full(size, NULL_BLOCK_ID, np.int64),  # its first slot: 0 times any size
        "temperatures": np.zeros(size, np.float32),
        "top_ks": np.zeros(size, np.int64),
        "top_ps": np.ones(size, np.float32),
        "min_ps": np.zeros(size, np.float32),
        "seeds": np.zeros(size, np.int64),
        "output_indices": np.zeros(size, np.int64),
    }


def pad_batch(batch: ExecutionBatch, size: int, table_width: int) -> dict[str, np.ndarray]:
    """The inputs of a batch of decodes, with rows of padding behind them."""
    arrays = padding_rows(size, table_width)
    for source in (batch, batch.sampling):
        for name, part in vars(source).items():
            if name in arrays:
                arrays[name][tuple(slice(n) for n in part.shape)] = part
    return arrays


LARGEST_GRAPH = 512  # rows; larger steps are launched kernel by kernel


def graph_sizes(max_rows: int) -> list[int]:
    """The numbers of rows that graphs are captured for: 1, 2, 4, then every eighth up to 256 and
    every sixteenth up to LARGEST_GRAPH, and `max_rows` itself if it is not above that."""
    largest = min(max_rows, LARGEST_GRAPH)
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, LARGEST_GRAPH + 1, 16)]
    return [size for size in sizes if size < largest] + [largest]


SORTED_AT_ONCE = 64  # rows


def truncate(scaled: Tensor, top_ks: Tensor, top_ps: Tensor) -> None:
    """Make what top-k and top-p leave out -inf, in place. `scaled` `[R, V]`, the others `[R]`; a
    row that is not cut has 0 and 1. As in `sample`, without asking the host anything."""
    vocab_size = scaled.shape[1]
    top_ks = top_ks.masked_fill((top_ks <= 0) | (top_ks > vocab_size), vocab_size)
    parts = (tensor.split(SORTED_AT_ONCE) for tensor in (scaled, top_ks, top_ps))
    for rows, ks, ps in zip(*parts, strict=True):
        bars, _ = truncation_bars(sort_descending(rows), None, ks, ps)
        rows.masked_fill_(rows < bars, -torch.inf)


def draw_random_rows(token_ids: Tensor, logits: Tensor, tokens: Tensor, inputs: dict, cut: bool):
    """Replace the greedy `token_ids` int64 `[R]` of random rows by draws; `logits` float32
    `[R, V]` are used up. As in `sample`, without asking the host anything.

    tokens: `token_keys` of the vocabulary; inputs: the tensors temperatures, min_ps, seeds and
    output_indices by name, and top_ks and top_ps if there are rows to `cut`.
    """
    greedy = inputs["temperatures"] < GREEDY_BELOW
    scale(logits, inputs["temperatures"].masked_fill(greedy, 1.0), inputs["min_ps"])
    if cut:
        truncate(logits, inputs["top_ks"], inputs["top_ps"])
    rows = row_keys(inputs["seeds"], inputs["output_indices"])
    token_ids.copy_(token_ids.where(greedy, draw(logits, rows, tokens)))


def draws_only(batch: SamplingBatch) -> bool:
    """Whether no row wants logits to be edited, or log-probabilities."""
    others = (batch.allowed, batch.forbidden, batch.biased, batch.penalized, batch.logprob_rows)
    return not any(map(len, others))


def draw_of(batch: SamplingBatch, vocab_size: int) -> str | None:
    """Which of a `DecodeStep`'s draws the rows need; None if all are greedy."""
    random = batch.temperatures >= GREEDY_BELOW
    top_k = (batch.top_ks > 0) & (batch.top_ks < vocab_size)
    if (random & (top_k | (batch.top_ps < 1))).any():
        return "draw_truncated"
    return "draw" if random.any() else None


class DecodeStep:
    """A decode step of `size` rows over memory that stays where it is.

    `forward` and the draws read and write nothing else, take no decision and never wait, so they
    can be captured. Outputs are shared by the steps of all sizes: only one runs at a time.

    Args:
        runner: a `CudaModelRunner` that has its cache.
        size: rows.
        logits, token_ids: float32 `[>= size, V]` and int64 `[>= size]`, where answers go.
        tokens: `token_keys` of the vocabulary.
    """

    def __init__(self, runner, size: int, logits: Tensor, token_ids: Tensor, tokens: Tensor):
        self.runner, self.size, self.tokens = runner, size, tokens
        arrays = padding_rows(size, runner.table_width)
        self.buffer = runner.send(arrays)
        self.inputs = unpack(self.buffer, arrays)
        self.attend = runner.decode_attention(self.inputs)
        self.logits, self.token_ids = logits[:size], token_ids[:size]

    def fill(self, batch: ExecutionBatch) -> None:
        """Bring a batch of at most `size` decodes, and padding, to where the step reads."""
        arrays = pad_batch(batch, self.size, self.runner.table_width)
        self.buffer.copy_(self.runner.pack(arrays), non_blocking=True)

    def forward(self) -> None:
        """From token ids to logits and the likeliest tokens."""
        model, inputs = self.runner.model, self.inputs
        hidden = model.forward(inputs["input_ids"], inputs["positions"], self.attend)
        self.logits.copy_(model.compute_logits(hidden))  # any type in, float32 out
        torch.argmax(self.logits, dim=-1, out=self.token_ids)

    def draw(self) -> None:
        """Draw the tokens of random rows, after `forward`, from the whole vocabulary."""
        draw_random_rows(self.token_ids, self.logits, self.tokens, self.inputs, False)

    def draw_truncated(self) -> None:
        """The same where some rows have top-k or top-p."""
        draw_random_rows(self.token_ids, self.logits, self.tokens, self.inputs, True)


class CudaCapture:
    """Records what a function asks of the current GPU; `replay()` of the result asks for it again,
    in one launch. All recordings share a stream and a pool of scratch memory."""

    def __init__(self):
        self.pool = torch.cuda.graph_pool_handle()
        self.stream = torch.cuda.Stream()  # PyTorch's default is one for all GPUs of a process

    def warm_up(self, function) -> None:
        """Run `function()` where it will be recorded: compilers and libraries set themselves up
        in a first call, some of them for each stream, and that cannot be recorded."""
        self.stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self.stream):
            function()
        self.stream.synchronize()

    def __call__(self, function) -> torch.cuda.CUDAGraph:
        """A recording of `function()`, which has been warmed up."""
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on allocating memory, such as those of an engine on another GPU.
        mode = {"stream": self.stream, "capture_error_mode": "thread_local"}
        with torch.cuda.graph(graph, pool=self.pool, **mode):
            function()
        return graph


CAPTURED = ("forward", "draw", "draw_truncated")  # methods of `DecodeStep`


class DecodeGraphs:
    """Decode steps of all padded sizes, each captured in parts: up to the likeliest tokens, and two
    ways to draw for random rows. vLLM: v1/cudagraph_dispatcher.py,
    v1/worker/gpu/cudagraph_utils.py.

    Args:
        runner: a `CudaModelRunner` that has its cache.
        capture: `capture(function)` returns an object whose `replay()` repeats the function.
            `capture.warm_up(function)` runs it; it is called before anything is captured.
    """

    def __init__(self, runner, capture):
        self.runner, config = runner, runner.config
        self.sizes = graph_sizes(min(config.max_num_seqs, config.max_num_batched_tokens))
        outputs = runner.decode_outputs(self.sizes[-1])
        # The largest first: the others find all the scratch memory that they need in the pool. It
        # is shared, yet graphs may be replayed in any order: inputs, logits and ids lie outside.
        steps = [DecodeStep(runner, size, *outputs) for size in reversed(self.sizes)]
        for step in steps:  # on padding alone
            for name in CAPTURED:
                capture.warm_up(getattr(step, name))
        self.graphs = {
            step.size: (step, {name: capture(getattr(step, name)) for name in CAPTURED})
            for step in steps
        }

    def fit(self, batch: ExecutionBatch) -> bool:
        """Whether a batch is one token of each sequence, sampled, and not too many of them."""
        num_seqs = len(batch.seq_lens)
        counts = (len(batch.input_ids), len(batch.logits_indices))
        return counts == (num_seqs, num_seqs) and num_seqs <= self.sizes[-1]

    def run(self, batch: ExecutionBatch) -> tuple[Tensor, ModelRunnerOutput]:
        """`ModelRunner.run` of a batch that fits, from the smallest graph with enough rows."""
        num_seqs, sampling = len(batch.seq_lens), batch.sampling
        step, graphs = self.graphs[min(s for s in self.sizes if s >= num_seqs)]
        step.fill(batch)
        graphs["forward"].replay()
        if not draws_only(sampling):
            mode = self.runner.config.logprobs_mode
            token_ids, logprobs = sample(step.logits[:num_seqs], sampling, mode)
            return token_ids, ModelRunnerOutput([], logprobs)
        drawing = draw_of(sampling, self.runner.vocab_size)
        if drawing is not None:
            graphs[drawing].replay()
        return step.token_ids[:num_seqs], ModelRunnerOutput([])


class PendingOutput:
    """The output of a step that may still run; `result()` waits for it, as a future's does."""

    def __init__(self, token_ids: Tensor, out: ModelRunnerOutput, device: torch.device):
        self.out, size = out, len(token_ids)
        self.token_ids = torch.empty(size, dtype=torch.int64, pin_memory=token_ids.is_cuda)
        self.token_ids.copy_(token_ids, non_blocking=True)
        # Not by the ids' device: a step that samples nobody has to be waited for, too.
        self.arrived = torch.cuda.Event() if device.type == "cuda" else None
        if self.arrived is not None:
            self.arrived.record()

    def result(self) -> ModelRunnerOutput:
        """Wait for the tokens, and return the whole output."""
        if self.arrived is not None:
            self.arrived.synchronize()
        self.out.sampled_token_ids = self.token_ids.tolist()
        return self.out


class CudaModelRunner(ModelRunner):
    """A `ModelRunner` for a GPU: Triton attention, one transfer a step, decodes from graphs.

    Args:
        config: an `EngineConfig`; with `enforce_eager` nothing is captured.
        model: a loaded model; None loads `config.model`.
        capture: what captures a function; None is CUDA's own capture.

    Raises:
        ValueError: as `ModelRunner`; also if the largest step or the graphs do not fit in memory.

    vLLM: v1/worker/gpu_model_runner.py.
    """

    def __init__(self, config, model: GPT2 | None = None, capture=None):
        super().__init__(config, model)
        self.graphs = None
        if self.config.enforce_eager:
            return
        try:
            with self.on_device(), torch.inference_mode():
                self.graphs = DecodeGraphs(self, capture or CudaCapture())
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"no memory of {self.device} is left for CUDA graphs: a smaller "
                f"{self.memory_setting()}, or enforce_eager=True, is needed"
            ) from error

    def on_device(self):
        """Within this context, kernels are launched where the model is."""
        return torch.cuda.device(self.device) if self.device.type == "cuda" else nullcontext()

    @property
    def table_width(self) -> int:
        """Blocks of a sequence of full length."""
        return -(-self.max_model_len // self.block_size)

    def pack(self, arrays: dict[str, np.ndarray]) -> Tensor:
        """The arrays in one buffer that can be copied to the device without waiting."""
        return pack(arrays, pinned=self.device.type == "cuda")

    def send(self, arrays: dict[str, np.ndarray]) -> Tensor:
        """The arrays in one buffer on the device."""
        return self.pack(arrays).to(self.device, non_blocking=True)

    def to_device(self, batch: ExecutionBatch) -> dict[str, Tensor]:
        """The batch's arrays by name: views of one buffer on the device, filled by one copy."""
        arrays = step_arrays(batch)
        return unpack(self.send(arrays), arrays)

    def attention(self, batch: ExecutionBatch, tensors: dict[str, Tensor]) -> Attend:
        """What the model calls in every layer of this step."""
        from tinyvllm.triton_attention import TritonPagedAttention  # not above: a CPU needs none

        return TritonPagedAttention.of(self.cache, batch, tensors)

    def decode_attention(self, inputs: dict[str, Tensor]) -> Attend:
        """The attention of decodes of any length, whose tensors will change but not move."""
        from tinyvllm.triton_attention import SPLIT_SIZE, TritonPagedAttention

        where = tuple(inputs[name] for name in ("query_start_loc", "seq_lens", "block_table"))
        max_splits = -(-self.max_model_len // SPLIT_SIZE)
        return TritonPagedAttention(self.cache, inputs["slot_mapping"], where, False, max_splits)

    def decode_outputs(self, size: int) -> tuple[Tensor, Tensor, Tensor]:
        """Logits and token ids of a `DecodeStep`, to be written, and the vocabulary's keys."""
        logits = torch.empty(size, self.vocab_size, device=self.device)
        token_ids = torch.empty(size, dtype=torch.int64, device=self.device)
        return logits, token_ids, token_keys(torch.arange(self.vocab_size, device=self.device))

    def launch(self, batch: ExecutionBatch) -> PendingOutput:
        """Start a step, and return before it is done, unless `sample` has to wait for it."""
        with self.on_device(), torch.inference_mode():
            fits = self.graphs is not None and self.graphs.fit(batch)
            token_ids, out = self.graphs.run(batch) if fits else self.run(batch)
            return PendingOutput(token_ids, out, self.device)

    def execute(self, batch: ExecutionBatch) -> ModelRunnerOutput:
        """Run one step of the model; returns when its tokens are here."""
        return self.launch(batch).result()

    def peak_memory(self, function) -> int:
        """Bytes that the device has to give while `function()` runs. PyTorch asks for memory in
        larger pieces than it hands out, so what it holds is counted, not what is in use."""
        torch.cuda.empty_cache()
        before = torch.cuda.memory_reserved(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        function()
        torch.cuda.synchronize(self.device)
        return torch.cuda.max_memory_reserved(self.device) - before

    @torch.inference_mode()
    def step_memory(self) -> int:
        """Bytes that the largest step takes beside the model, and then the largest graph."""
        config = self.config
        num_seqs = min(config.max_num_seqs, config.max_num_batched_tokens)
        num_tokens = min(config.max_num_batched_tokens, num_seqs * config.max_model_len)
        self.cache = self.make_cache(1)  # the null block
        batch = largest_batch(num_tokens, num_seqs, self.vocab_size)
        with self.on_device():
            needed = self.peak_memory(lambda: self.run(batch))
            if not config.enforce_eager:
                needed += self.peak_memory(lambda: self.run_decodes(graph_sizes(num_seqs)[-1]))
        return needed

    def run_decodes(self, size: int) -> None:
        """A decode step of padding, as it will be captured."""
        step = DecodeStep(self, size, *self.decode_outputs(size))
        for name in CAPTURED:
            getattr(step, name)()

    def kv_memory(self) -> tuple[int, str]:
        """Bytes that `gpu_memory_utilization` leaves beside the model and `step_memory`."""
        config, size = self.config, f"max_num_batched_tokens={self.config.max_num_batched_tokens}"
        try:
            needed = self.step_memory()
        except torch.cuda.OutOfMemoryError as error:
            raise ValueError(
                f"a step of {size} does not fit in the memory of {self.device} beside the model: "
                "a smaller number, or a smaller max_num_seqs, is needed"
            ) from error
        torch.cuda.empty_cache()
        free, total = torch.cuda.mem_get_info(self.device)
        budget = max(0, int(free - (1 - config.gpu_memory_utilization) * total) - needed)
        return budget, (
            f"gpu_memory_utilization={config.gpu_memory_utilization} of {total} bytes, of which "
            f"{free} are free and a step of {size} takes {needed},"
        )

    def memory_setting(self) -> str:
        """The field of the config that decided how large the KV cache is."""
        given = ("num_gpu_blocks_override", "kv_cache_memory_bytes")
        set_by = [name for name in given if getattr(self.config, name) is not None]
        return [*set_by, "gpu_memory_utilization"][0]


def largest_batch(num_tokens: int, num_seqs: int, vocab_size: int) -> ExecutionBatch:
    """A step of `num_tokens` tokens of `num_seqs` sequences, sampled the way that takes the most
    memory. All of it is in the null block."""
    starts = np.arange(num_seqs + 1) * num_tokens // num_seqs
    lengths, nothing, ones = np.diff(starts), np.empty(0, np.int64), np.ones(num_seqs, np.float32)
    return ExecutionBatch(
        input_ids=np.zeros(num_tokens, np.int64),
        positions=np.arange(num_tokens) - np.repeat(starts[:-1], lengths),
        query_start_loc=starts.astype(np.int32),
        seq_lens=lengths.astype(np.int32),
        block_table=np.full((num_seqs, lengths.max()), NULL_BLOCK_ID, np.int32),
        slot_mapping=np.full(num_tokens, NULL_BLOCK_ID),
        logits_indices=starts[1:] - 1,
        sampling=SamplingBatch(
            temperatures=ones,
            top_ks=np.full(num_seqs, vocab_size - 1),
            top_ps=ones / 2,
            min_ps=ones / 2,
            seeds=np.zeros(num_seqs, np.int64),
            output_indices=np.zeros(num_seqs, np.int64),
            allowed=[],
            forbidden=nothing.reshape(0, 2),
            biased=nothing.reshape(0, 2),
            biases=ones[:0],
            penalized=nothing,
            penalties=ones[:0].reshape(0, 3),
            history=nothing.reshape(0, 3),
            logprob_rows=np.arange(num_seqs),
            num_logprobs=5,
        ),
        prompt_logits_indices=nothing,
        prompt_targets=nothing,
        num_prompt_logprobs=0,
    )


def make_engine(config) -> Engine:
    """The engine and the runner that an `EngineConfig` asks for, with its model loaded."""
    on_gpu = resolve_device(config.device).type == "cuda"
    runner = (CudaModelRunner if on_gpu else ModelRunner)(config)
    engine = OverlappedEngine if config.async_scheduling else Engine
    return engine(config, runner, eos_token_id=runner.eos_token_id)
