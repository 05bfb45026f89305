"""The two errors that the command line answers with one line and exit code 2, and that line."""


class BadInput(ValueError):
    """The user named something that does not exist or makes no sense; the message says what to do.

    The command line prints the message alone, without a traceback.
    """


class MissingPart(RuntimeError):
    """Something that has to be installed first is missing; the message holds the line to run.

    The command line prints the message alone, without a traceback.
    """


def said(error: BaseException) -> str:
    """Return an error's message as any terminal and any file can take it."""
    try:
        text = str(error)
    except Exception as second:  # a user's own error, whose message cannot be made
        text = f"its message raised {type(second).__name__}"
    # Half of a surrogate pair is no character that can be written.
    return text.encode("utf-8", "backslashreplace").decode()


def one_line(error: BaseException) -> str:
    """Return another error's type and message as one line, cut to 300 characters."""
    return ": ".join(filter(None, (type(error).__name__, " ".join(said(error).split()))))[:300]
