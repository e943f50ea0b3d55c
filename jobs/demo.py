"""The demo: `klog demo`."""

from __future__ import annotations

from spark_klog.cli.main import main

if __name__ == "__main__":
    main(["demo"])
