"""GPT-2 over flat tokens: one file, Hugging Face's weight names, no padding and no cache inside.

Built, step by step, in notebooks/08_gpt2.ipynb.
"""

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from tinyvllm.config import DTYPES, check_choice
from tinyvllm.request import check_flag, check_integer, check_real

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "gelu_new": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_pytorch_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "gelu_fast": lambda x: F.gelu(x, approximate="tanh"),
    "gelu": F.gelu,
    "quick_gelu": lambda x: x * torch.sigmoid(1.702 * x),
    "relu": F.relu,
    "silu": F.silu,
    "swish": F.silu,
    "tanh": torch.tanh,
}

# Attention as the model sees it: (layer, query, key, value, scale) -> output, all [T, H, D].
Attend = Callable[[int, Tensor, Tensor, Tensor, float], Tensor]


@dataclass(frozen=True)
class GPT2Config:
    """The fields of a GPT-2 `config.json` that change what is computed (HF: `GPT2Config`)."""

    vocab_size: int = 50257
    n_positions: int = 1024
    n_embd: int = 768
    n_layer: int = 12
    n_head: int = 12
    n_inner: int | None = None
    activation_function: str = "gelu_new"
    layer_norm_epsilon: float = 1e-5
    scale_attn_weights: bool = True
    scale_attn_by_inverse_layer_idx: bool = False
    tie_word_embeddings: bool = True
    eos_token_id: int | None = 50256

    def __post_init__(self):
        for name in ("vocab_size", "n_positions", "n_embd", "n_head"):
            check_integer(name, getattr(self, name), 1)
        check_integer("n_layer", self.n_layer, 1, 10_000)  # weight_shapes() lists them all
        if self.n_inner is not None:
            check_integer("n_inner", self.n_inner, 1)
        if self.eos_token_id is not None:
            check_integer("eos_token_id", self.eos_token_id, 0)
        check_real("layer_norm_epsilon", self.layer_norm_epsilon, 0.0, 1.0)
        for name in (
            "scale_attn_weights",
            "scale_attn_by_inverse_layer_idx",
            "tie_word_embeddings",
        ):
            check_flag(name, getattr(self, name))
        if self.n_embd % self.n_head:
            raise ValueError(f"n_embd ({self.n_embd}) must be a multiple of n_head ({self.n_head})")
        check_choice("activation_function", self.activation_function, tuple(ACTIVATIONS))

    @property
    def head_size(self) -> int:
        """Width of one attention head."""
        return self.n_embd // self.n_head

    @property
    def inner_size(self) -> int:
        """Width of the hidden layer of the MLP: four times `n_embd` unless `n_inner` says."""
        return self.n_inner or 4 * self.n_embd

    def attention_scale(self, layer: int) -> float:
        """What the dot product of query and key is multiplied by in this layer.

        `reorder_and_upcast_attn`, the remaining switch of Hugging Face's attention, changes the
        precision of that product only. Our attention always computes it in float32.
        """
        scale = self.head_size**-0.5 if self.scale_attn_weights else 1.0
        return scale / (layer + 1) if self.scale_attn_by_inverse_layer_idx else scale

    def weight_shapes(self) -> dict[str, tuple[int, ...]]:
        """Every tensor of the checkpoint with its shape, as Hugging Face stores it.

        `Conv1D` weights are `[inputs, outputs]`, the transpose of `nn.Linear`.
        """
        d, inner = self.n_embd, self.inner_size
        shapes = {"wte.weight": (self.vocab_size, d), "wpe.weight": (self.n_positions, d)}
        for layer in range(self.n_layer):
            block = {
                "ln_1.weight": (d,),
                "ln_1.bias": (d,),
                "attn.c_attn.weight": (d, 3 * d),
                "attn.c_attn.bias": (3 * d,),
                "attn.c_proj.weight": (d, d),
                "attn.c_proj.bias": (d,),
                "ln_2.weight": (d,),
                "ln_2.bias": (d,),
                "mlp.c_fc.weight": (d, inner),
                "mlp.c_fc.bias": (inner,),
                "mlp.c_proj.weight": (inner, d),
                "mlp.c_proj.bias": (d,),
            }
            shapes |= {f"h.{layer}.{name}": shape for name, shape in block.items()}
        shapes |= {"ln_f.weight": (d,), "ln_f.bias": (d,)}
        if not self.tie_word_embeddings:
            shapes["lm_head.weight"] = (self.vocab_size, d)
        return shapes

    @classmethod
    def from_dict(cls, data: dict) -> "GPT2Config":
        """Read a parsed `config.json`; a model that is not GPT-2 raises `ValueError`."""
        kind = data.get("model_type", "gpt2")
        if kind != "gpt2":
            raise ValueError(f"model_type must be 'gpt2', got {kind!r}")
        if data.get("add_cross_attention"):
            raise ValueError("add_cross_attention must be false: this engine has no encoder")
        missing = [name for name in ("n_layer", "n_head", "n_embd") if name not in data]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing: this is not a GPT-2 config")
        return cls(**{f.name: data[f.name] for f in fields(cls) if f.name in data})

    @classmethod
    def from_pretrained(cls, folder: Path) -> "GPT2Config":
        """Read `folder/config.json`; every problem is a `ModelLoadError` that names the file."""
        path = Path(folder) / "config.json"
        data = read_json(path)
        try:
            return cls.from_dict(data)
        except ValueError as error:  # a field is out of range
            raise ModelLoadError(f"{path}: {error}") from None


