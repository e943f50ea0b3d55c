"""The `klog` command."""
