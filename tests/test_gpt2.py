"""Chapter 08: our GPT-2 gives Hugging Face's logits, and says what is wrong with a checkpoint."""

import json

import pytest
import torch
from checkpoints import SHAPES, make_hf, save, save_bin
from safetensors.torch import load_file, save_file
from transformers import GPT2LMHeadModel

from tinyvllm.gpt2 import ACTIVATIONS, GPT2Config, Linear, ModelLoadError, load_model

SMALL = {"n_embd": 12, "n_head": 3, "n_layer": 2, "vocab_size": 29, "n_positions": 32}


def dense(layer, query, key, value, scale):
    """Causal attention over one whole sequence, the textbook way."""
    scores = torch.einsum("qhd,khd->hqk", query, key) * scale
    future = torch.ones(len(query), len(query), dtype=torch.bool).triu(1)
    weights = scores.masked_fill(future, -torch.inf).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, value)


@torch.inference_mode()
def logits_of(model, ids):
    return model.compute_logits(model.forward(ids, torch.arange(len(ids)), dense))


@torch.inference_mode()
def assert_same(model, hf, tolerance=2e-5):
    """Logits of a random sequence agree with transformers."""
    torch.manual_seed(1)
    ids = torch.randint(0, hf.config.vocab_size, (21,))
    expected = hf(ids[None]).logits[0]
    assert (logits_of(model, ids) - expected).abs().max() < tolerance * expected.abs().max()


@pytest.fixture(scope="module")
def hf():
    return make_hf(**SMALL)


@pytest.fixture
def folder(hf, tmp_path):
    return save(hf, tmp_path / "model")


def edit_config(folder, **changes):
    path = folder / "config.json"
    data = json.loads(path.read_text()) | changes
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not ...}))


def edit_tensors(folder, edit):
    path = folder / "model.safetensors"
    tensors = load_file(path)
    edit(tensors)
    save_file({name: tensor.clone() for name, tensor in tensors.items()}, path)


@pytest.mark.parametrize("shape", SHAPES)
def test_logits_equal_transformers(shape, tmp_path):
    hf = make_hf(**SHAPES[shape])
    assert_same(load_model(save(hf, tmp_path)), hf)


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_every_activation_equals_transformers(name, tmp_path):
    hf = make_hf(**SMALL, activation_function=name)
    assert_same(load_model(save(hf, tmp_path)), hf)


@pytest.mark.parametrize("prefix", [True, False])
@pytest.mark.parametrize("masks", [True, False])
def test_bin_with_and_without_prefix_and_masks(hf, tmp_path, prefix, masks):
    assert_same(load_model(save_bin(hf, tmp_path, prefix, masks)), hf)


def test_bin_of_the_format_before_zip_files(hf, tmp_path):
    """The checkpoint that GPT-2 was published in."""
    hf.config.save_pretrained(tmp_path)
    torch.save(
        hf.state_dict(), tmp_path / "pytorch_model.bin", _use_new_zipfile_serialization=False
    )
    assert_same(load_model(tmp_path), hf)


def test_safetensors_without_prefix_and_with_masks(hf, folder):
    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("transformer.")] = tensors.pop(name)
        tensors["h.0.attn.bias"] = torch.ones(1, 1, 32, 32).tril()
        tensors["h.1.attn.masked_bias"] = torch.tensor(-1e4)

    edit_tensors(folder, strip)
    assert_same(load_model(folder), hf)


def test_shards(hf, tmp_path):
    hf.save_pretrained(tmp_path, max_shard_size="4KB")
    shards = list(tmp_path.glob("*.safetensors"))
    assert len(shards) > 2
    assert_same(load_model(tmp_path), hf)
    shards[1].unlink()
    with pytest.raises(ModelLoadError, match=shards[1].name):
        load_model(tmp_path)


