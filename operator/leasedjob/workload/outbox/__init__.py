"""The outbox: what is to be sent is put down in the transaction that makes it true, and published from there."""
