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
"""What transformers may raise for the folder of a model that holds anything."""


FLOAT_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
"""Types of parameters that are numbers by themselves."""
PYTHON_MODELS: dict[str, tuple[Any, Any]] = {}
"""Models that were given in Python, each with its tokenizer, by the names that stand for them in this process."""
SAVED_MODEL = "run:model"
"""In a run's config.json: the model lies in the run's own folder, as it was before the first step."""


def register_model(model: Any, tokenizer: Any) -> str:
    """The name of a model that was given in Python."""
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
    """The policy of a run that is resumed with the model that it was given: that object is trained in place again.

    Its parameters become those of the first step, which the run keeps, because the reference is made of them; then the
    checkpoint's are loaded. It has to be the same architecture in the same precision.
    """
    import transformers

    name = register_model(model, tokenizer)
    kept = transformers.AutoModelForCausalLM.from_pretrained(policy.model, dtype=model.dtype).state_dict()
    now = model.state_dict()
    odd = sorted(kept.keys() ^ now.keys()) or [key for key in kept if kept[key].shape != now[key].shape]
    if odd:
        there = [f"{tuple(state[odd[0]].shape) if odd[0] in state else 'missing'}" for state in (kept, now)]
        raise ConfigError(f"model is not the one of this run: {odd[0]} is {there[0]} in the run, {there[1]} now")
    if policy.dtype != "auto" and policy.dtype_on(model.device) != model.dtype:
        wanted = policy.dtype_on(model.device)
        raise ConfigError(f"model is in {model.dtype}, and this run in {policy.dtype}: model.to({wanted})")
    model.load_state_dict(kept)
    return replace(policy, model=name)


