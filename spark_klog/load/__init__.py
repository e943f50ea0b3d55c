"""Load topics into files, each record once: runs, their files and their audit. See docs/recipes/load.md.

    OUTPUT/TOPIC/TOPIC+PARTITION+FIRST+LAST.parquet   records; the name tells the offsets that the file covers
    OUTPUT/_klog/load.json                            the load: cluster, format, layout
    OUTPUT/_klog/latest.json                          the last committed run, for people
    OUTPUT/_klog/lease/EPOCH                          which run is under way (not on local disks; `journal/lease.py`)
    OUTPUT/_klog/checkpoint-RUN.json                  the sum of the runs up to RUN: what is in their manifests
    OUTPUT/_klog/runs/RUN/plan.json                   what the run reads, written before its tasks start
    OUTPUT/_klog/runs/RUN/offsets-TASK.json           what a task has read and written, when all its files are complete
    OUTPUT/_klog/runs/RUN/refused                     the run had too many records that may decode another time
    OUTPUT/_klog/runs/RUN/staging/                    files of tasks before the commit (local disks only)
    OUTPUT/_klog/runs/RUN/manifest.json               the commit: the run's files, offsets and audit
    OUTPUT/_klog/dead-letters/                        corrupt record batches, as the option badRecords keeps them, and
                                                      records that can't be written (`values.py`)

A run is committed when its manifest exists. A killed run has a plan, and the next run finishes it first: the tasks that
are complete are kept, the others run again and write files of the same names.

What a plain reader of the folder sees: on a local disk, files of committed runs only; they are renamed into place after
the manifest is written, so for a moment some may be missing. In an object store tasks upload whole files to their final
names: a reader may see a run's files before its commit. The run that goes on replaces files by name. Attempts that
failed, or ended by --max-time, may leave files of other names; the commit removes them, and a reader may see their
records twice until then. `files` lists exactly what is committed.
"""

from __future__ import annotations

from spark_klog.base.extras import require

require("A load", "pyarrow")

from spark_klog.load.journal.listing import CommittedFile, files

__all__ = ["CommittedFile", "files"]
