"""Fixtures of the attacks: small runs and a tiny model, created once."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

import ascent
from benchmarks.attacks.attempt import scratch
from benchmarks.attacks.folders import complaints_of, laid_out
from benchmarks.attacks.looking import REWARD

SMALL = {"length": 2, "numbers": 3, "prompts": 2, "samples": 2, "eval_prompts": 2, "steps": 2, "record_every": 1}
SMALL |= {"policy.width": 8, "policy.layers": 1, "policy.heads": 2, "checkpoint_every": 1}


def build_stage(stage: Path, small: bool = False) -> Path:
    """good, trl, verl: what is damaged.

    Unless small, also own: a run with a reward of its own; model: a tiny language model; files that become large.
    """
    quiet: dict[str, Any] = {"show": False, "threads": 1}
    if not small:
        (stage / "mine.py").write_text(REWARD)
        ascent.train("sort", reward=f"python:{stage / 'mine.py'}:own", out=stage / "own", **quiet, **SMALL)
        _write_model(stage / "model")
        _write_bombs(stage)
    longer = SMALL | {"steps": 6, "eval_every": 2, "checkpoint_every": 2, "keep": 3, "samples": 4}
    ascent.train("sort", out=stage / "good", **quiet, **longer)
    trl = stage / "trl"
    (trl / "completions").mkdir(parents=True)
    (trl / "checkpoint-2").mkdir()
    words = {"prompt": list("aabb"), "completion": list("xyzw"), "f": [1.0, 0.0, 1.0, 1.0]}
    for step in (1, 2):
        table = pa.table({"step": [step] * 4, **words, "advantage": [0.1, 0.2, 0.3, 0.4]})
        pq.write_table(table, trl / "completions" / f"completions_{step:05d}.parquet")
    history = [{"step": step, "reward": 1.0, "rewards/f/mean": 0.5} for step in (1, 2)]
    (trl / "checkpoint-2" / "trainer_state.json").write_text(json.dumps({"log_history": history}))
    (stage / "verl").mkdir()
    for step in (1, 2):
        row = {"input": "a", "output": "b", "gts": "4", "score": 1.0, "step": step, "acc": 1}
        (stage / "verl" / f"{step}.jsonl").write_text(f"{json.dumps(row)}\n" * 3)
    if not small:
        _warm_up(stage)
    return stage


def _warm_up(stage: Path) -> None:
    """Let this process import all that a tour needs, so that not every fork of it does."""
    with scratch() as folder:
        laid_out(stage, folder)
        complaints = complaints_of(folder, ours=True)
    assert not complaints, complaints


def _write_bombs(stage: Path) -> None:
    """Small files that are large in memory: bomb, and page and count, whose footers say that they are not."""
    few = {"group": [0], "sample": [0], "reward": [1.0], "prompt_text": ["p"], "response_text": ["r"]}
    text = pa.DictionaryArray.from_arrays(pa.array(np.zeros(60_000, np.int32)), ["x" * 2_000])
    zeros = pa.array(np.zeros(60_000, np.int64))
    many = pa.table({"group": zeros, "sample": zeros, "reward": zeros, "prompt_text": text, "response_text": text})
    pq.write_table(many, stage / "bomb.parquet", store_schema=False)
    plain = {"use_dictionary": False, "write_statistics": False}
    pq.write_table(
        pa.table(few | {"response_text": ["x" * (1 << 28)]}), stage / "page.parquet", compression="zstd", **plain
    )
    size = pq.ParquetFile(stage / "page.parquet").metadata.row_group(0).column(4).total_uncompressed_size
    _lie(stage / "page.parquet", size, 100)
    count = 40_000_000
    tokens = pa.ListArray.from_arrays([0, count], pa.array(np.zeros(count, np.int32)))
    pq.write_table(pa.table(few).append_column("response", tokens), stage / "count.parquet", write_statistics=False)
    _lie(stage / "count.parquet", count, 5)


def _lie(path: Path, truth: int, lie: int) -> None:
    """Let the footer of a Parquet file say another number, in as many bytes."""
    data, true, told = path.read_bytes(), _varint(2 * truth), _varint(2 * lie)
    footer = len(data) - 8 - int.from_bytes(data[-8:-4], "little")
    told = bytes(byte | 128 for byte in told) + b"\x80" * (len(true) - len(told) - 1) + b"\0"
    assert data.count(true, footer) and len(told) == len(true)
    path.write_bytes(data[:footer] + data[footer:].replace(true, told))


def _varint(value: int) -> bytes:
    return bytes([value]) if value < 128 else bytes([value & 127 | 128]) + _varint(value >> 7)


def _write_model(folder: Path) -> None:
    from tokenizers import Tokenizer, models
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
    from transformers.utils import logging

    logging.disable_progress_bar()
    config = LlamaConfig(hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2, vocab_size=16)
    LlamaForCausalLM(config).save_pretrained(folder)
    words = {f"w{i}": i for i in range(16)}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="w1", pad_token="w2").save_pretrained(folder)
