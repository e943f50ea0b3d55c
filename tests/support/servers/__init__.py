"""Servers in processes of their own: klog's and Kafka's brokers, ZooKeeper, and what stands beside them."""
