"""A Hugging Face causal language model as a policy. transformers is imported when one is loaded."""

from __future__ import annotations

import copy
import math
import os
from dataclasses import dataclass, replace
from functools import partial
from ipaddress import ip_address
from itertools import takewhile
from pathlib import Path
from pickle import PickleError
from typing import TYPE_CHECKING, Any, ClassVar, Literal
from urllib.parse import urlsplit

import numpy as np
import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from ascent.core.errors import ConfigError
from ascent.models.quantization import dequantize_linears, quantize_linears, unquantized_parameters

if TYPE_CHECKING:
    from transformers import PreTrainedModel

MODEL_LOAD_ERRORS = (
    OSError, ValueError, TypeError, LookupError, AttributeError, RuntimeError, ImportError, PickleError, SafetensorError
)  # fmt: skip
"""Errors that transformers may raise for a folder that does not contain a valid model."""


FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Unquantized dtypes of parameters."""
PYTHON_MODELS: dict[str, tuple[Any, Any]] = {}
"""Models passed as Python objects, each with its tokenizer, by the name that stands for them in this process."""
SAVED_MODEL = "run:model"
"""Value of `model` in config.json for a model passed as an object: the run's folder has a copy from before step 0."""


def register_model(model: Any, tokenizer: Any) -> str:
    """Register a model passed as a Python object; return the name that stands for it in the config."""
    if getattr(model, "get_output_embeddings", lambda: None)() is None or not hasattr(model, "save_pretrained"):
        raise ConfigError(
            f"model is {type(model).__name__}: give a name on the hub, a folder, or a causal language model of "
            "transformers, with tokenizer="
        )
    if hasattr(model, "peft_config") or hasattr(model, "hf_quantizer"):
        raise ConfigError(
            f"model is {type(model).__name__} with adapters or quantized weights: give the plain model, and "
            "peft_config=LoraConfig(…) for new adapters (merge_and_unload merges those that it has)"
        )
    if model.dtype not in (torch.float32, torch.bfloat16):
        raise ConfigError(f"model is in {model.dtype}: convert it first, model.to(torch.float32) or torch.bfloat16")
    if not hasattr(tokenizer, "apply_chat_template"):
        raise ConfigError("a model that is given as an object needs its tokenizer: tokenizer=tokenizer")
    name = f"object:{type(model).__name__}@{id(model):x}"
    PYTHON_MODELS[name] = model, tokenizer
    return name


def restore_python_model(policy: CausalLM, model: Any, tokenizer: Any) -> CausalLM:
    """Return the policy of a resumed run whose model is a Python object, which is trained in place again.

    Its parameters are reset to those before step 0, from which the reference is made; the checkpoint is loaded later.
    The model must have the same architecture and dtype.
    """
    import transformers

    name = register_model(model, tokenizer)
    saved = transformers.AutoModelForCausalLM.from_pretrained(policy.model, dtype=model.dtype).state_dict()
    now = model.state_dict()
    odd = sorted(saved.keys() ^ now.keys()) or [key for key in saved if saved[key].shape != now[key].shape]
    if odd:
        there = [f"{tuple(state[odd[0]].shape) if odd[0] in state else 'missing'}" for state in (saved, now)]
        raise ConfigError(f"model is not the one of this run: {odd[0]} is {there[0]} in the run, {there[1]} now")
    if policy.dtype != "auto" and policy.dtype_on(model.device) != model.dtype:
        wanted = policy.dtype_on(model.device)
        raise ConfigError(f"model is in {model.dtype}, and this run in {policy.dtype}: model.to({wanted})")
    model.load_state_dict(saved)
    return replace(policy, model=name)


def lora_settings(config: Any) -> dict[str, Any]:
    """Convert a peft LoraConfig to settings of the policy; a field without a counterpart raises ConfigError."""
    values = config.to_dict()
    if str(values.get("peft_type")).rpartition(".")[2] != "LORA":
        raise ConfigError(f"peft_config is {type(config).__name__}: only LoraConfig is supported")
    targets = values["target_modules"]
    plain = type(config)(r=values["r"], lora_alpha=values["lora_alpha"], target_modules=targets).to_dict()
    free = ("task_type", "base_model_name_or_path", "revision", "inference_mode", "auto_mapping", "peft_version")
    odd = [name for name, value in values.items() if name not in free and value != plain.get(name)]
    if odd:
        raise ConfigError(
            f"peft_config.{odd[0]} is {values[odd[0]]!r}: it has no counterpart here. Leave it at its default"
        )
    listed = "peft" if targets is None else targets if isinstance(targets, str) else ",".join(sorted(targets))
    return {"policy.lora": values["r"], "policy.lora_alpha": float(values["lora_alpha"]), "policy.lora_targets": listed}


