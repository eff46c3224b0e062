"""The errors that the package raises: one tree with the base `DproSearchError`."""


class DproSearchError(Exception):
    """Base of all. The message is one line: what is wrong, where, and what to do."""

    exit_code = 2


class InputError(DproSearchError, ValueError):
    """Wrong usage or bad input: an option, a file, a line or a field that the user can correct."""


class TraceFormatError(InputError):
    """A file does not have the expected format, or is incomplete."""


class TraceVersionError(TraceFormatError):
    """A trace was written by another, incompatible version."""


class GraphError(InputError):
    """A trace does not describe a graph that can be replayed."""


class JobError(DproSearchError, RuntimeError):
    """A training job failed."""

    exit_code = 1


class MissingCapabilityError(DproSearchError, RuntimeError):
    """This machine lacks a requirement: a framework, a permission, disk space."""

    exit_code = 1