def lora_settings(config: Any) -> dict[str, Any]:
    """A LoraConfig of peft as settings of a policy; refused with the field that has no counterpart here."""
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
    """A causal language model of transformers: a folder, or a name on the hub."""

    model: str = ""
    """Folder or hub name of the model."""
    dtype: Literal["auto", "float32", "mixed", "bfloat16", "float16"] = "auto"
    """Precision of the parameters; auto: float32 on a CPU; on a GPU, float16 or mixed for a policy all of whose
    parameters are trained, bfloat16 for everything else. mixed: parameters and matrix products in bfloat16, what lies
    between them in float32."""
    optimizer_state: Literal["auto", "float32", "bfloat16"] = "auto"
    """Of parameters in bfloat16: gradients and moments in float32 with a float32 copy (18 bytes per parameter), or in
    bfloat16, rounded at random, with what the copy has more (10 bytes); auto: the first if it fits the GPU."""
    device: str = "auto"
    """cpu, cuda, cuda:1, …, mps; auto: a GPU of NVIDIA's or AMD's if there is one."""
    lora: int = 0
    """Rank of LoRA adapters (peft); then only these are trained. 0: no adapters, every parameter is trained."""
    lora_alpha: float = 32.0
    """LoRA's scale: the adapters' output is multiplied by alpha/rank."""
    lora_targets: str = "all-linear"
    """Modules that get adapters: all-linear, names separated by commas, or peft: those that peft takes by default for
    the architecture. The head for words gets none."""
    bits: int = 0
    """4: keep the frozen matrices below LoRA's adapters in 4 bits (NF4, as in QLoRA), a quarter of their memory in
    bfloat16; 0: in the precision of the parameters."""
    last_layers: int = 0
    """Train only this many last layers and the norm after them; 0: every parameter (or LoRA's)."""
    checkpointing: bool = False
    """Gradient checkpointing: less memory, one more forward pass, the same numbers."""
    share_prompts: bool = True
    """Encode a prompt once for its whole group, also in training, if the architecture allows it."""
    gpu_memory: float = 0.0
    """GiB of a GPU that the run plans with and may take, as where two runs share a card; 0: all of it."""
    rows: int = 0
    """Responses that are decoded at once; 0: chosen for the device. Changes memory, not the distribution."""
    engine: Literal["local", "vllm", "sglang"] = "local"
    """Who samples: this process, or servers of vLLM or SGLang."""
    engine_url: tuple[str, ...] = ()
    """Servers that run already on this machine, such as http://127.0.0.1:8000, or `ascent engine` on others, as
    https://HOST:8443; several share the work."""
    engine_python: str = ""
    """The virtual environment that the engine is in: Ascent starts a server from it, watches it and ends it."""
    engine_args: str = ""
    """More arguments for a server that Ascent starts, in one word: "--tensor-parallel-size 2"."""
    engine_key_env: str = ""
    """Environment variable with the key of `ascent engine`; the urls are then such relays. The key is never written."""
    engine_key_file: str = ""
    """File with that key, for its owner alone."""
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

    def load(self, seed: int = 0, exact: bool = False) -> LanguageModel:
        """The model and its tokenizer, with LoRA adapters (initialized from the seed) if they are set.

        `exact`, for training: if the parameters are rounded to a lower precision, keep the stored ones too.
        """
        if not self.model:
            raise ConfigError("--model is missing: set the folder or the hub name of a causal language model")
        try:
            import transformers
        except ImportError:
            raise ConfigError("language models need transformers: pip install 'ascent-rl[lm]'") from None
        transformers.utils.logging.set_verbosity_error()
        transformers.utils.logging.disable_progress_bar()
        model, tokenizer, device, dtype = self._given() if self.model in PYTHON_MODELS else self._read(exact)
        model = model.requires_grad_(False)
        if self.last_layers:
            self._free_last(model)
        elif not self.lora:
            for part in (backbone_of(model), model.get_output_embeddings()):  # nothing else reads or writes text
                part.requires_grad_(True)
        finer = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad and p.dtype != dtype}
        if self.bits:
            quantize_linears(model, backbone_of(model), device, dtype)
        for p in unquantized_parameters(model):  # parameters only: of the buffers, rotary frequencies stay in float32
            p.data = p.data.to(dtype)
        model = model.to(device)  # what was stored finer stays where it was: a GPU need not hold both
        set_mixed_precision(model, self.dtype == "mixed")
        lm = LanguageModel(model, tokenizer, self._adapt(model, seed) if self.lora else None)
        lm.exact = finer if exact else {}
        if self.gpu_memory and device.type == "cuda":
            lm.limit = self.gpu_memory * 2**30
            there = torch.cuda.get_device_properties(device).total_memory
            torch.cuda.set_per_process_memory_fraction(min(1.0, lm.limit / there), device.index)
        return lm

    def _given(self) -> tuple[Any, Any, torch.device, torch.dtype]:
        """The model that was given in Python, to be trained in place, on its own device and in its own precision."""
        model, tokenizer = PYTHON_MODELS[self.model]
        device = model.device if self.device == "auto" else pick_device(self.device)
        return model, tokenizer, device, model.dtype if self.dtype == "auto" else self.dtype_on(device)

    def _read(self, exact: bool) -> tuple[Any, Any, torch.device, torch.dtype]:
        """The model from its folder or from the hub."""
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
            as_stored = self.bits or (exact and dtype in (torch.bfloat16, torch.float16))
            stored = "auto" if as_stored else dtype  # 4 bits: of the same numbers, whatever is computed in
            model: Any = transformers.AutoModelForCausalLM.from_pretrained(
                self.model, dtype=stored, trust_remote_code=False
            )
        except MODEL_LOAD_ERRORS as error:
            first = str(error).strip().splitlines()[0] if str(error).strip() else "no words"
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
        """The precision of the parameters on a device."""
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
        """LoRA adapters in the model's own layers; the first policy is the model itself."""
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
        """Which modules of the backbone get adapters, in peft's words. peft skips a name that it does not find."""
        names = {module: name for name, module in model.named_modules()}
        head, embedding = model.get_output_embeddings(), model.get_input_embeddings()
        inside = {names[module] for module in backbone_of(model).modules()}
        targets = [name.strip() for name in self.lora_targets.split(",")]
        targets = _peft_default_targets(model) if targets == ["peft"] else targets
        for target in targets if targets != ["all-linear"] else []:
            places = {name for name in names.values() if f".{name}".endswith(f".{target}")} if target else set()
            wrong = None if places & inside else "the model has no part of this name that reads text"
            if names[head] in places or (names[embedding] in places and head.weight is embedding.weight):
                wrong = "the head for words gets no adapter: log-probs are computed from its matrix, chunk by chunk"
                wrong += "" if names[head] in places else ", and here that is the embedding's"
            if wrong is not None:
                raise ConfigError(f"--policy.lora-targets {target}: {wrong}. Set all-linear, or other names")
        outside = [name for module, name in names.items() if isinstance(module, nn.Linear) and name not in inside]
        return {
            "target_modules": targets[0] if targets == ["all-linear"] else targets,
            "exclude_modules": [name for name in outside if name != names[head]] or None,
        }


