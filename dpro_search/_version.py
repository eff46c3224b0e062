"""The version, for every module that states it."""

__version__ = "0.2.0.dev0"
