# Columns to messages.
