"""Consumer groups: members, generations, committed offsets."""
