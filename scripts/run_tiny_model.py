"""Load a GPT-2 checkpoint and continue one prompt: the engine driven by hand, without `LLM`.

python scripts/run_tiny_model.py --model FOLDER --prompt "Once upon a time" --max-new-tokens 40

`--no-safetensors` reads `pytorch_model.bin` although there may be a `model.safetensors`.
"""

import argparse
import sys

from tinyvllm import Engine, EngineConfig, ModelRunner, Request, SamplingParams, Tokenizer
from tinyvllm.gpt2 import load_model
from tinyvllm.tokenizer import IncrementalDetokenizer


def main() -> int:
    """Print the prompt and its greedy continuation; 2 if the input is bad."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", help="folder or hub id (default: the model in the package)")
    parser.add_argument("--prompt", default="Once upon a time")
    parser.add_argument("--max-new-tokens", type=int, default=40)
    parser.add_argument("--no-safetensors", dest="use_safetensors", action="store_false")
    args = parser.parse_args()
    try:
        params = SamplingParams(temperature=0, max_tokens=args.max_new_tokens)
        config = EngineConfig(model=args.model, device="cpu")
        tokenizer = Tokenizer.from_pretrained(args.model)
        model = load_model(args.model, device="cpu", use_safetensors=args.use_safetensors)
    except ValueError as error:
        print(f"run_tiny_model: {error}", file=sys.stderr)
        return 2

    engine = Engine(config, ModelRunner(config, model), eos_token_id=model.config.eos_token_id)
    engine.add_request(Request("story", tokenizer.encode(args.prompt), params))
    detokenizer = IncrementalDetokenizer(tokenizer)
    print(args.prompt, end="", flush=True)
    while engine.has_unfinished_requests():
        for output in engine.step():
            if output.error is not None:
                print(f"\nrun_tiny_model: {output.error}", file=sys.stderr)
                return 2
            new_ids = output.outputs[0].token_ids[-1:]
            print(detokenizer.decode(new_ids, final=output.finished), end="", flush=True)
    print()
    return 0


if __name__ == "__main__":
    sys.exit(main())