@dataclass(frozen=True)
class CausalLM:
    """A causal language model of transformers: a folder or a hub name."""

    model: str = ""
    """Folder or hub name of the model."""
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "float16"] = "auto"
    """Precision of the parameters; auto: float32 on a CPU; on a GPU, float16 or mixed for a policy all of whose
    parameters are trained, bfloat16 otherwise. mixed: parameters and matmuls in bfloat16, the rest in float32."""
    optimizer_state: Literal["auto", "float32", "bfloat16"] = "auto"
    """Optimizer state for bfloat16 parameters: float32 gradients, moments and master weights (18 bytes per parameter),
    or bfloat16 with stochastic rounding (10 bytes); auto: float32 if it fits the GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …, mps; auto: an NVIDIA or AMD GPU if there is one."""
    lora: int = 0
    """Rank of LoRA adapters (peft); then only these are trained. 0: no adapters, every parameter is trained."""
    lora_alpha: float = 32.0
    """LoRA's scale: the adapters' output is multiplied by alpha/rank."""
    lora_targets: str = "all-linear"
    """Modules that get adapters: all-linear, names separated by commas, or peft: those that peft takes by default for
    the architecture. The LM head gets none."""
    bits: int = 0
    """4: quantize the frozen weights below LoRA adapters to 4 bits (NF4, as in QLoRA), a quarter of their memory in
    bfloat16; 0: no quantization."""
    last_layers: int = 0
    """Train only this many last layers and the norm after them; 0: every parameter (or LoRA's)."""
    checkpointing: bool = False
    """Gradient checkpointing: less memory, one more forward pass, the same numbers."""
    share_prompts: bool = True
    """Encode a prompt once for its whole group, also in training, if the architecture allows it."""
    gpu_memory: float = 0.0
    """GiB of GPU memory that the run may use, for example when two runs share a GPU; 0: all of it."""
    rows: int = 0
    """Responses that are decoded at once (batch size); 0: chosen for the device. Affects memory and speed only."""
    engine: Literal["local", "vllm", "sglang"] = "local"
    """Where responses are generated: in this process, or by servers of vLLM or SGLang."""
    engine_url: tuple[str, ...] = ()
    """Servers that run already on this machine, such as http://127.0.0.1:8000, or `ascent engine` on others, as
    https://HOST:8443; several share the work."""
    engine_python: str = ""
    """The virtual environment of the engine, from which Ascent starts, supervises and stops a server."""
    engine_args: str = ""
    """Further arguments for a server that Ascent starts, as one string: "--tensor-parallel-size 2"."""
    engine_key_env: str = ""
    """Environment variable with the key of `ascent engine`; the urls are then such relays. The key is never written."""
    engine_key_file: str = ""
    """File with that key, readable only by its owner."""
    engine_transport: Literal["file", "nccl"] = "file"
    """How weights reach a server of vLLM: file, through shared memory; or nccl, from GPU to GPU."""
    engine_deadline: float = 600.0
    """Seconds that a server may take for one response or one load of weights, and to come back after it is lost."""

    backend: ClassVar[str] = "language"

    def __post_init__(self) -> None:
        if not min(self.lora, self.rows, self.last_layers, self.gpu_memory) >= 0:
            raise ConfigError("--policy.lora, .rows, .last-layers and .gpu-memory must be 0 or more")
        if self.lora and self.last_layers:
            raise ConfigError(
                "--policy.lora with --policy.last-layers: both say which parameters are trained; set one of them"
            )
        if self.bits not in (0, 4):
            raise ConfigError(f"--policy.bits is {self.bits}: set 4, or leave it out")
        if self.bits and not self.lora:
            raise ConfigError(
                "--policy.bits 4 is for what is not trained: set --policy.lora 16 too, to train adapters beside it"
            )
        if self.optimizer_state == "bfloat16" and (self.lora or self.dtype in ("float32", "float16")):
            why = "LoRA's adapters are few, and in float32" if self.lora else f"--policy.dtype is {self.dtype}"
            raise ConfigError(f"--policy.optimizer-state bfloat16 is for parameters in bfloat16: {why}. Leave it out")
        if self.lora and not self.lora_alpha > 0:
            raise ConfigError(
                f"--policy.lora-alpha is {self.lora_alpha:g}: it scales the adapters, so it must be above 0"
            )
        self._check_engine()
        if self.engine_python:  # a resume may be started elsewhere
            object.__setattr__(self, "engine_python", str(Path(self.engine_python).expanduser().absolute()))

    def _check_engine(self) -> None:
        if self.bits and self.engine != "local":
            raise ConfigError(
                f"--policy.bits 4 with --engine {self.engine}: a server holds the whole model in 16 bits, so that "
                "nothing is saved. Set --engine local, or leave --policy.bits out"
            )
        if self.engine == "local":
            if self.engine_url or self.engine_python or self.engine_args or self.engine_key_env or self.engine_key_file:
                raise ConfigError(
                    "--engine.url, .python, .args and .key-… are for --engine vllm or sglang: set that too"
                )
            return
        if bool(self.engine_url) == bool(self.engine_python):
            raise ConfigError(
                f"--engine {self.engine}: say where it is, either by --engine.url (it runs already) or by "
                "--engine.python (the environment to start it from; `make engines` makes .engines/vllm)"
            )
        if self.engine_args and self.engine_url:
            raise ConfigError("--engine.args is for a server that Ascent starts, by --engine.python")
        if self.engine_key_env and self.engine_key_file:
            raise ConfigError("--engine.key-env with --engine.key-file: the key is in one of them; set that one")
        relayed = bool(self.engine_key_env or self.engine_key_file)
        if relayed and self.engine_python:
            raise ConfigError(
                "--engine.key-env and --engine.key-file are for an `ascent engine` that runs, by --engine.url"
            )
        if self.engine_transport == "nccl" and (self.engine != "vllm" or relayed):
            raise ConfigError("--engine.transport nccl is for --engine vllm on this machine: leave it at file")
        if len({url.rstrip("/") for url in self.engine_url}) < len(self.engine_url):
            raise ConfigError("--engine.url has the same server twice")
        for url in self.engine_url:
            check_address(url, relayed)
        if not self.engine_deadline > 0:
            raise ConfigError(f"--engine.deadline is {self.engine_deadline:g}: set a number of seconds above 0")

    def load(self, seed: int = 0, keep_full_precision: bool = False) -> LanguageModel:
        """Load the model and its tokenizer, with LoRA adapters (initialized from the seed) if they are set.

        With `keep_full_precision`, for training, parameters that loading rounds to a lower precision are also kept as
        stored.
        """
        if not self.model:
            raise ConfigError("--model is missing: set the folder or the hub name of a causal language model")
        try:
            import transformers
        except ImportError:
            raise ConfigError("language models need transformers: pip install 'ascent-rl[lm]'") from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model, tokenizer, device, dtype = (
            self._given() if self.model in PYTHON_MODELS else self._read(keep_full_precision)
        )
        model = model.requires_grad_(False)
        if self.last_layers:
            self._free_last(model)
        elif not self.lora:
            for part in (backbone_of(model), model.get_output_embeddings()):  # other parts do not process text
                part.requires_grad_(True)
        full_precision_params = {
            name: p.detach() for name, p in model.named_parameters() if p.requires_grad and p.dtype != dtype
        }
        if self.bits:
            quantize_linears(model, backbone_of(model), device, dtype)
        for p in unquantized_parameters(model):  # not buffers: RoPE frequencies stay in float32
            p.data = p.data.to(dtype)
        model = model.to(device)  # the full-precision copies stay on the CPU
        set_mixed_precision(model, self.dtype == "mixed")
        lm = LanguageModel(model, tokenizer, self._adapt(model, seed) if self.lora else None)
        lm.full_precision_params = full_precision_params if keep_full_precision else {}
        if self.gpu_memory and device.type == "cuda":
            lm.gpu_memory_limit = self.gpu_memory * 2**30
            there = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, lm.gpu_memory_limit / there), device.index)
        return lm

    def _given(self) -> tuple[Any, Any, torch.device, torch.dtype]:
        """Return a model passed as a Python object; it is trained in place, on its device and in its dtype."""
        model, tokenizer = PYTHON_MODELS[self.model]
        device = model.device if self.device == "auto" else pick_device(self.device)
        return model, tokenizer, device, model.dtype if self.dtype == "auto" else self.dtype_on(device)

    def _read(self, keep_full_precision: bool) -> tuple[Any, Any, torch.device, torch.dtype]:
        """Load the model from its folder or from the hub."""
        import transformers

        if self.model == SAVED_MODEL:
            raise ConfigError(
                f"--model {SAVED_MODEL}: this run was made with a model that was given in Python, and keeps it in its "
                "own folder. Set --model RUN/model"
            )
        device = pick_device(self.device)
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(self.model, trust_remote_code=False)
            dtype = self.dtype_on(device)
            as_stored = self.bits or (keep_full_precision and dtype in (torch.bfloat16, torch.float16))
            stored = "auto" if as_stored else dtype  # quantize the stored weights, whatever the compute dtype
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self.model, dtype=stored, trust_remote_code=False
            )
        except MODEL_LOAD_ERRORS as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else "no message"
            raise ConfigError(f"--model {self.model} cannot be loaded: {type(error).__name__}: {first}") from None
        if getattr(model, "hf_quantizer", None) is not None or any(
            p.dtype not in FLOAT_DTYPES for p in model.parameters()
        ):
            raise ConfigError(
                f"--model {self.model} is stored with quantized weights: give the plain model, and for one in 4 bits "
                "--policy.bits 4"
            )
        return model, tokenizer, device, dtype

    def dtype_on(self, device: torch.device) -> torch.dtype:
        """Return the dtype of the parameters on a device."""
        if self.dtype == "auto":
            if device.type == "cpu":
                return torch.float32
            old = (
                device.type == "cuda"
                and torch.version.hip is None
                and torch.cuda.get_device_capability(device) < (8, 0)
            )
            return torch.float16 if old else torch.bfloat16
        return torch.bfloat16 if self.dtype == "mixed" else getattr(torch, self.dtype)

    def _free_last(self, model: PreTrainedModel) -> None:
        layers, norm = (getattr(backbone_of(model), name, None) for name in ("layers", "norm"))
        if layers is None or self.last_layers > len(layers):
            there = "no list of layers" if layers is None else f"only {len(layers)}"
            raise ConfigError(f"--policy.last-layers {self.last_layers}: the model has {there}")
        for module in (*layers[-self.last_layers :], *([] if norm is None else [norm])):
            module.requires_grad_(True)

    def _adapt(self, model: PreTrainedModel, seed: int) -> Any:
        """Add LoRA adapters to the model's layers; they start at 0, so the policy equals the model at first."""
        try:
            from peft import LoraConfig, get_peft_model
        except ImportError:
            raise ConfigError("--policy.lora needs peft: pip install 'ascent-rl[lm]'") from None
        alpha: Any = self.lora_alpha
        config = LoraConfig(r=self.lora, lora_alpha=alpha, task_type="CAUSAL_LM", **self._targets(model))
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            try:
                return get_peft_model(model, config)
            except ValueError as error:
                raise ConfigError(f"--policy.lora-targets {self.lora_targets}: {error}") from None

    def _targets(self, model: PreTrainedModel) -> dict[str, Any]:
        """Return peft's arguments for the modules that get adapters; unknown names raise, because peft ignores them."""
        names = {module: name for name, module in model.named_modules()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        inside = {names[module] for module in backbone_of(model).modules()}
        targets = [name.strip() for name in self.lora_targets.split(",")]
        targets = _peft_default_targets(model) if targets == ["peft"] else targets
        for target in targets if targets != ["all-linear"] else []:
            places = {name for name in names.values() if f".{name}".endswith(f".{target}")} if target else set()
            wrong = None if places & inside else "the model has no module of this name in its text backbone"
            if names[head] in places or (names[embedding] in places and head.weight is embedding.weight):
                wrong = "the LM head gets no adapter: log-probs are computed from its weight, chunk by chunk"
                wrong += "" if names[head] in places else ", and this model ties it to the embedding"
            if wrong is not None:
                raise ConfigError(f"--policy.lora-targets {target}: {wrong}. Set all-linear, or other names")
        outside = [name for module, name in names.items() if isinstance(module, nn.Linear) and name not in inside]
        return {
            "target_modules": targets[0] if targets == ["all-linear"] else targets,
            "exclude_modules": [name for name in outside if name != names[head]] or None,
        }


def _peft_default_targets(model: PreTrainedModel) -> list[str]:
    """Return peft's default target modules, which are the query and value projections for most architectures."""
    from peft.utils import TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING as KNOWN

    kind = str(model.config.model_type)
    targets = KNOWN.get(kind)
    if not isinstance(targets, list):
        raise ConfigError(
            f"--policy.lora-targets peft (a peft_config without target_modules): peft has no default for {kind}. Set "
            'all-linear, or names: target_modules="all-linear"'
        )
    return list(targets)


def check_address(url: str, relayed: bool, flag: str = "--engine.url") -> None:
    """Raise ConfigError for a server address that exposes the server or a key, or that contains a password."""
    try:
        parts = urlsplit(url)
        host, _ = parts.hostname or "", parts.port
    except ValueError as error:
        raise ConfigError(f"{flag} {url}: {error}") from None
    if parts.scheme not in ("http", "https") or not host or parts.query or parts.fragment or parts.username is not None:
        raise ConfigError(f"{flag}: give http://127.0.0.1:PORT, or https://HOST:PORT of `ascent engine`, and no more")
    try:
        here = ip_address(host).is_loopback
    except ValueError:
        here = host == "localhost"
    if relayed and not here and parts.scheme == "http":
        raise ConfigError(f"{flag} {url}: everyone on the way could read key and weights. Use https, or a tunnel")
    if not relayed and (not here or parts.scheme == "https" or parts.path.strip("/")):
        raise ConfigError(
            f"{flag} {url}: weights are handed over in shared memory, and a server in development mode "
            "must not be reachable from elsewhere. Set http://127.0.0.1:PORT; for another machine run `ascent engine` "
            "there, and set --engine.key-file here (docs/serving.md)"
        )


def pick_device(name: str) -> torch.device:
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
    except RuntimeError:
        raise ConfigError(
            f"--policy.device {name}: there is no such device; set cpu, cuda, cuda:1, mps or auto"
        ) from None
    there = {"cuda": torch.cuda.is_available(), "mps": torch.backends.mps.is_available()}
    if not there.get(device.type, True):
        raise ConfigError(f"--policy.device {name}: torch sees no GPU here; set cpu or auto")
    return device


def backbone_of(model: Any) -> Any:
    """Return the transformer without the LM head, which the decoder of Llama 4 includes."""
    decoder = model.get_decoder()
    headed = getattr(decoder, "get_output_embeddings", lambda: None)() is not None
    return decoder.model if headed and hasattr(decoder, "model") else decoder


# ---- mixed precision: float32 residual stream, half-precision matmuls ------------------------------------


def set_mixed_precision(model: Any, enabled: bool = True) -> None:
    """Enable or disable mixed precision: residual stream and norms in float32, matmuls in the dtype of the parameters.

    It may already be enabled if an earlier run used the same model object.
    """
    backbone, words = backbone_of(model), model.get_input_embeddings()
    if enabled == is_mixed_precision(model):
        return
    replaced: dict[Any, Any] = {backbone: _autocast_forward} | {
        m: _float32_layer_norm for m in backbone.modules() if type(m) is nn.LayerNorm
    }
    for module, forward in replaced.items():
        if enabled:
            module.forward = partial(forward, module)
        else:
            del module.forward
    if enabled:
        words.register_forward_hook(_to_float32)
    else:
        words._forward_hooks.clear()


def is_mixed_precision(model: Any) -> bool:
    return getattr(backbone_of(model).forward, "func", None) is _autocast_forward


def _autocast_forward(backbone: Any, *args: Any, **more: Any) -> Any:
    weight = backbone.get_input_embeddings().weight
    with torch.autocast(weight.device.type, weight.dtype, cache_enabled=False):
        out = type(backbone).forward(backbone, *args, **more)
    out.last_hidden_state = out.last_hidden_state.to(
        weight.dtype
    )  # the LM head is a matmul in the dtype of the parameters
    return out


def _to_float32(_module: Any, _args: Any, words: Tensor) -> Tensor:
    return words.float()


def _float32_layer_norm(norm: Any, x: Tensor) -> Tensor:
    """LayerNorm in float32, which autocast does not do on a CPU; RMSNorms convert their inputs themselves."""
    weight, bias = (None if p is None else p.float() for p in (norm.weight, norm.bias))
    return torch.nn.functional.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)


