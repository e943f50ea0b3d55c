"""Who may connect and what each user may do: TLS, SASL, users, rules."""
