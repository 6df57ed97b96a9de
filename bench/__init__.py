"""Figures beside those of peers, taken in one run on one machine: `make bench`, or `python -m bench NAME...`."""
