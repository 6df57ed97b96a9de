module leasedjob.io/testcluster-pause

go 1.26.0
