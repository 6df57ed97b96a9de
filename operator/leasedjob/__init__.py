"""LeasedJob: each tick of a schedule is one logical run, owned by one holder at a time."""

__version__ = "0.1.0"
