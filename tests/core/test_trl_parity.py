"""The rows that TRL 1.16 has, computed by TRL's own trainers on the same tensors as ours.

The trainers are real: TRL's constructor, advantage code, log-prob bookkeeping and loss run as they are. Only two
things are put in their place, because both sides must see the same numbers: what was generated (`_generate`), and
the forward pass (`_get_per_token_logps_and_entropies`). The gradient is taken with respect to every token's
log-probability, so it is compared token by token, whatever the model.

Everything is float64. Where TRL means something else, a test names it and turns our number into TRL's.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import batch_of, close
from torch import Tensor

from ascent.core.advantages import Centered, LeaveOneOut, Normalized
from ascent.core.algorithms import ALGORITHMS, GRPO, Algorithm
from ascent.core.correction import Masked, Truncated, mismatch
from ascent.core.exploration import Constant
from ascent.core.groups import NoShaping, Overlong
from ascent.core.kl import InLoss, k3
from ascent.core.loop import rollout_metrics
from ascent.core.losses import Clipped, SequenceRatio
from ascent.core.reference import Frozen
from ascent.core.types import Batch, Outputs
from ascent.core.weights import SequenceSum, TokenMean

pytestmark = pytest.mark.slow
"""TRL takes 11 s to import, so it is imported by the first test that runs and not by the file."""

PROMPTS, SAMPLES, LIMIT = 4, 4, 6
ROWS_IN_ALL = PROMPTS * SAMPLES
PAD, END = 0, 1
EXACT = 1e-9
"""The issue asks for 1e-6; in float64 the two agree far better, so a small slip shows."""

# ---- the same batch for both sides ----------------------------------------------------------------

LENGTHS = [[3, 1, 6, 2], [4, 4, 2, 6], [1, 5, 3, 3], [6, 2, 5, 4]]
REWARDS = [[0.5, 2.0, -1.0, 0.25], [0.75, 0.75, 0.75, 0.75], [1.0, 0.0, 0.0, 0.0], [3.0, 1.5, -0.125, 0.5]]
"""Exact in float32, which TRL's reward code goes through. The second group is all equal."""
CUT = (0, 2)
"""The response that the limit cut off. (1, 3) is as long, but ended by itself."""
FAILED = (2, 1)
"""The response whose reward fails, where a test asks for it."""


@dataclass
class Case:
    """One batch, and the policy's log-probs now, with a gradient."""

    batch: Batch
    logp: Tensor
    entropy: Tensor

    @property
    def responses(self) -> int:
        return self.batch.valid.numel()


def case(moved: float = 0.3, failed: bool = False, seed: int = 0) -> Case:
    """Ragged responses, on which the policy's log-probs have moved by so much since they were sampled."""
    generator = torch.Generator().manual_seed(seed)
    shape = (PROMPTS, SAMPLES, LIMIT)

    def noise(size: float) -> Tensor:
        return size * torch.randn(shape, generator=generator, dtype=torch.float64)

    now = -noise(1.0).abs() - 0.1
    old = now + noise(moved)
    batch = batch_of(
        REWARDS,
        LENGTHS,
        limit=LIMIT,
        logp_old=old,
        logp_ref=now + noise(0.5),
        logp_sampler=old + noise(0.3),
        response=torch.randint(2, 6, shape, generator=generator),
    )
    last = batch.mask & (torch.arange(1, LIMIT + 1) == batch.length.unsqueeze(-1))
    truncated, valid = torch.zeros(shape[:2], dtype=torch.bool), torch.ones(shape[:2], dtype=torch.bool)
    truncated[CUT], valid[FAILED] = True, not failed
    response = torch.where(last & ~truncated.unsqueeze(-1), END, batch.response)
    batch = batch.add(response=response, truncated=truncated, valid=valid)
    return Case(batch, now.requires_grad_(), noise(0.5).abs().requires_grad_())


def without_truncated(algorithm: Algorithm) -> Algorithm:
    """TRL's mask_truncated_completions: the reward stays in its group, the tokens do not count."""
    return replace(algorithm, groups=replace(algorithm.groups, mask_truncated=True))


