"""Backends that run worker groups: in this process (`Local`) or on a Ray cluster (`RayBackend`).
Only this folder imports Ray."""
