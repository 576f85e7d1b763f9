"""scripts/gpu_check.py, where there is no GPU: what it counts, how it judges, what it keeps."""

import importlib.util
import inspect
import json
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from checkpoints import make_hf
from sampling import make_sampling

from tinyvllm.gpt2 import ASSETS, GPT2Config
from tinyvllm.sampler import sample

pytest.importorskip("triton")

SCRIPT = Path(__file__).parents[1] / "scripts" / "gpu_check.py"
SPEC = importlib.util.spec_from_file_location("gpu_check", SCRIPT)
gpu_check = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(gpu_check)

CARD = {"copy_bytes_per_second": 1e12, "matmul_operations_per_second": 1e14}
TINY = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 300}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A random model that a CPU runs in no time."""
    return gpu_check.random_checkpoint(tmp_path_factory.mktemp("tiny"), **TINY)


@pytest.fixture
def wall_clock(monkeypatch):
    """Time by a clock instead of CUDA events, and run instead of capturing."""

    def event_ms(run, finish=lambda result: None, repeats=1, spin=0):
        start = time.perf_counter()
        finish(run())
        return (time.perf_counter() - start) * 1e3

    monkeypatch.setattr(gpu_check, "event_ms", event_ms)
    monkeypatch.setattr(gpu_check, "captured", lambda run: run)


# Batches and workloads.


def test_a_step_keeps_the_rules_of_a_batch():
    batch = gpu_check.step_batch([20, 300, 16], [1, 4, 16], vocab_size=50)
    batch.check_invariants(gpu_check.BLOCK_SIZE)
    assert batch.query_start_loc.tolist() == [0, 1, 5, 21]
    assert batch.logits_indices.tolist() == [0, 4, 20]
    owned = batch.block_table[batch.block_table > 0]
    assert sorted(owned) == list(range(1, 2 + 19 + 1 + 1))
    assert owned.tolist() != sorted(owned), "blocks lie in order"


def test_the_workload_is_seeded_and_in_range():
    requests = gpu_check.workload()
    assert requests == gpu_check.workload()
    assert requests != gpu_check.workload(seed=1)
    prompts, wanted = [len(prompt) for prompt, _ in requests], [n for _, n in requests]
    assert len(requests) == 256
    for counts in (prompts, wanted):
        assert min(counts) >= 64 and max(counts) <= 512
        assert len(set(counts)) > 100, "the requests are hardly ragged"
    assert all(0 <= token_id < 50257 for prompt, _ in requests for token_id in prompt)


def test_decodes_are_seeded_and_in_range():
    lengths = gpu_check.decode_lengths(256)
    assert lengths.tolist() == gpu_check.decode_lengths(256).tolist()
    assert lengths.min() >= 64 and lengths.max() <= 960


# Bytes and operations, by hand.


def test_attention_by_hand():
    batch = gpu_check.step_batch([20, 300], [1, 4])
    shape = 2, 16  # heads, head size
    # Keys and values of 320 tokens, queries and answers of 5, in 16 bits; ids of 2 + 19 blocks.
    assert gpu_check.attention_bytes(batch, *shape, 2) == (2 * 320 + 2 * 5) * 32 * 2 + 4 * 21
    seen = 20 + (297 + 298 + 299 + 300)
    assert gpu_check.attention_operations(batch, *shape) == 4 * seen * 32
    assert gpu_check.store_bytes(batch, *shape, 2) == 5 * (2 * (32 + 32) * 2 + 8)


def test_splits_by_hand():
    batch = gpu_check.step_batch([20, 256, 257, 600], [1, 1, 1, 1])
    # Two heads: 2 + 3 parts of 16 numbers and a logsumexp in float32, two answers in 16 bits.
    assert gpu_check.split_bytes(batch, 2, 16, 2) == (2 * 5 * 17 * 4, 2 * 2 * 16 * 2)


def test_a_step_by_hand():
    model = GPT2Config(vocab_size=10, n_positions=8, n_embd=4, n_layer=2, n_head=2)
    batch = gpu_check.step_batch([3, 2], [1, 1])
    layer = (4 + 4) + (4 * 12 + 12) + (4 * 4 + 4) + (4 + 4) + (4 * 16 + 16) + (16 * 4 + 4)
    weights = 10 * 4 + 2 * layer + (4 + 4)
    embeddings, keys_and_values, logits = 2 * 2 * 4, 2 * 2 * (5 + 2) * 4, 2 * 2 * 10
    numbers = weights + embeddings + keys_and_values + logits
    assert gpu_check.step_bytes(batch, model, 2) == numbers * 2
    matrices = 2 * 2 * (4 * 12 + 4 * 4 + 4 * 16 + 16 * 4)
    attention = 4 * (3 + 2) * 4
    head = 2 * 2 * 4 * 10
    assert gpu_check.step_operations(batch, model) == 2 * (matrices + attention) + head
    untied = replace(model, tie_word_embeddings=False)
    assert gpu_check.step_bytes(batch, untied, 2) == numbers * 2, "only rows of wte are read"


def test_the_floor_is_the_larger_of_two():
    assert gpu_check.floor_seconds(2 * 10**9, 10**11, CARD) == 2e-3
    assert gpu_check.floor_seconds(10**9, 10**12, CARD) == 1e-2


# Judging tokens.


def test_equal_or_a_tie():
    found = gpu_check.judge([0.0, 0.0, 5e-4])
    assert found["right"] and found["not_the_best"] == 1 and found["largest_gap"] == 5e-4
    assert not gpu_check.judge([0.0, 0.1])["right"]
    assert not gpu_check.judge([0.0, float("nan"), 0.0])["right"]


def test_gaps_see_another_token():
    model, prompt = make_hf(n_embd=32, n_head=4, n_layer=2, vocab_size=97), [3, 1, 4, 1, 5]
    model.generation_config.eos_token_id = None
    ids = model.generate(torch.tensor([prompt]), max_new_tokens=8, do_sample=False, pad_token_id=0)
    answer = ids[0, len(prompt) :].tolist()
    assert gpu_check.judge(gpu_check.token_gaps(model, prompt, answer, gpu_check.GREEDY))["right"]
    answer[3] = (answer[3] + 1) % 97
    gaps = gpu_check.token_gaps(model, prompt, answer, gpu_check.GREEDY)
    assert gaps[:3] == [0, 0, 0] and gaps[3] > gpu_check.GAP_TOLERANCE
    cut = replace(gpu_check.GREEDY, top_k=1, top_p=0.5)  # means nothing without a temperature
    assert gpu_check.token_gaps(model, prompt, answer, cut) == gaps


def drawn(logits: list[float], params) -> int:
    """The first token that the sampler draws from these logits."""
    return sample(torch.tensor([logits]), make_sampling([params]))[0].item()


class Same(SimpleNamespace):
    """A model that has the same logits for every token."""

    def __call__(self, ids):
        return SimpleNamespace(logits=torch.tensor([[self.logits] * ids.shape[1]]))


@pytest.mark.parametrize("cut", [{"top_k": 2}, {"top_p": 0.7}, {"top_k": 3, "top_p": 0.7}])
@pytest.mark.parametrize("seed", range(12))
def test_a_tie_at_the_bar_is_a_tie(cut, seed):
    """The second and the third token are so close that a rounding error says which one stays: both
    answers are right, and the last token is not."""
    params = replace(gpu_check.SEEDED, temperature=1.0, seed=seed, **cut)
    for second, third in ((1.00001, 1.0), (1.0, 1.00001)):
        answer = drawn([1.2, second, third, -3.0], params)
        oracle = Same(device="cpu", logits=[1.2, 1.00001, 1.0, -3.0])
        assert gpu_check.judge(gpu_check.token_gaps(oracle, [0], [answer], params))["right"]
        assert not gpu_check.judge(gpu_check.token_gaps(oracle, [0], [3], params))["right"]


def test_a_token_that_the_cut_leaves_out_is_found():
    """Without the cut another token would be drawn."""
    model, found = Same(device="cpu", logits=[2.0, 1.9, 1.0, 0.5]), 0
    for seed in range(40):
        params = replace(gpu_check.SEEDED, temperature=1.0, seed=seed)
        free = drawn(model.logits, params)
        cut = replace(params, top_k=2)
        right = drawn(model.logits, cut)
        assert gpu_check.judge(gpu_check.token_gaps(model, [0], [right], cut))["right"]
        if free != right:
            found += not gpu_check.judge(gpu_check.token_gaps(model, [0], [free], cut))["right"]
            assert found
    assert found > 5


# The parts, at tiny shapes on the CPU.


def test_kernels_through_the_interpreter():
    section = {}
    gpu_check.check_kernels(section, "cpu", step=((18, 1), (5, 3)), heads=1, head_size=16)
    assert section.keys() == {"float32", "float16", "bfloat16"}
    assert all(found["step_error"] <= found["tolerance"] for found in section.values())


def test_a_wrong_kernel_is_found(monkeypatch):
    """One that stores what it should skip, and one that sees a key too many: the next is NaN."""
    monkeypatch.setattr(gpu_check, "TOLERANCES", {torch.float32: 2e-5})
    case = {"device": "cpu", "step": ((18, 1), (5, 1)), "heads": 1, "head_size": 16}
    kernels = gpu_check.kernels
    with monkeypatch.context() as patch:
        store = kernels.store_kv
        patch.setattr(kernels, "store_kv", lambda *args: store(*args[:4], args[4] + 16))
        with pytest.raises(gpu_check.CheckError, match="'stores_its_slots_only': False"):
            gpu_check.check_kernels({}, **case)
    decode = kernels.decode_attention
    longer = lambda *args: decode(*args[:5], args[5] + 1, *args[6:])  # noqa: E731
    monkeypatch.setattr(kernels, "decode_attention", longer)
    section = {}
    with pytest.raises(gpu_check.CheckError, match="nan"):
        gpu_check.check_kernels(section, **case)
    assert section["float32"]["unified_error"] <= 2e-5, "the other kernel's error was lost"


def test_tokens_and_modes(tiny, monkeypatch, one_thread):
    monkeypatch.setattr(gpu_check, "PROMPT_LENGTHS", (1, 5, 20))
    wishes = (gpu_check.GREEDY, gpu_check.SEEDED, replace(gpu_check.TRUNCATED, top_k=20))
    greedy, seeded, truncated = (replace(params, max_tokens=6) for params in wishes)
    section = {}
    gpu_check.check_tokens(section, {"tiny": tiny, "shipped": ASSETS}, "cpu", greedy)
    assert all(found["right"] and found["tokens"] == 18 for found in section.values())
    section, samplings = {}, {"greedy": greedy, "seeded": seeded, "truncated": truncated}
    gpu_check.check_modes(section, {"tiny": tiny}, "cpu", samplings)
    for sampling in samplings:
        assert section["tiny"][sampling].keys() == gpu_check.MODES.keys()
        assert section["tiny"]["engines"]["graphs, overlap"]["steps_ahead"] > 0
        for found in section["tiny"][sampling].values():
            assert found["right"] and found["tokens"] == found["same_as_eager"] == 18


def test_other_tokens_are_found(tiny, monkeypatch):
    """An overlapped engine that answers something else."""
    answers = {False: [[1, 2]], True: [[1, 3]]}
    monkeypatch.setattr(gpu_check, "PROMPT_LENGTHS", (4,))
    monkeypatch.setattr(
        gpu_check,
        "generate",
        lambda llm, prompts, params: answers[llm.engine.config.async_scheduling],
    )
    with pytest.raises(gpu_check.CheckError) as error:
        gpu_check.check_modes({}, {"tiny": tiny}, "cpu", {"greedy": gpu_check.GREEDY})
    assert "tiny, eager, overlap: no step was launched ahead" in str(error.value)
    assert "tiny, greedy, eager: other tokens than transformers'" in str(error.value)
    assert "tiny, greedy, graphs, overlap: other tokens than without overlap" in str(error.value)
    with pytest.raises(gpu_check.CheckError, match="other tokens than transformers' for tiny"):
        gpu_check.check_tokens({}, {"tiny": tiny}, "cpu")


def test_attention_is_timed_kernel_by_kernel(wall_clock, monkeypatch):
    monkeypatch.setattr(gpu_check, "CONTEXT", (257, 258))
    monkeypatch.setattr(gpu_check, "TIMED_DTYPE", "float32")
    monkeypatch.setattr(gpu_check, "LEAST_LAYERS", 1)
    section = {}
    gpu_check.measure_attention(section, CARD, 0, "cpu", batches=(1,), heads=1, head_size=16)
    names = ("store", "decode", "merge", "decode and merge", "unified", "chunks")
    assert list(section) == [f"{name} x 1" for name in names]
    whole, alone, merge = (section[f"{n} x 1"] for n in ("decode and merge", "decode", "merge"))
    parts, answer = 2 * (16 + 1) * 4, 16 * 4
    assert alone["bytes"] == whole["bytes"] + parts - answer
    assert merge["bytes"] == parts + answer
    json.dumps(section)
    assert whole["share_of_copy"] == pytest.approx(
        whole["bytes"] / (whole["microseconds"] * 1e-6) / 1e12
    )


def test_one_kernel_is_left_out(monkeypatch):
    """The decode kernel alone gives a row of two splits no answer, the merge then does."""
    monkeypatch.setattr(gpu_check, "LEAST_LAYERS", 1)
    arena = gpu_check.Arena([257], [1], "cpu", torch.float32, 0, 1, 16)
    runs = {name: run for name, _, run, *_ in gpu_check.attention_runs(arena, arena, 1, 16, 4)}
    arena.output.fill_(torch.nan)
    runs["decode"]()
    assert arena.output.isnan().all()
    runs["decode and merge"]()
    assert not arena.output.isnan().any()


def test_more_layers_than_the_cache_holds():
    arena = gpu_check.Arena([32], [1], "cpu", torch.float32, 10**6, 1, 16)
    layer_bytes = 2 * 3 * 16 * 16 * 4
    assert 4 * 10**6 <= arena.num_layers * layer_bytes < 4 * 10**6 + layer_bytes


def test_the_step(tiny, wall_clock, monkeypatch, one_thread):
    """The runner of a GPU on the CPU: a graph is a function that is called again."""

    class Capture:
        def warm_up(self, function):
            function()

        def __call__(self, function):
            return SimpleNamespace(replay=function)

    monkeypatch.setattr("tinyvllm.cuda_graphs.CudaCapture", Capture)
    monkeypatch.setattr(gpu_check, "CONTEXT", (3, 20))
    monkeypatch.setattr(gpu_check, "TIMED_DTYPE", "float32")
    section = {}
    gpu_check.measure_step(section, CARD, tiny, "cpu", batches=(1, 2))
    assert list(section) == ["graphs x 1", "graphs x 2", "eager x 1", "eager x 2"]
    for found in section.values():
        assert found["times_floor"] == found["step_ms"] / found["floor_ms"]
    json.dumps(section)
    assert section["graphs x 2"]["bytes"] == section["eager x 2"]["bytes"]


def test_the_card(wall_clock):
    section = {}
    gpu_check.measure_card(section, "cpu", num_bytes=1 << 16, side=32)
    assert section["copy_bytes_per_second"] > 0 and section["matmul_operations_per_second"] > 0


def test_the_engine_and_transformers(tiny, one_thread):
    requests = gpu_check.workload(3, 300, 4, 9)
    section = {}
    gpu_check.measure_engine(section, tiny, requests, "cpu", modes=("eager",), dtype="float32")
    assert section["eager"]["tokens_per_second"] > 0 and len(section["eager"]["seconds"]) == 2
    section = {}
    gpu_check.measure_transformers(section, tiny, requests, "cpu")
    assert section.keys() == {"batched", "not compiled", "compiled"}


def test_only_wanted_tokens_count():
    assert gpu_check.repeated(lambda: [[1, 2], [3]], wanted=3)["tokens_per_second"] > 0
    with pytest.raises(gpu_check.CheckError, match="3 tokens were made, 4 were wanted"):
        gpu_check.repeated(lambda: [[1, 2], [3]], wanted=4)


def test_events_are_timed_after_warming_up(monkeypatch):
    """Median of what comes after the first five; the host's wait is outside of both events."""
    log, times = [], iter([1.0, 9.0, 2.0])

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            log.append("record")

        def synchronize(self):
            log.append("synchronize")

        def elapsed_time(self, end):
            return next(times)

    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", lambda cycles: log.append(cycles))
    run, finish = lambda: log.append("run"), lambda result: log.append("finish")
    assert gpu_check.event_ms(run, finish, repeats=3, spin=7) == 2.0
    assert log == [7, "record", "run", "record", "finish", "synchronize"] * 8


