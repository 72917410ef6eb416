"""Embedded worlds and small pretrained models that need no download."""
