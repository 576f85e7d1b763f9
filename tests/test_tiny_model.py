"""The shipped model: its files, the grammar it was trained on, and what it has learned."""

import importlib.util
import json
import re
import subprocess
import sys
from dataclasses import asdict
from itertools import islice
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
MODEL = ROOT / "tinyvllm" / "assets" / "tiny-gpt2"
SCRIPT = ROOT / "scripts" / "train_tiny_gpt2.py"


@pytest.fixture(scope="module")
def grammar():
    spec = importlib.util.spec_from_file_location("train_tiny_gpt2", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def model():
    transformers = pytest.importorskip("transformers")
    return transformers.AutoModelForCausalLM.from_pretrained(MODEL).eval()


@pytest.fixture(scope="module")
def tokenizer():
    tokenizers = pytest.importorskip("tokenizers")
    return tokenizers.Tokenizer.from_file(str(MODEL / "tokenizer.json"))


# -------------------------------------------------------------------------------- the grammar


def test_importing_the_script_needs_no_torch_and_runs_nothing(tmp_path):
    code = f"""
import runpy, sys
sys.modules["torch"] = sys.modules["transformers"] = sys.modules["tokenizers"] = None
names = runpy.run_path({str(SCRIPT)!r}, run_name="grammar")
print(next(names["stories"](3, held_out=True)).text)
"""
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, check=True
    )
    assert done.stdout.count(".") > 5
    assert list(tmp_path.iterdir()) == []


def test_the_same_seed_tells_the_same_stories(grammar):
    def tell(seed):
        return list(islice(grammar.stories(seed, held_out=False), 50))

    assert tell(1) == tell(1)
    assert tell(1) != tell(2)


def test_stories_are_whole_and_about_their_hero(grammar):
    for story in islice(grammar.stories(4, held_out=False), 2000):
        assert not re.search(r"[\[\]{}|]|  | [.,?!]", story.text), story.text
        assert not re.search(r"\b[Aa] [aeiouAEIOU]|\b[Aa]n [^aeiouAEIOUh]", story.text), story.text
        assert story.text[0].isupper() and story.text[-1] in '.!?"'
        assert story.hero in story.opening and story.trait in story.opening
        assert story.hero != story.friend
        assert story.text.count(story.hero) >= 3 and story.friend in story.text
        assert 80 <= len(story.text.split()) <= 300


def test_stories_seldom_share_a_sentence_pattern(grammar):
    told = list(islice(grammar.stories(5, held_out=False), 2000))
    assert len({s.text for s in told}) == len(told)
    # Put the names and objects back into slots: what remains is the form of the sentence.
    forms = set()
    for story in told:
        form = story.text
        for word in (story.hero, story.friend, story.adjective, story.noun, story.trait):
            form = re.sub(rf"\b{word}\b", "_", form)
        forms |= set(re.split(r"(?<=[.!?]) ", form))
    assert len(forms) > 5000
    assert len({s.opening for s in told}) > 1900


def test_held_out_openings_never_occur_in_training(grammar):
    held_out = list(islice(grammar.stories(6, held_out=True), 300))
    pairs = {(s.hero, s.place) for s in held_out}
    training = islice(grammar.stories(7, held_out=False), 5000)
    assert not pairs & {(s.hero, s.place) for s in training}
    homes = {place: words[0] for place, words in grammar.PLACES.items()}
    for story in held_out:
        assert homes[story.place].lower() in story.opening.lower()


def test_a_story_knows_its_probability(grammar):
    """Where all choices have the same number of options, nats is the log of their product."""

    class FirstChoice:
        def random(self):
            return 0.0

    teller = grammar.Teller(FirstChoice())
    assert teller.say(["[a|b] [c|d|e]", "z"]) == "a c"
    assert teller.nats == pytest.approx(grammar.math.log(2 * 2 * 3))
    assert teller.chance(0.25) is True
    assert teller.nats == pytest.approx(grammar.math.log(2 * 2 * 3 * 4))


