"""The two errors that the command line answers with one line and exit code 2."""


class BadInput(ValueError):
    """The user named something that does not exist or makes no sense; the message says what to do.

    The command line prints the message alone, without a traceback.
    """


class MissingPart(RuntimeError):
    """Something that has to be installed first is missing; the message holds the line to run.

    The command line prints the message alone, without a traceback.
    """
