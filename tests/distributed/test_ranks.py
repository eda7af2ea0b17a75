"""Several ranks give the numbers of one process. `python -m benchmarks.ranks` measures every row, and kills ranks."""

from __future__ import annotations

import errno
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file

import ascent
from ascent.build.assemble import assemble
from ascent.build.backends import backend_of
from ascent.build.language_reward_model import add_head, response_scores
from ascent.build.launch import check_same_settings
from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError
from ascent.core.types import Batch, Terms
from ascent.core.update import Adam
from ascent.distributed.heartbeat import Heartbeat
from ascent.distributed.rank_group import RankGroup
from ascent.distributed.ranks import SINGLE_PROCESS, Ranks, assign_prompts, training_world_size
from ascent.models.causal_lm import set_mixed_precision
from ascent.models.fused_layers import ElementwiseReference, fuse_layers, fused_rope
from ascent.models.packed_attention import packed_attention_enabled
from ascent.rollout.rank_leader import RankZeroLearner
from ascent.runs.display.terminal import Display
from ascent.settings import config_from, configure
from ascent.tasks.base import TaskWrapper
from ascent.training import model_sharding
from ascent.training.fsdp import ShardedLearner
from ascent.training.language_learner import LanguageLearner
from ascent.training.packing import ForwardModule
from ascent.training.sharded_checkpoint import ShardWriter
from tests.language import batch_of, model_of

ROWS = ["grpo", "ppo", "trpo", "gspo", "dpo", "process-reward"]
HARD = ["tied embeddings", "adapters (LoRA)", "a rank without work", "unequal passes", "checkpointing"]
HARD += ["a critic on the policy", "adapters and a critic"]
WHOLE = ["exact KL in the loss", "padded (GPT-2)", "five steps", "checkpoints", "of rank 0 alone"]
HOW = ("replicated", "sharded")
REFUSED = ["trpo"]
"""In shards."""


# ---- one group of processes for all cases


@pytest.mark.smoke
def test_three_ranks_match_one_process() -> None:
    """With every parameter on each of them, and in shards where that is not refused."""
    from benchmarks.ranks import measure

    every = [*ROWS, *HARD, *WHOLE]
    gaps = measure(every, sharded=(False, True), sizes=(3,))
    replicated, sharded = ({case: gaps[f"{case} | 3 ranks | {how}"] for case in every} for how in HOW)
    assert {case for case, gap in sharded.items() if gap is None} == set(REFUSED)
    found = replicated | {f"{case}, sharded": gap for case, gap in sharded.items() if gap is not None}
    assert [(case, gap) for case, gap in found.items() if not (isinstance(gap, float) and gap <= 1e-12)] == []


# ---- torchrun


@pytest.fixture
def launch() -> Iterator[Callable[..., Any]]:
    """Starts a command by torchrun; whatever happens, it is ended."""
    from benchmarks.killed_ranks import Launched

    started = []

    def start(ranks: int, *words: str) -> Launched:
        started.append(Launched(ranks, *words))
        return started[-1]

    yield start
    for one in started:
        if one.process.poll() is None:
            one.process.terminate()
            one.end()


@pytest.mark.smoke
def test_killed_rank_ends_the_run_and_one_process_resumes_it(launch: Callable[..., Any], tmp_path: Path) -> None:
    """Meanwhile a second launch of the same run is refused. In the end the numbers are those of one process."""
    from benchmarks.killed_ranks import lines_of

    folder, flags = tmp_path / "run", ["--steps", "150", "--checkpoint-every", "3", "--eval-every", "50"]
    run = launch(2, "train", "lecture", *flags, "--out", str(folder))
    run.reach(folder, 4)
    pids, second = run.ranks(), launch(2, "resume", str(folder))
    status, said, _ = second.end()
    assert status != 0 and "writes this run: wait" in said
    os.kill(pids[1], signal.SIGKILL)
    status, said, _ = run.end()
    assert status != 0 and "rank 1 of 2, in the phase" in said
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids.values())
    failed = ascent.load(folder)
    assert failed.status == "failed" and "rank 1 of 2" in failed.info["reason"]
    resumed = ascent.api.resume(folder, display=Display())
    assert resumed.status == "finished"
    assert [line["step"] for line in resumed.metrics] == list(range(150))
    whole = ascent.train("lecture", out=tmp_path / "whole", show=False, steps=150, checkpoint_every=3, eval_every=50)
    for one, two in zip(lines_of(whole.folder)[:12], lines_of(folder)[:12], strict=True):
        assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.smoke