@dataclass
class Result:
    """What one side computed."""

    advantage: Tensor
    loss: Tensor
    gradient: Tensor
    metrics: dict[str, float]

    def __mul__(self, factor: float) -> Result:
        return replace(self, loss=self.loss * factor, gradient=self.gradient * factor)

    def plus(self, term: Tensor, given: Case) -> Result:
        """With one more term in the loss."""
        return replace(self, loss=self.loss + term.detach(), gradient=self.gradient + slope(term, given))


def slope(loss: Tensor, given: Case) -> Tensor:
    return torch.autograd.grad(loss, given.logp, retain_graph=True)[0]


def agree(theirs: Result, ours: Result, tolerance: float = EXACT) -> None:
    close(theirs.advantage, ours.advantage, tolerance)
    close(theirs.loss, ours.loss, tolerance)
    close(theirs.gradient, ours.gradient, tolerance)
    assert theirs.gradient.abs().max() > 1e-3, "nothing was compared"


def by_us(given: Case, algorithm: Algorithm) -> Result:
    """Our credit, weights and objective, on the whole batch as one optimizer step."""
    state = algorithm.initial_state()
    batch, _ = algorithm.compute_advantages(given.batch, state)
    batch = batch.add(weight=algorithm.weights(batch), **algorithm.scalars(state, 0.0))
    terms = algorithm.objective(batch, Outputs(given.logp, given.entropy))
    assert batch.advantage is not None
    return Result(
        batch.advantage[..., 0],
        -terms.objective.detach(),
        slope(-terms.objective, given),
        {name: float(total) / batch.tokens for name, total in terms.sums.items()},
    )


# ---- TRL's side -----------------------------------------------------------------------------------


@contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a model that TRL's constructor accepts; its numbers are never used."""
    pytest.importorskip("trl", reason="TRL is a test-only dependency")
    from transformers import LlamaConfig, LlamaForCausalLM

    folder = tmp_path_factory.mktemp("model")
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, pad_token_id=PAD, eos_token_id=END, **sizes, **heads)).save_pretrained(
        folder
    )
    return folder


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {word: i for i, word in enumerate(["<pad>", "<end>", "<unk>", "a", "b", "c", "d", "e"])}
    inner = Tokenizer(models.WordLevel(words, unk_token="<unk>"))
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<end>", unk_token="<unk>", padding_side="left"
    )


def trainer_of(given: Case, model: Path, **settings: Any) -> Any:
    """A real trainer of TRL's, whose rollouts and log-probs are those of the case."""
    import trl
    from datasets import Dataset
    from transformers import LlamaForCausalLM

    batch, count = given.batch, given.responses
    settings = {"num_generations": batch.mask.shape[1], "max_completion_length": batch.limit, **settings}
    rloo = settings.pop("rloo", False)
    parts = settings.get("steps_per_generation", settings.get("gradient_accumulation_steps", 1))
    vllm = settings.pop("use_vllm", False)
    args = (trl.RLOOConfig if rloo else trl.GRPOConfig)(
        output_dir=str(model / "out"),
        use_cpu=True,
        bf16=False,
        report_to="none",
        per_device_train_batch_size=count // parts,
        **settings,
    )
    scored = torch.where(batch.valid, batch.reward[..., 0], torch.nan).flatten().tolist()

    def reward(completions: list[Any], **_: Any) -> list[float | None]:
        return [None if math.isnan(value) else value for value in scored]

    made = (trl.RLOOTrainer if rloo else trl.GRPOTrainer)(
        model=LlamaForCausalLM.from_pretrained(model),
        reward_funcs=reward,
        args=args,
        train_dataset=Dataset.from_list([{"prompt": "a"}] * count),
        processing_class=tokenizer(),
    )
    made.model.train()
    made.use_vllm = vllm
    made.current_gradient_accumulation_steps = args.gradient_accumulation_steps
    # The prompt of a row is its number, so that a forward pass on any part of the batch can be answered.
    lengths = batch.length.flatten().tolist()
    ids = [row[:n] for row, n in zip(batch.response.flatten(0, 1).tolist(), lengths, strict=True)]
    sampled = [row[:n] for row, n in zip(batch.logp_sampler.flatten(0, 1).tolist(), lengths, strict=True)]
    numbers, texts = [[row] for row in range(count)], [""] * count
    generated = (numbers, ids, texts) if rloo else (numbers, ids, None, texts, sampled, {}, None, None)
    made._generate = lambda _: generated

    def forward(which: Any, input_ids: Tensor, *_: Any, **__: Any) -> tuple[Tensor, Tensor, None]:
        known = batch.logp_ref if which is made.ref_model else batch.logp_old
        logp = given.logp if torch.is_grad_enabled() else known
        assert logp is not None
        rows = input_ids[:, 0]
        return logp.flatten(0, 1)[rows], given.entropy.flatten(0, 1)[rows], None

    made._get_per_token_logps_and_entropies = forward
    return made


