"""Text of an error on the command line."""

from ddl.errors import ConfigError, DataError, DdlError


def text_of(error: DdlError) -> str:
    """Returns the message of an error; with the places of the bindings that it mentions."""
    message = str(error)
    if not isinstance(error, (ConfigError, DataError)):
        return message
    from ddl import config  # the flags are checked before gin is imported

    return "\n".join([message, *config.places_mentioned(message)])
