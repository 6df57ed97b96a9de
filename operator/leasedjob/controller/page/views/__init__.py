"""The pages. Pure: a snapshot and a query in, a document out.

What a person on call wants comes first: is something wrong, what, and since when; then all jobs.
"""
