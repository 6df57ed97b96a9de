"""The status page: what the operator knows, for a person to look at. It reads and never changes anything.

    observe   takes references from the engine's memory, and asks the database for what memory doesn't have
    model     what follows from them: the state of each job, in one word
    query     what a URL asks for: filter, order, page
    views     HTML, built by `markup`, through which every text goes
    server    HTTP: methods, hosts, headers, and a thread of its own for the work

Whoever can reach its port sees every namespace; see docs/status-page.md.
"""
