"""What an import costs, and that the control plane needs neither PyTorch nor anything beside it."""

import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

import tinyvllm

ROOT = Path(__file__).parents[1]
HEAVY = ["torch", "transformers", "numba", "triton", "tokenizers", "huggingface_hub"]

BLOCK = f"""
import sys
from importlib.abc import MetaPathFinder


class Blocker(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY}:
            raise ImportError(f"{{name}} is blocked")


sys.meta_path.insert(0, Blocker())
"""


def run_python(code: str, cwd: Path | None = None) -> str:
    """Run code in a fresh interpreter and return what it prints; an error there is one here."""
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code)], capture_output=True, text=True, cwd=cwd
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


@pytest.mark.parametrize(
    "statement",
    [
        "import tinyvllm",
        "import tinyvllm.cli; tinyvllm.cli.make_parser()",
        "from tinyvllm import Engine, EngineConfig, MockModelRunner, Request, SamplingParams",
    ],
)
def test_light_imports(statement):
    loaded = run_python(f"import sys; {statement}; print(*sys.modules)").split()
    assert "tinyvllm" in loaded
    assert not set(HEAVY) & set(loaded)


def test_import_alone_loads_none_of_our_modules():
    loaded = run_python("import sys, tinyvllm; print(*sys.modules)").split()
    assert [name for name in loaded if name.startswith("tinyvllm")] == ["tinyvllm"]


@pytest.mark.parametrize("name", tinyvllm.__all__)
def test_every_public_name_loads(name):
    assert getattr(tinyvllm, name).__name__ == name
    assert name in dir(tinyvllm)


def test_unknown_name():
    with pytest.raises(AttributeError, match="no attribute 'Magic'"):
        _ = tinyvllm.Magic


def test_control_plane_runs_with_torch_blocked():
    """A workload with shared prefixes, chunks, preemption and an abort, against its oracle."""
    code = """
    from tinyvllm import Engine, EngineConfig, MockModelRunner, Request, SamplingParams

    try:
        import torch
    except ImportError as error:
        print(error)

    config = EngineConfig(block_size=4, max_num_batched_tokens=6)
    runner = MockModelRunner(vocab_size=50, num_blocks=10, block_size=4)
    engine = Engine(config, runner)
    preempted = []
    engine.observers.append(lambda event: preempted.extend(event.preempted))
    prompts = {str(i): [7] * 9 + [i] for i in range(5)}
    params = SamplingParams(temperature=0, max_tokens=10)
    for request_id, prompt in prompts.items():
        engine.add_request(Request(request_id, prompt, params))
    engine.abort("4")
    finished = {}
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.finished:
                finished[output.request_id] = output.outputs[0].token_ids
        engine.check_invariants()
    for request_id, token_ids in finished.items():
        known = list(prompts[request_id])
        for token_id in token_ids:
            assert runner.next_token(known) == token_id
            known.append(token_id)
    print(sorted(finished), len(preempted) > 0)
    """
    printed = run_python(BLOCK + textwrap.dedent(code))
    assert printed == "torch is blocked\n['0', '1', '2', '3'] True"


def test_control_plane_tests_run_with_torch_blocked():
    """The tests of chapters 01 to 07 themselves; the long random ones are only loaded."""
    code = """
    import pytest

    names = ["request", "sequence", "config", "scheduler", "replay"]
    files = [f"tests/test_{name}.py" for name in names]
    ran = pytest.main(["-q", "-p", "no:cacheprovider", *files])
    loaded = pytest.main(["-q", "--collect-only", "tests/test_control_plane_properties.py"])
    print(int(ran), int(loaded), "torch" in sys.modules)
    """
    printed = run_python(BLOCK + textwrap.dedent(code), cwd=ROOT)
    assert printed.splitlines()[-1] == "0 0 False", printed


def test_the_gpu_path_needs_neither_numba_nor_psutil():
    """A machine with a GPU may have PyTorch, Triton and the tokenizer alone; an engine there
    must not ask for what only the CPU path uses."""
    block = BLOCK.replace(str(HEAVY), str(["numba", "psutil"]))
    code = """
    import tinyvllm.cuda_graphs
    import tinyvllm.llm
    from tinyvllm.config import EngineConfig
    from tinyvllm.gpt2 import load_model

    model = load_model(None, device="cpu", dtype="float32")
    tinyvllm.cuda_graphs.CudaModelRunner.free_memory = lambda self: 1 << 40
    config = EngineConfig(device="cpu", num_gpu_blocks_override=4, enforce_eager=True)
    tinyvllm.cuda_graphs.CudaModelRunner(config, model)
    for name in ("numba", "psutil"):
        try:
            __import__(name)
        except ImportError as error:
            print(error)
    """
    assert run_python(block + textwrap.dedent(code)) == "numba is blocked\npsutil is blocked"