def test_bin_shards(hf, tmp_path):
    hf.config.save_pretrained(tmp_path)
    names, tensors = list(hf.state_dict()), hf.state_dict()
    weight_map = {}
    for number, part in enumerate((names[:9], names[9:]), start=1):
        file = f"pytorch_model-{number:05d}-of-00002.bin"
        torch.save({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
    assert_same(load_model(tmp_path), hf)


def test_safetensors_first_unless_told_otherwise(hf, folder):
    other = make_hf(seed=5, **SMALL)
    save_bin(other, folder)
    assert_same(load_model(folder), hf)
    assert_same(load_model(folder, use_safetensors=False), other)


def test_dtypes(hf, folder, tmp_path):
    """A 16-bit checkpoint is computed in float32 on a CPU, unless 16 bits are asked for."""
    half = save(make_hf(**SMALL).to(torch.bfloat16), tmp_path / "half")
    assert load_model(half).dtype == torch.float32
    rounded = GPT2LMHeadModel.from_pretrained(half, dtype=torch.float32).eval()
    assert_same(load_model(half), rounded)
    for name in ("bfloat16", "float16"):
        model = load_model(folder, dtype=name)
        assert model.dtype == getattr(torch, name)
        assert logits_of(model, torch.arange(5)).dtype == model.dtype
    assert_same(load_model(folder, dtype="float16"), hf, tolerance=2e-2)


def test_untied_head_and_tied_head_that_is_stored_as_well(hf, tmp_path):
    both = save_bin(hf, tmp_path)  # .bin files of a tied model hold the head a second time
    assert "lm_head.weight" in torch.load(both / "pytorch_model.bin")
    assert_same(load_model(both), hf)


def test_hugging_face_loads_what_we_load(hf, folder):
    assert_same(load_model(folder), GPT2LMHeadModel.from_pretrained(folder).eval())


def test_a_row_is_the_same_bits_alone_and_in_a_batch(hf, folder):
    """Holds where oneDNN multiplies; elsewhere the rows agree to rounding."""
    torch.manual_seed(0)
    weight, bias, x = torch.randn(96, 64), torch.randn(96), torch.randn(64, 64)
    model = load_model(folder)
    hidden = torch.randn(64, 12)
    for layer, rows in ((Linear(weight, bias), x), (model.compute_logits, hidden)):
        together = layer(rows)
        for count in (1, 2, 3, 5, 7, 16, 33):
            if torch.backends.mkldnn.is_available():
                assert torch.equal(layer(rows[:count]), together[:count]), count
            else:
                assert torch.allclose(layer(rows[:count]), together[:count], atol=1e-5), count


def test_each_weight_is_held_once(folder):
    model = load_model(folder)
    assert model.lm_head.table is model.wte
    untied = load_model(folder)
    assert untied.wte.data_ptr() != model.wte.data_ptr()  # two models share nothing


def test_the_loaded_model_does_not_need_its_file(hf, folder):
    model = load_model(folder)
    for path in folder.iterdir():
        path.write_bytes(b"")
    assert_same(model, hf)


# What is wrong with a checkpoint is said with the file and the tensor or field.


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "llama"}, "model_type must be 'gpt2', got 'llama'"),
        ({"activation_function": "softplus7"}, "activation_function must be one of gelu_new"),
        ({"n_head": 5}, r"n_embd \(12\) must be a multiple of n_head \(5\)"),
        ({"activation_function": ["a"]}, r"activation_function must be one of .*got \['a'\]"),
        ({"activation_function": {"a": 1}}, "activation_function must be one of"),
        ({"activation_function": None}, "activation_function must be one of"),
        ({"model_type": ["gpt2"]}, r"model_type must be 'gpt2', got \['gpt2'\]"),
        ({"n_layer": 0}, "n_layer must be an integer from 1 to 10000, got 0"),
        # As long as it takes to list their tensors, if nobody stops it.
        ({"n_layer": 10**9}, "n_layer must be an integer from 1 to 10000, got 1000000000"),
        ({"n_embd": "wide"}, "n_embd must be an integer >= 1, got 'wide'"),
        ({"n_inner": -1}, "n_inner must be an integer >= 1, got -1"),
        ({"eos_token_id": [1, 2]}, "eos_token_id"),
        ({"layer_norm_epsilon": "small"}, "layer_norm_epsilon"),
        ({"add_cross_attention": True}, "add_cross_attention must be false"),
        ({"n_head": ..., "model_type": ...}, "n_head missing: this is not a GPT-2 config"),
    ],
)
def test_config_errors(folder, changes, message):
    edit_config(folder, **changes)
    with pytest.raises(ModelLoadError, match=message) as caught:
        load_model(folder)
    assert str(folder / "config.json") in str(caught.value)


