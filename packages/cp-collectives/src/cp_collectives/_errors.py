"""The exceptions of the project.

ContextParallelError
  InvalidInputError (ValueError)             a bad input, declaration or config
  UnsupportedError  (NotImplementedError)    legal, but not supported in this combination
  LifecycleError    (RuntimeError)           a step out of order: waited twice, launched and never waited
  PeerError         (RuntimeError)           another rank failed; carries that rank's message
"""


class ContextParallelError(Exception):
    """Base class of every error that the project raises on purpose."""


class InvalidInputError(ContextParallelError, ValueError):
    """An input, a declaration or a config value is wrong."""


class UnsupportedError(ContextParallelError, NotImplementedError):
    """A request is legal in itself, but this combination is not supported."""


class LifecycleError(ContextParallelError, RuntimeError):
    """A call came out of order, for example a collective was launched and never waited for."""


class PeerError(ContextParallelError, RuntimeError):
    """Another rank failed first; the message is that rank's."""
