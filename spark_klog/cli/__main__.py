"""`python -m spark_klog.cli` is the `klog` command."""

from spark_klog.cli.main import main

main()