# The report.


def numbers(**fields):
    return {"microseconds": 10.0, "bytes": 1, "operations": 1, "share_of_floor": 0.5} | fields


@pytest.fixture
def report():
    step = {"step_ms": 2.0, "device_ms": 1.5, "floor_ms": 1.0}
    step |= {"random_step_ms": 2.5, "top_p_step_ms": 3.0}
    return {
        "circumstances": {"card": "a card", "driver": "1.2", "torch": "2", "triton": "3"},
        "failed": {"tokens": "CheckError: other tokens"},
        "seconds": {"kernels": 12.3, "tokens": 4.5},
        "attention": {"decode and merge x 256": numbers(share_of_copy=0.85)},
        "step": {
            "graphs x 256": step | {"times_floor": 2.5},
            "graphs x 1": step | {"times_floor": 2.9},
        },
        "engine": {"graphs": {"tokens_per_second": 1234.0}},
        "transformers": {"batched": "all", "compiled": {"tokens_per_second": 321.0}},
    }


def test_aims_met_and_missed(report):
    assert [aim["met"] for aim in gpu_check.judge_aims(report)] == [True, False, True]
    del report["attention"], report["step"]["graphs x 1"]
    aims = gpu_check.judge_aims(report)
    assert [aim["met"] for aim in aims] == [None, False, None]
    assert aims[0]["value"] is None


