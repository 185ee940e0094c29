"""Rollyard runs the Python that RL rollouts write."""

from rollyard._version import __version__

__all__ = ["__version__"]
