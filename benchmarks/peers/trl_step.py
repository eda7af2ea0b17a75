"""TRL's GRPOTrainer, one optimizer step per turn: generation, reward, loss, backward pass and optimizer.

It has its fastest settings for this work: one batch per step, no reference, no checkpointing, nothing logged or
saved. Generation and update are aligned, so it needs no pass for old log-probs. On a GPU its parameters are bfloat16,
which its optimizer updates as they are, and the loss is split into micro-batches that fit. The clock runs from the
trainer's on_step_begin to its on_step_end, so that loading the data is not counted.

With `vllm`, the GiB of its caches, vLLM generates in the same process (TRL's colocated mode), with captured graphs, and
gets the new weights before each step, inside `generate`. No log-probs are computed again for it: its importance
sampling correction, which takes one more forward pass, is off.
"""

from __future__ import annotations

import tempfile
import time
from collections import defaultdict
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from reward import reward
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as version
from turns import WORK, answer, wait

PARTS = {"_generate": "generate", "_calculate_rewards": "reward", "compute_loss": "forward"}
spent: dict[str, float] = defaultdict(float)
masks: list[Any] = []
prompts: list[Any] = []
CPU = WORK["device"] == "cpu"


def rewards(completions: list[Any], **_: Any) -> list[float]:
    texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
    return [reward(text) for text in texts]


def clocked(trainer: GRPOTrainer) -> None:
    """Note how long the trainer's own methods take; the rest of a step is backward pass and optimizer."""

    def wrap(name: str, part: str) -> None:
        method = getattr(trainer, name)

        def timed(*args: Any, **more: Any) -> Any:
            begin = time.perf_counter()
            try:
                return method(*args, **more)
            finally:
                spent[part] += time.perf_counter() - begin
                if name == "compute_loss":
                    masks.append(args[1]["completion_mask"].sum())
                    prompts.append((args[1]["prompt_ids"], args[1]["prompt_mask"].bool()))

        setattr(trainer, name, timed)

    for name, part in PARTS.items():
        wrap(name, part)


class Turns(TrainerCallback):
    def on_step_begin(self, *_: Any, **__: Any) -> None:
        wait()
        for kept in (spent, masks, prompts):
            kept.clear()
        self.begin = time.perf_counter()

    def on_step_end(self, *_: Any, **__: Any) -> None:
        if not CPU:
            torch.cuda.synchronize()
        seconds = time.perf_counter() - self.begin
        rest = seconds - sum(spent.values())
        seen = {tuple(row[on].tolist()) for ids, mask in prompts for row, on in zip(ids, mask, strict=True)}
        more = {"tokens": int(sum(masks)), "prompts": sorted(seen)}
        answer(seconds=seconds, **spent, **{"backward, optimizer": rest}, **more)


def generation() -> dict[str, Any]:
    """Who generates; every response has the same number of tokens."""
    if not WORK.get("vllm"):
        return {"generation_kwargs": {"eos_token_id": None}}
    from trl.generation import vllm_generation

    room = int(WORK["vllm"] * 2**30)  # said and not measured: two of them may start at once
    vllm_generation.LLM = partial(vllm_generation.LLM, kv_cache_memory_bytes=room)
    return {
        "use_vllm": True,
        "vllm_mode": "colocate",
        "vllm_gpu_memory_utilization": 0.1,
        "vllm_max_model_length": 1024,
        "vllm_importance_sampling_correction": False,
        "generation_kwargs": {"ignore_eos": True},
    }


def main() -> None:
    if CPU:
        torch.set_num_threads(WORK["threads"])
    samples, words = WORK["samples"], WORK["prompts"]
    count = len(words) * samples
    part = WORK["rows"] or count
    tokenizer = AutoTokenizer.from_pretrained(WORK["model"])
    chat = tokenizer.chat_template is not None
    rows = [[{"role": "user", "content": prompt}] if chat else prompt for prompt in words]
    config = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=part,
        num_generations=samples,
        gradient_accumulation_steps=count // part,
        max_completion_length=WORK["tokens"],
        max_steps=100_000,
        shuffle_dataset=False,
        beta=0.0,
        loss_type="dr_grpo",
        scale_rewards="none",
        epsilon=0.2,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        **generation(),
        learning_rate=WORK["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=WORK["max_norm"],
        use_cpu=CPU,
        bf16=not CPU,
        gradient_checkpointing=False,
        dataloader_pin_memory=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    trainer = GRPOTrainer(
        model=AutoModelForCausalLM.from_pretrained(WORK["model"], dtype=torch.float32 if CPU else torch.bfloat16),
        reward_funcs=rewards,
        args=config,
        train_dataset=Dataset.from_dict({"prompt": rows * 256}),
        processing_class=tokenizer,
        callbacks=[Turns()],
    )
    trainer.eos_token_ids = []
    clocked(trainer)
    about = {"trl": version, "torch": torch.__version__, "attention": trainer.model.config._attn_implementation}
    if WORK.get("vllm"):
        from vllm import __version__ as generator

        about |= {"vllm": generator, "caches_gib": WORK["vllm"]}
    answer(**about)
    trainer.train()


if __name__ == "__main__":
    main()
