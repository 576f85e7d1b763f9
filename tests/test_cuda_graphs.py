"""Chapter 13: packed transfers, padded decode steps that replay, and memory for them.

A fake capture stands in for CUDA's: its replay calls the function again, over the same memory. So
it shows what padding can do wrong. It cannot show a tensor that moved, a number that was frozen, or
a question to the device: those are looked for by address and by operation.
"""

from contextlib import contextmanager
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import make_hf, save
from sampling import make_sampling
from test_attention import make_batch
from torch.utils._python_dispatch import TorchDispatchMode

from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine
from tinyvllm.execution_batch import ModelRunnerOutput
from tinyvllm.gpt2 import GPT2, GPT2Config, load_model
from tinyvllm.model_runner import ModelRunner, step_arrays
from tinyvllm.request import Request, SamplingParams
from tinyvllm.sampler import sample, token_keys

pytest.importorskip("triton")

from tinyvllm import cuda_graphs
from tinyvllm.cuda_graphs import (
    ALIGNMENT,
    CAPTURED,
    SORTED_AT_ONCE,
    CudaCapture,
    CudaModelRunner,
    DecodeStep,
    OverlappedEngine,
    PendingOutput,
    draw_of,
    draw_random_rows,
    draws_only,
    graph_sizes,
    largest_batch,
    pack,
    pad_batch,
    padding_rows,
    unpack,
)

SMALL = {"n_embd": 16, "n_head": 1, "n_layer": 2, "vocab_size": 61, "n_positions": 32}
CONFIG = {"device": "cpu", "block_size": 4, "num_gpu_blocks_override": 40, "max_num_seqs": 6}


class FakeGraph:
    """What a fake capture returns: it counts replays, and repeats the function."""

    def __init__(self, function):
        self.function, self.replays = function, 0

    def replay(self):
        self.replays += 1
        self.function()


class FakeCapture:
    """Stands in for `CudaCapture`; it notes what was run before, and what was captured."""

    def __init__(self):
        self.calls = []

    def warm_up(self, function):
        self.calls.append(("warm up", function.__self__.size, function.__name__))
        function()

    def __call__(self, function):
        self.calls.append(("capture", function.__self__.size, function.__name__))
        return FakeGraph(function)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = save(make_hf(**SMALL), tmp_path_factory.mktemp("model"))
    return load_model(folder, device="cpu")


def graph_runner(model, **settings):
    return CudaModelRunner(EngineConfig(**CONFIG | settings), model, FakeCapture())


def num_replays(runner):
    return sum(graphs["forward"].replays for _, graphs in runner.graphs.graphs.values())


WISHES = [
    {"temperature": 0},
    {"temperature": 0.9, "seed": 5},
    {"temperature": 1.4, "seed": -3, "min_p": 0.05},
    {"temperature": 0, "min_p": 0.3},
    {"temperature": 0.7, "seed": 1, "top_k": 100},
]
TRUNCATED = [
    {"temperature": 0.8, "seed": 2, "top_k": 5},
    {"temperature": 0.8, "seed": 2, "top_p": 0.7},
    {"temperature": 1.5, "seed": 4, "top_k": 20, "top_p": 0.6, "min_p": 0.01},
]
SPECIAL = [
    {"temperature": 0.8, "seed": 2, "top_k": 5, "logprobs": 1},
    {"temperature": 0, "logit_bias": {7: 3.0}},
    {"temperature": 0, "repetition_penalty": 1.5},
    {"temperature": 0, "logprobs": 2},
]


def serve(engine, wishes, max_tokens=(4, 6, 3, 5, 6)):
    """Outputs of one request per wish, which end at different times; by position."""
    rng = np.random.default_rng(0)
    for number, wish in enumerate(wishes):
        params = SamplingParams(
            max_tokens=max_tokens[number % len(max_tokens)], ignore_eos=True, **wish
        )
        prompt = rng.integers(0, 61, 3 + number).tolist()
        engine.add_request(Request(str(number), prompt, params))
    outputs = {}
    while engine.has_unfinished_requests():
        outputs |= {output.request_id: output.outputs[0] for output in engine.step()}
        engine.check_invariants()
    return [
        (outputs[str(n)].token_ids, outputs[str(n)].cumulative_logprob) for n in range(len(wishes))
    ]


