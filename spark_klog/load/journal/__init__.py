"""What a load keeps about its runs: plans, results, manifests, and the lock that keeps two runs apart."""
