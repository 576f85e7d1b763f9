"""The command line: what it prints, what it refuses, and how it ends."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from babbler import make_babbler

from tinyvllm import LLM, SamplingParams
from tinyvllm.cli import StoryPrinter, main

ROOT = Path(__file__).parents[1]
PROMPTS = ["a fox", "Once upon a time", "the boat"]


pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_babbler(tmp_path_factory.mktemp("babbler"))


@pytest.fixture
def run(folder, capsys, monkeypatch):
    """Run a command on the babbler, in this process; returns status, output and errors."""

    def run(*argv, stdin=""):
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        if argv[:1] in (("generate",), ("trace",)) and "--model" not in argv:
            argv = (*argv, "--model", str(folder))
        try:
            status = main(list(argv))
        except SystemExit as error:  # argparse's way out
            status = error.code
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


@pytest.fixture(scope="module")
def texts(folder):
    """What the greedy babbler says to the prompts, twelve tokens each."""
    llm = LLM(folder, device="cpu", num_gpu_blocks_override=100)
    params = SamplingParams(temperature=0, max_tokens=12)
    return [o.prompt + o.outputs[0].text for o in llm.generate(PROMPTS, params, use_tqdm=False)]


GREEDY = ("--temperature", "0", "--max-tokens", "12")


class TestGenerate:
    def test_one_story(self, run, texts):
        assert run("generate", PROMPTS[0], *GREEDY) == (0, texts[0] + "\n", "")

    def test_several_stories_in_order(self, run, texts):
        assert run("generate", *PROMPTS, *GREEDY) == (0, "\n\n".join(texts) + "\n", "")

    def test_prompts_from_standard_input(self, run, texts):
        stdin = f"{PROMPTS[0]}\n\n{PROMPTS[1]}\n  \n{PROMPTS[2]}"
        assert run("generate", *GREEDY, stdin=stdin) == (0, "\n\n".join(texts) + "\n", "")

    def test_json(self, run, texts):
        status, out, err = run("generate", *PROMPTS, *GREEDY, "--json")
        records = [json.loads(line) for line in out.splitlines()]
        assert (status, err) == (0, "")
        assert [record["prompt"] + record["text"] for record in records] == texts
        assert [record["error"] for record in records] == [None] * 3
        assert {record["finish_reason"] for record in records} <= {"stop", "length"}
        assert all(1 <= len(record["token_ids"]) <= 12 for record in records)

    def test_stats(self, run):
        status, out, _ = run("generate", *PROMPTS, *PROMPTS, *GREEDY, "--stats")
        assert status == 0
        figures = re.fullmatch(
            r"6 requests, (\d+) tokens, [\d.]+ tokens/s, (\d+) steps, peak (\d+) blocks, "
            r"prefix hits \d+ of \d+ prompt tokens",
            out.splitlines()[-1],
        )
        tokens, steps, blocks = map(int, figures.groups())
        assert 6 <= tokens <= 72 and 1 <= steps <= 12 and blocks >= 6

    def test_stats_as_json(self, run, folder):
        prompt = "Once upon a time there was a fox named Pip."
        _, out, _ = run("generate", prompt, prompt, *GREEDY, "--json", "--stats", "--block-size=4")
        first, second, last = (json.loads(line) for line in out.splitlines())
        stats, count = last["stats"], len(LLM(folder).tokenizer.encode(prompt))
        assert stats["requests"] == 2
        assert stats["tokens"] == len(first["token_ids"]) + len(second["token_ids"])
        assert stats["prompt_tokens"] == 2 * count
        assert stats["prefix_hits"] == second["num_cached_tokens"] == (count - 1) // 4 * 4

    def test_seed(self, run):
        command = ("generate", PROMPTS[0], "--max-tokens", "20")
        one, again, other = run(*command), run(*command, "--seed=0"), run(*command, "--seed=5")
        assert one == again
        assert one[1] != other[1]

    def test_stop(self, run, texts):
        story = texts[0].removeprefix(PROMPTS[0])
        stop = story[5:7]
        expected = PROMPTS[0] + story[: story.index(stop)]
        assert run("generate", PROMPTS[0], *GREEDY, "--stop", stop) == (0, expected + "\n", "")
        _, out, _ = run("generate", PROMPTS[0], *GREEDY, f"--stop={stop}", "--stop=@@@", "--json")
        record = json.loads(out)
        assert (record["finish_reason"], record["stop_reason"]) == ("stop", stop)

    def test_several_continuations(self, run, folder):
        drawn = ("--max-tokens", "12", "--temperature", "1.5", "--top-p", "0.9", "--top-k", "40")
        params = SamplingParams(n=3, max_tokens=12, temperature=1.5, top_p=0.9, top_k=40)
        llm = LLM(folder, device="cpu", num_gpu_blocks_override=100)
        outputs = llm.generate(PROMPTS[:2], params, use_tqdm=False)
        texts = [o.prompt + completion.text for o in outputs for completion in o.outputs]
        command = ("generate", *PROMPTS[:2], *drawn, "--n", "3")
        assert run(*command) == (0, "\n\n".join(texts) + "\n", "")
        records = [json.loads(line) for line in run(*command, "--json")[1].splitlines()]
        assert [record["prompt"] + record["text"] for record in records] == texts
        assert [record["index"] for record in records] == [0, 1, 2] * 2

    def test_a_bad_prompt_among_good_ones(self, run, texts):
        """The good ones are served; the bad one is a line on standard error and the status."""
        status, out, err = run("generate", PROMPTS[0], "", PROMPTS[1], *GREEDY)
        assert (status, out) == (2, "\n\n".join(texts[:2]) + "\n")
        assert re.fullmatch(r"tinyvllm: prompt 2: .*at least one token.*\n", err)

        status, out, err = run("generate", PROMPTS[0], "", *GREEDY, "--json")
        good, bad = (json.loads(line) for line in out.splitlines())
        assert status == 2 and err.count("\n") == 1
        assert good["prompt"] + good["text"] == texts[0]
        assert "at least one token" in bad["error"] and "text" not in bad


class TestStoryPrinter:
    def test_first_story_is_live_and_the_others_wait(self, capsys):
        printer = StoryPrinter(["A", "B", "C"])
        seen = []
        for i, text, finished in [
            (0, "1", False),
            (1, "1", False),
            (2, "1", True),
            (0, "2", True),
            (1, "2", False),
            (1, "3", True),
        ]:
            printer.add(i, text, finished)
            seen.append(capsys.readouterr().out)
        assert seen == ["A1", "", "", "2\n\nB1", "2", "3\n\nC1\n"]

    def test_bold_prompts_on_a_terminal(self, monkeypatch):
        monkeypatch.delenv("NO_COLOR", raising=False)
        terminal = io.StringIO()
        terminal.isatty = lambda: True
        monkeypatch.setattr(sys, "stdout", terminal)
        StoryPrinter(["A"]).add(0, "b", True)
        assert terminal.getvalue() == "\033[1mA\033[0mb\n"


class TestTrace:
    def table(self, out):
        """The rows of the table by column name. Every cell begins where its header does."""
        header, *lines = out.splitlines()
        names = header.split()
        starts = [header.index(name) for name in names] + [None]
        return [
            {name: line[starts[i] : starts[i + 1]].strip() for i, name in enumerate(names)}
            for line in lines
        ]

    def test_one_row_a_step(self, run, folder):
        command = ("trace", *PROMPTS[:2], "--max-tokens", "4", "--max-num-batched-tokens", "5")
        status, out, err = run(*command)
        assert (status, err) == (0, "")
        rows = self.table(out)
        assert [row["step"] for row in rows] == [str(i) for i in range(len(rows))]
        scheduled = [
            re.match(r"(\d):(\d+)\+(\d+)", cell)
            for row in rows
            for cell in row["scheduled"].split()
        ]
        lengths = [len(LLM(folder).tokenizer.encode(prompt)) for prompt in PROMPTS[:2]]
        for seq_id, length in zip("01", lengths, strict=True):
            position = 0  # chunk follows chunk, up to the token that nothing comes after
            for match in scheduled:
                if match[1] == seq_id:
                    assert int(match[2]) == position
                    position += int(match[3])
            assert position == length + 3
        assert [row["new"] for row in rows if row["new"]] != []
        assert " ".join(row["finished"] for row in rows).split() == ["0:length", "1:length"]

    def test_preemption_shows(self, run):
        status, out, _ = run(
            "trace", *PROMPTS, "--max-tokens=30", "--block-size=4", "--num-gpu-blocks-override=15"
        )
        rows = self.table(out)
        assert status == 0
        assert any(row["preempted"] for row in rows) and any(row["resumed"] for row in rows)
        assert rows[-1]["free"] == "14"


BAD_INPUT = [
    ([], "COMMAND"),
    (["tell"], "invalid choice: 'tell'"),
    (["generate"], "no prompt"),
    (["trace"], "no prompt"),
    (["generate", ""], "at least one token"),
    (["trace", ""], "at least one token"),
    (["generate", "\udcff"], "prompt 1 is not text"),
    (["generate", "a", "--frobnicate"], "unrecognized arguments: --frobnicate"),
    (["generate", "a", "--temperature", "-1"], "temperature must be"),
    (["generate", "a", "--temperature", "hot"], "invalid float value: 'hot'"),
    (["generate", "a", "--temperature", "nan"], "temperature must be"),
    (["generate", "a", "--max-tokens", "0"], "max_tokens must be"),
    (["generate", "a", "--max-tokens", "1.5"], "invalid int value: '1.5'"),
    (["generate", "a", "--seed", str(2**64)], "seed must be"),
    (["generate", "a", "--top-p", "0"], "top_p must be"),
    (["trace", "a", "--top-k", "-2"], "top_k must be"),
    (["generate", "a", "--n", "0"], "n must be"),
    (["generate", "a", "--stop", ""], "stop must be"),
    (["generate", "a", "--block-size", "0"], "block_size must be"),
    (["generate", "a", "--num-gpu-blocks-override", "1"], "num_gpu_blocks_override must be"),
    (["generate", "a", "--max-model-len", "100000"], "max_model_len must be"),
    (["generate", "a", "--model", "./nowhere"], "./nowhere: no such folder"),
    (["generate", "a", "--model", "not a hub id"], "not a hub id"),
    (["generate", "a", "--model", __file__], "test_cli.py"),
    (["generate", "a", "--model", str(ROOT / "tests")], "config.json"),
]


@pytest.mark.parametrize("argv, message", BAD_INPUT, ids=[" ".join(a)[:40] for a, _ in BAD_INPUT])
def test_bad_input_is_one_line_and_status_2(run, argv, message):
    status, out, err = run(*argv)
    assert status == 2
    assert err.count("\n") == 1 and err.startswith("tinyvllm") and message in err
    assert out.strip() in ("", "step  new  resumed  preempted  finished  free  scheduled")


def start(*argv, **kwargs):
    """The command in a process of its own, on the shipped model."""
    return subprocess.Popen(
        [sys.executable, "-m", "tinyvllm", *argv],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        # In the background of a shell SIGINT is ignored, and that would be inherited.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
        **kwargs,
    )


def test_help_loads_nothing_heavy():
    for argv in ["'--help'", "'generate', '--help'"]:
        code = f"""