# ------------------------------------------------------------------------------- the training


def test_which_targets_weigh_more(grammar, tokenizer):
    """A carried word that comes back, and its "an"; a signal always; tokens within a word."""
    plan = grammar.Round(
        steps=1,
        peak=1.0,
        mixed=True,
        trait_weight=7.0,
        word_weight=5.0,
        piece_weight=2.0,
        double_weight=9.0,
        an_weight=6.0,
        signal_weight=3.0,
    )
    weights = grammar.TargetWeights(tokenizer, plan)

    def weighed(text):
        encoded = tokenizer.encode(text)
        return list(zip(encoded.tokens[1:], weights.of(encoded.ids), strict=True))

    assert weighed(" Clara nodded. Clara<|endoftext|> Clara") == [
        ("Ġno", 1), ("d", 2), ("d", 9), ("ed", 9), (".", 1), ("ĠClara", 5),
        ("<|endoftext|>", 1), ("ĠClara", 1),
    ]  # fmt: skip
    first, *_, second = (w for token, w in weighed(" was an honest, an honest") if token == "Ġan")
    assert (first, second) == (1, 6)
    assert {w for _, w in weighed(" Nora beat the drum again and again")} == {3}


def test_stories_in_which_a_kind_comes_back_are_told_more_often(grammar):
    def comes_back(text):
        kinds = re.findall(rf" ({'|'.join(grammar.KINDS)})\b", text)
        return any(kinds.count(kind) > 1 for kind in kinds)

    told = list(islice(grammar.story_texts(3, held_out=False), 300))
    assert told == [story.text for story in islice(grammar.stories(3, held_out=False), 300)]
    chosen = set(islice(grammar.story_texts(3, held_out=False, kindless_share=0.2), 300))
    assert all(text in chosen for text in told if comes_back(text))
    others = [text in chosen for text in told if not comes_back(text)]
    assert 0.1 < sum(others) / len(others) < 0.3


def test_mean_weights(grammar):
    states = [{"a": 1.0, "b": -2.0}, {"a": 2.0, "b": 0.0}, {"a": 6.0, "b": 5.0}]
    assert grammar.mean_weights(states) == {"a": 3.0, "b": 1.0}


# ---------------------------------------------------------------------------------- the files


def test_the_folder_is_complete_and_small():
    files = {path.name: path.stat().st_size for path in MODEL.iterdir()}
    assert {
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.json",
        "merges.txt",
    } <= set(files)
    assert sum(files.values()) <= 5_000_000


def test_the_config_is_a_gpt2(model):
    config = json.loads((MODEL / "config.json").read_text())
    wanted = {
        "model_type": "gpt2",
        "n_layer": 4,
        "n_head": 2,
        "n_embd": 128,
        "n_positions": 1024,
        "vocab_size": 1024,
        "bos_token_id": 1023,
        "eos_token_id": 1023,
        "activation_function": "gelu_new",
    }
    assert {key: config[key] for key in wanted} == wanted
    assert model.num_parameters() == 1_055_488
    assert str(model.dtype) == "torch.float32"
    assert model.lm_head.weight.data_ptr() == model.transformer.wte.weight.data_ptr()


def test_the_three_forms_of_the_tokenizer_agree(tokenizer):
    transformers = pytest.importorskip("transformers")
    auto = transformers.AutoTokenizer.from_pretrained(MODEL)
    slow = transformers.GPT2Tokenizer(str(MODEL / "vocab.json"), str(MODEL / "merges.txt"))
    assert tokenizer.get_vocab_size() == 1024 and auto.eos_token_id == auto.bos_token_id == 1023
    for text in ("Once upon a time", "Zoë's 3 cafés,\n\tand ☃!", " a", ""):
        ids = tokenizer.encode(text).ids
        assert auto(text)["input_ids"] == slow(text)["input_ids"] == ids
        assert tokenizer.decode(ids) == auto.decode(ids) == text
    assert tokenizer.encode("The end.<|endoftext|>").ids[-1] == 1023