class LanguageModel(nn.Module):
    """A model with its tokenizer, and the properties that the engines need.

    A prompt passes the chat template once, here; text is never tokenized a second time.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, adapted: Any = None):
        super().__init__()
        self.model, self.tokenizer = model.eval(), tokenizer  # permanently: training mode would enable dropout
        self._adapted = (adapted,)  # peft's wrapper, for saving; in a tuple, so that it is not a submodule
        eos, stops = tokenizer.eos_token_id, model.generation_config.eos_token_id
        stops = [*(stops if isinstance(stops, list) else [stops]), eos]
        self.stop_token_ids = frozenset(token for token in stops if token is not None)
        if not self.stop_token_ids:
            raise ConfigError("the model has no end-of-sequence token, so no response could end")
        self.eos_token_id: int = min(self.stop_token_ids) if eos is None else eos
        self.vocab_size: int = model.get_output_embeddings().weight.shape[0]
        self.full_precision_params: dict[str, Tensor] = {}
        """Trained parameters in their stored precision, where loading rounded them: training starts from these."""
        self.gpu_memory_limit = math.inf
        """Bytes of GPU memory that may be used."""
        self.can_share_prompts = True
        """Whether a group's prompt can be encoded once; checked by the learner."""
        self.can_fuse_layers = True
        """Whether the learner may fuse layers; checked on the whole model (model_verification.py)."""
        self._own: dict[str, Tensor] | None = None
        """The last dict of parameters that consists of the model's own tensors."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def gpu_memory(self) -> float:
        """Bytes of GPU memory, or the limit that is set."""
        return min(self.gpu_memory_limit, torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def config(self) -> Any:
        """The config of the text model, which is one of several in a multimodal model (Gemma 3)."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def max_positions(self) -> int | None:
        """Maximum number of tokens of a sequence, if the model's config states it."""
        return getattr(self.config, "max_position_embeddings", None)

    @property
    def backbone(self) -> nn.Module:
        """The transformer without the LM head."""
        return backbone_of(self.model)

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any, backbone: nn.Module | None = None) -> Tensor:
        """Return the last hidden states `[row position hidden_size]`, with one of the attention layouts."""
        out = (backbone or self.backbone)(input_ids=ids, position_ids=positions, use_cache=False, layout=layout)
        return out.last_hidden_state

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """Apply the chat template with the generation prompt; without a template, tokenize the plain text.

        An end token that the tokenizer appends is removed, because the response continues the prompt.
        """
        if self.tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            ids = list(self.tokenizer(text)["input_ids"])
            return ids[
                : len(ids)
                - max(0, self._num_trailing_stop_tokens(ids) - self._num_trailing_stop_tokens(self.tokenize(text)))
            ]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def _num_trailing_stop_tokens(self, ids: list[int]) -> int:
        return len(list(takewhile(self.stop_token_ids.__contains__, reversed(ids))))

    def tokenize(self, text: str) -> list[int]:
        """Tokenize a text without adding special tokens."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def tokenize_steps(self, steps: list[str], separator: str, ended: bool) -> list[list[int]]:
        """Tokenize each step separately, followed by the separator; the last one by the end token if `ended`."""
        pieces = [self.tokenize(step + separator) for step in steps[:-1]]
        return [*pieces, [*self.tokenize(steps[-1]), *([self.eos_token_id] if ended else [])]]

    def decode(self, ids: list[int] | np.ndarray) -> str:
        # transformers inspects every element of a list, which takes longer than decoding; an array is faster
        return self.tokenizer.decode(np.asarray(ids, dtype=np.int64), skip_special_tokens=True)

    def token_text(self, token: int) -> str:
        """Return one token as text, special tokens included."""
        return self.tokenizer.decode([token])

    def save(self, folder: Path) -> None:
        """Save as an ordinary Hugging Face folder, with the adapters merged."""
        model: Any = self.model
        if self._adapted[0] is not None:
            model = copy.deepcopy(self._adapted[0])
            dequantize_linears(model)
            model = model.merge_and_unload()
        folder.mkdir(parents=True, exist_ok=True)
        model.save_pretrained(folder)
        self.tokenizer.save_pretrained(folder)
        for path in folder.iterdir():
            os.chmod(path, 0o644)

    def trained(self) -> dict[str, Tensor]:
        """Return the trained parameters by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def load_params(self, params: dict[str, Tensor]) -> None:
        """Load these trained parameters; tensors that are already the model's own are not copied."""
        if params is self._own:
            return
        own = self.trained() if params else {}
        for name, tensor in params.items():
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        if all(own[name] is tensor for name, tensor in params.items()):
            self._own = params
