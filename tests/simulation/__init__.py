"""A simulated year: real decisions, a store that answers as PostgreSQL does, and time that goes by at once.

naive.py     what a schedule means, said in the simplest way: minute by minute. Knows nothing of the package.
store.py     the rules of the lease tables in memory.
postgres.py  the lease tables' own functions, on a real PostgreSQL whose clock stands where it is put.
world.py     clusters, edits, suspends, outages, crashes, Pods: who looks when, and acts as `decide` says.
account.py   every tick accounted for exactly once, no run at a wrong instant. Knows nothing of decisions.
"""
