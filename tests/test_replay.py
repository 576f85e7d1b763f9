"""vLLM's own decisions, replayed; and proof that the replay notices a changed decision."""

import copy
import json
import subprocess
import sys
from pathlib import Path

import pytest
from replay_vllm_traces import COMPARED, TraceReplay

TRACES = sorted((Path(__file__).parent / "data" / "vllm-traces").glob("*.json"))
SCRIPT = Path(__file__).parent / "replay_vllm_traces.py"


def test_all_forty_traces_are_here():
    assert len(TRACES) == 40


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_same_decisions_as_vllm(path):
    assert TraceReplay(json.loads(path.read_text())).differences() == []


def wrong(value):
    """The same kind of value with something changed."""
    if isinstance(value, dict):
        return {**value, "nobody": 1}
    return value + 1 if isinstance(value, int) else [*value, "nobody"]


@pytest.mark.parametrize("key", COMPARED)
def test_a_changed_decision_is_reported(key):
    trace = copy.deepcopy(json.loads(TRACES[1].read_text()))
    step = trace["steps"][5]
    step[key] = wrong(step[key])
    assert any(f"step 5: {key}:" in line for line in TraceReplay(trace).differences())


def run_script(*arguments):
    command = [sys.executable, str(SCRIPT), *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def test_script_prints_the_count_last(tmp_path):
    (tmp_path / "a.json").write_text(TRACES[0].read_text())
    done = run_script(tmp_path)
    assert (done.returncode, done.stdout) == (0, "1/1 identical\n")

    trace = json.loads(TRACES[1].read_text())
    trace["steps"][0]["free_blocks_after"] -= 1
    (tmp_path / "b.json").write_text(json.dumps(trace))
    done = run_script(tmp_path)
    lines = done.stdout.splitlines()
    assert done.returncode == 1
    assert lines[0].startswith("b.json: step 0: free_blocks_after: vLLM")
    assert lines[-1] == "1/2 identical"


def test_script_refuses_an_empty_folder(tmp_path):
    assert run_script(tmp_path).returncode == 2