def test_missing_and_broken_config(folder):
    (folder / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(folder)
    (folder / "config.json").write_text("[]")
    with pytest.raises(ModelLoadError, match=r"config\.json"):
        load_model(folder)
    (folder / "config.json").unlink()
    with pytest.raises(ModelLoadError, match=r"config\.json: no such file"):
        load_model(folder)


NO_OBJECT = {
    "list": b"[]",
    "null": b"null",
    "number": b"3",
    "empty": b"",
    "half": b'{"a": ',
    "deep": b"[" * 100_000,
    "bytes": b"\x80\xff",
}


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json"])
@pytest.mark.parametrize("case", [*NO_OBJECT, "folder"])
def test_json_files_that_hold_no_object(folder, name, case):
    if name != "config.json":
        (folder / "model.safetensors").unlink()
    path = folder / name
    path.unlink(missing_ok=True)
    path.mkdir() if case == "folder" else path.write_bytes(NO_OBJECT[case])
    with pytest.raises(ModelLoadError, match=f"^{path}: "):
        load_model(folder)


@pytest.mark.parametrize("weights", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": None},
        {"weight_map": []},
        {"weight_map": {}},
        {"weight_map": {"a": 1}},
        {"weight_map": {"a": ["x"]}},
        {"weight_map": {"a": "x", "b": None}},
    ],
)
def test_an_index_without_a_map_of_shards(folder, weights, index):
    (folder / "model.safetensors").unlink()
    path = folder / f"{weights}.index.json"
    path.write_text(json.dumps(index))
    with pytest.raises(ModelLoadError, match=f"^{path}: weight_map must map tensor names"):
        load_model(folder)


@pytest.mark.parametrize("shard", ["", ".", "..", "nowhere", "a\0b", "\ud800", "x" * 5000])
def test_an_index_that_lists_no_file(folder, shard):
    (folder / "model.safetensors").unlink()
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"wte.weight": shard}}))
    with pytest.raises(ModelLoadError, match=f"missing, but {index.name} lists it"):
        load_model(folder)


def test_wrong_shape(folder):
    edit_config(folder, n_inner=7)
    with pytest.raises(
        ModelLoadError, match=r"h\.0\.mlp\.c_fc\.bias' has shape \[48\].*\[7\]"
    ) as e:
        load_model(folder)
    assert "model.safetensors" in str(e.value)


def test_missing_and_unexpected_tensors(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("transformer.h.1.ln_2.bias"))
    with pytest.raises(
        ModelLoadError, match=r"model\.safetensors: tensor 'h\.1\.ln_2\.bias' is mi"
    ):
        load_model(folder)
    edit_tensors(folder, lambda tensors: tensors.update({"score.weight": torch.ones(2)}))
    with pytest.raises(ModelLoadError, match=r"model\.safetensors: unexpected tensor 'score"):
        load_model(folder)


def test_tied_config_with_another_head(hf, tmp_path):
    save_bin(hf, tmp_path)
    path = tmp_path / "pytorch_model.bin"
    torch.save(torch.load(path) | {"lm_head.weight": torch.ones(29, 12)}, path)
    with pytest.raises(ModelLoadError, match=r"lm_head\.weight' differs"):
        load_model(tmp_path)
    edit_config(tmp_path, tie_word_embeddings=False)
    assert torch.equal(
        logits_of(load_model(tmp_path), torch.arange(3)).diff(dim=1), torch.zeros(3, 28)
    )


