"""Settings of TLS and SASL: how users write them, what they mean, and which of them are secret."""
