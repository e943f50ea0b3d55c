"""Values with a schema: what a user gives as one, and the bulk parsing of JSON by it."""
