"""Backbones, projectors and how they are put together."""
