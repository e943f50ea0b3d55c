"""Topics, brokers and leaders of the cluster, kept in the directories."""