# ---------------------------------------------------------------------------------- one transfer


def random_batch(lengths=(9, 1, 14), chunks=(4, 1, 1)):
    return make_batch(list(lengths), list(chunks), 4, 20, np.random.default_rng(3))


def test_packed_arrays_come_back_as_views():
    arrays = step_arrays(random_batch()) | {"nothing": np.empty((0, 3), np.int64)}
    buffer = pack(arrays, pinned=False)
    assert buffer.dtype == torch.uint8 and len(buffer) % ALIGNMENT == 0
    views = unpack(buffer, arrays)
    assert views.keys() == arrays.keys()
    for name, array in arrays.items():
        assert torch.equal(views[name], torch.from_numpy(array)), name
        assert views[name].dtype == torch.from_numpy(array).dtype
        assert (views[name].data_ptr() - buffer.data_ptr()) % ALIGNMENT == 0 or not array.size
    views["seq_lens"] += 1
    again = unpack(buffer, arrays)
    assert torch.equal(again["seq_lens"], torch.from_numpy(arrays["seq_lens"] + 1))
    assert torch.equal(again["positions"], torch.from_numpy(arrays["positions"]))


def test_arrays_that_are_not_contiguous_are_packed_too():
    arrays = {"a": np.arange(12, dtype=np.int32).reshape(3, 4).T, "b": np.arange(9)[::-2]}
    for name, view in unpack(pack(arrays, pinned=False), arrays).items():
        assert np.array_equal(view.numpy(), arrays[name])


def test_a_step_is_one_transfer(model, monkeypatch):
    runner = graph_runner(model)
    sent = []
    monkeypatch.setattr(runner, "pack", lambda arrays: sent.append(0) or pack(arrays, False))
    engine = Engine(runner.config, runner)
    steps = []
    engine.observers.append(steps.append)
    serve(engine, WISHES)
    assert len(sent) == len(steps)
    assert 0 < num_replays(runner) < len(steps)


# --------------------------------------------------------------------------------------- padding


@pytest.mark.parametrize(
    ("max_rows", "expected"),
    [
        (1, [1]),
        (2, [1, 2]),
        (3, [1, 2, 3]),
        (8, [1, 2, 4, 8]),
        (20, [1, 2, 4, 8, 16, 20]),
    ],
)
def test_graph_sizes(max_rows, expected):
    assert graph_sizes(max_rows) == expected


def test_graph_sizes_stay_few():
    assert len(graph_sizes(256)) == 35 and graph_sizes(256)[-1] == 256
    assert graph_sizes(10_000) == graph_sizes(512)
    assert len(graph_sizes(512)) == 51
    for rows in range(1, 513):
        size = min(size for size in graph_sizes(512) if size >= rows)
        assert size - rows < max(8, rows / 8 + 1) if rows > 4 else size <= 4


def test_padding_touches_only_the_null_block():
    batch = random_batch((9, 5), (1, 1))
    arrays = pad_batch(batch, 4, 8)
    assert arrays["slot_mapping"].tolist() == [*batch.slot_mapping, 0, 0]
    assert arrays["seq_lens"].tolist() == [9, 5, 1, 1]
    assert not arrays["block_table"][2:].any() and not arrays["block_table"][:2, 3:].any()
    assert arrays["query_start_loc"].tolist() == [0, 1, 2, 3, 4]
    assert padding_rows(4, 8).keys() == arrays.keys()
    for name, array in padding_rows(4, 8).items():
        assert array.dtype == arrays[name].dtype and array.shape == arrays[name].shape


def poison(cache):
    """Random bytes in every slot; returns a copy."""
    generator = torch.Generator().manual_seed(0)
    for part in (cache.keys, cache.values):
        part.copy_(torch.randn(part.shape, generator=generator))
    return torch.stack([cache.keys, cache.values]).clone()