def parts_by_trl(given: Case, model: Path, dtype: torch.dtype = torch.float64, **settings: Any) -> list[Result]:
    """TRL's loss and gradient of each part into which it cuts the generation batch."""
    from trl.trainer.utils import split_tensor_dict

    fresh = torch.equal(given.batch.logp_old, given.logp.detach())  # type: ignore[arg-type]
    trainer = trainer_of(given, model, **({} if fresh else {"num_iterations": 2}) | settings)
    with default_dtype(dtype):
        generated = trainer._generate_and_score_completions([{"prompt": "a"} for _ in range(given.responses)])
    assert ("old_per_token_logps" in generated or "old_logps" in generated) or fresh
    credit = generated["advantages"].view(given.batch.valid.shape)
    found = []
    for part in split_tensor_dict(generated, trainer.args.steps_per_generation):
        with default_dtype(dtype):
            loss = trainer._compute_loss(trainer.model, part)
        metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if values}
        found.append(Result(credit, loss.detach(), slope(loss, given), metrics))
    return found


def by_trl(given: Case, model: Path, **settings: Any) -> Result:
    """TRL's optimizer step on the whole batch; the parts of an accumulation add up."""
    parts = parts_by_trl(given, model, **settings)
    whole = parts[0]
    for part in parts[1:]:
        whole = replace(whole, loss=whole.loss + part.loss, gradient=whole.gradient + part.gradient)
    return whole


# ---- the rows -------------------------------------------------------------------------------------