class ModelLoadError(ValueError):
    """A checkpoint cannot be used; the message names the file and the tensor or field."""


def first_line(error: Exception) -> str:
    """The kind of an error and the first line of what it says."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def read_json(path: Path) -> dict:
    """Parse a file that holds one JSON object; a `ModelLoadError` names it if it does not."""
    if not os.path.isfile(path):
        raise ModelLoadError(f"{path}: no such file; is this a model folder?")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise ModelLoadError(f"{path}: cannot be read as JSON: {first_line(error)}") from None
    if not isinstance(data, dict):
        raise ModelLoadError(f"{path}: must hold a JSON object, got a {type(data).__name__}")
    return data


def onednn_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """`x @ weight.T + bias` by oneDNN; `weight` is packed or a plain `[outputs, inputs]`."""
    return torch.ops.mkldnn._linear_pointwise(x, weight, bias, "none", [], "")


def use_onednn(weight: Tensor) -> bool:
    """Whether oneDNN multiplies by this weight: float32 on a CPU that PyTorch built it for."""
    return (
        weight.device.type == "cpu"
        and weight.dtype == torch.float32
        and torch.backends.mkldnn.is_available()
        and hasattr(torch.ops.mkldnn, "_linear_pointwise")
    )


class Linear:
    """`y = x @ weight.T + bias` with `weight` `[outputs, inputs]`, held once.

    On the CPU in float32 the weight is kept in the blocked order that oneDNN computes with
    (`packed`). PACK_ROWS is the batch size the order is chosen for. One order for all batch
    sizes: a row's result then does not depend on how many rows come with it.
    """

    PACK_ROWS = 16

    def __init__(self, weight: Tensor, bias: Tensor | None):
        self.out_features, self.in_features = weight.shape
        self.packed = use_onednn(weight)
        if self.packed:
            weight = torch.ops.mkldnn._reorder_linear_weight(weight.contiguous(), self.PACK_ROWS)
        self.weight, self.bias = weight, bias

    def __call__(self, x: Tensor) -> Tensor:
        if self.packed:
            return onednn_linear(x, self.weight, self.bias)
        return F.linear(x, self.weight, self.bias)


class TiedHead:
    """The vocabulary projection by the embedding table itself: one tensor serves both.

    Looking rows up needs the plain order, so the table is not packed. oneDNN multiplies by a
    plain weight too, but takes another route for one row than for several; a single row is
    therefore computed as two, and its logits are the same bits alone and in a batch.
    """

    def __init__(self, table: Tensor):
        self.table, self.onednn = table, use_onednn(table)

    def __call__(self, x: Tensor) -> Tensor:
        if not self.onednn:
            return F.linear(x, self.table)
        if len(x) == 1:
            return onednn_linear(x.expand(2, -1).contiguous(), self.table, None)[:1]
        return onednn_linear(x, self.table, None)


class LayerNorm:
    """Layer normalisation over the last axis."""

    def __init__(self, weight: Tensor, bias: Tensor, eps: float):
        self.weight, self.bias, self.eps = weight, bias, eps

    def __call__(self, x: Tensor) -> Tensor:
        return F.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)


class GPT2Block:
    """One transformer layer: attention, then an MLP, each added to the residual stream."""

    def __init__(self, config: GPT2Config, layer: int, take: Callable[[str], Tensor]):
        def linear(name: str) -> Linear:
            # Conv1D stores [inputs, outputs]: transposed here, once.
            return Linear(take(f"{name}.weight").t(), take(f"{name}.bias"))

        def norm(name: str) -> LayerNorm:
            eps = config.layer_norm_epsilon
            return LayerNorm(take(f"{name}.weight"), take(f"{name}.bias"), eps)

        self.layer, self.n_head = layer, config.n_head
        self.scale = config.attention_scale(layer)
        self.activation = ACTIVATIONS[config.activation_function]
        self.ln_1, self.ln_2 = norm("ln_1"), norm("ln_2")
        self.c_attn, self.attn_c_proj = linear("attn.c_attn"), linear("attn.c_proj")
        self.c_fc, self.mlp_c_proj = linear("mlp.c_fc"), linear("mlp.c_proj")

    def __call__(self, x: Tensor, attend: Attend) -> Tensor:
        x = x + self.attention(self.ln_1(x), attend)
        return x + self.mlp_c_proj(self.activation(self.c_fc(self.ln_2(x))))

    def attention(self, x: Tensor, attend: Attend) -> Tensor:
        """`[T, d] -> [T, d]`: project, let `attend` mix the tokens, project back."""
        num_tokens, width = x.shape
        qkv = self.c_attn(x)  # [T, 3d]
        query, key, value = (
            part.view(num_tokens, self.n_head, -1) for part in qkv.split(width, dim=-1)
        )  # [T, H, D] each
        mixed = attend(self.layer, query, key, value, self.scale)
        return self.attn_c_proj(mixed.reshape(num_tokens, width))


class GPT2:
    """GPT-2 over a flat list of tokens that may belong to any number of sequences.

    `weights` maps the names of `config.weight_shapes()` to tensors. Each is copied once, into
    the dtype, the device and the order it is used in. HF: `GPT2LMHeadModel`.
    """

    def __init__(
        self,
        config: GPT2Config,
        weights: dict[str, Tensor],
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ):
        def take(name: str) -> Tensor:
            return weights[name].to(device, dtype, copy=True)

        self.config = config
        self.wte, self.wpe = take("wte.weight"), take("wpe.weight")
        self.blocks = [
            GPT2Block(config, layer, lambda name, layer=layer: take(f"h.{layer}.{name}"))
            for layer in range(config.n_layer)
        ]
        self.ln_f = LayerNorm(take("ln_f.weight"), take("ln_f.bias"), config.layer_norm_epsilon)
        if config.tie_word_embeddings:
            self.lm_head = TiedHead(self.wte)
        else:
            self.lm_head = Linear(take("lm_head.weight"), None)

    @property
    def device(self) -> torch.device:
        """Where the weights are."""
        return self.wte.device

    @property
    def dtype(self) -> torch.dtype:
        """What the weights are."""
        return self.wte.dtype

    def forward(self, input_ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Hidden states `[T, d]` after the final norm, for int64 `[T]` tokens and positions.

        The tokens do not know each other here; `attend` alone decides who sees whom.
        """
        x = self.wte[input_ids] + self.wpe[positions]
        for block in self.blocks:
            x = block(x, attend)
        return self.ln_f(x)

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """`[R, d] -> [R, vocab_size]`: call it for the rows that are sampled, no others."""
        return self.lm_head(hidden)


