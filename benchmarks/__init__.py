"""Benchmarks of spark_klog and its peers: `python -m benchmarks.run` writes `results.json` and `results.md`."""