def test_interrupt_saves_once_and_ranks_resume(launch: Callable[..., Any], tmp_path: Path) -> None:
    from benchmarks.killed_ranks import lines_of

    folder, flags = tmp_path / "run", ["--steps", "40", "--checkpoint-every", "100", "--eval-every", "100"]
    run = launch(2, "train", "lecture", *flags, "--out", str(folder))
    run.reach(folder, 2)
    run.process.send_signal(signal.SIGINT)
    run.end()
    saved = list((folder / "checkpoints").iterdir())
    assert ascent.load(folder).status == "interrupted" and len(saved) == 1
    status, said, _ = launch(2, "resume", str(folder)).end()
    assert status == 0, said
    whole = ascent.train("lecture", out=tmp_path / "whole", show=False, steps=40, checkpoint_every=100, eval_every=100)
    assert len(lines_of(folder)) == 40
    for one, two in zip(lines_of(whole.folder)[:12], lines_of(folder)[:12], strict=True):
        assert two == pytest.approx(one, abs=1e-4)


@pytest.mark.smoke
def test_sharded_checkpoint_is_exported_by_one_process_and_resumed_by_three(
    launch: Callable[..., Any], tmp_path: Path
) -> None:
    """Two ranks are interrupted. In the end the numbers are those of one process."""
    from benchmarks.killed_ranks import lines_of, trainings

    words, folder = trainings(tmp_path), tmp_path / "run"
    run = launch(2, *words["llama, in shards and parts"], "--out", str(folder))
    run.reach(folder, 8)
    run.process.send_signal(signal.SIGINT)
    run.end()
    (newest,) = [max((folder / "checkpoints").iterdir())]
    parts = sorted(path.name for path in newest.glob("shard-*.safetensors"))
    assert len(parts) == 2 and ascent.load(folder).status == "interrupted"
    exported = ascent.export(folder, tmp_path / "exported")
    assert ascent.sample(model=exported, prompts="1+1?")
    status, said, _ = launch(3, "resume", str(folder)).end()
    assert status == 0, said
    status, said, _ = launch(1, *words["llama"], "--out", str(tmp_path / "whole")).end()
    assert status == 0, said
    found, whole = lines_of(folder), lines_of(tmp_path / "whole")
    assert len(found) == len(whole) == 24
    for one, two in zip(whole[:12], found[:12], strict=True):
        assert two == pytest.approx(one, abs=1e-3)


# ---- one rank


@pytest.fixture
def one_rank() -> Iterator[RankGroup]:
    """A group of one, in this process."""
    group = RankGroup(60.0, "cpu", (dist.TCPStore("127.0.0.1", 0, 1, True), 0, 1))
    yield group
    group.heartbeat.close()
    dist.destroy_process_group()


GRPO = ALGORITHMS["grpo"]


def both(group: RankGroup, dtype: torch.dtype, prepare: Callable[[Any], Any] = lambda lm: lm) -> tuple[Any, Any, Batch]:
    """A plain learner, the same one in shards, and a batch for them."""
    algorithm = replace(GRPO, update=Adam(lr=1e-2))
    memory, settings = (0, False), (algorithm.update, True, algorithm.outputs)
    one, two = (prepare(model_of(dtype=dtype)) for _ in range(2))
    batch, state = algorithm.compute_advantages(batch_of(model_of()), algorithm.initial_state())
    batch = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    return LanguageLearner(one, *settings, *memory), ShardedLearner(two, *settings, *memory, group), batch


def written(folder: Path) -> set[str]:
    return {path.name for path in folder.glob("shard-*.safetensors")}


