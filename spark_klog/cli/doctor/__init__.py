"""`klog doctor`: the command, its checks, and the round trip through Spark."""
