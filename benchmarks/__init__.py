"""Measurements of spark_klog beside its peers: `python -m benchmarks.run` writes `results.json` and `results.md`."""
