"""`ascent plan`: predictions computed by hand, model configs, and errors."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import transformers
from language import SHAPE

from ascent.cli.main import main
from ascent.core.errors import ConfigError
from ascent.settings import configure
from ascent.workflows.planning.cost_model import GpuCostModel, TokenCounts
from ascent.workflows.planning.gpus import GIB, GPUS, Cluster, FittedConstants, Gpu, bytes_per_second, gpu_named
from ascent.workflows.planning.model_shapes import ModelShape, read_shape
from ascent.workflows.planning.plan_text import plan_text
from ascent.workflows.planning.planner import Planner, ResponseLengths, forecast
from ascent.workflows.planning.schedule_simulation import SimulatedGpu, simulate

QWEN_7B = ModelShape(
    "qwen2", 28, 3584, 18_944, 28, 4, 128, 152_064, 6_525_621_760, 7_615_616_512, 2_000_000, 32_768, None
)
PLAIN = Gpu("plain", 10**12, bandwidth=1e9, rate=1e12, link=1e9)
"""A GPU whose seconds are easy to compute."""
SMALL = ModelShape("llama", 2, 8, 16, 2, 1, 4, 100, 1000, 1800, 100, None, None)
FITTED = FittedConstants(
    layer_seconds=0.5,
    matmul_factor=2.0,
    kv_read_factor=3.0,
    update_matmul_factor=1.0,
    update_attention_factor=1.0,
    activation_passes=1.0,
    launch_seconds=0.0,
    update_seconds=0.0,
)
ONE = GpuCostModel(SMALL, PLAIN, FITTED)


# ---- costs


def test_decode_step_by_hand() -> None:
    """Two layers of 0.5 s; 1,800 weights are 3,600 bytes; a token's cache is 4·2·1·4 = 32 bytes."""
    assert ONE.decode_seconds(1, 1e6) == pytest.approx(2 * 0.5 + 2 * 3600 / 1e9 + 3 * 32e6 / 1e9)
    slow = GpuCostModel(
        SMALL, Gpu("slow", 10**12, 1e15, 1e6, 1e9), FITTED
    )  # bound by operations, and rows fill a bucket
    assert slow.decode_seconds(10, 0) == pytest.approx(2 * 0.5 + 2 * 2 * 1800 * 16 / 1e6)


def test_an_update_and_a_score_by_hand() -> None:
    batch = TokenCounts.of(3, [[2, 1], [4, 4]])
    assert (batch.tokens, batch.loss, batch.pairs) == (17, 11, 2 * 6 + (6 + 3) + (3 + 1) + 2 * (12 + 10))
    operations = 6 * 1000 * 17 + 8 * 800 * 11 + 12 * 2 * 2 * 4 * batch.pairs
    kept = SMALL.activation_bytes * 17 / 1e9
    assert ONE.update_seconds(batch, 100, 1800) == pytest.approx(28 * 1800 / 1e9 + operations / 1e12 + kept)
    again = (4 / 3) * (operations - 8 * 800 * 11) / 1e12 + 8 * 800 * 11 / 1e12 + 4 / 3 * kept
    assert ONE.update_seconds(batch, 100, 1800, checkpointing=True) == pytest.approx(28 * 1800 / 1e9 + again)
    forward = (operations - 8 * 800 * 11) / 3e12 + 2 * 800 * 11 / 1e12 + kept / 3
    assert ONE.score_seconds(batch, 100) == pytest.approx(forward)
    launches = GpuCostModel(
        SMALL, PLAIN, FittedConstants(launch_seconds=5.0, update_seconds=1.0)
    )  # 17 tokens in micro-batches of 6: three
    assert launches.update_seconds(batch, 6, 0) == pytest.approx(1 + 3 * 2 * 5)


def test_finished_sequences_make_later_steps_cheaper() -> None:
    lanes = SimulatedGpu(ONE, 8, prompt=10)
    lanes.add(0, [[2, 4]])
    encoded = lanes.clock
    lanes.run(0, float("inf"))
    first = 2 * ONE.decode_seconds(2, 10 + 2)  # a prompt, and two rows of one token on average
    second = 2 * ONE.decode_seconds(1, 5 + 2 + 1)
    assert encoded == pytest.approx(ONE.prefill_seconds(1, 10))
    assert lanes.clock - encoded == pytest.approx(first + second) and not lanes.unfinished[0]


