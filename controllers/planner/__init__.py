"""Planner: costs of models, and searches for placements and schedules."""
