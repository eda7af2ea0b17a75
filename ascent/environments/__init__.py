"""Conversations and tools: what plays the episodes of a task whose responses have turns."""
