"""Policies: a choice builds a module, and the module computes logits and samples responses."""

from ascent.policies.base import Policy, draw_next
from ascent.policies.causal_lm import CausalLM, LanguageModel
from ascent.policies.per_position import PerPosition
from ascent.policies.transformer import Transformer

POLICIES = (PerPosition, Transformer, CausalLM)

__all__ = ["POLICIES", "CausalLM", "LanguageModel", "PerPosition", "Policy", "Transformer", "draw_next"]
