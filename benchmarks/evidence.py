"""What every recorded measurement shares: interleaved rounds, and where and when it was made."""

import json
import platform
import statistics
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import numba
import torch


def interleaved_medians(candidates: dict[str, Callable], rounds: int) -> dict[str, float]:
    """Median milliseconds of each candidate; a round runs each once, so all meet the same noise."""
    times = {name: [] for name in candidates}
    for run in candidates.values():
        run()  # warm up: compile, pack, fill caches
    for _ in range(rounds):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            times[name].append((time.perf_counter() - start) * 1e3)
    return {name: round(statistics.median(values), 4) for name, values in times.items()}


def cpu_name() -> str:
    """The processor as the system names it."""
    info = Path("/proc/cpuinfo")
    if info.exists():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":")[1].strip()
    return platform.processor() or platform.machine()


def circumstances() -> dict:
    """Machine, versions, commit and date."""
    git = ["git", "rev-parse", "--short", "HEAD"]
    return {
        "cpu": cpu_name(),
        "instructions": torch.backends.cpu.get_cpu_capability(),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numba": numba.__version__,
        "commit": subprocess.run(git, capture_output=True, text=True).stdout.strip(),
        "date": time.strftime("%Y-%m-%d"),
    }


def save(path: str, evidence: dict):
    """Write the evidence with its circumstances."""
    with open(path, "w") as file:
        json.dump({"circumstances": circumstances()} | evidence, file, indent=1)
        file.write("\n")
