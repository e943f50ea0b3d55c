"""Restore topics from a load: `spark-submit jobs/restore.py --help`, or without this checkout
`python -m spark_klog.cli.jobs.restore --help`.
"""

from __future__ import annotations

from spark_klog.cli.jobs.running import needed_packages

with needed_packages("restore"):
    from spark_klog.cli.jobs.restore import main

if __name__ == "__main__":
    main()
