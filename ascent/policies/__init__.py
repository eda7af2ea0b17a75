"""Policies: a choice builds a module, and the module computes logits and samples responses."""

from ascent.policies.causal_lm import CausalLM, LanguageModel
from ascent.policies.small import PerPosition, Policy, Transformer, draw_next

POLICIES = (PerPosition, Transformer, CausalLM)

__all__ = ["POLICIES", "CausalLM", "LanguageModel", "PerPosition", "Policy", "Transformer", "draw_next"]
