"""Subcommands of `klog`, a module for each."""
