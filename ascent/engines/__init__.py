"""Engines: how rollouts are made and steps are taken. One process is the reference."""
