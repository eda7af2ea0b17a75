"""Weights by a broadcast: vLLM's life cycle of a transfer, over gloo. Over NCCL it is untested."""

from __future__ import annotations

import asyncio
import threading
from contextlib import ExitStack
from pathlib import Path

import pytest
import torch

from ascent.core.errors import ConfigError, RunError
from ascent.inference.remote.engine_adapter import ServerConfig
from ascent.inference.remote.nccl_transfer import NcclVLLM, WeightGroup, run_together
from ascent.inference.remote.server_client import ServerLostError
from ascent.inference.remote.weight_files import prepare_weights
from ascent.settings import configure
from tests.inference.remote.test_remote_engine import EngineSetup, max_logprob_error, stack
from tests.stand_in import VllmStandIn

__all__ = ["stack"]  # a fixture
NCCL = {"engine_transport": "nccl"}


@pytest.mark.long
@pytest.mark.parametrize("tied", [False, True])
def test_weights_arrive_by_broadcast_over_a_persistent_group(stack: ExitStack, tied: bool) -> None:
    setup = EngineSetup(stack, servers=2, policy=NCCL, tie_word_embeddings=tied)
    for version in (0, 1):
        setup.load(version)
        rollouts = setup.generate()
        assert max_logprob_error(setup.lm, rollouts) < 1e-5 and (rollouts.version == version).all()
        setup.perturb_weights()
    for server in setup.servers:
        calls = [call for call in server.calls if "weight" in call or call in ("/pause", "/resume")]
        assert calls.count("/init_weight_transfer_engine") == 1
        cycle = ["/pause", "/start_weight_update", "/update_weights", "/finish_weight_update", "/resume"]
        assert calls[1:] == cycle * 2


def test_broadcast_preserves_dtype_and_layout() -> None:
    tensors = {
        "half": torch.randn(3, 5).bfloat16(),
        "turned": torch.randn(4, 3).T,
        "one": torch.tensor(2.5, dtype=torch.float64),
        "whole": torch.arange(5),
    }
    with prepare_weights(tensors, as_file=False) as weights:
        held = weights.tensors or {}
        group, server = WeightGroup(2, torch.device("cpu"), 60.0), VllmStandIn(torch.nn.Linear(1, 1))
        joined = threading.Thread(target=group.join)
        joined.start()
        server.join({"port": group.port, "size": 2, "seconds": 60.0})
        joined.join()
        sent = threading.Thread(target=group.broadcast, args=[held])
        sent.start()
        shapes, dtypes = ([[*t.shape] for t in held.values()], [str(t.dtype)[6:] for t in held.values()])
        received = server.receive({"names": list(held), "shapes": shapes, "dtypes": dtypes})
        sent.join()
    assert all(torch.equal(received[name], tensor) for name, tensor in tensors.items())
    assert weights.checksums["turned"][0] == [3, 4]
    group.abort()


@pytest.mark.long
@pytest.mark.parametrize("after", [0, 3])
def test_interrupted_broadcast_creates_a_new_group(stack: ExitStack, after: int) -> None:
    setup = EngineSetup(stack, policy=NCCL)
    setup.load(0)
    setup.server.cut_off_after = after  # type: ignore[attr-defined]
    setup.perturb_weights()
    setup.load(1)
    assert max_logprob_error(setup.lm, setup.generate()) < 1e-5
    assert setup.server.calls.count("/init_weight_transfer_engine") == 2


@pytest.mark.long
def test_server_that_never_joins_is_an_error_within_the_deadline(stack: ExitStack) -> None:
    setup = EngineSetup(stack, policy=NCCL, deadline=0.5)
    setup.server.join = lambda _: None  # type: ignore[attr-defined]
    with pytest.raises(RunError, match=r"the engine was lost 4 times in a row|the engine is gone"):
        setup.load(0)


def test_first_failure_of_request_and_broadcast_is_raised() -> None:
    ended = threading.Event()

    async def refused() -> None:
        raise ServerLostError("500")

    async def never() -> None:
        await asyncio.sleep(600)

    with pytest.raises(ServerLostError, match="500"):
        asyncio.run(run_together(refused(), lambda: ended.wait(60) and None))
    ended.set()
    with pytest.raises(ServerLostError, match=r"the broadcast of weights has failed: ZeroDivisionError"):
        asyncio.run(run_together(never(), lambda: print(1 / 0)))


def test_store_is_on_loopback_and_gpu_group_uses_nccl() -> None:
    group = WeightGroup(2, torch.device("cuda", 0), 9.0)
    assert group.backend == "nccl" and WeightGroup(2, torch.device("cpu"), 9.0).backend == "gloo"
    listening = [line.split() for line in open("/proc/net/tcp")][1:]  # noqa: SIM115
    ours = [line[1] for line in listening if int(line[1].partition(":")[2], 16) == group.port and line[3] == "0A"]
    assert ours == [f"0100007F:{group.port:04X}"]
    assert group.timeout.total_seconds() > 9.0, "the deadline of the request precedes NCCL's timeout"


def test_broadcast_requires_a_server_that_ascent_starts() -> None:
    started = NcclVLLM(torch.device("cpu"), 9.0).server_arguments(
        ServerConfig({}, "float32", 64, 8, False), Path("m"), 1
    )
    assert started[-2:] == ["--weight-transfer-config", '{"backend": "collective"}']
    for more in ({"engine": "sglang"}, {"engine": "vllm", "engine.key_env": "A"}):
        settings = {"model": "tiny", "engine.url": "http://127.0.0.1:1", "engine.transport": "nccl"} | more
        with pytest.raises(ConfigError, match="nccl is for --engine vllm on this machine"):
            configure("countdown", settings)
