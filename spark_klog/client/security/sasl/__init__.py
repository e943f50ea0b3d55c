"""SASL mechanisms of the client, the tokens and tickets that they need, and the requests that carry them."""
