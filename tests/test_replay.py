"""vLLM's own decisions, replayed; and proof that the replay notices a changed decision."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from replay_vllm_traces import COMPARED, KEYS, TraceReplay

TRACES = sorted((Path(__file__).parent / "data" / "vllm-traces").glob("*.json"))
SCRIPT = Path(__file__).parent / "replay_vllm_traces.py"


def test_all_forty_traces_are_here():
    assert len(TRACES) == 40


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
def test_same_decisions_as_vllm(path):
    assert TraceReplay(json.loads(path.read_text())).differences() == []


def read(i=1):
    return json.loads(TRACES[i].read_text())


def differences(trace):
    """What the script reports, as one text; a report is never a traceback."""
    return "\n".join(TraceReplay(trace).differences())


def wrong(value):
    """The same kind of value with something changed."""
    if isinstance(value, dict):
        return {**value, "nobody": 1}
    return value + 1 if isinstance(value, int) else [*value, "nobody"]


@pytest.mark.parametrize("key", COMPARED)
def test_a_changed_decision_is_reported(key):
    trace = read()
    step = trace["steps"][5]
    step[key] = wrong(step[key])
    assert any(f"step 5: {key}:" in line for line in TraceReplay(trace).differences())


# Decisions alone do not make a trace: it must tell of the whole workload, to the end.


@pytest.mark.parametrize("path", TRACES, ids=lambda path: path.stem)
@pytest.mark.parametrize("kept", [0, 3, -1])
def test_a_trace_cut_short_is_not_identical(path, kept):
    trace = json.loads(path.read_text())
    trace["steps"] = trace["steps"][:kept]
    assert differences(trace) != ""


def test_what_a_short_trace_lacks_is_named():
    trace = read()
    trace["steps"] = []
    everyone = ", ".join(f"r{i}" for i in range(12))
    assert differences(trace) == f"end: the trace has no steps\nend: never added: {everyone}"

    trace = read()
    trace["steps"] = trace["steps"][:3]
    assert differences(trace).startswith("end: never added: r9, r10, r11\nend: not finished ")
    trace["requests"] = [r for r in trace["requests"] if r["arrival_step"] < 3]
    assert differences(trace).splitlines()[0].startswith("end: not finished after 3 steps: ")


def test_a_step_left_out_is_reported():
    trace = read()
    del trace["steps"][7]
    assert differences(trace) == "step 7: the trace goes on with step 8"


def test_an_arrival_left_out_is_reported():
    trace = read()
    trace["steps"][3]["added"].remove("r11")
    assert "step 3: added: vLLM " in differences(trace)


def test_an_abort_left_out_is_reported():
    i = next(i for i in range(40) if any(step["aborted"] for step in read(i)["steps"]))
    trace = read(i)
    step = next(step for step in trace["steps"] if step["aborted"])
    step["aborted"] = []
    assert f"step {step['step']}: aborted: vLLM [], ours ['r" in differences(trace)


def test_outputs_are_compared():
    trace = read()
    outputs = trace["outputs"]
    trace["outputs"] = {}
    lines = differences(trace).splitlines()
    assert len(lines) == 12
    assert lines[0] == f"end: outputs of r0: vLLM None, ours {outputs['r0']}"
    trace["outputs"] = outputs | {"r3": outputs["r3"][:-1], "r99": []}
    short, stray = differences(trace).splitlines()
    assert short.startswith("end: outputs of r3: vLLM ") and stray == "end: outputs of nobody: r99"


def test_queues_are_optional():
    trace = read()
    for step in trace["steps"]:
        del step["waiting"]
    assert differences(trace) == ""


def test_an_unknown_setting_is_reported():
    trace = read()
    trace["config"] |= {"spec_tokens": 3, "async": True}
    assert differences(trace) == "config: unknown async, spec_tokens"


@pytest.mark.parametrize("kind, key", [(kind, key) for kind, keys in KEYS.items() for key in keys])
def test_a_missing_key_is_reported(kind, key):
    trace = read()
    part, where = {
        "trace": (trace, "trace"),
        "config": (trace["config"], "config"),
        "request": (trace["requests"][2], "request 2"),
        "step": (trace["steps"][4], "step 4"),
    }[kind]
    del part[key]
    assert f"{where}: missing {key}" in differences(trace).splitlines()


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda t: t["config"].update(watermark=0.5), "config: ValueError: watermark must be 0.0"),
        (lambda t: t["config"].update(block_size=0), "config: ValueError: block_size must be"),
        (lambda t: t["config"].update(num_blocks="many"), "config: "),
        (lambda t: t.update(config=None), "trace: "),
        (lambda t: t.update(steps=None), "trace: "),
        (lambda t: t["requests"][0].update(max_tokens=0), "step 0: ValueError: max_tokens"),
        (lambda t: t["requests"][0]["model_output_token_ids"].pop(), "step 3: IndexError: "),
        (lambda t: t["steps"][3]["added"].append("r99"), "step 3: KeyError: 'r99'"),
        (lambda t: t["steps"][3]["added"].append("r1"), "step 3: ValueError: seq_id 'r1'"),
        (lambda t: t["steps"].append(7), "trace: "),
    ],
)
def test_nonsense_is_reported(change, message):
    trace = read()
    change(trace)
    assert differences(trace).startswith(message) and "\n" not in differences(trace)


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


def test_script_goes_on_after_a_trace_that_it_cannot_read(tmp_path):
    (tmp_path / "a.json").write_text('{"steps": [')
    (tmp_path / "b.json").write_text("[]")
    (tmp_path / "c.json").mkdir()
    (tmp_path / "d.json").write_text(TRACES[0].read_text())
    done = run_script(tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    lines = done.stdout.splitlines()
    assert lines[0].startswith("a.json: cannot be read: JSONDecodeError: ")
    assert lines[1].startswith("b.json: trace: ")
    assert lines[2].startswith("c.json: cannot be read: IsADirectoryError: ")
    assert lines[3:] == ["1/4 identical"]