ASSETS = Path(str(files("tinyvllm"))) / "assets" / "tiny-gpt2"  # the model that ships with us


def find_model(name_or_path: str | Path | None) -> Path:
    """The folder of a model: the shipped one for None, a local folder, or one from the hub.

    A name that is no local folder is taken as a Hugging Face hub id, downloaded by the hub's
    own client and cached where it caches.
    """
    if name_or_path is None:
        return ASSETS
    if not isinstance(name_or_path, str | Path):
        raise ModelLoadError(f"a folder or a hub id is a string or a Path, got {name_or_path!r}")
    # os.path, since pathlib raises where the name is too long, or ~ a user that nobody is.
    folder = Path(os.path.expanduser(name_or_path))
    if os.path.isdir(folder):
        return folder
    name = str(name_or_path)
    if os.path.exists(folder):
        raise ModelLoadError(f"{name}: a file; expected a model folder or a hub id")
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or "\\" in name:
        raise ModelLoadError(f"{name}: no such folder")
    return download(name)


def download(name: str) -> Path:
    """Fetch a model from the Hugging Face hub: safetensors where it has them, else .bin."""
    from huggingface_hub import snapshot_download

    patterns = ["*.json", "merges.txt", "model*.safetensors"]
    try:
        folder = Path(snapshot_download(name, allow_patterns=patterns))
        if not any(folder.glob("model*.safetensors")):
            folder = Path(snapshot_download(name, allow_patterns=[*patterns, "pytorch_model*.bin"]))
    except Exception as error:  # the hub's client has dozens: offline, unknown, gated, ...
        raise ModelLoadError(
            f"{name}: neither a folder nor a model that the hub gives: {first_line(error)}"
        ) from error
    return folder


