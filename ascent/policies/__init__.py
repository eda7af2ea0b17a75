"""Policies: a choice builds a module, and a module gives logits and draws responses."""

from ascent.policies.base import Policy, draw
from ascent.policies.causal_lm import CausalLM, LanguageModel
from ascent.policies.per_position import PerPosition
from ascent.policies.transformer import Transformer

POLICIES = (PerPosition, Transformer, CausalLM)

__all__ = ["POLICIES", "CausalLM", "LanguageModel", "PerPosition", "Policy", "Transformer", "draw"]