def _peft_default_targets(model: PreTrainedModel) -> list[str]:
    """The modules that peft adapts where its config names none: for most architectures the queries and the values."""
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
    """Refuse an address of a server that would be exposed, expose a key, or be written down with a password."""
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
    """The part from ids to last hidden states. What Llama 4 calls its decoder has the head too."""
    decoder = model.get_decoder()
    headed = getattr(decoder, "get_output_embeddings", lambda: None)() is not None
    return decoder.model if headed and hasattr(decoder, "model") else decoder


# ---- float32 between products in half precision ------------------------------------------------------


def set_mixed_precision(model: Any, on: bool = True) -> None:
    """From now on, if `on`, the model is computed as autocast does it: words, and what is added to them, in float32.

    Norms are worked out in float32 too, and matrix products in the type of the parameters. A model that was given in
    Python may have been mixed by an earlier run.
    """
    backbone, words = backbone_of(model), model.get_input_embeddings()
    if on == is_mixed_precision(model):
        return
    replaced: dict[Any, Any] = {backbone: _autocast_forward} | {
        m: _float32_layer_norm for m in backbone.modules() if type(m) is nn.LayerNorm
    }
    for module, forward in replaced.items():
        if on:
            module.forward = partial(forward, module)
        else:
            del module.forward
    if on:
        words.register_forward_hook(_to_float32)
    else:
        words._forward_hooks.clear()


def is_mixed_precision(model: Any) -> bool:
    return getattr(backbone_of(model).forward, "func", None) is _autocast_forward


def _autocast_forward(backbone: Any, *args: Any, **more: Any) -> Any:
    weight = backbone.get_input_embeddings().weight
    with torch.autocast(weight.device.type, weight.dtype, cache_enabled=False):
        out = type(backbone).forward(backbone, *args, **more)
    out.last_hidden_state = out.last_hidden_state.to(weight.dtype)  # the head is a matrix product
    return out


def _to_float32(_module: Any, _args: Any, words: Tensor) -> Tensor:
    return words.float()


def _float32_layer_norm(norm: Any, x: Tensor) -> Tensor:
    """On a CPU autocast does not do this; norms of other kinds widen what they are given themselves."""
    weight, bias = (None if p is None else p.float() for p in (norm.weight, norm.bias))
    return torch.nn.functional.layer_norm(x.float(), norm.normalized_shape, weight, bias, norm.eps)


