"""Policies: a choice builds a module, and the module computes logits and samples responses."""

from ascent.models.causal_lm import CausalLM, LanguageModel
from ascent.models.small_policies import PerPosition, Policy, Transformer, draw_next

POLICIES = (PerPosition, Transformer, CausalLM)

__all__ = ["POLICIES", "CausalLM", "LanguageModel", "PerPosition", "Policy", "Transformer", "draw_next"]
