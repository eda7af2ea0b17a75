"""TRL's GRPOTrainer for benchmarks/learn.py: it trains for a given time, with Ascent's task, reward and evaluation.

Only training is on the clock, from the trainer's on_step_begin to its on_step_end. The parameters are float32 under
bfloat16 autocast, nothing is saved or logged, and there is no reference.
"""

from __future__ import annotations

import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer
from trl import __version__ as version
from turns import WORK, answer, wait

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from ascent.core.config import Config
from ascent.inference.engine import LocalEngine
from ascent.inference.runners.eager import EagerRunner
from ascent.models import LanguageModel
from ascent.rewards.tokenized_task import TokenizedTask
from ascent.runs.held_out_evaluation import sample_evaluator
from ascent.settings import configure

SETTINGS = WORK["settings"]


def problems(config: Config) -> Dataset:
    """More than it will see, from the task's own generator."""
    indices = torch.randint(
        2**62, (200_000 // config.samples,), generator=torch.Generator().manual_seed(1 + WORK["seed"])
    ).tolist()
    return Dataset.from_dict(
        {"prompt": [config.task.messages(config.task.train(i)) for i in indices], "index": [str(i) for i in indices]}
    )


class Watch(TrainerCallback):
    """The clock, and the learning curve; ends the training when its time is over."""

    def __init__(self, config: Config, model: Any, tokenizer: Any):
        lm = LanguageModel(model, tokenizer)
        task = TokenizedTask(config.task, lm)
        sampler = LocalEngine(lm, config.task.max_tokens, 1.0, torch.Generator(), max_num_seqs=512)
        sampler.runner = EagerRunner
        self.evaluate, self.config, self.task = sample_evaluator(config, task, sampler), config, task
        self.points: list[dict[str, float]] = []
        self.spent, self.done = 0.0, 0
        self.note(model)

    def note(self, model: Any) -> None:
        training = model.training
        with torch.autocast("cuda", torch.bfloat16):
            found = self.evaluate()
        model.train(training)
        samples = self.done * self.config.prompts * self.config.samples
        point = {"seconds": self.spent, "samples": samples, "steps": self.done}
        self.points.append(point | {"strict": found["eval/accuracy"], "lenient": found["eval/lenient"]})
        answer(point=self.points[-1])

    def on_step_begin(self, *_: Any, **__: Any) -> None:
        self.begin = time.perf_counter()

    def on_step_end(self, _args: Any, _state: Any, control: Any, model: Any = None, **__: Any) -> Any:
        torch.cuda.synchronize()
        self.spent += time.perf_counter() - self.begin
        self.done += 1
        over = self.spent >= WORK["seconds"]
        if over or self.done % self.config.eval_every == 0:
            self.note(model)
        control.should_training_stop = over
        return control


def main() -> None:
    config = configure("reasoning-gym:chain_sum", {"model": WORK["model"], **SETTINGS})
    tokenizer = AutoTokenizer.from_pretrained(WORK["model"])
    model = AutoModelForCausalLM.from_pretrained(WORK["model"], dtype=torch.float32).to("cuda")

    def reward(completions: list[Any], index: list[str], **_: Any) -> list[float]:
        texts = [c if isinstance(c, str) else c[0]["content"] for c in completions]
        pairs = zip(index, texts, strict=True)
        return [config.task.grade(config.task.train(int(i)), text).value for i, text in pairs]

    args = GRPOConfig(
        output_dir=tempfile.mkdtemp(),
        per_device_train_batch_size=config.prompts * config.samples,
        num_generations=config.samples,
        max_completion_length=config.task.max_tokens,
        max_steps=100_000,
        seed=42 + WORK["seed"],
        beta=0.0,
        loss_type="grpo",
        scale_rewards="group",
        epsilon=0.2,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        learning_rate=SETTINGS["lr"],
        lr_scheduler_type="constant",
        optim="adamw_torch_fused",
        weight_decay=0.0,
        max_grad_norm=SETTINGS["update.max_norm"],
        bf16=True,
        gradient_checkpointing=False,
        logging_strategy="no",
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    answer(trl=version, torch=torch.__version__, attention=model.config._attn_implementation)
    watch = Watch(config, model, tokenizer)
    trainer = GRPOTrainer(
        model=model,
        reward_funcs=reward,
        args=args,
        train_dataset=problems(config),
        processing_class=tokenizer,
        callbacks=[watch],
    )
    wait()
    trainer.train()
    watch.task.close()
    answer(over=True)


if __name__ == "__main__":
    main()