class LanguageModel(nn.Module):
    """A model with its tokenizer, and what the engines need to know about them.

    A prompt goes through the chat template once, here; nothing is ever tokenized again.
    """

    def __init__(self, model: PreTrainedModel, tokenizer: Any, adapted: Any = None):
        super().__init__()
        self.model, self.tokenizer = model.eval(), tokenizer  # for good: training mode would turn dropout on
        self._adapted = (adapted,)  # peft's wrapper of the same module, for saving; in a tuple: it is not a submodule
        own, ends = tokenizer.eos_token_id, model.generation_config.eos_token_id
        self.ends = frozenset(e for e in [*(ends if isinstance(ends, list) else [ends]), own] if e is not None)
        if not self.ends:
            raise ConfigError("the model has no end token, so no response could ever end")
        self.end: int = min(self.ends) if own is None else own
        self.vocab: int = model.get_output_embeddings().weight.shape[0]
        self.exact: dict[str, Tensor] = {}
        """Trained parameters as stored, where the model has rounded them: training starts from these."""
        self.limit = math.inf
        """Bytes of its GPU that may be taken."""
        self.shares = True
        """Can a group's prompt be encoded once? The learner finds out."""
        self.fuses = True
        """May a learner fuse its parts? A proof of the whole model says it."""
        self._own: dict[str, Tensor] | None = None
        """A table of parameters, all of which are its own."""

    @property
    def device(self) -> torch.device:
        return next(self.model.parameters()).device

    @property
    def gpu_memory(self) -> float:
        """Bytes of the GPU that it is on, or what may be taken of them."""
        return min(self.limit, torch.cuda.get_device_properties(self.device).total_memory)

    @property
    def config(self) -> Any:
        """The configuration of the part that reads and writes text: of a composite model (Gemma 3), one of several."""
        return self.model.config.get_text_config(decoder=True)

    @property
    def backbone(self) -> nn.Module:
        """The transformer without the head: from ids to last hidden states."""
        return backbone_of(self.model)

    def hidden(self, ids: Tensor, positions: Tensor, layout: Any, backbone: nn.Module | None = None) -> Tensor:
        """Last hidden states `[row position width]`, with one of the engines' attention layouts."""
        out = (backbone or self.backbone)(input_ids=ids, position_ids=positions, use_cache=False, layout=layout)
        return out.last_hidden_state

    def encode(self, messages: list[dict[str, str]]) -> list[int]:
        """The ids of a chat in its template, ready for the answer; without a template, of the plain text.

        Some tokenizers put their end token behind a text. A response continues the prompt, so it is taken off again.
        """
        if self.tokenizer.chat_template is None:
            text = "\n\n".join(message["content"] for message in messages)
            ids = list(self.tokenizer(text)["input_ids"])
            return ids[: len(ids) - max(0, self._ends_behind(ids) - self._ends_behind(self.tokenize(text)))]
        return list(self.tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False))

    def _ends_behind(self, ids: list[int]) -> int:
        return len(list(takewhile(self.ends.__contains__, reversed(ids))))

    def tokenize(self, text: str) -> list[int]:
        """The ids of a text, with no special token added."""
        return list(self.tokenizer(text, add_special_tokens=False)["input_ids"])

    def tokenize_steps(self, steps: list[str], separator: str, ended: bool) -> list[list[int]]:
        """Each step with the separator behind it, tokenized by itself; the end token last, if the response ended."""
        pieces = [self.tokenize(step + separator) for step in steps[:-1]]
        return [*pieces, [*self.tokenize(steps[-1]), *([self.end] if ended else [])]]

    def decode(self, ids: list[int] | np.ndarray) -> str:
        # An array, because transformers first inspects every number of a list, which takes longer than decoding.
        return self.tokenizer.decode(np.asarray(ids, dtype=np.int64), skip_special_tokens=True)

    def piece(self, token: int) -> str:
        """One token as text, special tokens included."""
        return self.tokenizer.decode([token])

    def save(self, folder: Path) -> None:
        """An ordinary Hugging Face folder, with the adapters merged."""
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
        """The trained parameters, by name."""
        return {name: p for name, p in self.model.named_parameters() if p.requires_grad}

    @torch.no_grad()
    def take(self, params: dict[str, Tensor]) -> None:
        """Use these as its trained parameters; its own are not copied."""
        if params is self._own:
            return
        own = self.trained() if params else {}
        for name, tensor in params.items():
            if own[name].data_ptr() != tensor.data_ptr():
                own[name].copy_(tensor)
        if all(own[name] is tensor for name, tensor in params.items()):
            self._own = params
