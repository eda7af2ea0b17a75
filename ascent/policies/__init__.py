"""Policies: a choice builds a module, and a module gives logits and draws responses."""

from ascent.policies.base import Policy, draw
from ascent.policies.per_position import PerPosition
from ascent.policies.transformer import Transformer

POLICIES = (PerPosition, Transformer)

__all__ = ["POLICIES", "PerPosition", "Policy", "Transformer", "draw"]
