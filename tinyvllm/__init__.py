"""tinyvllm: a GPT-2 serving engine built one notebook at a time."""
