"""`make chaos`: two clusters, real and simulated holders of leases, faults at random, a judge that believes nobody.

plan        a seed -> the jobs, and what is done to whom and when                                       pure
records     what is written down of a run, and the folder that it is kept in
checker     the records -> what became of each tick, and the promises that were broken                  pure
recorder    a process outside the clusters, to which every workload tells its start, effects and stop
clusters, database, clocks, holders, manifests, faults    the parts of the arena
arena       brings them up, does the harm, heals, waits until all is decided, collects the records
"""
