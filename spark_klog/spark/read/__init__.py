"""The sources: planning of offset ranges on the driver, and the tasks that read them."""
