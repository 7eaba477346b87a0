"""The one error that a command may end with.

Must never import anything heavy: every start of the command line loads it.
"""


class CallFailed(Exception):
    """The gateway refused, or did not answer. `status` is None when there was no answer."""

    def __init__(self, code: str, detail: str, *, hint: str | None = None, status: int | None = None) -> None:
        super().__init__(detail)
        self.code = code
        self.detail = detail
        self.hint = hint
        self.status = status
