"""Samplers that are replicas on a Ray cluster, under one learner or several ranks."""