def test_the_table(report):
    report["aims"] = gpu_check.judge_aims(report)
    text = gpu_check.table(report)
    for part in ("a card", "12.3  ok", "other tokens", "85%", "2.000", "1234", "321", "not met"):
        assert part in text
    empty = {key: {} for key in ("failed", "seconds", "attention", "step", "engine")}
    empty |= {"circumstances": report["circumstances"]}
    empty["aims"] = gpu_check.judge_aims(empty)
    assert gpu_check.table(empty).count("not measured") == 3


def test_a_part_that_fails_leaves_the_others(tmp_path, capsys):
    out, seen = tmp_path / "data" / "gpu.json", []

    def good(section, report):
        section["number"] = 1 / 3

    def bad(section, report):
        section["kept"] = True
        raise gpu_check.CheckError("it does not hold")

    def last(section, report):
        seen.append(json.loads(out.read_text()))
        section["sees"] = report["good"]["number"]

    report = gpu_check.run_parts({"good": good, "bad": bad, "last": last}, out)
    assert report["failed"] == {"bad": "CheckError: it does not hold"}
    (before_last,) = seen
    assert not before_last["complete"] and before_last["good"] == {"number": 0.3333}
    assert before_last["bad"] == {"kept": True} and "last" not in before_last["seconds"]
    saved = json.loads(out.read_text())
    assert saved["complete"] and saved["last"] == {"sees": 0.3333}
    assert saved["seconds"].keys() == {"good", "bad", "last"}
    assert saved["circumstances"].keys() >= {"card", "driver", "torch", "triton", "commit", "date"}
    assert [path.name for path in out.parent.iterdir()] == ["gpu.json"]
    assert "it does not hold" in capsys.readouterr().err


