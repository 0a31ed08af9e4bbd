"""The one exception users see: it says what went wrong and what to do next."""


class ClusterError(Exception):
    """Something the user has to know about; the message names the log or the next step."""
