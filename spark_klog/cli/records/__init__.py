"""`klog consume` and `klog produce`: records of any cluster, to and from files, pipes and terminals."""
