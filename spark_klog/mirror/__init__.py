"""The mirror: copy topics of one cluster into another, batch by batch.

    from spark_klog.mirror.mirror import Mirror
    from spark_klog.mirror.settings import MirrorSettings

`klog mirror` runs one in a process, `jobs/mirror.py` several in Spark's tasks.
"""
