"""Functions for columns of records: rows from bytes and back, in any DataFrame. Users import them from
`spark_klog.schemas`.

columns.py   the functions
options.py   their options, under Databricks' names and ours
udfs.py      what runs in Spark's Python workers
"""