def test_a_run_that_is_cut_keeps_what_it_had(tmp_path):
    def cut(section, report):
        raise KeyboardInterrupt

    out = tmp_path / "gpu.json"
    with pytest.raises(KeyboardInterrupt):
        gpu_check.run_parts({"good": lambda section, report: section.update(a=1), "cut": cut}, out)
    assert json.loads(out.read_text())["good"] == {"a": 1}


def test_rates_that_were_not_measured():
    assert gpu_check.rates({"failed": {}, "card": CARD}) == CARD
    with pytest.raises(gpu_check.CheckError, match="'card' failed"):
        gpu_check.rates({"failed": {"card": "?"}, "card": {}})


def test_it_needs_few_packages(tmp_path):
    """Where those of the CPU path and of the tests are missing, it gets as far as without a GPU."""
    program = f"""
import runpy, sys
for name in ("numba", "psutil", "matplotlib", "hypothesis", "pytest"):
    sys.modules[name] = None
sys.argv = ["gpu_check.py", "--out", "gpu.json"]
import tinyvllm.cuda_graphs
runpy.run_path({str(SCRIPT)!r}, run_name="__main__")
"""
    environment = os.environ | {"PYTHONPATH": str(SCRIPT.parents[1]), "CUDA_VISIBLE_DEVICES": ""}
    command = [sys.executable, "-c", program]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (2, ""), done.stderr
    assert "no CUDA device" in done.stderr and not list(tmp_path.iterdir())


