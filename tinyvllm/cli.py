"""The command line: `tinyvllm generate` tells stories, `tinyvllm trace` shows the engine at work.

Only the standard library is imported until a command runs, so that `--help` answers at once.
"""

import argparse
import json
import os
import sys
import time
from collections import deque

# Engine arguments that the command line offers, all of them integers: name and help.
ENGINE_OPTIONS = [
    ("block_size", "tokens that a KV block holds"),
    ("num_gpu_blocks_override", "KV blocks to allocate, instead of sizing from memory"),
    ("max_num_batched_tokens", "the token budget of a step"),
    ("max_num_seqs", "most sequences that run at once"),
    ("max_model_len", "most tokens of a sequence, prompt and continuation"),
]


STATS_LINE = (
    "{requests} requests, {tokens} tokens, {tokens_per_second} tokens/s, {steps} steps, "
    "peak {peak_blocks} blocks, prefix hits {prefix_hits} of {prompt_tokens} prompt tokens"
)


class BadInput(Exception):
    """What the user gave cannot be served; the message is one line for standard error."""


class Parser(argparse.ArgumentParser):
    """An argument parser whose errors are one line."""

    def error(self, message: str):
        message = " ".join(message.split())
        self.exit(2, f"{self.prog}: {message} (see {self.prog} --help)\n")


def make_parser() -> argparse.ArgumentParser:
    """The commands and their options."""
    parser = Parser(prog="tinyvllm", description="A GPT-2 serving engine, small enough to read.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    generate = commands.add_parser(
        "generate",
        help="continue prompts, streaming",
        description="Continue every prompt. All of them run at once; they are printed one after "
        "the other, the first unfinished one as it grows.",
    )
    generate.set_defaults(run=run_generate)
    generate.add_argument(
        "--json", action="store_true", help="print one JSON object per continuation"
    )
    generate.add_argument("--stats", action="store_true", help="end with a line of figures")
    generate.add_argument(
        "--n", type=int, metavar="N", default=1, help="continuations of each prompt (default: 1)"
    )
    generate.add_argument(
        "--stop", action="append", metavar="TEXT", help="end before this text; may be repeated"
    )

    trace = commands.add_parser(
        "trace",
        help="print what each step of the engine did",
        description="Continue every prompt and print one row per step of the engine. A cell "
        "'1:16+8' means: sequence 1, from position 16 on, 8 tokens.",
    )
    trace.set_defaults(run=run_trace)

    for command, max_tokens, temperature in [(generate, 400, 0.5), (trace, 16, 0.0)]:
        command.add_argument(
            "prompts", nargs="*", metavar="PROMPT", help="default: the lines of standard input"
        )
        command.add_argument(
            "--model", help="folder or hub id of a GPT-2 (default: the model in the package)"
        )
        command.add_argument(
            "--max-tokens",
            type=int,
            metavar="N",
            default=max_tokens,
            help="per prompt (default: %(default)s)",
        )
        command.add_argument(
            "--temperature",
            type=float,
            metavar="X",
            default=temperature,
            help="0 takes the likeliest token (default: %(default)s)",
        )
        command.add_argument(
            "--top-p",
            type=float,
            metavar="X",
            default=1.0,
            help="draw from the likeliest tokens that together have this probability",
        )
        command.add_argument(
            "--top-k", type=int, metavar="N", default=0, help="draw from the N likeliest tokens"
        )
        command.add_argument(
            "--seed",
            type=int,
            metavar="N",
            default=0,
            help="another seed, another story (default: %(default)s)",
        )
        for name, text in ENGINE_OPTIONS:
            command.add_argument(f"--{name.replace('_', '-')}", type=int, metavar="N", help=text)
        command.add_argument(
            "--no-enable-prefix-caching",
            dest="enable_prefix_caching",
            action="store_false",
            help="compute every prompt from its first token",
        )
    return parser


