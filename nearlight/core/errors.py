"""The two errors that the command line answers with one line and exit code 2, and that line."""


class BadInput(ValueError):
    """The user named something that does not exist or makes no sense; the message says what to do.

    The command line prints the message alone, without a traceback.
    """


class MissingPart(RuntimeError):
    """Something that has to be installed first is missing; the message holds the line to run.

    The command line prints the message alone, without a traceback.
    """


def one_line(error: BaseException) -> str:
    """Return another error's type and message as one line, cut to 300 characters."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"[:300]
