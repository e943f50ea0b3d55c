"""Who may connect, and what they may do: TLS, SASL, users, rules."""