import sys
from tinyvllm.cli import main
try:
    main([{argv}])
except SystemExit as end:
    print(end.code, *sys.modules)
"""
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
        assert done.stdout.startswith("usage: tinyvllm") and done.stderr == ""
        status, *modules = done.stdout.splitlines()[-1].split()
        assert status == "0"
        assert not {"torch", "transformers", "numba", "numpy", "tokenizers"} & set(modules)


def test_ctrl_c_without_a_reader_of_errors(monkeypatch):
    """Nobody reads standard error any more: the exit status still says what happened."""
    reading, writing = os.pipe()
    os.close(reading)

    def interrupt():
        raise KeyboardInterrupt

    monkeypatch.setattr("tinyvllm.cli.make_parser", interrupt)
    with os.fdopen(writing, "w", buffering=1) as nobody:
        monkeypatch.setattr(sys, "stderr", nobody)
        assert main(["generate"]) == 130


MANY = ["Once upon a time"] * 64  # so that not all is told before what interrupts it


def test_ctrl_c_ends_cleanly():
    """A real SIGINT while the story is being told."""
    process = start("generate", *MANY, "--max-tokens", "1000")
    assert process.stdout.read(30).startswith(b"Once upon a time")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=120)
    assert process.returncode == 130
    assert err.decode().strip() == "tinyvllm: interrupted"


def test_broken_pipe_ends_cleanly():
    """As in `tinyvllm generate ... | head -c 30`: the reader goes away."""
    process = start("generate", *MANY, "--max-tokens", "1000")
    assert process.stdout.read(30).startswith(b"Once upon a time")
    process.stdout.close()
    assert process.wait(timeout=120) == 141
    assert process.stderr.read() == b""


FULL = Path("/dev/full")  # a device on which there is never any space


class TestStreams:
    """Standard streams that are closed, full, or cannot hold every character."""

    @pytest.mark.parametrize(
        "encoding, shown", [("ascii", "\\xe9 \\u65e5"), ("latin-1", "é \\u65e5")]
    )
    @pytest.mark.parametrize("errors", ["strict", "surrogateescape"])
    def test_what_the_encoding_lacks_is_escaped(self, run, monkeypatch, encoding, shown, errors):
        binary = io.BytesIO()
        stdout = io.TextIOWrapper(binary, encoding, errors)
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run("generate", "é 日", *GREEDY) == (0, "", "")
        assert binary.getvalue().decode(encoding).startswith(shown)

    def test_the_users_own_way_with_characters_is_kept(self, run, monkeypatch):
        binary = io.BytesIO()
        stdout = io.TextIOWrapper(binary, "ascii", "replace")
        monkeypatch.setattr(sys, "stdout", stdout)
        assert run("generate", "é", *GREEDY) == (0, "", "")
        assert binary.getvalue().startswith(b"?")

    def test_errors_stay_out_of_the_json(self, run, monkeypatch):
        monkeypatch.setattr(sys, "stderr", None)
        status, out, _ = run("generate", "", PROMPTS[0], *GREEDY, "--json", "--stats")
        assert status == 2
        bad, good, stats = (json.loads(line) for line in out.splitlines())
        assert bad["error"] and good["error"] is None and stats["stats"]["requests"] == 2

    @pytest.mark.parametrize("argv", [("generate", ""), ("generate", "a", "--seed=x"), ("tell",)])
    def test_without_standard_error_the_status_tells(self, run, monkeypatch, argv):
        monkeypatch.setattr(sys, "stderr", None)
        assert run(*argv)[:2] == (2, "")

    @pytest.mark.parametrize("argv", [("generate", "a"), ("trace", "a"), ("--help",)])
    def test_standard_output_is_closed(self, run, monkeypatch, argv):
        monkeypatch.setattr(sys, "stdout", None)
        assert run(*argv) == (2, "", "tinyvllm: standard output is closed\n")

    @pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
    @pytest.mark.parametrize(
        "argv", [("generate", "a"), ("generate", "a", "--json"), ("trace", "a"), ("--help",)]
    )
    def test_standard_output_is_full(self, run, monkeypatch, argv):
        with FULL.open("w") as full:
            monkeypatch.setattr(sys, "stdout", full)
            status, _, err = run(*argv)
        assert (status, err) == (1, "tinyvllm: [Errno 28] No space left on device\n")

    @pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
    def test_standard_error_is_full(self, run, monkeypatch, texts):
        with FULL.open("w") as full:
            monkeypatch.setattr(sys, "stderr", full)
            status, out, _ = run("generate", "", PROMPTS[0], *GREEDY)
        assert (status, out) == (2, texts[0] + "\n")

    def test_standard_input_cannot_be_read(self, capsys, monkeypatch, tmp_path):
        descriptor = os.open(tmp_path / "file", os.O_WRONLY | os.O_CREAT)
        with open(descriptor) as stdin:  # text to read, says Python; the system knows better
            monkeypatch.setattr(sys, "stdin", stdin)
            assert main(["generate"]) == 2
        expected = "tinyvllm: standard input cannot be read: Bad file descriptor\n"
        assert capsys.readouterr().err == expected

    @pytest.mark.skipif(not FULL.exists(), reason="needs /dev/full")
    def test_nothing_is_left_for_python_to_complain_about_at_exit(self):
        command = [sys.executable, "-m", "tinyvllm", "generate", "a", "--max-tokens", "3"]
        with FULL.open("w") as full:
            done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, check=False)
        assert (done.returncode, done.stderr.count(b"\n")) == (1, 1)


class TestScripts:
    def script(self, name, *argv):
        done = subprocess.run(
            [sys.executable, str(ROOT / "scripts" / name), *argv], capture_output=True, text=True
        )
        return done.returncode, done.stdout, done.stderr

    def test_smoke(self):
        status, out, err = self.script("smoke.py")
        assert status == 0, out + err
        assert out.count("\nok ") == 6 and "6 of 6 in" in out.splitlines()[-1]

    def test_run_tiny_model(self, folder, tmp_path, texts):
        argv = ("--prompt", PROMPTS[0], "--max-new-tokens", "12")
        status, out, _ = self.script("run_tiny_model.py", "--model", str(folder), *argv)
        assert (status, out) == (0, texts[0] + "\n")

        from transformers import GPT2LMHeadModel

        model = GPT2LMHeadModel.from_pretrained(folder)
        model.config.save_pretrained(tmp_path)
        torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
        (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
        (tmp_path / "model.safetensors").write_text("nothing that anybody could read")
        argv = ("--model", str(tmp_path), "--no-safetensors", *argv)
        status, out, _ = self.script("run_tiny_model.py", *argv)
        assert (status, out) == (0, texts[0] + "\n")

    def test_run_tiny_model_with_bad_input(self, folder):
        status, out, err = self.script(
            "run_tiny_model.py", "--model", str(folder), "--no-safetensors"
        )
        assert (status, out) == (2, "")
        assert "pytorch_model.bin" in err and err.count("\n") == 1
