"""The command lines: `leasedjob` (migrations; in the operator's image) and `kubectl leasedjob` (a person's machine).

One file a verb. Entry points are `leasedjob.py`, `kubectl.py` and `complete.py`; what the verbs of the plugin share is
in `exits.py`, `cluster.py`, `options.py` and `output.py`. Nothing heavy is imported before a verb needs it.
"""
