"""Releases that an upgrade starts from: archives, so that its test needs neither history nor registry."""
