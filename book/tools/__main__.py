"""`python -m book.tools export | refresh | new`: the tools that make and keep the book."""

import importlib
import sys

COMMANDS = {
    "export": "notebooks -> tinyvllm/*.py (--check compares)",
    "refresh": "run notebooks and save their outputs (--check compares)",
    "new": "a chapter from the template",
}


def main() -> int:
    if len(sys.argv) > 1 and sys.argv[1] in COMMANDS:
        return importlib.import_module(f"book.tools.{sys.argv[1]}").main(sys.argv[2:])
    print("usage: python -m book.tools COMMAND ...\n")
    for name, text in COMMANDS.items():
        print(f"  {name:8} {text}")
    return 0 if sys.argv[1:] in (["-h"], ["--help"]) else 2


if __name__ == "__main__":
    sys.exit(main())
