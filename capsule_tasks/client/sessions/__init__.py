"""Named sessions of the cluster, from the producer's side."""
