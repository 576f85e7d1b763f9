"""tinyvllm: a GPT-2 serving engine built one notebook at a time.

The public names are loaded when they are first used (PEP 562): `import tinyvllm` costs next to
nothing, and the control plane runs where PyTorch is not installed.
"""

import importlib

_MODULES = {
    "AsyncEngine": "async_llm",
    "CompletionOutput": "request",
    "Engine": "engine",
    "EngineConfig": "config",
    "EngineDeadError": "async_llm",
    "GenerationOutput": "request",
    "IncrementalDetokenizer": "tokenizer",
    "LLM": "llm",
    "Logprob": "request",
    "MockModelRunner": "engine",
    "ModelRunner": "model_runner",
    "Request": "request",
    "SamplingParams": "request",
    "StepEvent": "engine",
    "Tokenizer": "tokenizer",
}

__all__ = list(_MODULES)


def __getattr__(name: str):
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)


def __dir__() -> list[str]:
    return sorted([*globals(), *_MODULES])
