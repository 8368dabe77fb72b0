"""The exceptions whose message is all that a person needs: the scripts print it as a single line, without a traceback."""


class UsageError(ValueError):
    """A flag, a file or a setting that cannot work. The message names it, its value and the remedy, in one line."""


class RunError(RuntimeError):
    """A run that cannot go on, for a reason that its one line says in full. The scripts exit with code 1."""
