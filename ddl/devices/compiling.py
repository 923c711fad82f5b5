"""The end of a trace that XLA cannot compile."""


class CannotCompileError(BaseException):
    """Ends the trace of a compiled piece. An `except Exception` in a layer does not catch it.

    Attributes:
      reason: The operation with its layer, and why XLA cannot compile it; a clause without a full
        stop.
      remedy: A sentence, or "".
    """

    def __init__(self, reason: str, remedy: str = ""):
        """Keeps the arguments."""
        super().__init__(reason)
        self.reason, self.remedy = reason, remedy
