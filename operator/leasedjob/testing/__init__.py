"""For tests, also those of users: real parts, started and stopped by the test."""
