"""Fused parts compute what the model's own parts do, at every size of input, and so does the whole model with them.

In half precision, log-probs may be a little farther from float32 than those of the model's own forward pass.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor, nn

from ascent.build import model_verification
from ascent.build.model_verification import verify_model
from ascent.core.algorithms import ALGORITHMS
from ascent.core.errors import ConfigError
from ascent.models import LanguageModel
from ascent.models.causal_lm import set_mixed_precision
from ascent.models.fused_layers import ElementwiseReference, fuse_layers
from tests.language import SHAPE, Tokens, model_of
from tests.models.test_architectures import batch_of, learner_of, own_log_probs


class GatedMLP(nn.Module):
    """silu(gate)·up, each clamped; a limit of None is the plain one, as in Llama."""

    def __init__(self, width: int, inner: int, std: float, limit: float | None = None):
        super().__init__()
        self.gate_proj, self.up_proj = (nn.Linear(width, inner, bias=False) for _ in range(2))
        self.down_proj, self.act_fn, self.limit = nn.Linear(inner, width, bias=False), nn.SiLU(), limit
        generator = torch.Generator().manual_seed(5)
        for p in self.parameters():
            nn.init.normal_(p, std=std, generator=generator)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_proj(x), self.up_proj(x)
        if self.limit is not None:
            gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return self.down_proj(self.act_fn(gate) * up)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_only_an_mlp_that_does_not_clamp_is_fused(dtype: torch.dtype) -> None:
    """Whatever the size of its parameters; with formulas in the place of a GPU's kernels."""
    for std in (0.02, 0.06, 0.25):
        for limit in (None, 7.0, 10.0, 16.0, 100.0):
            mlp = GatedMLP(32, 48, std, limit).to(dtype)
            x = (torch.randn(8, 32, generator=torch.Generator().manual_seed(1)) * 64 / std / 32).to(dtype)
            with torch.no_grad():
                own, fused = mlp(x), fuse_layers(mlp, ElementwiseReference)
                apart = float((mlp(x) - own).float().norm() / own.float().norm())
            assert fused == (limit is None) and apart < 0.02, f"std {std}, limit {limit}"


@pytest.mark.parametrize(
    ("module", "name", "args"),
    [
        ("deepseek_v4.modeling_deepseek_v4", "DeepseekV4MLP", ()),
        ("glm5_next.modeling_glm5_next", "Glm5NextTextMLP", ()),
        ("step3p7.modeling_step3p7", "Step3p7MLP", (0,)),
    ],
)
def test_the_clamps_of_transformers_own_mlps_are_kept(module: str, name: str, args: tuple[Any, ...]) -> None:
    kind = getattr(pytest.importorskip(f"transformers.models.{module}"), name)
    limits = {"swiglu_limit": 10.0, "swiglu_limits_shared": [16.0], "share_expert_dim": 96}
    config = {"hidden_size": 64, "intermediate_size": 96, "mlp_bias": False, "hidden_act": "silu"} | limits
    mlp = kind(SimpleNamespace(**config), *args)
    generator = torch.Generator().manual_seed(5)
    for p in mlp.parameters():
        nn.init.normal_(p, std=0.125, generator=generator)
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(1)) * 8
    with torch.no_grad():
        own = mlp(x)
        fuse_layers(mlp)
        assert torch.allclose(mlp(x), own, rtol=1e-4, atol=1e-4)


@pytest.mark.long
def test_a_model_that_clamps_is_trained_with_its_own_log_probs() -> None:
    """Behind norms whose weights are 8, as in trained models, its clamps matter."""
    config = getattr(transformers, "DeepseekV4Config", None)
    if config is None:
        pytest.skip("transformers has no DeepSeek V4")
    few = {"moe_intermediate_size": 16, "num_hidden_layers": 2, "n_routed_experts": 4, "num_experts_per_tok": 2}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config(**SHAPE | few)).float().eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() > 1 and p.shape[-1] > 1:
                nn.init.normal_(p, std=0.2)
            if "post_attention_layernorm" in name or "ffn_norm" in name:
                p.fill_(8.0)
    lm, batch = LanguageModel(model, Tokens()), batch_of()
    with torch.no_grad():
        own = own_log_probs(lm, batch)
    verify_model(lm, 12, sampled=False, fused=True)
    learner = learner_of(lm)
    learner.gradient(batch, ALGORITHMS["reinforce"].objective)
    assert float((learner._logp[0][batch.mask] - own).abs().max()) < 1e-3


def test_what_differs_only_in_the_whole_model_is_not_fused() -> None:
    """An MLP that, row by row, is Llama's; the learner gives it texts, and it computes something else for these."""
    lm, batch = model_of(dtype=torch.float32), batch_of()
    mlp = lm.backbone.layers[0].mlp

    class Odd(type(mlp)):  # type: ignore[misc]
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (1.5 if x.dim() == 3 else 1.0)

    mlp.__class__ = Odd
    with torch.no_grad():
        own = own_log_probs(lm, batch)
    assert verify_model(lm, 12, fused=True) is None
    learner = learner_of(lm)
    learner.gradient(batch, ALGORITHMS["reinforce"].objective)
    assert float((learner._logp[0][batch.mask] - own).abs().max()) < 1e-3


def test_a_plain_model_is_fused_and_says_so() -> None:
    lm = model_of(dtype=torch.float32)
    assert verify_model(lm, 12, fused=True) is None and lm.can_fuse_layers
    assert "forward" in vars(lm.backbone.layers[0].mlp), "its own forward was replaced"


@pytest.mark.long
@pytest.mark.parametrize(("dtype", "factor"), [("bfloat16", 1.1), ("mixed", 1.1), ("float16", 1.02)])
def test_a_wrong_scale_is_found_in_half_precision(dtype: str, factor: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of hidden states: far below a bound of 0.3 or 0.1 nats, and far above rounding."""
    whole = model_verification.hidden_states
    for wrong in (False, True):
        lm = model_of(dtype=torch.bfloat16 if dtype == "mixed" else getattr(torch, dtype))
        set_mixed_precision(lm.model, dtype == "mixed")
        kept = {name: (p.data_ptr(), p.dtype) for name, p in lm.model.named_parameters()}
        by = factor if wrong else 1.0
        monkeypatch.setattr(model_verification, "hidden_states", lambda *args, by=by, **more: whole(*args, **more) * by)
        if wrong:
            with pytest.raises(ConfigError, match="times as far apart as rounding explains"):
                verify_model(lm, 12)
        else:
            assert verify_model(lm, 12) is None
        assert kept == {name: (p.data_ptr(), p.dtype) for name, p in lm.model.named_parameters()}, "as they were"
