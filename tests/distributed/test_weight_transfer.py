"""Weights from rank 0 to replicas by gloo: who dies, hangs or is not reached holds up nobody, and nobody for long."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from language import model_of, sampler_of
from processes import Forked
from torch import Tensor

from ascent.distributed import replica_dispatch, weight_transfer
from ascent.distributed.replica import Replica
from ascent.distributed.replica_errors import ReplicaLostError, ReplicaUnreachableError
from ascent.distributed.weight_transfer import TransferOffer, WeightSender, WeightSnapshot, receive_weights
from tests.distributed.test_replicas import (
    FIVE_PROMPTS,
    OPEN_ENGINES,
    InProcessReplicas,
    local_rollouts,
    same_rollouts,
    start_engine,
)

CPU, HERE = torch.device("cpu"), "127.0.0.1"
SECONDS = 60.0


@pytest.fixture(autouse=True)
def short_delays(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(weight_transfer, "BUCKET_NUMEL", 1000)
    monkeypatch.setattr(replica_dispatch, "RETRY_DELAY", 0.001)
    yield
    while OPEN_ENGINES:
        OPEN_ENGINES.pop().close()


def mixed_params() -> dict[str, Tensor]:
    """Return parameters of two dtypes and many shapes; one is larger than a bucket."""
    generator = torch.Generator().manual_seed(0)
    shapes = {"scalar": (), "none": (0, 3), "large": (40, 50), "a": (30, 20), "b": (500,), "c": (7, 3, 2)}
    params = {name: torch.randn(shape, generator=generator) for name, shape in shapes.items()}
    return params | {"half": torch.randn(33, 31, generator=generator).bfloat16(), "one": torch.ones(1).bfloat16()}


def receive_all(offer: TransferOffer) -> dict[str, Tensor]:
    return {name: tensor for part in receive_weights(offer, CPU, HERE) for name, tensor in part.items()}


def same_params(one: dict[str, Tensor], two: dict[str, Tensor]) -> bool:
    return one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)


def test_parameters_arrive_as_of_the_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    params = mixed_params()
    expected = {name: p.clone() for name, p in params.items()}
    weights, sender = WeightSnapshot(params), WeightSender(HERE, CPU, SECONDS)
    for p in params.values():
        p.zero_()
    assert len(weights.buckets) > 4 and same_params(weights.params(), expected)
    with ThreadPoolExecutor(3) as pool:  # three at once, each with its own copy
        offers = [sender.offer(weights) for _ in range(3)]
        calls = [pool.submit(receive_all, offer) for offer in offers]
        for offer, call in zip(offers, calls, strict=True):
            sender.start(offer, weights, call)
        assert all(same_params(call.result(SECONDS), expected) for call in calls)


def test_store_listens_on_one_address_and_replicas_on_the_same_gpu_use_gloo(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sender, chosen = WeightSender(HERE, CPU, SECONDS), list[str]()
    listening = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    ours = [line[1] for line in listening if int(line[1].partition(":")[2], 16) == sender.port and line[3] == "0A"]
    assert ours == [f"0100007F:{sender.port:04X}"]

    def refuse(store: Any, rank: int, size: int, backend: str, *_: Any) -> Any:
        chosen.append(backend)
        raise RuntimeError("Duplicate GPU detected\nand more")

    monkeypatch.setattr(weight_transfer, "make_process_group", refuse)
    monkeypatch.setattr(weight_transfer, "gpu_uuid", lambda device: "GPU-a" if device.type == "cuda" else "")
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    offer = sender.offer(WeightSnapshot(mixed_params()))
    for device, gpu in (("cuda", "GPU-b"), ("cuda", "GPU-a"), ("cuda", ""), ("cpu", "GPU-b")):
        with pytest.raises(ReplicaUnreachableError, match=r"weights did not arrive by .*: Duplicate GPU detected$"):
            next(receive_weights(offer._replace(gpu=gpu), torch.device(device), HERE))
    assert chosen == ["nccl", "gloo", "gloo", "gloo"]


# ---- failures


def receive_then_signal(offer: TransferOffer, number: int) -> None:
    parts = receive_weights(offer, CPU, HERE)
    next(parts), next(parts)
    os.kill(os.getpid(), number)
    list(parts)


@pytest.mark.slow
@pytest.mark.parametrize(("number", "deadline"), [(signal.SIGKILL, SECONDS), (signal.SIGSTOP, 0.5)])
def test_replica_that_dies_or_hangs_during_a_transfer_does_not_block_others(
    tmp_path: Path, number: int, deadline: float
) -> None:
    weights = WeightSnapshot({str(i): torch.randn(400_000) for i in range(20)})
    sender, never = WeightSender(HERE, CPU, deadline), Future[Any]()
    offer = sender.offer(weights)
    forked = Forked(lambda: receive_then_signal(offer, number), tmp_path)
    sending = sender.start(offer, weights, never)
    with ThreadPoolExecutor(1) as pool:
        other = sender.offer(weights)
        call = pool.submit(receive_all, other)
        sender.start(other, weights, call)
        assert same_params(call.result(SECONDS), weights.params()), "another replica gets its weights meanwhile"
    sending.join(SECONDS)
    assert not sending.is_alive(), "it ends by itself"
    if number == signal.SIGSTOP:
        forked.kill()
    assert forked.wait() == -signal.SIGKILL


def test_replica_gets_an_error_if_rank_0_ends_or_never_connects(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, sender = WeightSnapshot(mixed_params()), WeightSender(HERE, CPU, SECONDS)
    truncated = WeightSnapshot(mixed_params())
    truncated.flat = truncated.flat[:2]  # rank 0 sends two buckets and closes its end of the group
    offer = sender.offer(weights)
    with ThreadPoolExecutor(1) as pool:
        call = pool.submit(receive_all, offer)
        sender.start(offer, truncated, call)
        with pytest.raises(ReplicaUnreachableError, match=r"did not arrive by gloo: .*Connection"):
            call.result(SECONDS)
    monkeypatch.setattr(weight_transfer, "JOIN_TIMEOUT", 0.2)
    with pytest.raises(ReplicaUnreachableError, match="did not arrive by gloo"):
        receive_all(sender.offer(weights))
    with pytest.raises(ReplicaUnreachableError, match="did not arrive by gloo"):
        receive_all(sender.offer(weights)._replace(port=1))


def test_rank_0_does_not_wait_for_a_finished_call() -> None:
    weights, sender, call = WeightSnapshot(mixed_params()), WeightSender(HERE, CPU, SECONDS), Future[Any]()
    sending = sender.start(sender.offer(weights), weights, call)
    assert sending.is_alive()
    call.set_exception(ReplicaLostError("killed"))
    sending.join(SECONDS)
    assert not sending.is_alive()


# ---- whole loads


class WeightReceivingReplicas(InProcessReplicas):
    """Replicas in this process, each with a thread, to which weights are sent. `unreachable`: replicas that are not."""

    def __init__(self, count: int, unreachable: tuple[str, ...] = ()):
        super().__init__(count)
        self.sender, self.unreachable, self.transports = (
            WeightSender(HERE, CPU, SECONDS),
            unreachable,
            list[tuple[str, str]](),
        )
        self.pools = {name: ThreadPoolExecutor(1) for name in self.replica_names}

    def put(self, params: dict[str, Tensor]) -> WeightSnapshot:
        return WeightSnapshot(params)

    def load(self, name: str, weights: WeightSnapshot, version: int, config: dict[str, Any]) -> Future[Any]:
        if not self.sender.is_reachable(name):
            self.transports.append((name, "store"))
            return self.call(name, "load", weights.params(), version, config)
        self.transports.append((name, "gloo"))
        offer = self.sender.offer(weights)
        call = self.pools[name].submit(self.reach, name, offer, version, config)
        self.sender.start(offer, weights, call)
        call.add_done_callback(lambda done: self.sender.record_result(name, done.exception()))
        return call

    def reach(self, name: str, *args: Any) -> Any:
        if name in self.unreachable:
            raise ReplicaUnreachableError("weights did not arrive by gloo: no route to host")
        return self.do(name, "receive", "", *args)


@pytest.mark.long
def test_replicas_match_the_local_engine_and_unreachable_ones_use_the_object_store(
    capsys: pytest.CaptureFixture[str],
) -> None:
    replica_set = WeightReceivingReplicas(2, unreachable=("sampler-1",))
    engine = start_engine(replica_set)
    assert same_rollouts(engine.generate(FIVE_PROMPTS, 3, seed=7), local_rollouts())
    for version in (2, 3):
        engine.load(engine.local_engine.lm.trained(), version)
        for _ in range(200 if version == 2 else 0):
            assert same_rollouts(engine.generate(FIVE_PROMPTS, 3, seed=7), local_rollouts())
            if ("sampler-1", "store") in replica_set.transports:
                break
        assert same_rollouts(engine.generate(FIVE_PROMPTS, 3, seed=7), local_rollouts())
    used = [way for name, way in replica_set.transports if name == "sampler-1"]
    assert used[:3] == ["gloo", "gloo", "store"] and "gloo" not in used[2:]
    assert {way for name, way in replica_set.transports if name == "sampler-0"} == {"gloo"}
    stderr = capsys.readouterr().err
    assert (
        stderr.count("weights go to sampler-1 through Ray's object store (weights did not arrive by gloo: no route")
        == 1
    )


def test_replica_with_partial_weights_refuses_requests_until_reloaded() -> None:
    weights, sender = WeightSnapshot(model_of("Llama").trained()), WeightSender(HERE, CPU, SECONDS)
    engine = sampler_of(model_of("Llama", seed=9), limit=6)
    replica = Replica(lambda _: (engine, engine))

    def load(sent: WeightSnapshot, version: int) -> None:
        offer, call = sender.offer(weights), Future[Any]()
        sending = sender.start(offer, sent, call)
        try:
            replica.receive(offer, version, {})
        finally:
            sending.join(SECONDS)

    load(weights, 1)
    truncated = WeightSnapshot(model_of("Llama").trained())
    truncated.flat = truncated.flat[:2]
    with pytest.raises(ReplicaUnreachableError):
        load(truncated, 2)
    with pytest.raises(ReplicaLostError, match="version -1"):
        replica.generate(1, FIVE_PROMPTS, 3, None, None)
    load(weights, 3)
    assert replica.generate(3, FIVE_PROMPTS, 3, None, None).response.shape[:2] == (5, 3)
    assert threading.active_count() < 50