def read_prompts(args: argparse.Namespace) -> list[str]:
    """The prompts: the arguments, or else the lines of standard input that are not blank."""
    prompts = args.prompts
    if not prompts and sys.stdin is not None and not sys.stdin.isatty():
        try:
            prompts = [line.rstrip("\n") for line in sys.stdin if line.strip()]
        except UnicodeDecodeError as error:
            raise BadInput(f"standard input is not text: {error}") from error
        except OSError as error:
            raise BadInput(f"standard input cannot be read: {error.strerror}") from error
    if not prompts:
        raise BadInput("no prompt: give some as arguments, or on standard input, one a line")
    for i, prompt in enumerate(prompts):
        try:
            prompt.encode()
        except UnicodeEncodeError as error:  # bytes of the command line that are no text
            raise BadInput(f"prompt {i + 1} is not text: {error}") from error
    return prompts


def load(args: argparse.Namespace):
    """The `LLM` and the `SamplingParams` that the options ask for."""
    from tinyvllm.request import SamplingParams

    engine_args = {"seed": args.seed, "enable_prefix_caching": args.enable_prefix_caching}
    for name, _ in ENGINE_OPTIONS:
        if getattr(args, name) is not None:
            engine_args[name] = getattr(args, name)
    try:
        # First what is checked at once; PyTorch takes a second or two to import.
        params = SamplingParams(
            n=getattr(args, "n", 1),
            max_tokens=args.max_tokens,
            temperature=args.temperature,
            top_p=args.top_p,
            top_k=args.top_k,
            stop=getattr(args, "stop", None),
        )
        from tinyvllm.llm import LLM

        return LLM(args.model, **engine_args), params
    except (ValueError, OSError) as error:
        raise BadInput(" ".join(str(error).split())) from error


class Stats:
    """Counts what the engine does, as one of its observers."""

    def __init__(self, engine):
        self.engine = engine
        self.start = time.monotonic()
        self.num_steps = self.num_tokens = self.peak_blocks = 0
        engine.observers.append(self)

    def __call__(self, event):
        """Take note of one step."""
        self.num_steps += 1
        self.num_tokens += len(event.sampled)
        # Blocks of sequences that finished in this step are free again, so look at both.
        scheduled = {block for table in event.block_ids.values() for block in table}
        held = self.engine.kv.num_usable_blocks - event.free_blocks
        self.peak_blocks = max(self.peak_blocks, len(scheduled), held)

    def figures(self, num_requests: int) -> dict[str, float]:
        """The figures so far, by name."""
        seconds = time.monotonic() - self.start
        cache = self.engine.scheduler.prefix_cache_stats
        return {
            "requests": num_requests,
            "tokens": self.num_tokens,
            "tokens_per_second": round(self.num_tokens / seconds, 1),
            "steps": self.num_steps,
            "peak_blocks": self.peak_blocks,
            "prefix_hits": cache.num_hit,
            "prompt_tokens": cache.num_queried,
        }


class StoryPrinter:
    """Prints texts that grow at the same time, one below the other.

    The first unfinished one is printed as it grows; the others are kept until it is their turn.
    """

    def __init__(self, prompts: list[str]):
        bold = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        self.pieces = [[f"\033[1m{prompt}\033[0m" if bold else prompt] for prompt in prompts]
        self.finished = [False] * len(prompts)
        self.order = deque(range(len(prompts)))  # not printed to the end yet

    def skip(self, i: int):
        """Text `i` will not come."""
        self.order.remove(i)

    def add(self, i: int, text: str, finished: bool):
        """Text `i` grew; print what can be printed."""
        self.pieces[i].append(text)
        self.finished[i] = finished
        while self.order:
            current = self.order[0]
            print("".join(self.pieces[current]), end="", flush=True)
            self.pieces[current] = []
            if not self.finished[current]:
                break
            self.order.popleft()
            print("\n" if self.order else "", flush=True)


def complain(message: str, begin: str = ""):
    """One line on standard error. Where even that fails there is nobody left to tell."""
    try:
        print(f"{begin}tinyvllm: {message}", file=sys.stderr, flush=True)
    except OSError:
        discard(sys.stderr)


