"""Measurements; `make bench` prints them. Each line gives a number, its unit and what it is measured against."""
