"""A real Kubernetes for the demo and the end-to-end tests, on any machine that can have one.

Three sources, tried in this order (`source.choose`): a kubeconfig that the user names, kind where a container engine
answers, and a one-node Kubernetes built from the Go modules in `go/` that runs in namespaces of its own. `python -m
tests.cluster --help` lists what can be done with it; the Makefile calls nothing else.

Only the standard library is imported here, so that it works before anything is installed.
"""