@pytest.mark.parametrize("name", ["model.safetensors", "pytorch_model.bin"])
@pytest.mark.parametrize("damage", ["truncated", "text", "empty"])
def test_damaged_files(hf, tmp_path, name, damage):
    (save_bin if name.endswith("bin") else save)(hf, tmp_path)
    path = tmp_path / name
    whole = path.read_bytes()
    path.write_bytes(
        {"truncated": whole[: len(whole) // 2], "text": b"hello", "empty": b""}[damage]
    )
    with pytest.raises(ModelLoadError, match=name):
        load_model(tmp_path)


def test_a_bin_file_cannot_run_code(hf, tmp_path):
    save_bin(hf, tmp_path)
    torch.save({"wte.weight": print}, tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match=r"pytorch_model\.bin"):
        load_model(tmp_path)


def test_a_bin_file_of_something_else(hf, tmp_path):
    save_bin(hf, tmp_path)
    torch.save([1, 2], tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelLoadError, match="holds a list, not named tensors"):
        load_model(tmp_path)


@pytest.mark.parametrize(
    "name, value, message",
    [
        ("transformer.h.0.ln_1.weight", 3, "'transformer.h.0.ln_1.weight' is a int; expected a te"),
        ("more", {"wte.weight": torch.ones(2)}, "'more' is a dict; expected a tensor with a name"),
        (3, torch.zeros(1), "3 is a Tensor; expected a tensor with a name"),
        (None, None, "None is a NoneType; expected a tensor with a name"),
        ("wte.weight", torch.ones(29, 12).to_sparse(), "'wte.weight' is not a plain array"),
        ("wte.weight", torch.ones(29, 12, device="meta"), "'wte.weight' is not a plain array"),
        ("wte.weight", torch.ones(29, 12, dtype=torch.int8), "'wte.weight' holds torch.int8, not"),
        ("wte.weight", torch.ones(29, 12, dtype=torch.cfloat), "'wte.weight' holds torch.complex"),
        ("wte.weight", torch.tensor(1.0), r"'wte.weight' has shape \[\], config.json asks for"),
        ("lm_head.weight", torch.ones(29, 12).to_sparse(), "'lm_head.weight' is not a plain array"),
        ("lm_head.weight", torch.ones(29, 12).half(), "'lm_head.weight' differs from 'wte.weight'"),
        ("lm_head.weight", torch.ones(3, 12), r"'lm_head.weight' has shape \[3, 12\]"),
    ],
)
def test_entries_of_a_bin_file_that_are_no_weights(hf, tmp_path, name, value, message):
    save_bin(hf, tmp_path, prefix=False)
    path = tmp_path / "pytorch_model.bin"
    torch.save(torch.load(path) | {name: value}, path)
    with pytest.raises(ModelLoadError, match=f"^{path}: (tensor )?{message}"):
        load_model(tmp_path)


def test_a_tied_head_stored_in_another_dtype(hf, tmp_path):
    save_bin(hf, tmp_path, prefix=False)
    path = tmp_path / "pytorch_model.bin"
    tensors = torch.load(path)
    torch.save(tensors | {"lm_head.weight": tensors["wte.weight"].double()}, path)
    assert_same(load_model(tmp_path), hf)


def test_no_weights_and_no_folder(folder, tmp_path, monkeypatch):
    (folder / "model.safetensors").unlink()
    with pytest.raises(
        ModelLoadError, match=r"looked for model\.safetensors and pytorch_model\.bin"
    ):
        load_model(folder)
    with pytest.raises(ModelLoadError, match="no such folder"):
        load_model(tmp_path / "nowhere" / "else")
    with pytest.raises(ModelLoadError, match="no such folder"):
        load_model("~nobody-of-that-name/model")
    with pytest.raises(ModelLoadError, match="a file; expected a model folder"):
        load_model(folder / "config.json")
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    for name in ("not a model!", "no-such-owner/no-such-model", "x" * 5000):
        with pytest.raises(ModelLoadError, match=f"{name}: neither a folder nor a model"):
            load_model(name)


def test_device_and_dtype_errors(folder):
    for dtype in ("int8", ["float32"], None):
        with pytest.raises(ValueError, match="dtype must be one of auto, float32"):
            load_model(folder, dtype=dtype)
    for device in ("toaster", ["cpu"]):
        with pytest.raises(ValueError, match="device must be 'auto', 'cpu' or 'cuda'"):
            load_model(folder, device=device)
    if not torch.cuda.is_available():
        with pytest.raises(ValueError, match="no CUDA device"):
            load_model(folder, device="cuda")


def test_weight_shapes_count_the_published_parameters():
    """GPT-2 small has 124,439,808 parameters, XL 1,557,611,200."""

    def count(config):
        return sum(torch.Size(shape).numel() for shape in config.weight_shapes().values())

    assert count(GPT2Config()) == 124_439_808
    assert count(GPT2Config(n_embd=1600, n_head=25, n_layer=48)) == 1_557_611_200