def discard(stream):
    """Send the rest of a stream that cannot be written nowhere; Python flushes it at exit."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def report(i: int, error: str):
    """Say on standard error why the prompt at position `i` was not served."""
    complain(f"prompt {i + 1}: {error}")


def run_generate(args: argparse.Namespace) -> int:
    """Continue the prompts; 2 if one of them could not be served."""
    prompts = read_prompts(args)
    llm, params = load(args)
    stats = Stats(llm.engine)
    tell = tell_json if args.json else tell_stories
    num_failed = tell(llm, prompts, params)
    if args.stats:
        figures = stats.figures(len(prompts))
        print(json.dumps({"stats": figures}) if args.json else "\n" + STATS_LINE.format(**figures))
    return 2 if num_failed else 0


def tell_stories(llm, prompts: list[str], params) -> int:
    """Print the stories as they grow; returns how many prompts were refused."""
    printer = StoryPrinter([prompt for prompt in prompts for _ in range(params.n)])
    num_failed = 0
    for output in llm.stream(prompts, params):
        i = int(output.request_id)  # a new LLM counts its requests from 0
        if output.error is None:
            for piece in output.outputs:
                printer.add(i * params.n + piece.index, piece.text, piece.finished)
        else:
            report(i, output.error)
            for index in range(params.n):
                printer.skip(i * params.n + index)
            num_failed += 1
    return num_failed


def tell_json(llm, prompts: list[str], params) -> int:
    """Print one JSON object per continuation, in order; returns how many prompts were refused."""
    num_failed = 0
    for i, output in enumerate(llm.generate(prompts, params, use_tqdm=False)):
        record = {"prompt": output.prompt, "error": output.error}
        if output.error is not None:
            report(i, output.error)
            num_failed += 1
            print(json.dumps(record), flush=True)
        for completion in output.outputs:
            record["index"] = completion.index
            record["text"] = completion.text
            record["token_ids"] = completion.token_ids
            record["finish_reason"] = completion.finish_reason
            record["stop_reason"] = completion.stop_reason
            record["num_cached_tokens"] = output.num_cached_tokens
            print(json.dumps(record), flush=True)
    return num_failed


TRACE_HEADER = ("step", "new", "resumed", "preempted", "finished", "free", "scheduled")


def trace_row(event) -> tuple[str, ...]:
    """One step as the cells of a row."""
    return (
        str(event.step),
        " ".join(event.new),
        " ".join(event.resumed),
        " ".join(event.preempted),
        " ".join(f"{seq_id}:{reason}" for seq_id, reason in event.finished.items()),
        str(event.free_blocks),
        " ".join(f"{seq_id}:{start}+{num}" for seq_id, start, num in event.scheduled),
    )


def format_table(rows: list[tuple[str, ...]]) -> str:
    """Left-aligned columns, each as wide as its widest cell."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


def run_trace(args: argparse.Namespace) -> int:
    """Continue the prompts and print what each step did; 2 if one could not be served."""
    prompts = read_prompts(args)
    llm, params = load(args)
    rows = [TRACE_HEADER]
    llm.engine.observers.append(lambda event: rows.append(trace_row(event)))
    outputs = llm.generate(prompts, params, use_tqdm=False)
    print(format_table(rows))
    for i, output in enumerate(outputs):
        if output.error is not None:
            report(i, output.error)
    return 2 if any(output.error is not None for output in outputs) else 0


def prepare_streams():
    """Make the standard streams take whatever we print; BadInput if there is no output at all.

    A stream that was closed before we started is None, and `print` takes None for standard
    output: without a standard error our errors would end up among the JSON.
    """
    if sys.stderr is None:
        sys.stderr = open(os.devnull, "w")  # noqa: SIM115 (open as long as the process is)
    if sys.stdout is None:
        raise BadInput("standard output is closed")
    # A story is worth more than its accents: what the encoding lacks is printed as \xe9.
    if sys.stdout.errors in ("strict", "surrogateescape"):
        sys.stdout.reconfigure(errors="backslashreplace")


def main(argv: list[str] | None = None) -> int:
    """Run the command line; returns the exit status."""
    try:
        prepare_streams()
        try:
            args = make_parser().parse_args(argv)
            return args.run(args)
        finally:
            sys.stdout.flush()  # here, where an error is still caught; also after --help
    except BadInput as error:
        complain(str(error))
        return 2
    except KeyboardInterrupt:
        complain("interrupted", begin="\n")
        return 130
    except BrokenPipeError:  # the reader has gone, as in `tinyvllm generate ... | head -1`
        discard(sys.stdout)
        return 141
    except OSError as error:  # the disk is full, or the like
        complain(str(error))
        discard(sys.stdout)
        return 1