def test_batch_of_one_decodes_responses_sequentially() -> None:
    one, two = SimulatedGpu(ONE, 1, prompt=0), SimulatedGpu(ONE, 2, prompt=0)
    for lanes in (one, two):
        lanes.add(0, [[5, 5]])
        lanes.run(0, float("inf"))
    assert one.clock - ONE.prefill_seconds(1, 0) == pytest.approx(2 * (two.clock - ONE.prefill_seconds(1, 0)), rel=1e-3)


# ---- the simulation


def lengths(gpu: int, step: int) -> list[list[int]]:
    return [[20, 20 + 60 * ((gpu + step) % 3 == 0)]]


def test_without_ahead_a_step_is_the_slowest_gpu_plus_learning() -> None:
    simulated_gpus = [SimulatedGpu(ONE, 8, 0) for _ in range(2)]
    found = simulate(simulated_gpus, lambda gpu, _: [[20 + 10 * gpu]], 0, learn=7.0, sync=2.0, together=True)
    alone = SimulatedGpu(ONE, 8, 0)
    alone.add(0, [[30]])
    alone.run(0, float("inf"))
    assert found.sample == pytest.approx(alone.clock) and found.step == pytest.approx(alone.clock + 9)
    assert all(not any(gpu.unfinished.values()) for gpu in simulated_gpus), "a response was lost"


@pytest.mark.parametrize("together", [True, False])
def test_sampling_ahead_is_never_slower_and_fills_the_tail(together: bool) -> None:
    steps = [
        simulate([SimulatedGpu(ONE, 8, 0), SimulatedGpu(ONE, 8, 0)], lengths, k, 5.0, 0.0, together).step
        for k in (0, 1, 4)
    ]
    assert steps[0] > 1.2 * steps[1] > 1.2 * 0.99 * steps[2]


def test_sampling_gpus_work_while_others_train() -> None:
    found = simulate([SimulatedGpu(ONE, 8, 0)], lambda *_: [[20]], 1, learn=50.0, sync=0.0, together=False)
    assert found.step == pytest.approx(50, rel=0.01), "sampling takes 20 s and is hidden"
    found = simulate([SimulatedGpu(ONE, 8, 0)], lambda *_: [[20]], 1, learn=1.0, sync=0.0, together=False)
    assert 10 < found.step < 14, "two steps are decoded together: 20 s for both, and what is encoded"


# ---- memory and placement


def config(**settings: Any) -> Any:
    return configure("gsm8k", {"model": "m", "prompts": 8, "samples": 4, "policy.dtype": "bfloat16", **settings})


