"""The one exception that ends a command with a message instead of a traceback."""


class Failure(Exception):
    """Something the user can mend; the message is one line that says what is wrong and what to do."""