PLAIN = Algorithm(Normalized(1e-4), Clipped(0.2, 0.2), TokenMean())
NO_CORRECTION = {"use_bias_correction_kl": False}
ROWS: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "grpo": (ALGORITHMS["grpo"], {"loss_type": "grpo", "beta": 0.04, **NO_CORRECTION}),
    "dr_grpo": (ALGORITHMS["dr-grpo"], {"loss_type": "dr_grpo", "scale_rewards": "none"}),
    "dapo": (replace(ALGORITHMS["dapo"], shaping=NoShaping()), {"loss_type": "dapo", "epsilon_high": 0.28}),
    "bnpo": (PLAIN, {"loss_type": "bnpo"}),
    "gspo": (
        ALGORITHMS["gspo"],
        {"loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "gspo per token": (
        replace(ALGORITHMS["gspo"], weights=TokenMean()),
        {"loss_type": "dapo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    "luspo": (
        replace(ALGORITHMS["gspo"], weights=SequenceSum()),
        {"loss_type": "luspo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
    ),
    # TRL's bound is ε_high itself, the paper's 1 + ε_high: 5 there is 4 here.
    "cispo": (ALGORITHMS["cispo"], {"loss_type": "cispo", "epsilon_high": 5.0}),
    "dual clip": (
        replace(PLAIN, loss=Clipped(0.2, 0.2, dual=1.25)),
        {"loss_type": "dapo", "delta": 1.25},
    ),
    "kl, token mean": (
        replace(GRPO, weights=TokenMean()),
        {"loss_type": "dapo", "beta": 0.04, **NO_CORRECTION},
    ),
}
BY_TOKENS = ("dapo", "bnpo", "gspo per token", "cispo", "dual clip", "kl, token mean")
"""Rows whose denominator is a number of tokens; the others' is a number of responses."""
rows = pytest.mark.parametrize("row", ROWS)


@rows
@pytest.mark.parametrize("moved", [0.0, 0.3, 1.5], ids=["fresh", "moved", "moved far"])
def test_a_row_is_trls(row: str, moved: float, model: Path) -> None:
    """On ragged lengths with an all-equal group and a truncated response, at ρ = 1 and in later inner steps."""
    algorithm, settings = ROWS[row]
    given = case(moved)
    theirs, ours = by_trl(given, model, **settings), by_us(given, algorithm)
    agree(theirs, ours)
    assert torch.equal(ours.advantage[1], torch.zeros(SAMPLES, dtype=torch.float64)), "the all-equal group"
    clipped = ours.metrics["clip_ratio/low_mean"], ours.metrics["clip_ratio/high_mean"]
    if row == "cispo":  # no lower bound, and an upper one that is far away
        assert clipped[0] == 0 and (clipped[1] > 0) == (moved == 1.5)
    else:
        assert (min(clipped) > 0) == (moved > 0), "the case has to clip at both bounds, but not at ρ = 1"


@rows
def test_masked_truncated_completions_count_in_trls_number_of_responses(row: str, model: Path) -> None:
    """TRL divides by all responses, ours by those with a token that counts. Denominators of tokens are the same."""
    algorithm, settings = ROWS[row]
    theirs = by_trl(case(), model, mask_truncated_completions=True, **settings)
    ours = by_us(case(), without_truncated(algorithm)) * (1 if row in BY_TOKENS else (ROWS_IN_ALL - 1) / ROWS_IN_ALL)
    agree(theirs, ours)
    assert not theirs.gradient[CUT].any()


@rows
def test_failed_rewards_count_in_trls_denominators_and_kl(row: str, model: Path) -> None:
    """A reward of None has no credit on either side. TRL keeps its tokens in every denominator and in the KL."""
    algorithm, settings = ROWS[row]
    given = case(failed=True)
    theirs, ours = by_trl(given, model, **settings), by_us(given, algorithm)
    everyone = given.batch.add(valid=torch.ones_like(given.batch.valid))
    if row in BY_TOKENS:
        ours = ours * (given.batch.tokens / everyone.tokens)
    else:
        ours = ours * ((ROWS_IN_ALL - 1) / ROWS_IN_ALL)
    if algorithm.kl.where == "loss":
        kl = (algorithm.weights(everyone) * k3(given.logp - given.batch.logp_ref))[FAILED]
        ours = ours.plus(algorithm.kl.coef * kl.sum(), given)
    agree(theirs, ours)
    assert theirs.advantage[FAILED] == 0


# ---- one optimizer step in several parts ----------------------------------------------------------


@pytest.mark.parametrize("row", ["grpo", "dr_grpo", "dapo", "gspo", "cispo", "kl, token mean"])
def test_accumulated_micro_batches_are_one_step_of_ours(row: str, model: Path) -> None:
    algorithm, settings = ROWS[row]
    agree(by_trl(case(), model, gradient_accumulation_steps=4, **settings), by_us(case(), algorithm))


def test_bnpo_depends_on_how_a_step_is_cut(model: Path) -> None:
    """TRL's bnpo divides by the tokens of one micro-batch: the mean of our losses of the parts, and not our loss."""
    given = case()
    theirs = by_trl(given, model, gradient_accumulation_steps=4, loss_type="bnpo")
    parts = [one_group(given, prompt, PLAIN) for prompt in range(PROMPTS)]
    close(theirs.loss, sum(part.loss for part in parts) / PROMPTS, EXACT)
    close(theirs.gradient, sum(part.gradient for part in parts) / PROMPTS, EXACT)
    assert abs(theirs.loss - by_us(given, PLAIN).loss) > 1e-3, "ours does not depend on it"


@pytest.mark.parametrize("row", ["grpo", "dr_grpo", "dapo", "gspo", "cispo"])
def test_mini_batches_of_token_rows_share_trls_denominator(row: str, model: Path) -> None:
    """Several optimizer steps on one generation batch.

    TRL's dapo and cispo divide each by the mean number of tokens of a mini-batch, ours by the tokens of this one; rows
    with a number of responses are the same.
    """
    algorithm, settings = ROWS[row]
    given = case()
    theirs = parts_by_trl(given, model, steps_per_generation=PROMPTS, **settings)
    tokens = given.batch.mask.sum((1, 2)).tolist()
    for prompt, part in enumerate(theirs):
        ours = one_group(given, prompt, algorithm)
        factor = tokens[prompt] / (sum(tokens) / PROMPTS) if row in BY_TOKENS else 1.0
        close(part.loss, ours.loss * factor, EXACT)
        close(part.gradient, ours.gradient * factor, EXACT)


def one_group(given: Case, prompt: int, algorithm: Algorithm) -> Result:
    """Our loss of the mini-batch that holds this prompt alone; TRL cuts the batch into the same parts here."""
    part = replace(given, batch=given.batch.select(slice(prompt, prompt + 1)))
    small = Case(part.batch, given.logp[prompt : prompt + 1], given.entropy[prompt : prompt + 1])
    found = by_us(small, algorithm)
    gradient = torch.zeros_like(given.logp)
    gradient[prompt] = found.gradient[0]
    return replace(found, gradient=gradient)


# ---- advantages -----------------------------------------------------------------------------------


def test_an_all_equal_group_leaves_trl_a_residue_in_float32(model: Path) -> None:
    """TRL centers in float32 and divides by std + 1e-4.

    The mean of seven equal rewards may be off by a rounding, and then all seven get the same credit, which is not
    small for large rewards. Ours is 0; our centered reward over its
    std + 1e-4 is TRL's number.
    """
    values = torch.tensor([1000.1, 3000.7, 77.7, 0.3])
    batch = batch_of(values.view(-1, 1).expand(4, 7).tolist(), torch.full((4, 7), 2), logp_old=torch.zeros(4, 7, 2))
    batch = batch.add(reward=batch.reward.float(), logp_sampler=batch.logp_sampler.float())
    logp = torch.zeros(4, 7, 2, dtype=torch.float64, requires_grad=True)
    theirs = by_trl(Case(batch, logp, logp), model, dtype=torch.float32, loss_type="grpo").advantage
    assert not Normalized(1e-4)(batch, {}).any()
    residue = Centered()(batch, {})[..., 0]
    close(theirs, residue / ((residue.square().sum(1, keepdim=True) / 6).sqrt() + 1e-4), 1e-6)
    assert theirs.abs().max() > 0.1


def test_scale_rewards_batch_is_centered_over_the_std_of_the_batch(model: Path) -> None:
    """Not on our menu: its std is that of all rewards, its mean the group's."""
    given = case(failed=True)
    theirs = by_trl(given, model, loss_type="dapo", scale_rewards="batch").advantage
    std = given.batch.reward[..., 0][given.batch.valid].std()
    close(theirs, Centered()(given.batch, {})[..., 0] / (std + 1e-4), EXACT)


def test_overlong_shaping_is_trls_reward(model: Path) -> None:
    from trl.rewards import get_soft_overlong_punishment

    batch = case().batch
    theirs = get_soft_overlong_punishment(LIMIT, 4)([[0] * n for n in batch.length.flatten().tolist()])
    ours = Overlong(margin=4)(batch)
    assert ours is not None
    close(torch.tensor(theirs).view(PROMPTS, SAMPLES), ours[..., 0], 1e-6)


# ---- the KL in the loss ---------------------------------------------------------------------------


WITH_RATIO = InLoss("k3", 0.04, importance=True)
DEFAULT_KL: dict[str, tuple[Algorithm, dict[str, Any]]] = {
    "grpo": (replace(GRPO, kl=WITH_RATIO), {"loss_type": "grpo"}),
    "dapo": (replace(PLAIN, kl=WITH_RATIO, reference=Frozen()), {"loss_type": "dapo"}),
    "cispo": (replace(ALGORITHMS["cispo"], kl=WITH_RATIO, reference=Frozen()), ROWS["cispo"][1]),
    "gspo": (replace(ALGORITHMS["gspo"], kl=WITH_RATIO, reference=Frozen()), ROWS["gspo"][1]),
}


@pytest.mark.parametrize("row", DEFAULT_KL)
@pytest.mark.parametrize("moved", [0.0, 0.3], ids=["fresh", "moved"])
def test_trls_default_kl_is_ours_with_importance(row: str, moved: float, model: Path) -> None:
    """use_bias_correction_kl, on by default, makes the term ρ·k3, with the ratio of the loss: per token, or GSPO's."""
    given = case(moved)
    algorithm, settings = DEFAULT_KL[row]
    theirs, ours = by_trl(given, model, beta=0.04, **settings), by_us(given, algorithm)
    agree(theirs, ours)
    close(theirs.metrics["kl"], ours.metrics["kl"], 1e-6)
    plain = by_us(given, replace(algorithm, kl=InLoss("k3", 0.04)))
    assert (theirs.gradient - plain.gradient).abs().max() > 1e-4


def test_trls_default_kl_pushes_as_k2_does_on_a_fresh_batch(model: Path) -> None:
    """∇(ρ·k3) at ρ = 1 is (k3 + 1 − e^−ℓ)·∇logp = ℓ·∇logp, which is ∇k2: token by token, not only on average."""
    given = case(moved=0.0)
    theirs = by_trl(given, model, loss_type="grpo", beta=0.04)
    close(theirs.gradient, by_us(given, replace(GRPO, kl=InLoss("k2", 0.04))).gradient, EXACT)
    assert (theirs.gradient - by_us(given, GRPO).gradient).abs().max() > 1e-4


# ---- sampler and trainer --------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("mode", "low", "high", "correction"),
    [
        ("token_truncate", None, 1.2, Truncated("token", 1.2)),
        ("token_truncate", 0.9, 1.2, Truncated("token", 1.2, 0.9)),
        ("sequence_truncate", 0.9, 1.2, Truncated("sequence", 1.2, 0.9)),
        ("sequence_truncate", None, 1.2, Truncated("sequence", 1.2)),
        ("token_mask", 0.8, 1.2, Masked("token", 0.8, 1.2)),
        ("sequence_mask", 0.8, 1.2, Masked("sequence", 0.8, 1.2)),
    ],
)
def test_the_correction_is_trls_for_vllm(
    mode: str, low: float | None, high: float, correction: Any, model: Path
) -> None:
    """On the surrogate and not on the KL. No mass here: TRL leaves out what top-p kept."""
    given = case()
    theirs = by_trl(
        given,
        model,
        use_vllm=True,
        loss_type="grpo",
        beta=0.04,
        vllm_importance_sampling_mode=mode,
        vllm_importance_sampling_clip_min=low,
        vllm_importance_sampling_clip_max=high,
        **NO_CORRECTION,
    )
    agree(theirs, by_us(given, replace(GRPO, correction=correction)))
    w = correction(given.batch)
    bound = (w == 1.2) if mode.endswith("truncate") else (w == 0)
    assert bound.any() and not bound.all()
    measured = mismatch(given.batch.logp_old, given.batch)
    for name in ("mean", "max"):
        name = f"sampling/sampling_logp_difference/{name}"
        close(theirs.metrics[name], float(measured[name]), EXACT)


# ---- entropy --------------------------------------------------------------------------------------


@pytest.mark.parametrize("row", ["grpo", "dapo"])
def test_trls_entropy_bonus_is_a_token_mean_whatever_the_loss(row: str, model: Path) -> None:
    """Ours takes the surrogate's own weights, as the KL does: the same for token-mean rows, and predicted for grpo."""
    algorithm, settings = ROWS[row]
    given, coef = case(), 0.1
    with_bonus = replace(algorithm, exploration=Constant(coef))
    theirs = by_trl(given, model, entropy_coef=coef, **settings)
    gap = ((TokenMean()(given.batch) - algorithm.weights(given.batch)) * given.entropy).sum()
    assert (abs(gap) > 1e-3) == (row == "grpo")
    agree(theirs, by_us(given, with_bonus).plus(-coef * gap + 0.0 * given.logp.sum(), given))


# ---- RLOO -----------------------------------------------------------------------------------------

RLOO = ALGORITHMS["rloo"]
TRL_RLOO = replace(RLOO, loss=SequenceRatio("product", 0.2, 0.2))
"""What TRL's trainer computes: the same credit and weights, on a clipped product of ratios."""


def test_rloo_is_trls_on_a_fresh_batch(model: Path) -> None:
    """Advantages (the KL taken off the reward) and gradient.

    The losses differ, as ρ and log π do: TRL's at ρ = 1 is −mean A, ours −mean A·log π.
    """
    given = case(moved=0.0)
    theirs, ours = by_trl(given, model, rloo=True), by_us(given, RLOO)
    close(theirs.advantage, ours.advantage, EXACT)
    close(theirs.gradient, ours.gradient, EXACT)
    close(theirs.loss, -ours.advantage.mean(), EXACT)
    agree(theirs, by_us(given, TRL_RLOO))


@pytest.mark.parametrize("failed", [False, True], ids=["all scored", "one failed"])
def test_rloo_in_later_inner_steps_is_the_product_ratio(failed: bool, model: Path) -> None:
    given = case(failed=failed)
    theirs = by_trl(given, model, rloo=True)
    agree(theirs, by_us(given, TRL_RLOO) * ((ROWS_IN_ALL - failed) / ROWS_IN_ALL))


def test_rloos_log_prob_becomes_trls_with_the_ratio(model: Path) -> None:
    """Our row has no ratio: times ρ of the response, and 0 where TRL clips, its gradient is TRL's."""
    given = case()
    theirs, ours = by_trl(given, model, rloo=True), by_us(given, RLOO)
    ρ = torch.exp(torch.where(given.batch.mask, given.logp - given.batch.logp_old, 0.0).sum(-1)).detach()
    clipped = ((ρ > 1.2) & (ours.advantage > 0)) | ((ρ < 0.8) & (ours.advantage < 0))
    assert clipped.any() and not clipped.all()
    close(theirs.gradient, ours.gradient * torch.where(clipped, 0.0, ρ).unsqueeze(-1), EXACT)


def test_rloo_with_masked_truncated_completions(model: Path) -> None:
    """The masked response pays no KL, keeps its place in the mean, and adds −δ/N to TRL's loss as a constant."""
    theirs = by_trl(case(), model, rloo=True, mask_truncated_completions=True)
    ours = by_us(case(), without_truncated(TRL_RLOO)) * ((ROWS_IN_ALL - 1) / ROWS_IN_ALL)
    agree(theirs, replace(ours, loss=ours.loss - ours.advantage[CUT] / ROWS_IN_ALL))


def test_rloos_normalize_advantages_is_one_division_more(model: Path) -> None:
    """Off by default in TRL, and not on our menu."""
    given = case(failed=True)
    theirs = by_trl(given, model, rloo=True, normalize_advantages=True, beta=0.0).advantage
    ours = LeaveOneOut()(given.batch, {})[..., 0]
    scored = ours[given.batch.valid]
    close(theirs, torch.where(given.batch.valid, (ours - scored.mean()) / (scored.std() + 1e-4), 0.0), EXACT)


# ---- metrics of one name mean one thing -----------------------------------------------------------


def test_metrics_of_the_same_name_are_the_same_numbers(model: Path) -> None:
    given = case(failed=True)
    everyone = replace(given, batch=given.batch.add(valid=torch.ones_like(given.batch.valid)))
    theirs = by_trl(given, model, loss_type="grpo", beta=0.04, **NO_CORRECTION).metrics
    sampled = rollout_metrics(given.batch)
    for name in ("reward", "reward_std", "frac_reward_zero_std"):
        close(theirs[name], sampled[name], 1e-6)
    of_all = by_trl(everyone, model, loss_type="grpo", beta=0.04, **NO_CORRECTION).metrics
    ours = by_us(everyone, GRPO).metrics
    for name in ("entropy", "kl", "clip_ratio/low_mean", "clip_ratio/high_mean"):
        close(of_all[name], ours[name], 1e-6)
