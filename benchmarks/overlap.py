"""What overlap hides: the host's time in a decode step, before its launch and after it.

    python benchmarks/overlap.py [--json book/data/overlap.json]

Only the processor time of the engine's own thread counts, so other programs do not disturb. The
device is left out: before the launch it would stand idle, after it it would work. The result says
nothing about a GPU.
"""

import argparse
import statistics
import time
from itertools import cycle, islice

from evidence import save

from tinyvllm.config import EngineConfig
from tinyvllm.engine import Engine
from tinyvllm.execution_batch import ModelRunnerOutput
from tinyvllm.overlap import OverlappedEngine
from tinyvllm.request import Request, SamplingParams

STEPS = 60
ENGINES = {"plain": Engine, "overlapped": OverlappedEngine}


class ClockRunner:
    """Answers at once, and notes how long the host was busy before and after each launch."""

    vocab_size, max_model_len, block_size, num_blocks = 50257, 1024, 16, 20000

    def __init__(self):
        self.returned, self.before, self.after = time.thread_time(), [], []

    def launch(self, batch):
        self.launched = time.thread_time()
        self.before.append(self.launched - self.returned)
        self.rows = len(batch.logits_indices)
        return self

    def result(self):
        self.returned = time.thread_time()
        self.after.append(self.returned - self.launched)
        return ModelRunnerOutput([7] * self.rows)

    def execute(self, batch):
        return self.launch(batch).result()


def measure(engine_class, num_seqs):
    """Median milliseconds of the host in a decode step, before and after its launch."""
    config = EngineConfig(max_num_seqs=num_seqs, max_num_batched_tokens=65536)
    runner = ClockRunner()
    engine = engine_class(config, runner)
    params = SamplingParams(temperature=0, max_tokens=STEPS)
    for i in range(num_seqs):
        # Lengths 64 to 448: about one sequence in sixteen begins a block in each step.
        prompt = list(islice(cycle(range(100 + i, 50000)), 64 + i * 384 // num_seqs))
        engine.add_request(Request(str(i), prompt, params))
    while engine.has_unfinished_requests():
        engine.step()
    return {
        name: round(1e3 * statistics.median(getattr(runner, name)[2:]), 3)
        for name in ("before", "after")
    }


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", help="write the evidence to this file")
    path = parser.parse_args().json
    rows = []
    for num_seqs in (1, 16, 64, 256):
        ms = {name: measure(kind, num_seqs) for name, kind in ENGINES.items()}
        rows.append({"sequences": num_seqs, "ms": ms})
        print(rows[-1], flush=True)
    if path:
        save(path, {"steps": STEPS, "rows": rows})


if __name__ == "__main__":
    main()