def test_only_own_slots_and_the_null_block_change(model):
    """Batches of 1 to 6 decodes through graphs of 1, 2, 4 and 6 rows, larger ones first: what
    others own stays as it was to the last byte, and a stale row of a larger batch writes
    nothing."""
    runner = graph_runner(model)
    reference = ModelRunner(EngineConfig(**CONFIG), model)
    rng = np.random.default_rng(7)
    for rows in (6, 5, 3, 2, 1, 4):
        before = poison(runner.cache)
        poison(reference.cache)
        lengths = rng.integers(1, 30, rows).tolist()
        batch = make_batch(lengths, [1] * rows, 4, 40, rng)
        batch.input_ids = rng.integers(0, 61, rows)
        batch.logits_indices = np.arange(rows)
        batch.sampling = largest_batch(rows, rows, 61).sampling
        batch.sampling.temperatures[:] = np.arange(rows) % 2
        batch.sampling.top_ps[:], batch.sampling.top_ks[:] = 1, 0
        batch.sampling.logprob_rows = np.arange(0)
        got = runner.execute(batch).sampled_token_ids
        assert got == reference.execute(batch).sampled_token_ids
        after = torch.stack([runner.cache.keys, runner.cache.values]).flatten(2, 3)
        changed = (after != before.flatten(2, 3)).any(dim=(0, 1, 3, 4)).nonzero().flatten()
        padding = [0] if rows in (5, 3) else []  # its one slot in the null block
        assert changed.tolist() == sorted([*padding, *batch.slot_mapping.tolist()])
    assert num_replays(runner) == 6


@pytest.mark.parametrize("wishes", [WISHES, TRUNCATED + WISHES, SPECIAL, WISHES + SPECIAL[:1]])
def test_the_same_tokens_as_without_graphs(model, wishes):
    """Against the CPU runner and the eager Triton path, with sequences that come and go."""
    runner = graph_runner(model)
    got = serve(Engine(runner.config, runner), wishes)
    assert num_replays(runner) > 3
    cpu = ModelRunner(EngineConfig(**CONFIG), model)
    for other in (cpu, graph_runner(model, enforce_eager=True)):
        expected = serve(Engine(other.config, other), wishes)
        assert [tokens for tokens, _ in got] == [tokens for tokens, _ in expected]
        for (_, ours), (_, theirs) in zip(got, expected, strict=True):
            assert ours == pytest.approx(theirs, abs=1e-4)


class NaiveStep(DecodeStep):
    """Leaves the rows behind the batch as they are."""

    def fill(self, batch):
        for name, part in pad_batch(batch, self.size, self.runner.table_width).items():
            self.inputs[name][: len(batch.seq_lens)] = torch.from_numpy(part[: len(batch.seq_lens)])


class StaleSlots(DecodeStep):
    """Pads everything but the slots."""

    def fill(self, batch):
        stale = self.inputs["slot_mapping"].clone()
        super().fill(batch)
        self.inputs["slot_mapping"][len(batch.seq_lens) :] = stale[len(batch.seq_lens) :]


def test_a_wrong_fill_changes_tokens():
    """Freed blocks that are soon somebody else's: the right fill gives the tokens of the plain
    runner, and each wrong one does not."""
    shape = GPT2Config(vocab_size=61, n_positions=32, n_embd=16, n_layer=1, n_head=1)
    generator = torch.Generator().manual_seed(1)
    shapes = shape.weight_shapes().items()
    model = GPT2(shape, {k: torch.randn(s, generator=generator) for k, s in shapes})
    config = EngineConfig(**CONFIG | {"max_num_seqs": 8, "num_gpu_blocks_override": 30})

    def tokens(runner):
        engine, outputs = Engine(config, runner), {}
        for i, count in enumerate((12, 2, 12, 3, 12, 4, 10, 2, 9)):
            params = SamplingParams(max_tokens=count, ignore_eos=True, temperature=0)
            prompt = [(10 * i + k) % 61 for k in range(3 + i % 4)]
            engine.add_request(Request(str(i), prompt, params))
        while engine.has_unfinished_requests():
            outputs |= {output.request_id: output.outputs[0].token_ids for output in engine.step()}
        return outputs

    expected, wrong = tokens(ModelRunner(config, model)), []
    for step_class in (DecodeStep, NaiveStep, StaleSlots):
        runner = CudaModelRunner(config, model, FakeCapture())
        for step, _ in runner.graphs.graphs.values():
            step.__class__ = step_class
        got = tokens(runner)
        wrong.append(sum(got[name] != expected[name] for name in expected))
    assert wrong[0] == 0 and min(wrong[1:]) > 0, wrong


