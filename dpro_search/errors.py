"""Every error that the package raises on purpose: one tree, so that a caller catches what it means to."""


class DproSearchError(Exception):
    """Base of all. The message is one line: what is wrong, where, and what to do."""

    exit_code = 2


class InputError(DproSearchError, ValueError):
    """Wrong usage or bad input: a file, a line or a field that the user can mend."""


class TraceFormatError(InputError):
    """A file is not what its reader expects, or ends in the middle."""


class TraceVersionError(TraceFormatError):
    """A trace was written by another, incompatible version."""


class GraphError(InputError):
    """A trace does not describe a graph that can be replayed."""


class JobError(DproSearchError, RuntimeError):
    """A training job that was started failed by itself."""

    exit_code = 1


class MissingCapabilityError(DproSearchError, RuntimeError):
    """This machine lacks something that the request needs: a framework, a permission, disk space."""

    exit_code = 1