def test_exit_status(tmp_path, monkeypatch, capsys):
    out = tmp_path / "gpu.json"
    monkeypatch.setattr("sys.argv", ["gpu_check.py", "--out", str(out)])
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main() == 2
    assert "no CUDA device" in capsys.readouterr().err and not out.exists()

    about = dict.fromkeys(("card", "driver", "torch", "triton"), "?")
    monkeypatch.setattr(gpu_check, "circumstances", lambda: about)
    monkeypatch.setattr(gpu_check, "free_memory", lambda: None)
    monkeypatch.setattr(gpu_check, "random_checkpoint", lambda folder: folder)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    for error, status in ((None, 0), (RuntimeError("out of memory"), 1)):

        def part(section, report, error=error):
            if error:
                raise error

        monkeypatch.setattr(gpu_check, "all_parts", lambda folder, part=part: {"only": part})
        assert gpu_check.main() == status
        assert ("out of memory" in capsys.readouterr().out) == (status == 1)


def test_every_part_gets_what_it_asks_for(monkeypatch, tmp_path):
    """The real list of parts, each replaced by one that only looks at its arguments."""
    called = []
    for name in [n for n in vars(gpu_check) if n.startswith(("check_", "measure_"))]:
        signature = inspect.signature(getattr(gpu_check, name))

        def part(*args, signature=signature, name=name, **kwargs):
            signature.bind(*args, **kwargs)
            called.append(name)

        monkeypatch.setattr(gpu_check, name, part)
    report = gpu_check.run_parts(gpu_check.all_parts(tmp_path), tmp_path / "gpu.json")
    assert report["failed"] == {} and len(set(called)) == len(called) == 8


def test_every_part_is_documented():
    parts = gpu_check.all_parts(ASSETS)
    assert list(parts)[:3] == ["kernels", "tokens", "modes"], "what is right comes first"
    for name in parts:
        assert f"\n    {name} " in gpu_check.__doc__, name


def test_random_weights_make_tokens_depend_on_the_past(tiny):
    """Untouched, a random GPT-2 repeats its last token for ever, and a lost cache would not show."""
    model = gpu_check.load_transformers(tiny, "cpu", torch.float32, "eager")
    prompt = np.random.default_rng(0).integers(0, 300, 10).tolist()
    ids = torch.tensor([prompt])
    tokens = model.generate(ids, max_new_tokens=12, do_sample=False, pad_token_id=0)[0, 10:]
    assert len(set(tokens.tolist())) > 4
