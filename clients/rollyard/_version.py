"""The one place where Rollyard's version stands."""

__version__ = "0.1.0"
