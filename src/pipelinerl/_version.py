"""The version of this package, apart from everything that it exports."""

__version__ = "0.1.0"