def test_what_is_no_decode_takes_the_eager_way(model):
    runner = graph_runner(model)
    for lengths, chunks, sampled in (((9, 5), (2, 1), 2), ((9, 5), (1, 1), 1)):
        batch = random_batch(lengths, chunks)
        batch.logits_indices = batch.query_start_loc[1 : sampled + 1].astype(np.int64) - 1
        assert not runner.graphs.fit(batch)
    many = random_batch([3] * 7, [1] * 7)
    many.logits_indices = np.arange(7)
    assert not runner.graphs.fit(many)
    assert graph_runner(model, enforce_eager=True).graphs is None


# ------------------------------------------------------------------------------------ sampling


@pytest.mark.parametrize("truncated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_draws_are_those_of_the_sampler(dtype, truncated):
    """In bfloat16 many logits are equal: ties at the bars."""
    rng = np.random.default_rng(11)
    rows, vocab_size = 2 * SORTED_AT_ONCE + 7, 2000
    sampling = largest_batch(rows, rows, vocab_size).sampling
    sampling.temperatures = rng.choice([0, 0.3, 1, 2], rows).astype(np.float32)
    sampling.min_ps = rng.choice([0, 0.1, 1], rows).astype(np.float32)
    sampling.top_ks, sampling.top_ps = np.zeros(rows, np.int64), np.ones(rows, np.float32)
    if truncated:
        sampling.top_ks = rng.choice([0, 1, 7, 1500, vocab_size - 1, vocab_size, 9999], rows)
        sampling.top_ps = rng.choice([0.01, 0.5, 0.9, 1], rows).astype(np.float32)
    sampling.logprob_rows = np.arange(0)
    sampling.seeds = rng.integers(-(2**63), 2**63 - 1, rows)
    sampling.output_indices = rng.integers(0, 1000, rows)
    assert draws_only(sampling)
    assert draw_of(sampling, vocab_size) == ("draw_truncated" if truncated else "draw")
    logits = torch.randn(rows, vocab_size).mul(3).to(dtype)
    expected, _ = sample(logits.clone(), sampling)
    inputs = {
        name: torch.from_numpy(array)
        for name, array in vars(sampling).items()
        if name in padding_rows(rows, 1)
    }
    logits = logits.to(torch.float32, copy=True)
    got = logits.argmax(-1)
    draw_random_rows(got, logits, token_keys(torch.arange(vocab_size)), inputs, truncated)
    assert torch.equal(got, expected)


@pytest.mark.parametrize("wish", WISHES + TRUNCATED)
def test_wishes_that_a_graph_can_grant(wish):
    sampling = make_sampling([SamplingParams(temperature=0), SamplingParams(**wish)])
    assert draws_only(sampling)
    random = "draw_truncated" if wish in TRUNCATED else "draw"
    assert draw_of(sampling, 61) == (random if wish["temperature"] else None)


@pytest.mark.parametrize("wish", TRUNCATED)
def test_greedy_rows_need_no_bars(wish):
    assert draw_of(make_sampling([SamplingParams(**wish | {"temperature": 0})]), 61) is None


@pytest.mark.parametrize("wish", SPECIAL)
def test_wishes_that_it_cannot(wish):
    assert not draws_only(make_sampling([SamplingParams(temperature=0), SamplingParams(**wish)]))


# What makes the host wait for a GPU, or cannot be known while a graph is recorded.
WAITING = {
    "_local_scalar_dense", "nonzero", "is_nonzero", "equal", "masked_select", "unique2",
    "repeat_interleave", "_unique2", "allclose", "lift_fresh", "scalar_tensor",
}  # fmt: skip


class Watch(TorchDispatchMode):
    """Notes the operations that run."""

    def __init__(self):
        super().__init__()
        self.names = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names.append(func.overloadpacket.__name__)
        return func(*args, **(kwargs or {}))


def test_what_is_captured_never_asks_the_host(model, monkeypatch):
    """No operation that waits, no copy from the host, and the same operations whatever the
    inputs are."""

    def on_a_gpu(scaled):  # on a CPU, NumPy sorts
        return scaled.sort(dim=-1, descending=True).values

    monkeypatch.setattr(cuda_graphs, "sort_descending", on_a_gpu)
    runner = graph_runner(model)
    step = DecodeStep(runner, 4, *runner.decode_outputs(4))
    seen = []
    for temperature, top_k, top_p in ((0, 0, 1), (1, 0, 1), (1, 3, 0.5)):
        step.inputs["temperatures"].fill_(temperature)
        step.inputs["top_ks"].fill_(top_k)
        step.inputs["top_ps"].fill_(top_p)
        with torch.inference_mode(), Watch() as watch:
            for name in CAPTURED:
                getattr(step, name)()
        assert WAITING & set(watch.names) == set()
        seen.append(watch.names)
    assert seen[0] == seen[1] == seen[2]


def test_all_is_warm_before_anything_is_captured(model):
    capture = FakeCapture()
    CudaModelRunner(EngineConfig(**CONFIG), model, capture)
    each = [(size, name) for size in (6, 4, 2, 1) for name in CAPTURED]
    assert capture.calls == [(kind, *call) for kind in ("warm up", "capture") for call in each]


def test_captures_share_one_stream_of_their_own(monkeypatch):
    """What CUDA would be asked: a fake notes it."""
    log = []

    def context(name):
        @contextmanager
        def enter(*args, **kwargs):
            log.append((name, *args, kwargs))
            yield
            log.append(f"end of {name}")

        return enter

    stream = SimpleNamespace(
        wait_stream=lambda other: log.append(("wait for", other)),
        synchronize=lambda: log.append("synchronize"),
    )
    fakes = {
        "graph_pool_handle": lambda: "pool",
        "Stream": lambda: stream,
        "current_stream": lambda: "current",
        "CUDAGraph": lambda: "graph",
        "stream": context("stream"),
        "graph": context("graph"),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    capture = CudaCapture()
    capture.warm_up(lambda: log.append("run"))
    on_stream = [("stream", stream, {}), "run", "end of stream"]
    assert log == [("wait for", "current"), *on_stream, "synchronize"]
    log.clear()
    assert capture(lambda: log.append("run")) == "graph"
    asked = {"pool": "pool", "stream": stream, "capture_error_mode": "thread_local"}
    assert log == [("graph", "graph", asked), "run", "end of graph"]


def test_a_step_that_samples_nobody_is_waited_for(monkeypatch):
    log = []
    event = SimpleNamespace(
        record=lambda: log.append("record"), synchronize=lambda: log.append("synchronize")
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda: event)
    for device, expected in (("cpu", []), ("cuda", ["record", "synchronize"])):
        nobody = torch.empty(0, dtype=torch.int64)  # on the CPU, as `ModelRunner.run` makes it
        pending = PendingOutput(nobody, ModelRunnerOutput([]), torch.device(device))
        assert log == expected[:1]
        assert pending.result().sampled_token_ids == []
        assert log == expected


def test_static_memory_stays_where_it_is(model):
    runner = graph_runner(model)
    steps = [step for step, _ in runner.graphs.graphs.values()]

    def places():
        tensors = [(*step.inputs.values(), step.logits, step.token_ids) for step in steps]
        return [tensor.data_ptr() for group in tensors for tensor in group]

    before = places()
    serve(Engine(runner.config, runner), WISHES)
    assert places() == before
    for step in steps:
        arrays = padding_rows(step.size, runner.table_width)
        views = unpack(step.buffer, arrays)
        for name, view in step.inputs.items():
            assert view.data_ptr() == views[name].data_ptr()
            assert view.data_ptr() % 8 == 0
        attend = step.attend
        assert attend.slot_mapping is step.inputs["slot_mapping"]
        assert attend.where[2] is step.inputs["block_table"]
    pointers = {step.logits.data_ptr() for step, _ in runner.graphs.graphs.values()}
    assert len(pointers) == 1
    assert list(runner.graphs.graphs) == [6, 4, 2, 1]


# -------------------------------------------------------------------------------------- memory


@pytest.fixture
def fake_memory(monkeypatch):
    """A device of 1000 MiB that has 900 left; a step takes `peak`."""
    memory = SimpleNamespace(total=1000 << 20, free=900 << 20, peaks=[100 << 20, 30 << 20])
    fakes = {
        "memory_reserved": lambda device: 7,
        "max_memory_reserved": lambda device: 7 + memory.peaks.pop(0),
        "reset_peak_memory_stats": lambda device: None,
        "synchronize": lambda device: None,
        "empty_cache": lambda: None,
        "mem_get_info": lambda device: (memory.free, memory.total),
    }
    for name, fake in fakes.items():
        monkeypatch.setattr(torch.cuda, name, fake)
    monkeypatch.setattr(CudaModelRunner, "free_memory", lambda self: memory.free)
    return memory


def measured(model, **settings):
    config = EngineConfig(device="cpu", block_size=4, max_num_batched_tokens=16, **settings)
    return CudaModelRunner(config, model, FakeCapture())


def test_blocks_are_what_the_largest_step_leaves(model, fake_memory, monkeypatch):
    block_bytes = 2 * 2 * 4 * 16 * 4
    fake_memory.free = (230 << 20) + 50 * block_bytes  # 100 are not ours, 130 the steps take
    runner = measured(model, max_num_seqs=8)
    assert runner.num_blocks == 50 == runner.cache.keys.shape[1]
    fake_memory.peaks = [130 << 20]
    assert measured(model, max_num_seqs=8, enforce_eager=True).num_blocks == 50


def test_the_profile_runs_the_largest_step(model, fake_memory, monkeypatch):
    seen = []
    run = CudaModelRunner.run
    monkeypatch.setattr(CudaModelRunner, "run", lambda self, b: seen.append(b) or run(self, b))
    measured(model, max_num_seqs=3)
    (batch,) = seen
    assert len(batch.input_ids) == 16 and np.diff(batch.query_start_loc).tolist() == [5, 5, 6]
    assert len(batch.logits_indices) == 3
    assert not batch.slot_mapping.any() and not batch.block_table.any()
    assert batch.sampling.logprob_rows.tolist() == [0, 1, 2]  # every row asks for everything
    fake_memory.peaks = [0, 0]
    config = EngineConfig(device="cpu", max_num_seqs=2, max_num_batched_tokens=999)
    CudaModelRunner(config, model, FakeCapture())
    assert np.diff(seen[1].query_start_loc).tolist() == [32, 32]  # no longer than a sequence


def test_memory_that_does_not_suffice_is_explained(model, fake_memory, monkeypatch):
    fake_memory.peaks = [790 << 20, 30 << 20]
    with pytest.raises(ValueError) as error:
        measured(model, max_num_seqs=4)
    message = str(error.value)
    assert message.startswith("gpu_memory_utilization=0.9 of 1048576000 bytes, of which 943718400 ")
    assert "a step of max_num_batched_tokens=16 takes 859832320, holds 0 KV blocks" in message

    def run_out(self, batch):
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CudaModelRunner, "run", run_out)
    with pytest.raises(ValueError, match="a step of max_num_batched_tokens=16 does not fit"):
        measured(model)


@pytest.mark.parametrize(
    "setting", ["gpu_memory_utilization", "num_gpu_blocks_override", "kv_cache_memory_bytes"]
)
def test_graphs_that_do_not_fit_are_explained(model, fake_memory, setting):
    class RunsOut(FakeCapture):
        def __call__(self, function):
            raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    values = {"num_gpu_blocks_override": 30, "kv_cache_memory_bytes": 1 << 20}
    wish = {setting: values[setting]} if setting in values else {}
    config = EngineConfig(device="cpu", block_size=4, max_num_batched_tokens=16, **wish)
    with pytest.raises(ValueError) as error:
        CudaModelRunner(config, model, RunsOut())
    assert f"a smaller {setting}, or enforce_eager=True, is needed" in str(error.value)


def test_dtype_auto_is_a_16_bit_type_on_a_gpu(monkeypatch):
    from tinyvllm.gpt2 import resolve_dtype

    for supported, dtype in ((True, torch.bfloat16), (False, torch.float16)):
        monkeypatch.setattr(torch.cuda, "is_bf16_supported", lambda supported=supported: supported)
        assert resolve_dtype("auto", torch.device("cuda")) == dtype


# --------------------------------------------------------------------------------------- overlap


def test_overlap_and_graphs_together(model):
    """What runs on a GPU with `async_scheduling`: the same tokens, most steps predicted."""
    plain = graph_runner(model)
    expected = serve(Engine(plain.config, plain), WISHES[:3], max_tokens=(7,))
    runner = graph_runner(model)
    engine = OverlappedEngine(runner.config, runner)
    assert serve(engine, WISHES[:3], max_tokens=(7,)) == expected
    assert engine.num_predicted == 6  # of 7 steps: all but the first