def weight_files(folder: Path, use_safetensors: bool = True) -> list[Path]:
    """The files that hold a checkpoint's tensors: one, or the shards that an index lists."""
    names = ["pytorch_model.bin"]
    if use_safetensors:
        names.insert(0, "model.safetensors")
    for name in names:
        single, index = folder / name, folder / f"{name}.index.json"
        if single.exists():
            return [single]
        if index.exists():
            weight_map = read_json(index).get("weight_map")
            shards = list(weight_map.values()) if isinstance(weight_map, dict) else []
            if not shards or not all(isinstance(shard, str) for shard in shards):
                raise ModelLoadError(f"{index}: weight_map must map tensor names to file names")
            paths = [folder / shard for shard in sorted(set(shards))]
            for path in paths:
                if not os.path.isfile(path):
                    raise ModelLoadError(f"{path}: missing, but {index.name} lists it")
            return paths
    raise ModelLoadError(f"{folder}: holds no weights; looked for {' and '.join(names)}")


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of one `.safetensors` or `.bin` file, as stored: on the CPU, not converted."""
    try:
        if path.suffix == ".safetensors":
            from safetensors.torch import load_file

            return load_file(path)
        tensors = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # truncated, not such a file, or pickled code instead of tensors
        raise ModelLoadError(
            f"{path}: cannot be read as a checkpoint: {first_line(error)}"
        ) from error
    if not isinstance(tensors, dict):
        raise ModelLoadError(f"{path}: holds a {type(tensors).__name__}, not named tensors")
    for name, tensor in tensors.items():
        if not isinstance(name, str) or not isinstance(tensor, Tensor):
            kind = type(tensor).__name__
            raise ModelLoadError(f"{path}: {name!r} is a {kind}; expected a tensor with a name")
    return tensors


def tensor_problem(tensor: Tensor, shape: tuple[int, ...]) -> str | None:
    """Why a tensor cannot be a weight of this shape, for the end of a sentence; or None."""
    if tensor.layout != torch.strided or tensor.is_nested or tensor.device.type != "cpu":
        return f"is not a plain array: {tensor.layout}, {tensor.device}"
    if not tensor.is_floating_point():
        return f"holds {tensor.dtype}, not floating-point numbers"
    if tuple(tensor.shape) != shape:
        return f"has shape {list(tensor.shape)}, config.json asks for {list(shape)}"
    return None


def load_weights(folder: Path, config: GPT2Config, use_safetensors: bool = True) -> dict:
    """The checkpoint's tensors under the names of `config.weight_shapes()`, checked.

    The prefix `transformer.` is dropped; causal masks that old checkpoints carry
    (`attn.bias`, `attn.masked_bias`) are ignored. Anything else that is missing, unexpected or
    of another shape or kind is a `ModelLoadError` that names file and tensor.
    """
    expected, weights = config.weight_shapes(), {}
    # A tied head may be stored all the same; then it must be the embedding.
    known = {"lm_head.weight": expected["wte.weight"], **expected}
    files = weight_files(folder, use_safetensors)
    for path in files:
        for stored_name, tensor in read_tensors(path).items():
            name = stored_name.removeprefix("transformer.")
            if name.endswith((".attn.bias", ".attn.masked_bias")):
                continue
            if name not in known:
                raise ModelLoadError(f"{path}: unexpected tensor {stored_name!r}")
            problem = tensor_problem(tensor, known[name])
            if problem:
                raise ModelLoadError(f"{path}: tensor {stored_name!r} {problem}")
            weights[name] = tensor
    where = files[0] if len(files) == 1 else f"{folder} ({len(files)} shards)"
    missing = [name for name in expected if name not in weights]
    if missing:
        raise ModelLoadError(
            f"{where}: tensor {missing[0]!r} is missing ({len(missing)} missing in all)"
        )
    if config.tie_word_embeddings:
        wte = weights["wte.weight"]
        if not torch.equal(weights.pop("lm_head.weight", wte).to(wte.dtype), wte):
            raise ModelLoadError(
                f"{where}: tensor 'lm_head.weight' differs from 'wte.weight', but config.json "
                "ties them; set tie_word_embeddings to false"
            )
    return weights


def resolve_device(device: str | torch.device) -> torch.device:
    """`"auto"` is CUDA where there is one, else the CPU."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError):
        raise ValueError(f"device must be 'auto', 'cpu' or 'cuda', got {device!r}") from None
    if resolved.type == "cuda" and not torch.cuda.is_available():
        raise ValueError("device is 'cuda', but PyTorch finds no CUDA device")
    return resolved


def resolve_dtype(dtype: str | torch.dtype, device: torch.device) -> torch.dtype:
    """`"auto"` is float32 on the CPU and a 16-bit type on a GPU: bfloat16 where it has it."""
    if isinstance(dtype, torch.dtype):
        return dtype
    check_choice("dtype", dtype, DTYPES)
    if dtype != "auto":
        return getattr(torch, dtype)
    if device.type != "cuda":
        return torch.float32
    return torch.bfloat16 if torch.cuda.is_bf16_supported() else torch.float16


def load_model(
    name_or_path: str | Path | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    use_safetensors: bool = True,
) -> GPT2:
    """Load a GPT-2 from a folder or a hub id; None is the model that ships with the package.

    Raises `ModelLoadError` for anything wrong with the checkpoint. vLLM:
    `model_executor/model_loader/default_loader.py`.
    """
    device = resolve_device(device)
    dtype = resolve_dtype(dtype, device)
    folder = find_model(name_or_path)
    config = GPT2Config.from_pretrained(folder)
    weights = load_weights(folder, config, use_safetensors)
    with torch.inference_mode():
        return GPT2(config, weights, dtype, device)