def planned(gpus: int, shape: ModelShape = QWEN_7B, **settings: Any) -> Any:
    cluster = Cluster(GPUS["h200"], min(gpus, 8), max(1, gpus // 8), 40e9)
    return forecast(config(**settings), shape, cluster, ResponseLengths(100, 100.0, 0.5, 200))


def test_seven_billion_parameters_fit_on_one_gpu_in_bfloat16_and_in_shards_on_two() -> None:
    one, two, less = planned(1, **{"policy.optimizer_state": "float32"}), planned(2), planned(1)
    assert not one.fits and one.needed == 2 and two.fits and two.shard
    assert (
        less.fits and less.needed == 1 and less.memory["gradients and Adam in bfloat16"] == 8 * QWEN_7B.num_parameters
    )
    assert planned(1, algorithm="grpo").fits and "float32 copy, gradients, Adam" in planned(1, SMALL).memory
    with pytest.raises(ConfigError, match="needs one GPU and Adam"):
        planned(2, **{"policy.optimizer_state": "bfloat16"})
    assert one.memory["float32 copy, gradients, Adam"] == 16 * QWEN_7B.num_parameters
    assert two.memory["float32 copy, gradients, Adam"] == 8 * QWEN_7B.num_parameters, "half of it each"
    assert two.memory["parameters"] == 2 * QWEN_7B.num_parameters, "and a whole copy to sample from"
    small = planned(2, SMALL)
    assert not small.shard and "sync" not in [k for k, v in small.requested.phases.items() if v]


@pytest.mark.long
def test_memory_follows_trained_parameters_and_extra_models() -> None:
    base = sum(planned(8).memory.values())
    assert "reference" not in planned(8).memory and planned(8, algorithm="grpo").memory["reference"] > 0
    with_lora = planned(1, **{"policy.lora": 16})
    assert with_lora.fits and any("LoRA" in note for note in with_lora.notes)
    assert (
        planned(8, **{"ranks.shard": "replicate"}).memory["float32 copy, gradients, Adam"]
        == 16 * QWEN_7B.num_parameters
    )
    assert sum(planned(64).memory.values()) < base
    with pytest.raises(ConfigError, match="needs several GPUs"):
        planned(1, **{"ranks.shard": "shard"})


def test_separate_critic_is_sharded() -> None:
    """18 bytes per parameter, divided by the ranks; without sharding each rank has all of them."""
    whole = planned(2, algorithm="ppo", **{"ranks.shard": "replicate"}).memory["critic"]
    assert whole == 18 * QWEN_7B.num_parameters
    for ranks in (2, 8):
        assert planned(ranks, algorithm="ppo", **{"ranks.shard": "shard"}).memory["critic"] == whole // ranks
    assert planned(4, algorithm="ppo").fits, "which it would not with a whole critic on each: 137 GB beside the policy"


def test_mixed_precision_keeps_the_residual_stream_in_float32() -> None:
    """By hand: hidden size 8 and 2 layers with two norms each, which keep 2 more bytes per value of a token."""
    mixed = GpuCostModel(SMALL, PLAIN, FITTED, mixed=True)
    assert mixed.bytes_per_token(True) - ONE.bytes_per_token(True) == 2 * (2 * 2 * 8) + 2 * (2 * 8), (
        "a layer twice, and the inputs"
    )
    assert mixed.bytes_per_token(False) - ONE.bytes_per_token(False) == 2 * (2 * 2 * 8) + 2 * 2 * 8, (
        "all layers, and one more"
    )
    found = {dtype: planned(2, **{"policy.dtype": dtype}) for dtype in ("bfloat16", "mixed")}
    assert found["mixed"].micro_tokens < found["bfloat16"].micro_tokens, "so fewer tokens fit at once"
    assert found["mixed"].memory["parameters"] == found["bfloat16"].memory["parameters"]


def test_the_command_plans_for_mixed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    transformers.LlamaConfig(**SHAPE | {"max_position_embeddings": 1024}).save_pretrained(tmp_path)
    tokens = {}
    for dtype in ("auto", "bfloat16", "mixed"):
        arguments = ["plan", "gsm8k", "--model", str(tmp_path), "--policy.dtype", dtype, "--json"]
        assert main(arguments) == 0
        tokens[dtype] = json.loads(capsys.readouterr().out)["micro_tokens"]
    assert tokens["mixed"] < tokens["bfloat16"] == tokens["auto"]


def test_a_critic_and_more_epochs_take_more_time() -> None:
    base, more, epochs = (planned(1, SMALL, **s).requested.phases for s in ({}, {"algorithm": "ppo"}, {"epochs": 3}))
    assert more["update"] > 1.9 * base["update"] / 1 and more["score"] > base["score"]
    assert epochs["update"] == pytest.approx(3 * base["update"])


@pytest.mark.long
def test_plans_for_thousands_of_gpus_note_idle_gpus() -> None:
    many = planned(4096, prompts=64)
    assert many.requested.idle > 0.9 and any("have no work" in note for note in many.notes)
    assert any("stands for the slowest of 4,096" in note for note in many.notes)
    assert (
        many.best.tokens_per_second >= many.best_supported.tokens_per_second and many.best_supported.unsupported is None
    )


def test_batch_shares_are_whole_prompts_and_balanced() -> None:
    planner = Planner(config(), SMALL, Cluster(GPUS["h200"], 8, 1, 1e9), ResponseLengths(10, 100.0, 1.0, 400))
    sums = sorted(10 + sum(own) for own in planner.batch_lengths)
    assert planner.largest_share(8).tokens == sums[-1] and planner.largest_share(1).tokens == sum(sums)
    assert sum(sums) / 2 <= planner.largest_share(2).tokens <= sum(sums) / 2 + sums[-1]


def test_policy_gpu_memory_caps_the_memory_of_a_gpu() -> None:
    assert planned(1, SMALL, **{"policy.gpu_memory": 10}).cluster.gpu.memory == 10 * GIB
    assert planned(1, SMALL, **{"policy.gpu_memory": 10**6}).cluster.gpu.memory == GPUS["h200"].memory


HUGE = replace(QWEN_7B, num_parameters=10**12, block_parameters=10**12 - 10**9)
"""A model of which no GPU holds a whole copy."""
WIDE_LORA = replace(QWEN_7B, lora_dims=600_000_000)
"""Adapters of rank 16 with 9.6e9 parameters: 173 GB of state, more than one H200 has."""
ADVICE: list[tuple[int, ModelShape, dict[str, Any], int, str]] = [
    (1, QWEN_7B, {"policy.optimizer_state": "float32"}, 2, "take 2 GPUs or more (sharded), or --policy.lora 16"),
    (1, WIDE_LORA, {"policy.lora": 16}, 2, "take 2 GPUs or more (sharded), or --policy.bits 4"),
    (2, QWEN_7B, {"ranks.shard": "replicate"}, 2, "set --ranks.shard shard"),
    (1, HUGE, {}, 0, "take a smaller model, a GPU with more memory, or --policy.lora 16"),
    (2, HUGE, {"policy.lora": 16}, 0, "take a smaller model, a GPU with more memory, or --policy.bits 4"),
    (1, HUGE, {"policy.lora": 16, "policy.bits": 4}, 0, "take a smaller model, a GPU with more memory"),
]


@pytest.mark.parametrize(("gpus", "shape", "settings", "needed", "advice"), ADVICE)
def test_plan_that_does_not_fit_suggests_a_change(
    gpus: int, shape: ModelShape, settings: dict[str, Any], needed: int, advice: str
) -> None:
    plan = planned(gpus, shape, **settings)
    words = " ".join(plan_text(plan).split())
    assert not plan.fits and plan.needed == needed
    assert words.partition(" assumed")[0].endswith(f"tokens. It does not fit: {advice}"), words
    assert "new tokens per second" not in words, "no speed of a run that cannot be"


@pytest.mark.parametrize(
    ("gpus", "shape", "placement"),
    [
        (1, SMALL, "none (one GPU)"),
        (2, SMALL, "replicate: every GPU has all parameters"),
        (2, QWEN_7B, "shard: each GPU trains a part of the parameters and samples with a full copy"),
    ],
)
def test_plan_text_names_the_sharding(gpus: int, shape: ModelShape, placement: str) -> None:
    words = " ".join(plan_text(planned(gpus, shape)).split())
    assert f"sharding {placement} memory" in words and "It does not fit" not in words
    assert "new tokens per second" in words


NOTES = {
    "decoding without captured graphs (it has no RoPE)": ({}, "it has no RoPE"),
    "sampling with LoRA": ({"policy.lora": 16}, None),
    "4-bit matrices": ({"policy.lora": 16, "policy.bits": 4}, None),
    "vllm was not measured": ({"policy.engine": "vllm", "policy.engine_url": "http://localhost:8000"}, None),
    "a conversation is counted as one response": ({"tools": ("python",)}, None),
}


@pytest.mark.parametrize("note", NOTES)
def test_plan_notes_list_the_assumptions(note: str) -> None:
    settings, unlike = NOTES[note]
    shape = replace(SMALL, eager_reason=unlike)
    assert sum(note in said for said in planned(1, shape, **settings).notes) == 1
    assert not any(note in said for said in planned(1, SMALL).notes)


# ---- GPUs


def test_rates_of_networks_and_kinds_of_gpus() -> None:
    given = {"40GB/s": 40e9, "400Gb/s": 50e9, "400Gbps": 50e9, "5e9": 5e9, " 1.5 TB/s ": 1.5e12, "100Mbit/s": 12.5e6}
    assert {text: bytes_per_second(text) for text in given} == given
    for text in ("", "fast", "-1GB/s", "0GB/s", "1.2.3GB/s", "40GB", "nan", "inf", "9e99"):
        with pytest.raises(ConfigError, match="--network"):
            bytes_per_second(text)
    assert gpu_named("H200").measured and not gpu_named("h100").measured
    with pytest.raises(ConfigError, match="mi300x"):
        gpu_named("h2000")
    cluster = Cluster(GPUS["h200"], 8, 2, 40e9)
    assert cluster.all_reduce_seconds(8e9, 1) == 0 and cluster.all_reduce_seconds(8e9, 8) == pytest.approx(
        2 * 7 / 8 * 8 / 300
    )
    assert cluster.all_reduce_seconds(8e9, 16) == pytest.approx(2 * 15 / 16 * 8 / 40), (
        "between nodes the network decides"
    )


# ---- the command


class Said(NamedTuple):
    status: int
    out: str
    err: str


@pytest.fixture
def plan(capsys: pytest.CaptureFixture[str]) -> Any:
    def call(*args: Any) -> Said:
        status = main(["plan", *map(str, args)])
        return Said(status, *capsys.readouterr())

    return call


def written(folder: Path, kind: str, **changes: Any) -> Path:
    """Write a config.json without weights."""
    own = {k: v for k, v in (SHAPE | changes).items() if not (kind == "Falcon" and k == "head_dim")}
    made = getattr(transformers, f"{kind}Config")(**own)
    made.architectures = [f"{kind}ForCausalLM"]
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(made.to_json_string(use_diff=False))
    return folder


KINDS = ("Llama", "Qwen3", "GPT2", "OPT", "Bloom", "Falcon", "Gemma2", "Phi3")


@pytest.mark.long
def test_parameters_are_counted_for_every_architecture(tmp_path: Path) -> None:
    for kind in KINDS:
        more = {"n_inner": 48} if kind == "GPT2" else {}
        path = written(tmp_path / kind, kind, **more)
        shape = read_shape(str(path / "config.json"))
        loaded = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(path))
        assert shape.num_parameters == sum(p.numel() for p in loaded.parameters()), kind
        like = kind in ("Llama", "Qwen3", "Phi3")
        assert (shape.eager_reason is None) == like, (kind, shape.eager_reason)
        if like:
            assert shape.num_layers == 2 and shape.kv_bytes == 4 * 2 * 2 * 8 and shape.lora_dims > 0, kind


@pytest.mark.long
def test_plan_as_text_and_as_json(plan: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = written(tmp_path / "model", "Qwen2", max_position_embeddings=2048)
    flags = ("gsm8k", "--model", folder / "config.json", "--gpus", 8, "--nodes", 2, "--prompts", 32)
    for columns in (40, 100):
        monkeypatch.setenv("COLUMNS", str(columns))
        said = plan(*flags)
        assert said.status == 0 and not said.err
        words = [
            line for line in said.out.splitlines() if not line.startswith(("samplers", "all", "4 ", "8 ", "12", "14"))
        ]
        assert max(map(len, words)) <= columns, columns
        assert "16 × h200 on 2 nodes" in " ".join(said.out.split()) and "not measured" in " ".join(said.out.split())
    found = json.loads(plan(*flags, "--json", "--network", "100GB/s", "--gpu", "h100").out)
    assert found["cluster"] | {"gpus": 8, "nodes": 2, "network": 1e11, "measured": False} == found["cluster"]
    assert found["requested"]["samplers"] == 0 and found["requested"]["unsupported"] is None
    assert sum(found["memory"]["parts"].values()) == found["memory"]["total"] and found["memory"]["fits"]
    assert found["requested"]["seconds"] == pytest.approx(sum(found["requested"]["phases"].values()))
    assert found["run"]["gpu_hours"] == pytest.approx(16 * found["run"]["hours"])
    assert 12 in {placement["samplers"] for placement in found["placements"]}


@pytest.mark.long
def test_impossible_plans_are_rejected(plan: Any, tmp_path: Path) -> None:
    folder = written(tmp_path / "model", "Llama")
    (tmp_path / "empty").mkdir()
    for name, text in (("broken", '{"model_type": "llama", '), ("odd", '{"model_type": "never"}'), ("list", "[1]")):
        (tmp_path / f"{name}.json").write_text(text)
    (tmp_path / "many.json").write_text(json.dumps(SHAPE | {"model_type": "llama", "num_hidden_layers": 10**9}))
    written(tmp_path / "experts", "Mixtral", num_local_experts=4)
    model = ("--model", folder)
    cases: list[tuple[tuple[Any, ...], str]] = [
        ((), "TASK is missing"),
        (("sort",), "a plan needs a language model"),
        (("gsm8k",), "--model is missing"),
        (("gsm8k", "--model", tmp_path / "nowhere"), "no such folder"),
        (("gsm8k", "--model", tmp_path / "empty"), "no config.json"),
        (("gsm8k", "--model", tmp_path / "broken.json"), "cannot be read"),
        (("gsm8k", "--model", tmp_path / "odd.json"), "cannot be read"),
        (("gsm8k", "--model", tmp_path / "list.json"), "cannot be read"),
        (("gsm8k", "--model", tmp_path / "many.json"), "1000000000 layers"),
        (("gsm8k", "--model", tmp_path / "experts"), "mixture of experts"),
        (("gsm8k", *model, "--gpus", 0), "gpus"),
        (("gsm8k", *model, "--gpus", 8, "--nodes", 10**6), "at most 100,000"),
        (("gsm8k", *model, "--gpu", "h300"), "h200"),
        (("gsm8k", *model, "--network", "fast"), "--network"),
        (("gsm8k", *model, "--answer-tokens", 300), "--answer-tokens 300"),
        (("gsm8k", *model, "--answer-spread", -1), "--answer-spread"),
        (("gsm8k", *model, "--policy.dtype", "float32"), "bfloat16"),
        (("gsm8k", *model), "positions"),
        (("gsm8k", *model, "--gpuss", 8), "no such flag"),
    ]
    for args, words in cases:
        said = plan(*args)
        assert said.status == 2 and words in said.err and not said.out, (args, said)


def test_without_transformers_a_plan_names_the_extra(plan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "transformers", None)
    said = plan("gsm8k", "--model", "m")
    assert said.status == 2 and "pip install 'ascent-rl[lm]'" in said.err


def test_help_after_the_task_is_help(plan: Any) -> None:
    said = plan("gsm8k", "--model", "m", "--help")
    assert said.status == 0 and "--answer-spread" in said.out and not said.err


# ---- the calibration


@pytest.mark.long
def test_fit_excludes_the_held_out_measurements() -> None:
    from dataclasses import replace

    from benchmarks.plan import fit_constants, measured_before, measured_here

    points = [*measured_here(), *measured_before()]
    shapes = {p.shape for p in points if not p.fitted}
    assert {p.shape for p in points if p.fitted} == {"135m", "1.5b"} and "360m" in shapes
    wrong = [p if p.fitted else replace(p, measured=100 * p.measured) for p in points]
    assert fit_constants(wrong) == fit_constants(points)


def test_activation_bytes_match_the_measurement() -> None:
    lines = json.loads((Path(__file__).parents[2] / "benchmarks" / "results" / "plan_gpu.json").read_text())
    from benchmarks.plan import gpu_cost

    for line in (x for x in lines if x["phase"] == "update"):
        assert gpu_cost(line["shape"]).bytes_per_token(False) == pytest.approx(line["bytes_per_token"], rel=0.01), line[
            "shape"
        ]
    assert gpu_cost("1.5b").gpu.memory / GIB == pytest.approx(139.8, abs=0.1)
