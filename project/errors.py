"""The one exception that means "the user can mend this"; the scripts print it as a single line and exit with code 2."""


class UsageError(ValueError):
    """A flag, a file or a setting that cannot work. The message names it, its value and the remedy, in one line."""