def test_rank_0_returns_its_shard_write_and_other_ranks_start_theirs(one_rank: RankGroup, tmp_path: Path) -> None:
    class Second(Ranks):
        rank = 1

    groups = {"params": {"a": torch.arange(3.0)}, "optimizer": {"b": torch.ones(2)}}
    first, second = ShardWriter(one_rank), ShardWriter(Second())
    parts = first.stage(groups, tmp_path / "first", "bfloat16")
    assert parts is not None and parts.narrow == "bfloat16"
    groups["params"]["a"] += 1.0
    assert not written(tmp_path / "first"), "nothing is written before it is asked for"
    assert parts.write().keys() == written(tmp_path / "first") != set()
    (path,) = (tmp_path / "first").glob("shard-*.safetensors")
    assert {name: value.tolist() for name, value in load_file(path).items()} == {
        "params/a": [0.0, 1.0, 2.0],
        "optimizer/b": [1.0, 1.0],
    }
    assert second.stage(groups, tmp_path / "second", "bfloat16") is None
    second.saver.wait()
    assert written(tmp_path / "second")


def test_shard_write_failure_is_an_os_error(one_rank: RankGroup, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    writer = ShardWriter(one_rank)
    parts = writer.stage({"params": {"a": torch.ones(1)}}, tmp_path / "file" / "below", "float32")
    assert parts is not None
    with pytest.raises(OSError, match="Not a directory") as error:
        parts.write()
    assert error.value.errno == errno.ENOTDIR
    with pytest.raises(OSError, match="nobody can write this") as error:
        writer._write({"params/a": Unwritable()}, tmp_path / "aside")
    assert error.value.errno == errno.EIO


class Unwritable:
    """Something that is not a tensor and cannot be pickled."""

    def __reduce__(self) -> Any:
        raise ValueError("nobody can write this")


@pytest.mark.long
def test_shards_resume_from_bfloat16_state(one_rank: RankGroup) -> None:
    """Parameters and moments are the same numbers, in float32."""
    plain, sharded, batch = both(one_rank, torch.bfloat16)
    small = LanguageLearner(model_of(dtype=torch.bfloat16), Adam(lr=1e-2), True, GRPO.outputs, rounding=3)
    small.step(batch, GRPO.objective, Adam(lr=1e-2))
    for learner in (plain, sharded):
        learner.restore(small.state())
    state, want = sharded.state(), plain.state()
    for group in ("wide", "optimizer"):
        assert state[group].keys() == want[group].keys()
        assert all(torch.equal(value, want[group][name]) for name, value in state[group].items())


@pytest.mark.long
def test_other_ranks_shard_bfloat16_state(one_rank: RankGroup) -> None:
    """Rank 0 sends what it has read; each of the others keeps its part of every tensor, and only then restores it."""
    _, sharded, batch = both(one_rank, torch.bfloat16)
    small = LanguageLearner(model_of(dtype=torch.bfloat16), Adam(lr=1e-2), True, GRPO.outputs, rounding=3)
    small.step(batch, GRPO.objective, Adam(lr=1e-2))
    sent: dict[str, Any] = {}
    rank_0 = SimpleNamespace(failing_together=nullcontext, send_command=lambda *_: None, broadcast_groups=sent.update)
    RankZeroLearner(SimpleNamespace(params=sharded.params, restore=lambda _: None), rank_0).restore(small.state())
    sharded.restore(
        {group: {name: sharded.local_shard(group, name, t) for name, t in own.items()} for group, own in sent.items()}
    )
    masters = dict(zip(small.params(), small.compact.masters(), strict=True))
    assert all(torch.equal(t, masters[name]) for name, t in sharded.state()["wide"].items())


@pytest.mark.long
def test_reward_model_with_adapters_moves_between_shards_and_one_process(one_rank: RankGroup) -> None:
    """In shards every trained parameter is in float32; in one process the head of a bfloat16 model has a copy."""
    from benchmarks.ranks import adapt
    from benchmarks.ranks import batch_of as pairs_of

    row, update = ALGORITHMS["reward-model"], Adam(lr=1e-2)

    def made() -> Any:
        lm = model_of(dtype=torch.bfloat16)
        adapt(lm.model, 4)
        for name, p in lm.model.named_parameters():
            p.data = p.data.float() if "lora" in name else p.data
        return add_head(lm)

    def learners() -> tuple[LanguageLearner, ShardedLearner]:
        alone = LanguageLearner(made(), update, False, row.outputs)
        spread = ShardedLearner(made(), update, False, row.outputs, 0, False, one_rank)
        for learner in (alone, spread):
            learner.train_reward(partial(response_scores, learner.lm, forward=learner.forward_module))
        return alone, spread

    def exact(learner: LanguageLearner) -> dict[str, torch.Tensor]:
        state = learner.state()
        return {name: t.float().clone() for name, t in state.get("wide", state["params"]).items()}

    batch, state = row.compute_advantages(pairs_of(row, (5, 2, 7, 3)), row.initial_state())
    batch = batch.add(weight=row.weights(batch), **row.scalars(state, 0.0))
    batch = batch.add(**{key: getattr(batch, key).float() for key in ("logp_sampler", "reward", "advantage", "weight")})
    for trained, resumed in (learners(), learners()[::-1]):
        first = exact(trained)
        for _ in range(3):
            trained.step(batch, row.objective, update)
        saved, want = trained.state(), exact(trained)
        saved = {group: {name: t.clone() for name, t in own.items()} for group, own in saved.items()}
        resumed.restore(saved)
        assert all(torch.equal(t, want[name]) for name, t in exact(resumed).items())
        resumed.step(batch, row.objective, Adam(lr=1e-6))
        for name, t in exact(resumed).items():
            assert float((t - want[name]).abs().max()) < 1e-5, f"{name} went back"
        assert any(float((want[name] - t).abs().max()) > 1e-2 for name, t in first.items()), "something was learned"


@pytest.mark.smoke
def test_sharded_learner_on_one_rank_matches_plain_learner(one_rank: RankGroup) -> None:
    one, two, batch = both(one_rank, torch.float64)
    assert two.placement.startswith("each trains a part")
    for learner in (one, two):
        learner.step(batch, GRPO.objective, one_update)
        learner.refresh_params()
    found, wanted = two.state(), one.state()
    assert found.keys() == wanted.keys()
    for group in wanted:
        assert found[group].keys() == wanted[group].keys()
        assert all(torch.equal(found[group][name], wanted[group][name]) for name in wanted[group]), group
    assert all(torch.equal(p, one.params()[name]) for name, p in two.params().items()), "the sampler's copy"


def one_update(learner: Any, mini: Batch, objective: Any) -> Any:
    return Adam(lr=1e-2, max_norm=0.5)(learner, mini, objective)


@pytest.mark.smoke
@pytest.mark.parametrize("mixed", [False, True])
def test_shards_are_float32_while_layers_compute_in_bfloat16(one_rank: RankGroup, mixed: bool) -> None:
    """The step is that of the plain learner, which steps bfloat16 parameters through float32 copies."""

    def prepare(lm: Any) -> Any:
        set_mixed_precision(lm.model, mixed)
        return lm

    one, two, batch = both(one_rank, torch.bfloat16, prepare)
    seen = []
    two.lm.backbone.layers[0].mlp.register_forward_hook(
        lambda mlp, _, out: seen.append((mlp.up_proj.weight.dtype, out.dtype))
    )
    for learner in (one, two):
        learner.step(batch, GRPO.objective, one_update)
        learner.refresh_params()
    assert set(seen) == {(torch.bfloat16, torch.bfloat16)}
    assert {p.dtype for p in two.trainable()} == {p.grad.dtype for p in two.trainable()} == {torch.float32}
    found, wanted = two.state(), one.state()
    assert {t.dtype for t in found["wide"].values()} == {torch.float32} != {t.dtype for t in found["params"].values()}
    for group in ("wide", "params", "optimizer"):
        for name, value in wanted[group].items():
            torch.testing.assert_close(found[group][name], value, atol=1e-6, rtol=1e-6)


@pytest.mark.long
@pytest.mark.parametrize("mixed", [False, True])
def test_sharded_reference_matches_policy_before_the_first_step(one_rank: RankGroup, mixed: bool) -> None:
    """They are the same parameters, so a KL penalty is 0 to the bit."""

    def prepare(lm: Any) -> Any:
        set_mixed_precision(lm.model, mixed)
        return lm

    *learners, batch = both(one_rank, torch.bfloat16, prepare)
    for learner in learners:
        scores = learner.score(batch, frozenset({"logp_ref", "logp_old"}))
        assert torch.equal(scores["logp_ref"], scores["logp_old"]), learner.placement


@pytest.mark.smoke
def test_adapters_are_replicated_over_a_sharded_bfloat16_model(one_rank: RankGroup) -> None:
    from benchmarks.ranks import adapt

    def prepared(lm: Any) -> Any:
        adapt(lm.model, 4)
        for name, p in lm.model.named_parameters():
            p.data = p.data.float() if "lora" in name else p.data
        return lm

    one, two, batch = both(one_rank, torch.bfloat16, prepared)
    for learner in (one, two):
        learner.step(batch, GRPO.objective, one_update)
    assert not any(hasattr(p, "to_local") for p in two.trainable())
    below = [p for p in two.lm.model.parameters() if not p.requires_grad]
    two.forward_module.reshard()
    assert below and {p.dtype for p in below} == {torch.bfloat16}
    found, wanted = two.state()["params"], one.state()["params"]
    assert found.keys() == wanted.keys()
    for name in wanted:
        torch.testing.assert_close(found[name], wanted[name], atol=1e-6, rtol=1e-6)


def test_sharding_never_holds_two_whole_copies(one_rank: RankGroup, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layer by layer: what is made of a layer in float32 is cut before the next one is made."""
    real, whole = model_sharding.MetaDeviceCopy.fill, []

    def fill(self: Any, part: Any) -> None:
        real(self, part)
        plain = [p for p in part.parameters() if not hasattr(p, "to_local")]
        whole.append(sum(p.numel() for p in plain))

    monkeypatch.setattr(model_sharding.MetaDeviceCopy, "fill", fill)
    monkeypatch.setattr(model_sharding, "BUCKET_NUMEL", 1)
    lm = model_of(dtype=torch.bfloat16, num_hidden_layers=4)
    model_sharding.shard_model(lm, 1)
    every = sum(p.numel() for p in lm.model.parameters())
    assert len(whole) == 5 and sum(whole) == every and max(whole) < every / 3


@pytest.mark.smoke
def test_sharded_layers_use_fused_kernels(one_rank: RankGroup) -> None:
    """Parameters are in float32 there, and layers compute in bfloat16: what that type is fused by counts."""
    lm, seen = model_of(dtype=torch.bfloat16), []

    class Counted(ElementwiseReference):
        @staticmethod
        def rope(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, back: bool) -> torch.Tensor:
            seen.append(x.dtype)
            return ElementwiseReference.rope(x, cos, sin, back)

    assert fuse_layers(lm.model, ElementwiseReference) == 7, "two gated MLPs and five norms"
    forward, batch = model_sharding.shard_model(lm, 1), batch_of(model_of())
    copied = forward._lm[0].backbone.layers[0].mlp
    assert copied.forward.args[0] is copied, "its own parameters, and not those of the whole model"
    with torch.no_grad(), packed_attention_enabled(lm.model), fused_rope(lm.model, ElementwiseReference):
        wanted = ForwardModule(lm)(batch, lambda _, hidden: hidden)
    with torch.no_grad(), packed_attention_enabled(forward.model), fused_rope(forward.model, Counted):
        found = forward(batch, lambda _, hidden: hidden)
    assert set(seen) == {torch.bfloat16} and torch.equal(found, wanted)


def test_rank_0_computes_separate_evaluations_alone(one_rank: RankGroup) -> None:
    """It may keep what it is shown, which cannot be sent; in shards the others only go along."""
    one, two, batch = both(one_rank, torch.float64)
    shown: dict[str, list[torch.Tensor]] = {"one": [], "two": []}

    def keep(name: str) -> Any:
        def objective(micro: Batch, out: Any) -> Terms:
            shown[name].append(out.logp.detach())
            return Terms(torch.zeros(()), {})

        return objective

    one.evaluate_objective(batch, keep("one"))
    RankZeroLearner(two, one_rank).evaluate_objective(batch, keep("two"))
    assert two.ranks is one_rank and torch.equal(torch.cat(shown["one"]), torch.cat(shown["two"]))


def test_one_process_under_torchrun_can_shard(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = {"model": "any", "ranks.shard": "shard"}
    config = configure("reasoning-gym:chain_sum", settings)
    assert training_world_size("shard") == 0, "nobody launched this process"
    with pytest.raises(ConfigError, match="one process has nothing to share"):
        backend_of(config).check_ranks(config, 0)
    for name, value in {"TORCHELASTIC_RUN_ID": "x", "RANK": "0", "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    assert (training_world_size("shard"), training_world_size("replicate"), training_world_size("auto")) == (1, 1, 0)
    backend_of(config).check_ranks(config, 1)


# ---- who it was


@pytest.fixture
def pair() -> Iterator[tuple[Heartbeat, Heartbeat]]:
    """Two ranks in one process, each with its heartbeats."""
    store = dist.HashStore()
    both = Heartbeat(store, 0, 2, 1.0), Heartbeat(store, 1, 2, 1.0)
    yield both
    for one in both:
        one.close()


def until(found: Callable[[], Any]) -> Any:
    end = time.monotonic() + 60
    while not (value := found()):
        assert time.monotonic() < end
        time.sleep(0.01)
    return value


def test_silent_rank_is_reported_with_phase_and_step(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    first.is_ending = True  # it is asked below, and not interrupted
    second.phase, second.step = "update", 7
    until(lambda: first._beats.get(1, {}).get("step") == 7)
    first.is_ending = False
    first._interrupt = lambda *_: None  # type: ignore[method-assign]
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)
    second._stop.set()
    said = until(first.failure)
    assert said.startswith("rank 1 of 2, in the phase update of step 7: no heartbeat for 1 seconds")


def test_every_rank_reports_the_first_failure(pair: tuple[Heartbeat, Heartbeat]) -> None:
    first, second = pair
    first.is_ending = second.is_ending = True
    second.phase, second.step = "generate", 3
    error = second.explain(torch.OutOfMemoryError("too much"))
    assert "rank 1 of 2, in the phase generate of step 3: out of memory: lower --micro-batch" in str(error)
    assert str(first.explain(RuntimeError("[gloo] Connection closed by peer"))) == str(error)


# ---- shares


def test_shares_partition_prompts_and_balance_tokens() -> None:
    batch = batch_of(model_of())
    cost = (batch.prompt >= 0).sum(-1) + batch.present.sum((1, 2))
    for size in (1, 2, 3, 5):
        parts = assign_prompts(batch, size)
        assert torch.cat(parts).sort().values.tolist() == [0, 1, 2]
        loads = [int(cost[part].sum()) for part in parts]
        assert max(loads) - min(loads) <= int(cost.max())


def test_share_is_normalized_by_tokens_of_the_whole_batch() -> None:
    batch = batch_of(model_of())
    part = batch.sub_batch(assign_prompts(batch, 2)[1])
    assert part.tokens == batch.tokens > int(part.loss_mask.sum())


def test_single_process_ranks_are_no_ops() -> None:
    batch, numbers = batch_of(model_of()), [torch.ones(3)]
    SINGLE_PROCESS.all_reduce(numbers)
    assert SINGLE_PROCESS.shard(batch) is batch and torch.equal(numbers[0], torch.ones(3))
    assert (
        SINGLE_PROCESS.gather(5) == [5] and SINGLE_PROCESS.broadcast(6) == 6 and SINGLE_PROCESS.all_reduce_max(7) == 7
    )


class FirstOfTwo(Ranks):
    """A rank beside another one, whose numbers are known beforehand."""

    world_size = 2

    def __init__(self, others: list[Any], rank: int = 0):
        self.others, self.rank = others, rank

    def all_reduce(self, tensors: list[torch.Tensor]) -> None:
        for tensor, other in zip(tensors, self.others.pop(0), strict=True):
            tensor += other

    def gather(self, value: Any) -> list[Any]:
        return [] if self.rank else [value, *self.others]


def test_shards_are_gathered_in_batch_order() -> None:
    batch = batch_of(model_of())
    mine, others = assign_prompts(batch, 2)
    assert torch.cat([mine, others]).tolist() != [0, 1, 2]
    numbers = torch.tensor([10.0, 20.0, 30.0])
    assert torch.equal(FirstOfTwo([numbers[others]]).gather_shards(numbers[mine], batch), numbers)
    part = numbers[others]
    assert FirstOfTwo([], rank=1).gather_shards(part, batch) is part, "only rank 0 has all of them"
    assert SINGLE_PROCESS.gather_shards(numbers, batch) is numbers


def test_terms_are_reduced_by_name() -> None:
    def number(value: float, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.tensor(value, dtype=dtype, requires_grad=True)

    terms = Terms(number(1.0), {"a": number(2.0), "b": number(3.0, torch.float64)}, {"c": number(4.0)})
    total = FirstOfTwo([[torch.tensor([10.0, 20.0, 30.0, 40.0])]]).all_reduce_terms(terms)
    assert total.objective.item() == 11.0 and total.objective.dtype == torch.float32
    assert {name: value.item() for name, value in total.sums.items()} == {"a": 22.0, "b": 33.0}
    assert total.sums["b"].dtype == torch.float64
    assert {name: value.item() for name, value in total.means.items()} == {"c": 44.0}
    assert SINGLE_PROCESS.all_reduce_terms(terms) is terms


def test_gradients_are_reduced_where_any_rank_has_one() -> None:
    mine, theirs, nobodys = (torch.nn.Parameter(torch.zeros(2)) for _ in range(3))
    mine.grad = torch.tensor([1.0, 2.0])
    reached = torch.tensor([0.0, 1.0, 0.0])
    other = FirstOfTwo([[reached], [torch.zeros(2), torch.tensor([3.0, 4.0])]])
    other.all_reduce_gradients([mine, theirs, nobodys])
    assert mine.grad.tolist() == [1.0, 2.0]
    assert theirs.grad is not None and theirs.grad.tolist() == [3.0, 4.0]
    assert nobodys.grad is None


# ---- settings


def test_only_rank_0_loads_a_reward_model(tmp_path: Path) -> None:
    class Second(Ranks):
        rank, world_size = 1, 2

    (tmp_path / "config.json").write_text('{"loss": {"name": "bradley-terry"}}')  # as of a run
    (tmp_path / "checkpoints" / "step_000001").mkdir(parents=True)
    config = configure("sort", {"reward": ("positions", f"0.5*model:{tmp_path}")})
    assert isinstance(assemble(config, ranks=Second()).task, TaskWrapper)
    with pytest.raises(ConfigError, match=str(tmp_path)):
        assemble(config)


def test_rank_settings_are_one_group_in_config_json() -> None:
    config = configure("lecture", {"ranks.shard": "replicate", "ranks.deadline": 30})
    assert config.to_dict()["ranks"] == {"shard": "replicate", "deadline": 30.0, "gather": 32.0}
    assert config_from(config.to_dict()) == config
    older = {name: value for name, value in config.to_dict().items() if name != "ranks"}
    assert config_from(older).ranks.shard == "auto", "a run from before there were ranks"
    with pytest.raises(ConfigError, match="--ranks has no value of its own: set its fields"):
        configure("lecture", {"ranks": "torchrun"})


@pytest.mark.parametrize(
    ("task", "settings", "why"),
    [
        ("lecture", {"ranks.shard": "shard"}, "a small policy fits everywhere"),
        ("lecture", {"ahead": 1, "loss": "clipped"}, "would depend on the number of ranks"),
    ],
)
def test_unsupported_rank_settings_are_rejected_with_a_reason(task: str, settings: dict[str, Any], why: str) -> None:
    config = configure(task, settings)
    backend = backend_of(config)

    def check() -> None:
        backend.check(config)
        backend.check_ranks(config, 2)

    with pytest.raises(ConfigError, match=why):
        check()


def test_deadline_must_be_positive() -> None:
    with pytest.raises(ConfigError, match=r"--ranks\.deadline is 0"):
        configure("lecture", {"ranks.deadline": 0})


def test_ranks_with_different_settings_are_rejected_by_name() -> None:
    one = configure("lecture", {}).to_dict()
    other = configure("lecture", {"samples": 12}).to_dict()
    with pytest.raises(ConfigError, match=r"rank 1 was started with samples = 12, and rank 0 with 10"):
        check_same_settings(one, other, 1)
    check_same_settings(one, dict(one), 1)
