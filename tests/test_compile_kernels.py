"""Chapter 12: every kernel compiles for both GPU generations, without a GPU and without spills."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

ROOT = Path(__file__).parents[1]
KERNELS = {"store_kv", "decode_attention", "merge_splits", "paged_attention"}


def check(rows):
    """No spills anywhere, and keys and values in loads of 16 bytes."""
    for row in rows:
        assert row["spilled_bytes"] == 0, row
        assert row["registers"] <= 255, row
        assert row["shared_bytes"] <= 99 << 10, "more than some GPUs of this generation have"
        if row["kernel"] in ("decode_attention", "paged_attention"):
            assert row["wide_loads"], row


def test_the_defaults_compile_without_spills(tmp_path):
    """GPT-2's shape in float16; the whole matrix is in the record below."""
    out = tmp_path / "rows.json"
    command = [ROOT / "scripts/compile_kernels.py", "--head-size", "64", "--dtype", "float16"]
    done = subprocess.run(
        [sys.executable, *command, "--json", out],
        capture_output=True,
        text=True,
        cwd=ROOT,
        env=os.environ | {"TRITON_CACHE_DIR": str(tmp_path)},
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    rows = json.loads(out.read_text())["kernels"]
    assert {(row["kernel"], row["arch"]) for row in rows} == {
        (k, a) for k in KERNELS for a in (80, 90)
    }
    check(rows)


def test_the_recorded_matrix():
    """What the chapter shows holds for every type and head size, not only the one compiled here."""
    rows = json.loads((ROOT / "book/data/triton_compile.json").read_text())["kernels"]
    assert {row["dtype"] for row in rows} == {"float16", "bfloat16", "float32"}
    assert {row["head_size"] for row in rows} >= {16, 64, 80, 128, 256}
    # One number of 8 bytes, in a mode that nobody serves in, is known; nothing else spills.
    known = [row for row in rows if row["dtype"] == "float32" and row["head_size"] in (80, 128)]
    assert all(row["spilled_bytes"] <= 8 for row in known)
    check(row for row in rows if row not in known)
