"""The errors that a mistake of the caller's raises.  Each names the input, the limit and the way out."""


class ConfigError(ValueError):
    """A model directory or an option that cannot work; the message says what would."""


class InvalidRequest(ValueError):
    """A request that can never run: the message names the input, the limit and the way out."""
