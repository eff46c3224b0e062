"""The version, for every module that states it."""

__version__ = "0.1.0"
