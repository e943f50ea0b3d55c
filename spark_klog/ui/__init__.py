"""`klog ui`: a page about a cluster, served on loopback. Needs the extra `ui` (Starlette, Uvicorn)."""
