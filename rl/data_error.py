"""The error of a data set that cannot be used."""


class DataError(ValueError):
    """A data set that cannot be trained on; the message is one line: file, row, field, remedy."""
