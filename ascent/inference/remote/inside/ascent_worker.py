"""Two weight-transfer backends that run inside vLLM: from a file and by a broadcast.

vLLM imports this module by name (`--worker-extension-cls ascent_worker.Worker`) in its own environment, so it imports
nothing of Ascent. `--weight-transfer-config '{"backend": "file"}'` (or "collective") selects one of them.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from vllm.distributed.weight_transfer.base import WeightTransferEngine, WeightTransferInitInfo, WeightTransferUpdateInfo
from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

LOOPBACK = "127.0.0.1"


class Transfer(WeightTransferEngine):
    """Loads a whole checkpoint in place. Records the received tensors and the parameters that were not loaded."""

    received: dict[str, list[Any]]
    """Tensors of the latest update by name: shape and checksum."""
    untouched: list[str]
    """Parameters of the model that the latest update has not loaded."""

    def init_transfer_engine(self, init_info: Any) -> None:
        self.received, self.untouched = {}, []

    def start_weight_update(self) -> None:
        names = [name for name, _ in self.model.named_parameters()]
        self.received, self.untouched = {}, [name for name in names if not (self._tied and "lm_head" in name)]
        initialize_layerwise_reload(self.model)

    def load_tensors(self, tensors: dict[str, torch.Tensor]) -> None:
        self.received |= {name: [list(tensor.shape), checksum(tensor)] for name, tensor in tensors.items()}
        loaded = self.model.load_weights(iter(tensors.items())) or set()
        self.untouched = [name for name in self.untouched if name not in loaded]

    def finish_weight_update(self) -> None:
        finalize_layerwise_reload(self.model, self.model_config)
        if self._tied:  # reloading unties the two tensors
            for head, embedding in self._heads():
                head.weight = embedding.weight
                head.quant_method.process_weights_after_loading(head)

    def shutdown(self) -> None:
        pass

    @property
    def _tied(self) -> bool:
        config = self.model_config.hf_config
        return bool(getattr(config.get_text_config(), "tie_word_embeddings", False))

    def _heads(self) -> Iterator[tuple[Any, Any]]:
        """Yield the head and the embedding of the model, if these are two modules."""
        modules = [module for module in self.model.modules() if isinstance(module, VocabParallelEmbedding)]
        embedding = next(module for module in modules if not isinstance(module, ParallelLMHead))
        return ((head, embedding) for head in modules if isinstance(head, ParallelLMHead))


@dataclass
class FileInit(WeightTransferInitInfo):
    """The file transfer needs no initialization."""


@dataclass
class FileUpdate(WeightTransferUpdateInfo):
    path: str = ""
    """A safetensors file with every parameter by its checkpoint name."""


class FileTransfer(Transfer):
    init_info_cls, update_info_cls = FileInit, FileUpdate

    def receive_weights(self, update_info: FileUpdate) -> None:
        self.load_tensors(load_file(update_info.path))


@dataclass
class CollectiveInit(WeightTransferInitInfo):
    """The TCP store of the trainer on loopback. The trainer is rank 0; the workers are the other ranks."""

    port: int = 0
    size: int = 0
    backend: str = "nccl"
    seconds: float = 600.0


@dataclass
class CollectiveUpdate(WeightTransferUpdateInfo):
    """The tensors that are broadcast, in order."""

    names: list[str] = field(default_factory=list)
    dtypes: list[str] = field(default_factory=list)
    shapes: list[list[int]] = field(default_factory=list)


class CollectiveTransfer(Transfer):
    init_info_cls, update_info_cls = CollectiveInit, CollectiveUpdate
    group: Any = None

    def init_transfer_engine(self, init_info: CollectiveInit) -> None:
        super().init_transfer_engine(init_info)
        parallel, timeout = self.parallel_config, timedelta(seconds=init_info.seconds)
        rank = 1 + parallel.data_parallel_index * parallel.world_size + parallel.rank
        store = dist.TCPStore(LOOPBACK, init_info.port, init_info.size, False, timeout)
        if init_info.backend == "nccl":
            options = dist.ProcessGroupNCCL.Options()
            options._timeout = timeout
            self.group = dist.ProcessGroupNCCL(store, rank, init_info.size, options)
        else:
            gloo: Any = dist.ProcessGroupGloo
            gloo_options = gloo._Options()
            gloo_options._timeout, gloo_options._devices = timeout, [gloo.create_device(hostname=LOOPBACK)]
            self.group = gloo(store, rank, init_info.size, gloo_options)

    def receive_weights(self, update_info: CollectiveUpdate) -> None:
        options = dist.BroadcastOptions()
        options.rootRank, options.rootTensor = 0, 0
        for name, dtype, shape in zip(update_info.names, update_info.dtypes, update_info.shapes, strict=True):
            tensor = torch.empty(shape, dtype=getattr(torch, dtype), device=self.device)
            self.group.broadcast([tensor], options).wait()
            self.load_tensors({name: tensor})


def checksum(tensor: torch.Tensor) -> int:
    """Return the CRC-32 of the bytes of a tensor."""
    return zlib.crc32(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())  # type: ignore[arg-type]


for name, transfer in (("file", FileTransfer), ("collective", CollectiveTransfer)):
    if name not in WeightTransferEngineFactory._registry:
        WeightTransferEngineFactory.register_engine(name, transfer)


class Worker:
    """Methods added to every vLLM worker and called over HTTP (`/collective_rpc`)."""

    weight_transfer_engine: Any

    def ascent_received(self) -> dict[str, Any]:
        """Return the tensors of the latest update (shape and checksum by name) and the parameters not loaded."""
        engine = self.weight_transfer_engine
        return {"tensors": engine.received, "untouched": engine.untouched}
