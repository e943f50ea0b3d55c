"""Load topics into files, each record once: `spark-submit jobs/batch_load.py --help`, or without this checkout
`python -m spark_klog.cli.jobs.batch_load --help`.
"""

from __future__ import annotations

from spark_klog.cli.jobs.running import needed_packages

with needed_packages("batch_load"):
    from spark_klog.cli.jobs.batch_load import main

if __name__ == "__main__":
    main()