# ----------------------------------------------------------------------- what the model learned


def test_held_out_stories_are_not_much_less_likely_than_the_grammar_says(grammar, model, tokenizer):
    told = list(islice(grammar.stories(8, held_out=True), 24))
    losses = grammar.story_losses(model, tokenizer, told)
    tokens = sum(n for _, n in losses)
    model_nats = sum(loss for loss, _ in losses) / tokens
    grammar_nats = sum(story.nats for story in told) / tokens
    assert model_nats < 0.27
    assert model_nats < 1.05 * grammar_nats


def test_all_positions_are_trained(grammar, model, tokenizer):
    losses = grammar.losses_by_position(model, tokenizer, seed=9, rows=6)
    assert losses[-1] < 1.25 * sum(losses) / len(losses)  # the last eighth is 896 to 1023


def test_greedy_stories_from_unseen_openings_keep_hero_and_trait(grammar, model, tokenizer):
    hero_kept, traits = 0, []
    known = set()  # words that stories are made of
    for story in islice(grammar.stories(11, held_out=False), 3000):
        known.update(re.findall(r"[\w'-]+", story.text))
    told = list(islice(grammar.stories(10, held_out=True), 6))
    for story in told:
        text = grammar.continue_story(model, tokenizer, story.opening, temperature=0.0, seed=0)
        assert text.startswith(story.opening)
        assert set(re.findall(r"[\w'-]+", text)) <= known, text
        rest = text[len(story.opening) :]
        heroes = {n for n in grammar.GIRLS + grammar.BOYS if re.search(rf"\b{n}\b", rest)}
        friends = {n for n in grammar.FRIEND_NAMES if re.search(rf"\b{n}\b", rest)}
        assert heroes == {story.hero}, text
        assert len(friends) <= 1, text
        hero_kept += story.hero in " ".join(re.split(r"(?<=[.!?]) ", rest)[-3:])
        named = re.findall(rf"\b({'|'.join(grammar.TRAITS)})\b", rest)
        assert named[0] == story.trait, text
        traits += [trait == story.trait for trait in named]
    assert hero_kept >= len(told) - 1
    assert sum(traits) >= 0.9 * len(traits)


@pytest.mark.parametrize("what", ["kind", "article", "signal"])
def test_late_sentences_know_who_the_hero_is_and_what_the_object_does(
    grammar, model, tokenizer, what
):
    """A goose is not called a squirrel two hundred tokens later, and no mirror is blown."""
    import torch

    signals = "|".join(grammar.signals())
    kinds = "|".join(grammar.KINDS)
    pattern = {
        "kind": rf"(?:Another|job for an? \w+|tale of the \w+|[Ww]hat an? \w+)( (?:{kinds}))\b",
        "article": rf"(?:What|job for)( an?) \w+ (?:{kinds})",
        "signal": rf"Then [A-Z]\w+( (?:{signals}))",
    }[what]
    right = []
    for story in islice(grammar.stories(12, held_out=True), 400):
        for match in re.finditer(pattern, story.text):
            before = tokenizer.encode(story.text[: match.start(1)]).ids
            said = tokenizer.encode(match[1]).ids
            with torch.no_grad():
                logits = model(torch.tensor([[*before, *said]])).logits[0]
            right.append(logits[len(before) - 1 : -1].argmax(-1).tolist() == said)
    assert len(right) >= 20
    assert sum(right) >= 0.95 * len(right), f"{sum(right)} of {len(right)}"


def test_the_evidence_describes_this_model(grammar, model):
    evidence = json.loads((ROOT / "book" / "data" / "tiny_gpt2.json").read_text())
    assert evidence["parameters"] == model.num_parameters()
    assert evidence["rounds"] == [asdict(plan) for plan in grammar.ROUNDS]
    assert evidence["held_out"]["perplexity"] < 1.295
    assert len(evidence["samples"]) == 10
